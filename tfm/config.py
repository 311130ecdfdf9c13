"""Frozen dataclasses that say everything about an experiment. No JAX here: a config is plain data.

`Config` holds five parts: `ModelConfig` (the architecture, in `model_config.py`), `DataConfig`, `OptimizerConfig`,
`TrainConfig` and `DecodeConfig`. Each checks itself when it is made; an error names the field, the value and what
would be right. `config_json.py` writes and reads them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from tfm.config_checks import as_tuple, require, require_choices, require_positive, require_rates, require_types
from tfm.model_config import (
    Activation,
    AttentionPattern,
    ModelConfig,
    Norm,
    NormPosition,
    Position,
    RotaryScaling,
)

__all__ = ["Activation", "AttentionPattern", "Config", "DataConfig", "DecodeConfig", "ModelConfig", "Norm",
           "NormPosition", "OptimizerConfig", "Position", "RotaryScaling", "TrainConfig", "require"]


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes batches."""

    source: Literal["generated", "text", "tfds"] = "generated"
    """generated: our own grammar, no files; text: plain or .gz files, one example a line; tfds: a TFDS builder."""
    train: tuple[str, ...] = ()
    """text: (source file, target file), or one file for a language model; classify: (text file, label file) or one
    file of lines `text TAB label`. tfds: the split's name."""
    valid: tuple[str, ...] = ()
    """Held out while training."""
    test: tuple[str, ...] = ()
    """Held out until eval.py."""
    labels: tuple[str, ...] = ()
    """classify: names of the classes in order. (): those of the train split, sorted; they are kept with the run."""
    task: Literal["translate", "causal_lm", "prefix_lm", "masked_lm", "span_corruption", "infilling",
                  "classify"] = "translate"
    """What is learnt from the text."""
    tfds_name: str = ""
    """tfds: builder and config, such as wmt14_translate/de-en, or a folder prepared before."""
    tfds_features: tuple[str, ...] = ()
    """tfds: names of the source and target features, such as ("en", "de")."""
    tfds_dir: str | None = None
    """tfds: data folder. None: TFDS's own default."""
    generated_size: int = 200_000
    """generated: distinct training sentences before an epoch ends."""
    max_length: int = 128
    """Most tokens of a side, EOS included."""
    too_long: Literal["skip", "cut"] = "skip"
    """What happens to longer examples; their number is printed."""
    tokens_per_batch: int = 4096
    """Token budget of a batch, for each side, padding included (the paper: 25,000)."""
    batching: Literal["bucket", "pack"] = "bucket"
    """bucket: pad to a few fixed lengths; pack: several examples a row, with segments."""
    buckets: int | None = None
    """Number of bucket lengths: as many shapes are compiled. None: as few as keep padding under a tenth, at most 32."""
    tokenizer: Literal["unigram", "bpe", "byte", "file"] = "bpe"
    """sentencepiece model trained on the train split, plain bytes, or a given file."""
    tokenizer_path: str | None = None
    """tokenizer="file": a sentencepiece model or tokenizer.json."""
    vocab_size: int = 8000
    """Size of a trained vocabulary."""
    normalization: Literal["identity", "nfkc"] = "identity"
    """Unicode normalisation inside the tokenizer; identity keeps every character."""
    document_separator: str | None = None
    """text for language models: a line that separates documents. None: each line is a document."""
    mask_rate: float = 0.15
    """Share of tokens that masked_lm, span_corruption (.15) and infilling (.30) corrupt."""
    mean_span: float = 3.0
    """Mean length of a corrupted span."""
    whole_word: bool = False
    """masked_lm: mask whole words."""
    permute_sentences: bool = False
    """infilling: shuffle the sentences of the source."""
    cache_dir: str | None = None
    """Where tokenised text is kept. None: a folder beside the run."""

    def __post_init__(self) -> None:
        for name in ("train", "valid", "test", "tfds_features", "labels"):
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        require_types("data", self)
        require_choices("data", self)
        require_positive("data", self, ("max_length", "tokens_per_batch", "buckets", "vocab_size", "generated_size",
                                         "mean_span"))
        require_rates("data", self, ("mask_rate",))
        require(self.tokens_per_batch >= self.max_length, "data.tokens_per_batch", self.tokens_per_batch,
                f"a batch must hold one example of max_length={self.max_length} tokens")
        for name in ("train", "valid", "test") if self.source == "generated" else ():
            require(not getattr(self, name), f"data.{name}", getattr(self, name),
                    "source='generated' reads no files: choose data.source='text' or 'tfds'")
        require(self.task == "classify" or not self.labels, "data.labels", self.labels, "only task='classify' has them")
        require(self.source != "text" or bool(self.train), "data.train", self.train,
                "source='text' needs the training file(s)")
        require(self.source != "tfds" or bool(self.tfds_name), "data.tfds_name", self.tfds_name,
                "source='tfds' needs a builder such as wmt14_translate/de-en")
        require(len(set(self.labels)) == len(self.labels), "data.labels", self.labels, "no name may occur twice")
        require((self.tokenizer == "file") == (self.tokenizer_path is not None), "data.tokenizer_path",
                self.tokenizer_path, "it goes together with data.tokenizer='file'")

    @property
    def is_pair(self) -> bool:
        """Whether an example has a source and a target text."""
        return self.task == "translate"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its schedule and the loss."""

    name: Literal["adam", "adamw", "adafactor", "sgd"] = "adam"
    """Update rule (optax)."""
    schedule: Literal["warmup_inverse_sqrt", "warmup_cosine", "warmup_linear", "constant"] = "warmup_inverse_sqrt"
    """warmup_inverse_sqrt: the paper's equation 3."""
    learning_rate: float = 1.0
    """Peak rate; for warmup_inverse_sqrt a factor on the paper's formula."""
    final_learning_rate: float = 0.0
    """Rate at the last step (warmup_cosine, warmup_linear)."""
    warmup_steps: int = 4000
    """Updates until the peak."""
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0
    """adamw, adafactor: decay of kernels and embeddings (not of norms and biases), times the learning rate."""
    label_smoothing: float = 0.1
    """Share of the target probability spread over all V classes."""
    accumulate: int = 1
    """Micro-batches into which each batch is split to save memory; the update is that of the whole batch."""
    clip_norm: float | None = None
    """Clip the gradient's global norm."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the parameters."""

    def __post_init__(self) -> None:
        require_types("optimizer", self)
        require_choices("optimizer", self)
        require_positive("optimizer", self, ("learning_rate", "accumulate", "epsilon", "clip_norm"))
        require_rates("optimizer", self, ("beta1", "beta2", "label_smoothing"))
        for name in ("warmup_steps", "weight_decay", "final_learning_rate"):
            require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "it cannot be negative")
        require(self.warmup_steps > 0 or self.schedule != "warmup_inverse_sqrt", "optimizer.warmup_steps", 0,
                "warmup_inverse_sqrt needs at least 1")
        require(self.weight_decay == 0.0 or self.name in ("adamw", "adafactor"), "optimizer.weight_decay",
                self.weight_decay, f"{self.name} has none: choose adamw or adafactor")
        require(self.ema_decay is None or 0.0 < self.ema_decay < 1.0, "optimizer.ema_decay", self.ema_decay,
                "it must lie in (0, 1)")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop."""

    steps: int = 1000
    """Updates of the parameters."""
    seed: int = 0
    """Seed of initialisation, dropout and data order."""
    eval_every: int = 200
    """Updates between evaluations on the validation split."""
    checkpoint_every: int = 200
    """Updates between checkpoints."""
    log_every: int = 20
    """Updates between lines of metrics.jsonl."""
    keep: int = 5
    """Newest checkpoints kept; the best by BLEU is kept besides."""
    eval_sentences: int = 200
    """Validation sentences translated for BLEU while training; 0: none."""
    samples: int = 3
    """Sample translations shown at each evaluation."""
    init_from: str | None = None
    """Run folder, checkpoint of one, Hugging Face folder or .gguf file whose parameters and tokenizer training starts
    from; what it lacks is initialised, and shapes that differ are an error."""
    init_model: Literal["config", "source"] = "config"
    """With init_from. source: its architecture replaces that of the config, but for dropout, adapters and speed."""

    def __post_init__(self) -> None:
        require_types("train", self)
        require_choices("train", self)
        require_positive("train", self, ("steps", "eval_every", "checkpoint_every", "log_every", "keep"))
        require(0 <= self.seed < 2**63, "train.seed", self.seed, "it must lie in [0, 2^63)")
        for name in ("eval_sentences", "samples"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "it cannot be negative")


@dataclass(frozen=True)
class DecodeConfig:
    """How text is generated."""

    beam_size: int = 4
    """Hypotheses kept; 1: greedy."""
    alpha: float = 0.6
    """Exponent of the length penalty ((5 + length) / 6) ** alpha."""
    max_length: int | None = None
    """Most new tokens. None: source length + 50 for translation, 128 otherwise."""
    n_best: int = 1
    """Hypotheses returned."""
    batch_size: int = 32
    """Sentences decoded together."""

    def __post_init__(self) -> None:
        require_types("decode", self)
        require_positive("decode", self, ("beam_size", "max_length", "n_best", "batch_size"))
        require(self.alpha >= 0.0, "decode.alpha", self.alpha, "it cannot be negative")
        require(self.n_best <= self.beam_size, "decode.n_best", self.n_best,
                f"it can be at most beam_size={self.beam_size}")


@dataclass(frozen=True)
class Config:
    """One experiment."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)

    def replace(self, **changes: Any) -> Config:
        """A copy with whole parts replaced: `config.replace(train=TrainConfig(steps=10))`."""
        return dataclasses.replace(self, **changes)
