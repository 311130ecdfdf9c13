"""JAX's persistent compilation cache."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def enable_compilation_cache() -> Path:
    """Keep compiled programs, small ones too, in the user's cache folder, so that the next start compiles none again.

    `JAX_COMPILATION_CACHE_DIR` names another folder, `JAX_ENABLE_COMPILATION_CACHE=false` keeps nothing. Training and
    evaluation steps are kept in its folder `steps`, too (`tfm.parallel.kept_programs`).

    Returns:
        the folder.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or base / "tfm" / "jax")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder
