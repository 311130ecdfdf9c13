"""The Transformer as pure functions in JAX and Flax.

The names below are imported when they are first used, so that `import tfm` stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfm.config import (
    AttentionPattern,
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    RotaryScaling,
    TrainConfig,
)

if TYPE_CHECKING:
    from tfm import masks, ops, positions
    from tfm.bundle import Bundle, load
    from tfm.models import build, count_params, init_params, presets

__all__ = [
    "AttentionPattern",
    "Bundle",
    "Config",
    "DataConfig",
    "DecodeConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RotaryScaling",
    "TrainConfig",
    "build",
    "count_params",
    "init_params",
    "load",
    "masks",
    "ops",
    "positions",
    "presets",
]

__version__ = "0.1.0"

_LAZY = {
    "Bundle": "tfm.bundle",
    "load": "tfm.bundle",
    "build": "tfm.models",
    "count_params": "tfm.models",
    "init_params": "tfm.models",
    "presets": "tfm.models.presets",
}
_SUBMODULES = ("analysis", "data", "decoding", "interop", "masks", "models", "nn", "ops", "parallel", "positions",
               "training")


def __getattr__(name: str) -> Any:
    if name == "presets":
        return importlib.import_module(_LAZY[name])
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"tfm.{name}")
    raise AttributeError(f"module 'tfm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What completion in a shell offers, imported or not."""
    return sorted({*globals(), *__all__, *_SUBMODULES})
