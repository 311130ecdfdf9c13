"""What a foreign checkpoint says about generating text: ids that begin, end, are forced and are forbidden."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tfm.config import require
from tfm.interop.kinds import check_kinds
from tfm.interop.tensor_files import read_json

# Settings that would change the output and that nothing here carries out, with the values that leave it alone.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "constraints": (None,),
    "diversity_penalty": (None, 0.0),
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None, []),
    "forced_decoder_ids": (None, []),
    "guidance_scale": (None, 1.0),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0.0),
    "prompt_lookup_num_tokens": (None,),
    "sequence_bias": (None,),
    "stop_strings": (None, []),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}

PAIRS = ("bart", "mbart", "marian", "t5", "mt5")
"""Model types that are encoder-decoders."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")

# What else a file may say: what is read below, and what does not change which tokens come out.
_KNOWN = frozenset({
    *_NEUTRAL, *_SAMPLING, "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id",
    "do_sample", "early_stopping", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams",
    "pad_token_id", "renormalize_logits", "repetition_penalty", "suppress_tokens",
    "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "disable_compile", "is_assistant", "low_memory", "max_cache_len", "max_matching_ngram_size", "max_time",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "prefill_chunk_size", "remove_invalid_values",
    "return_dict_in_generate", "speculation_type", "target_lookbehind", "transformers_version",
    "use_cache", "use_mtp", "is_encoder_decoder", "model_type",
})


@dataclass(frozen=True)
class GenerationSettings:
    """The generation settings of a checkpoint, as transformers' `generate` takes them."""

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
    length_penalty: float = 1.0
    """Beam search compares sums divided by length ** length_penalty."""
    early_stopping: bool | Literal["never"] = False
    """When a beam search stops; see `tfm.decoding.power_beam`."""
    renormalize: bool = False
    """Whether the probabilities that the rules leave sum to 1 again, for beam search."""
    min_length: int = 0
    """Least new tokens before an end."""
    min_total: int = 0
    """Least tokens before an end, those of the prompt counted (decoders)."""
    max_length: int | None = None
    """Most new tokens."""
    max_total: int | None = None
    """Most tokens, those of the prompt counted (decoders)."""
    no_repeat_ngram: int = 0
    """No sequence of so many tokens occurs twice; 0: any may."""
    repetition_penalty: float = 1.0
    sampling: tuple[tuple[str, float], ...] = ()
    """What the checkpoint asks for that is not carried out unless the caller does: (name, value)."""


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
    values = read_settings(path / "config.json")
    if (path / "generation_config.json").is_file():
        newer = read_settings(path / "generation_config.json")
        if unknown := sorted(set(newer) - _KNOWN):
            listed = ", ".join(f"{name} = {newer[name]!r}" for name in unknown)
            raise ValueError(f"{path / 'generation_config.json'} has {listed}, which is not known")
        values = {**values, **{name: value for name, value in newer.items() if value is not None}}
    return settings_from(values)


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file, with its values of the right kinds."""
    values = read_json(path)
    check_kinds(values, f"{path}: ")
    return values


def settings_from(values: dict[str, Any], *, pair: bool | None = None) -> GenerationSettings:
    """The settings in a foreign config.

    Args:
        values: of the config.
        pair: whether the model is an encoder-decoder; None: the config says so.
    """
    values = {name: value for name, value in values.items() if not (name.endswith("_token_id") and value == -1)}
    for name, allowed in _NEUTRAL.items():
        require(values.get(name) in allowed, f"generation_config.json: {name}", values.get(name),
                f"only {allowed[-1]!r} is supported")
    start = values.get("decoder_start_token_id")
    if start is None:
        start = values.get("bos_token_id")
    if start is None and values.get("model_type") in ("t5", "mt5", "marian"):
        start = values.get("pad_token_id", 0)
    if pair is None:
        pair = bool(values.get("is_encoder_decoder")) or values.get("model_type") in PAIRS
    # an older name of the same: the first token is bos_token_id
    first = values.get("bos_token_id") if values.get("force_bos_token_to_be_generated") else None
    # min_length and max_length count the decoder's first input, or the prompt; the settings of new tokens go first
    least, most, new = values.get("min_length") or 0, values.get("max_length"), values.get("min_new_tokens")
    return GenerationSettings(
        eos_ids=_ids(values.get("eos_token_id")), pad_id=values.get("pad_token_id"), bos_id=values.get("bos_token_id"),
        # forced behind one token only: the decoder's first input, which a decoder alone does not have
        decoder_start_id=start, forced_bos_id=_default(values.get("forced_bos_token_id"), first) if pair else None,
        forced_eos_ids=_ids(values.get("forced_eos_token_id")), suppressed_ids=_ids(values.get("suppress_tokens")),
        begin_suppressed_ids=_ids(values.get("begin_suppress_tokens")),
        bad_words=tuple(tuple(word) for word in values.get("bad_words_ids") or ()),
        num_beams=values.get("num_beams") or 1, length_penalty=_default(values.get("length_penalty"), 1.0),
        early_stopping=values.get("early_stopping") or False,
        renormalize=values.get("renormalize_logits") or False,
        min_length=new if new is not None else max(least - 1, 0) if pair else 0,
        min_total=least if new is None and not pair else 0,
        max_length=values.get("max_new_tokens") or (most - 1 if pair and most else None),
        max_total=None if pair or values.get("max_new_tokens") else most,
        no_repeat_ngram=values.get("no_repeat_ngram_size") or 0,
        repetition_penalty=values.get("repetition_penalty") or 1.0, sampling=_sampling(values))


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _sampling(values: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    if not values.get("do_sample"):
        return ()
    return (("do_sample", True), *((name, values[name]) for name in _SAMPLING if values.get(name) is not None))


def id_attributes(settings: GenerationSettings) -> dict[str, Any]:
    """The settings about ids alone, for a foreign config; what is absent is left out."""
    eos, forced = list(settings.eos_ids), list(settings.forced_eos_ids)
    values = {
        "eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": settings.pad_id,
        "bos_token_id": settings.bos_id, "decoder_start_token_id": settings.decoder_start_id,
        "forced_bos_token_id": settings.forced_bos_id, "forced_eos_token_id": forced[0] if len(forced) == 1 else forced,
        "suppress_tokens": list(settings.suppressed_ids), "begin_suppress_tokens": list(settings.begin_suppressed_ids),
        "bad_words_ids": [list(word) for word in settings.bad_words],
    }
    return {name: value for name, value in values.items() if value is not None and value != []}


def settings_attributes(settings: GenerationSettings, *, pair: bool) -> dict[str, Any]:
    """The inverse of `settings_from`, for a foreign config; what is absent or usual is left out.

    Args:
        settings: of a model.
        pair: whether it is an encoder-decoder.
    """
    plain = GenerationSettings()
    most = settings.max_total if settings.max_length is None else settings.max_length + 1 if pair else None
    values: dict[str, tuple[Any, Any]] = {
        "num_beams": (settings.num_beams, plain.num_beams),
        "length_penalty": (settings.length_penalty, plain.length_penalty),
        "early_stopping": (settings.early_stopping, plain.early_stopping),
        "renormalize_logits": (settings.renormalize, plain.renormalize),
        "min_length": (settings.min_length + 1 if pair and settings.min_length else settings.min_total, 0),
        "min_new_tokens": (0 if pair else settings.min_length, 0),
        "max_length": (most, None),
        "max_new_tokens": (None if pair else settings.max_length, None),
        "no_repeat_ngram_size": (settings.no_repeat_ngram, 0),
        "repetition_penalty": (settings.repetition_penalty, plain.repetition_penalty),
    }
    rules = {name: value for name, (value, usual) in values.items() if value != usual}
    return {**id_attributes(settings), **rules, **dict(settings.sampling)}


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
