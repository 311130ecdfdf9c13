"""What a foreign checkpoint says about generating text: ids that begin, end, are forced and are forbidden."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm.config import require
from tfm.interop.checkpoint import read_json

# Settings that would change the output and that nothing here carries out, with the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "diversity_penalty": (None, 0.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "forced_decoder_ids": (None, []),
    "guidance_scale": (None, 1.0),
    "num_beam_groups": (None, 1),
    "sequence_bias": (None,),
}


@dataclass(frozen=True)
class GenerationSettings:
    """The generation settings of a checkpoint. Sampling (temperature, top-k, ...) is left to the caller."""

    eos_ids: tuple[int, ...] = ()
    """Ids that end a text."""
    pad_id: int | None = None
    bos_id: int | None = None
    decoder_start_id: int | None = None
    """First input of an encoder-decoder's decoder."""
    forced_bos_id: int | None = None
    """First token that it must write (mBART: the target language)."""
    forced_eos_ids: tuple[int, ...] = ()
    """What a text ends with where it reaches its greatest length."""
    suppressed_ids: tuple[int, ...] = ()
    """Never written."""
    begin_suppressed_ids: tuple[int, ...] = ()
    """Never written first."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences never written."""
    num_beams: int = 1
    min_length: int = 0
    """Least new tokens before an end."""
    no_repeat_ngram: int = 0
    """No sequence of so many tokens occurs twice; 0: any may."""
    repetition_penalty: float = 1.0


def load_generation_settings(path: str | Path) -> GenerationSettings:
    """Read `generation_config.json`, and `config.json` for what it leaves out.

    Args:
        path: the checkpoint folder.

    Raises:
        FileNotFoundError: the folder has no `config.json`.
        ValueError: a setting that would change the output and is not supported.

    Example:
        >>> import json, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 1}))
        ...     load_generation_settings(folder).eos_ids
        (2,)
    """
    path = Path(path)
    values = read_json(path / "config.json")
    if (path / "generation_config.json").is_file():
        newer = read_json(path / "generation_config.json")
        values = {**values, **{name: value for name, value in newer.items() if value is not None}}
    return settings_from(values)


def settings_from(values: dict[str, Any]) -> GenerationSettings:
    """The settings in a foreign config."""
    for name, allowed in _NEUTRAL.items():
        require(values.get(name) in allowed, f"generation_config.json: {name}", values.get(name),
                f"only {allowed[-1]!r} is supported")
    start = values.get("decoder_start_token_id")
    if start is None:
        start = values.get("bos_token_id")
    if start is None and values.get("model_type") in ("t5", "marian"):
        start = values.get("pad_token_id", 0)
    return GenerationSettings(
        eos_ids=_ids(values.get("eos_token_id")), pad_id=values.get("pad_token_id"), bos_id=values.get("bos_token_id"),
        decoder_start_id=start, forced_bos_id=values.get("forced_bos_token_id"),
        forced_eos_ids=_ids(values.get("forced_eos_token_id")), suppressed_ids=_ids(values.get("suppress_tokens")),
        begin_suppressed_ids=_ids(values.get("begin_suppress_tokens")),
        bad_words=tuple(tuple(word) for word in values.get("bad_words_ids") or ()),
        num_beams=values.get("num_beams") or 1, min_length=_min_length(values),
        no_repeat_ngram=values.get("no_repeat_ngram_size") or 0,
        repetition_penalty=values.get("repetition_penalty") or 1.0)


def settings_attributes(settings: GenerationSettings) -> dict[str, Any]:
    """The inverse of `settings_from`, for a foreign config; what is absent is left out."""
    eos, forced = list(settings.eos_ids), list(settings.forced_eos_ids)
    values = {
        "eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": settings.pad_id,
        "bos_token_id": settings.bos_id, "decoder_start_token_id": settings.decoder_start_id,
        "forced_bos_token_id": settings.forced_bos_id, "forced_eos_token_id": forced[0] if len(forced) == 1 else forced,
        "suppress_tokens": list(settings.suppressed_ids), "begin_suppress_tokens": list(settings.begin_suppressed_ids),
        "bad_words_ids": [list(word) for word in settings.bad_words],
    }
    return {name: value for name, value in values.items() if value is not None and value != []}


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _min_length(values: dict[str, Any]) -> int:
    """`min_length` counts the decoder's first input, `min_new_tokens` does not."""
    if values.get("min_new_tokens"):
        return values["min_new_tokens"]
    return max((values.get("min_length") or 0) - 1, 0) if values.get("is_encoder_decoder") else 0
