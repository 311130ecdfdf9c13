"""Shared settings of the tests: a persistent compilation cache, and hypothesis without time limits."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "tfm-test-jax-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import hypothesis

hypothesis.settings.register_profile("tfm", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("tfm")
