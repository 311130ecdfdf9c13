"""The attributes of a foreign `config.json`, none of which may be overlooked."""

from __future__ import annotations

from typing import Any

from tfm.config import Activation, require
from tfm.interop.kinds import check_kinds

_MISSING = object()

# Neither changes what the model computes: bookkeeping, the default behaviour of other software, and the labels of heads
# that the tables do not read (their tensors would be reported).
_HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels",
    "architectures", "attn_implementation", "chunk_size_feed_forward", "classifier_dropout", "dtype", "eos_token_ids",
    "finetuning_task", "gradient_checkpointing", "id2label", "initializer_factor", "label2id", "language",
    "languages", "license", "model_type", "name_or_path", "num_labels", "output_attentions", "output_hidden_states",
    "output_past", "problem_type", "return_dict", "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "use_bfloat16", "use_cache", "xla_device",
})

# Read by `load_generation_settings`.
_GENERATION = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cls_token_id", "decoder_start_token_id",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "force_bos_token_to_be_generated", "forced_bos_token_id",
    "forced_decoder_ids", "forced_eos_token_id", "length_penalty", "mask_token_id", "max_length", "max_new_tokens",
    "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "pad_token_id", "prefix", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "top_k",
    "top_p", "typical_p", "unk_token_id",
})

# What else any config may have, with the values that leave the model as the tables know it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "neftune_noise_alpha": (None,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "tie_encoder_decoder": (False,),
}

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}
_ACTIVATION_NAMES: dict[Activation, str] = {
    "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "silu": "silu",
}


class Attributes:
    """A foreign config while it is read: what nobody took, expected or skipped is an error in the end, and a value of a
    wrong kind is one at once.

    Example:
        >>> attributes = Attributes({"hidden_size": 8, "model_type": "bert", "new_trick": True})
        >>> attributes.take("hidden_size")
        8
        >>> attributes.finish()
        Traceback (most recent call last):
            ...
        ValueError: config.json has new_trick = True, which no table of tfm.interop knows: ...
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        check_kinds(values, f"{where}: ")
        self._values = values
        self._where = where
        self._left = set(values) - _HARMLESS - _GENERATION

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, *names: str, default: Any = _MISSING) -> Any:
        """The value of the first of some names that is there and not null.

        Raises:
            ValueError: none is there, and there is no default.
        """
        self._left -= set(names)
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is _MISSING:
            raise ValueError(f"{self._where} has no {' or '.join(names)}, which a model of type "
                             f"{self._values.get('model_type')!r} needs")
        return default

    def expect(self, name: str, *allowed: Any, because: str) -> None:
        """Refuse an attribute whose value is none of those that the table reproduces."""
        self._left.discard(name)
        value = self._values.get(name, allowed[0])
        require(value in allowed, f"{self._where}: {name}", value,
                f"only {' or '.join(repr(a) for a in allowed)} is supported: {because}")

    def skip(self, *names: str) -> None:
        """Pass over attributes that change nothing in the models of this family."""
        self._left -= set(names)

    def activation(self, *names: str, default: Any = _MISSING) -> Activation:
        """An activation by its foreign name."""
        value = self.take(*names, default=default)
        require(value in _ACTIVATIONS, f"{self._where}: {names[0]}", value, f"it must be one of {sorted(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def finish(self) -> None:
        """Check the attributes that all families share, and that nothing is left.

        Raises:
            ValueError: an attribute that nobody knows.
        """
        for name, allowed in _NEUTRAL.items():
            if name in self._left:
                self.expect(name, *allowed, because="the tables know no other")
        if self._left:
            listed = ", ".join(f"{name} = {self._values[name]!r}" for name in sorted(self._left))
            raise ValueError(f"{self._where} has {listed}, which no table of tfm.interop knows: "
                             "the model may not be what it seems, so it is not loaded")


def activation_name(activation: Activation) -> str:
    """The foreign name of an activation."""
    return _ACTIVATION_NAMES[activation]
