"""RoPE's settings in foreign configs: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from typing import Any

from tfm.config import ModelConfig, RotaryScaling, require
from tfm.interop.attributes import Attributes
from tfm.interop.kinds import check_kinds

_KNOWN = {
    "default": set(), "linear": {"factor"}, "dynamic": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"},
}
"""What each kind may say beside its kind, the base and the share of a head that rotates."""
_NEEDED = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""What it must say."""


def read_rotary(attributes: Attributes, head_dim: int, *, share: float | None = None) -> dict[str, Any]:
    """The fields of `ModelConfig` about RoPE.

    Args:
        attributes: the foreign config.
        head_dim: width of a head.
        share: of a head that rotates where the config does not say; None: the models of this family know no part.

    Raises:
        ValueError: a kind of scaling, or a setting of it, that is not known, or one that is missing; two spellings that
            contradict each other; a part of a head in a family that rotates all of it.
    """
    base = attributes.take("rope_theta", "rotary_emb_base", default=None)
    part = attributes.take("partial_rotary_factor", "rotary_pct", default=None)
    max_positions = attributes.take("max_position_embeddings", "max_sequence_length")
    settings = _settings(attributes)
    kind = settings.pop("rope_type", "default")
    base = _agreed("rope_theta", base, settings.pop("rope_theta", None)) or 10000.0
    part = _agreed("partial_rotary_factor", part, settings.pop("partial_rotary_factor", None)) or share or 1.0
    require(share is not None or part == 1.0, "partial_rotary_factor", part,
            "models of this type rotate whole heads: it must be 1.0 or absent")
    require(kind in _KNOWN, "rope_scaling.rope_type", kind, f"it must be one of {', '.join(_KNOWN)}")
    for name, value in settings.items():
        require(name in _KNOWN[kind], f"rope_scaling.{name}", value, f"it is not known for rope_type {kind!r}")
    for name in _NEEDED.get(kind, ()):
        require(settings.get(name) is not None, f"rope_scaling.{name}", None, f"rope_type {kind!r} needs it")
    width = int(head_dim * part)
    return {"position": "rotary", "position_base": float(base), "max_positions": max_positions,
            "rotary_dim": None if width == head_dim else width,
            "rotary_scaling": None if kind == "default" else _scaling(kind, settings, max_positions)}


def _agreed(name: str, outer: float | None, inner: float | None) -> float | None:
    """What a config says once or twice: by itself, and among the settings of RoPE."""
    require(outer is None or inner is None or outer == inner, name, outer,
            f"rope_parameters.{name} is {inner!r} beside it: remove the one that does not hold")
    return outer if inner is None else inner


def _settings(attributes: Attributes) -> dict[str, Any]:
    """`rope_parameters`, or the older `rope_scaling`, which users add by hand to a config that has the other."""
    new, old = (dict(attributes.take(name, default={})) for name in ("rope_parameters", "rope_scaling"))
    for settings in (new, old):
        check_kinds(settings, "rope_scaling.")
        kind = settings.pop("type", None)
        if kind is not None:
            settings.setdefault("rope_type", kind)
    for name, value in old.items() if new else ():
        require(new.get(name) == value, f"rope_scaling.{name}", value,
                f"rope_parameters.{name} is {new.get(name)!r} beside it: remove the one that does not hold")
    return new or old


def _scaling(kind: Any, settings: dict[str, Any], max_positions: int) -> RotaryScaling:
    original = settings.get("original_max_position_embeddings") or max_positions
    values = {name: settings[name] for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
                                                "attention_factor", "truncate") if settings.get(name) is not None}
    return RotaryScaling(kind, settings.get("factor") or max_positions / original, original, **values)


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_rotary`, in both spellings, so that older readers understand it too."""
    scaling = config.rotary_scaling
    written: dict[str, Any] = {"rope_theta": config.position_base, "max_position_embeddings": config.max_positions}
    settings: dict[str, Any] = {"rope_type": "default" if scaling is None else scaling.kind}
    if scaling is not None:
        require(scaling.kind in _KNOWN, "model.rotary_scaling.kind", scaling.kind,
                f"foreign configs have {', '.join(_KNOWN)}")
        values = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_max_positions,
                  "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
                  "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate,
                  "attention_factor": scaling.attention_factor}
        settings |= {name: values[name] for name in values if name in _KNOWN[scaling.kind]
                     and values[name] is not None}
        written["rope_scaling"] = dict(settings)
    share = 1.0 if config.rotary_dim is None else config.rotary_dim / config.resolved_head_dim
    if share != 1.0:
        settings["partial_rotary_factor"] = written["partial_rotary_factor"] = share
    return {**written, "rope_parameters": {**settings, "rope_theta": config.position_base}}
