"""What kind of value each attribute of a foreign config must have, so that a wrong one is named where it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tfm.config import require


@dataclass(frozen=True)
class _Kind:
    needed: str
    fits: Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _id(value: Any) -> bool:
    return _whole(value) and value >= 0


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(fits(item) for item in value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


_KINDS = {
    _Kind("a whole number above 0", lambda value: _whole(value) and value > 0): (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "max_position_embeddings", "max_sequence_length", "sliding_window", "type_vocab_size",
        "n_embd", "n_head", "n_layer", "n_inner", "n_positions", "dim", "hidden_dim", "n_heads", "n_layers",
        "d_model", "d_ff", "d_kv", "num_heads", "num_layers", "num_decoder_layers", "relative_attention_num_buckets",
        "relative_attention_max_distance", "decoder_vocab_size", "encoder_attention_heads", "decoder_attention_heads",
        "encoder_ffn_dim", "decoder_ffn_dim", "encoder_layers", "decoder_layers", "num_labels",
        "original_max_position_embeddings", "num_beams", "max_length", "max_new_tokens"),
    _Kind("a whole number, 0 or above", _id): (
        "max_window_layers", "min_length", "min_new_tokens", "no_repeat_ngram_size"),
    _Kind("a number above 0", lambda value: _number(value) and value > 0): (
        "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "rope_theta", "rotary_emb_base", "rotary_pct",
        "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
        "attention_factor", "repetition_penalty"),
    _Kind("a number, 0 or above", lambda value: _number(value) and value >= 0): ("initializer_range", "init_std"),
    _Kind("a number", _number): ("length_penalty",),
    _Kind("a number from 0 to below 1", lambda value: _number(value) and 0 <= value < 1): (
        "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "hidden_dropout", "dropout",
        "dropout_rate", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    _Kind("true or false", lambda value: value in (True, False)): (
        "tie_word_embeddings", "tie_weights_", "attention_bias", "mlp_bias", "use_sliding_window", "scale_attn_weights",
        "scale_embedding", "scale_decoder_outputs", "use_parallel_residual", "share_encoder_decoder_embeddings",
        "truncate", "is_encoder_decoder", "do_sample", "renormalize_logits", "force_bos_token_to_be_generated"),
    _Kind("true, false or 'never'", lambda value: value in (True, False, "never")): ("early_stopping",),
    _Kind("a text", _text): (
        "model_type", "hidden_act", "hidden_activation", "activation", "activation_function", "feed_forward_proj",
        "rope_type", "type"),
    _Kind("a list of texts", _list_of(_text)): ("architectures", "layer_types"),
    _Kind("an object", lambda value: isinstance(value, dict)): ("rope_parameters", "rope_scaling", "id2label"),
    _Kind("a token's id (-1: none)", lambda value: _whole(value) and value >= -1): (
        "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    _Kind("a token's id (-1: none) or a list of ids", lambda value: (_whole(value) and value >= -1)
          or _list_of(_id)(value)): ("eos_token_id", "forced_eos_token_id"),
    _Kind("a list of ids", _list_of(_id)): ("suppress_tokens", "begin_suppress_tokens"),
    _Kind("a list of lists of ids, none empty", _list_of(lambda value: bool(value) and _list_of(_id)(value))): (
        "bad_words_ids",),
}
_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names}


def check_kinds(values: Mapping[str, Any], before: str) -> None:
    """Refuse values of a wrong kind; null is what is absent, and names that are not known are left alone.

    Args:
        values: of a foreign config, or of an object in one.
        before: put before a name in the message.

    Raises:
        ValueError: the first of them.

    Example:
        >>> check_kinds({"hidden_size": "16"}, "config.json: ")
        Traceback (most recent call last):
            ...
        ValueError: config.json: hidden_size is '16', but it must be a whole number above 0
    """
    for name, value in values.items():
        if value is not None and name in _BY_NAME:
            require(_BY_NAME[name].fits(value), before + name, value, f"it must be {_BY_NAME[name].needed}")
