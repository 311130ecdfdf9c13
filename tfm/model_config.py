"""The architecture as a frozen dataclass, with its attention patterns and RoPE scaling."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal

from tfm.config_checks import as_tuple, require, require_choices, require_positive, require_rates, require_types

Norm = Literal["layer", "rms"]
NormPosition = Literal["post", "pre"]
Position = Literal["sinusoidal", "learned", "shaw", "t5", "rotary", "alibi", "none"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Ties = Literal["all", "inputs", "decoder", "none"]
DType = Literal["float32", "bfloat16", "float16"]
PatternKind = Literal["full", "window", "longformer", "bigbird", "linear"]
ScalingKind = Literal["linear", "dynamic", "llama3", "yarn", "factors"]


@dataclass(frozen=True)
class RotaryScaling:
    """How RoPE's frequencies are changed for contexts longer than those trained on."""

    kind: ScalingKind
    factor: float = 1.0
    """Ratio of the new context length to the original one."""
    original_max_positions: int = 4096
    """Context length before scaling (llama3, yarn, dynamic)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor stay as they are."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this keep their frequency."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this are interpolated."""
    attention_factor: float | None = None
    """yarn: factor on the rotated vectors; None: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    factors: tuple[float, ...] = ()
    """factors: what the frequency of each pair of dimensions is divided by."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", as_tuple(self.factors))
        require_types("model.rotary_scaling", self)
        require_choices("model.rotary_scaling", self)
        require((self.kind == "factors") == bool(self.factors), "model.rotary_scaling.factors", self.factors,
                "they go together with kind='factors'")
        require(self.factor >= 1.0, "model.rotary_scaling.factor", self.factor, "it must be at least 1")
        require(self.high_freq_factor > self.low_freq_factor, "model.rotary_scaling.high_freq_factor",
                self.high_freq_factor, f"it must be above low_freq_factor={self.low_freq_factor}")
        require(self.beta_fast >= self.beta_slow, "model.rotary_scaling.beta_fast", self.beta_fast,
                f"it must be at least beta_slow={self.beta_slow}")


@dataclass(frozen=True)
class AttentionPattern:
    """Which keys a self-attention layer sees, beside the causal rule of a decoder and padding."""

    kind: PatternKind = "full"
    window: int = 512
    """window: keys seen, itself included (causal); longformer, bigbird: window width over both sides."""
    dilation: int = 1
    """longformer: step between the keys of the window."""
    global_tokens: tuple[int, ...] = (0,)
    """longformer: positions that see all and are seen by all."""
    block_size: int = 64
    """bigbird: width of a block."""
    random_blocks: int = 3
    """bigbird: random key blocks for each query block."""
    seed: int = 0
    """bigbird: seed of the random blocks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_tokens", as_tuple(self.global_tokens))
        require_types("model.attention_pattern", self)
        require_choices("model.attention_pattern", self)
        require_positive("model.attention_pattern", self, ("window", "dilation", "block_size"))
        require(self.kind != "longformer" or self.window % 2 == 0, "model.attention_pattern.window", self.window,
                "longformer's must be even, half of it to each side")
        require(self.random_blocks >= 0, "model.attention_pattern.random_blocks", self.random_blocks,
                "it cannot be negative")


@dataclass(frozen=True)
class ModelConfig:
    """The whole architecture: one dataclass for encoder-decoders, decoders and encoders of every family.

    `encoder_layers=0` makes a decoder-only model, `decoder_layers=0` an encoder. The defaults are the base model of
    "Attention Is All You Need" (Vaswani et al., 2017), without a vocabulary size.
    """

    vocab_size: int
    """Rows of the embedding table."""
    d_model: int = 512
    """Width M of the residual stream."""
    d_ff: int = 2048
    """Inner width F of the feed-forward layer."""
    num_heads: int = 8
    """Query heads H."""
    num_kv_heads: int | None = None
    """Key/value heads K (grouped heads); H must be a multiple. None: as many as query heads."""
    head_dim: int | None = None
    """Width D of one head of queries and keys (d_k). None: d_model / num_heads."""
    value_dim: int | None = None
    """Width of one head of values (d_v). None: as head_dim."""
    encoder_layers: int = 6
    """Layers of the encoder; 0: no encoder."""
    decoder_layers: int = 6
    """Layers of the decoder; 0: no decoder."""
    decoder_d_ff: int | None = None
    """d_ff of the decoder where it differs from the encoder's."""
    decoder_num_heads: int | None = None
    """num_heads of the decoder where it differs from the encoder's."""

    norm: Norm = "layer"
    """LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019)."""
    norm_position: NormPosition = "post"
    """post: x = norm(x + f(x)), as in the paper; pre: x = x + f(norm(x)), with a norm after the last layer."""
    norm_epsilon: float = 1e-6
    """Added to the variance."""
    norm_bias: bool = True
    """Whether LayerNorm has a bias."""
    norm_unit_offset: bool = False
    """RMSNorm multiplies by 1 + scale, so that a scale of 0 is neutral (Gemma)."""
    embedding_norm: bool = False
    """Norm on the sum of the embeddings (BERT, BART)."""
    qk_norm: bool = False
    """RMSNorm over each head of queries and keys (Qwen 3)."""
    parallel_residual: bool = False
    """x + attention(norm(x)) + feed_forward(norm(x)) (GPT-NeoX)."""

    position: Position = "sinusoidal"
    """How positions enter."""
    position_base: float = 10000.0
    """Base of the wavelengths of sinusoidal and rotary positions."""
    sinusoidal_layout: Literal["interleaved", "half"] = "interleaved"
    """interleaved: sin and cos alternate (the paper); half: all sines, then all cosines (Marian)."""
    rotary_layout: Literal["half", "interleaved"] = "half"
    """Which dimensions rotate together: i and i + D/2, or 2i and 2i + 1."""
    rotary_dim: int | None = None
    """Dimensions of a head that rotate. None: all."""
    rotary_scaling: RotaryScaling | None = None
    """Change of RoPE's frequencies for long contexts."""
    shaw_distance: int = 16
    """Shaw: distances are clipped at plus and minus this."""
    t5_buckets: int = 32
    """T5: number of buckets."""
    t5_max_distance: int = 128
    """T5: distance from which all share the last bucket."""
    max_positions: int = 512
    """Rows of the learned position table; longer sequences are refused. Other schemes use it as the trained length."""
    position_offset: int = 0
    """Rows of the learned table before that of position 0 (BART 2, RoBERTa pad id + 1)."""
    token_types: int = 0
    """Rows of the token type table (BERT 2); 0: none."""

    activation: Activation = "relu"
    """Activation of the feed-forward layer; gelu is exact, gelu_tanh the approximation."""
    gated: bool = False
    """f(x W1) * (x W3) W2: SwiGLU, GEGLU (Shazeer, 2020)."""
    feed_forward_bias: bool = True
    """Biases in the feed-forward layer."""
    attention_bias: bool = False
    """Biases in the projections of queries, keys and values."""
    attention_output_bias: bool = False
    """Bias in the output projection of attention."""
    attention_scale: float | None = None
    """Factor on q k^T. None: 1 / sqrt(head_dim); T5: 1."""
    attention_softcap: float | None = None
    """scores = cap * tanh(scores / cap)."""
    attention_pattern: tuple[AttentionPattern, ...] = (AttentionPattern(),)
    """Pattern of each self-attention layer, repeated over the layers."""

    dropout_rate: float = 0.1
    """Dropout on each sub-layer's output and on the sums of embeddings and positions."""
    attention_dropout_rate: float = 0.0
    """Dropout on the attention weights, after the softmax."""
    activation_dropout_rate: float = 0.0
    """Dropout inside the feed-forward layer, after the activation."""

    tie_embeddings: Ties = "all"
    """all: source, target and output share one table; inputs: source and target; decoder: target and output."""
    source_vocab_size: int | None = None
    """Rows of the source table where it is not shared. None: vocab_size."""
    scale_embeddings: bool = True
    """Multiply embeddings by sqrt(d_model)."""
    logit_scale: float = 1.0
    """Factor on the hidden vectors before the output matrix (tied T5: d_model**-0.5)."""
    logit_bias: bool = False
    """Bias on the logits (BERT, Marian)."""
    logit_softcap: float | None = None
    """logits = cap * tanh(logits / cap)."""
    token_head: bool = False
    """BERT's transform before the output matrix: dense, activation, norm."""
    pooler: bool = False
    """BERT's dense and tanh on the first hidden vector."""
    num_classes: int = 0
    """Outputs of an encoder's classification head; 0: none. Training fills it in from the data."""
    class_pooling: Literal["first", "mean"] = "first"
    """What that head reads: the first hidden vector (through the pooler where there is one), or the mean of all."""
    lora_rank: int = 0
    """Rank of the adapters x A B beside some projections (Hu et al., 2021); 0: none. With them nothing else is
    trained but a classification head."""
    lora_alpha: float = 16.0
    """The adapters are multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("attention/(query|value)$",)
    """Regular expressions of the projections that have one: self_attention/query, feed_forward/up, ..."""
    embedding_init: Literal["scaled", "normal"] = "scaled"
    """scaled: N(0, 1/d_model); normal: N(0, init_std^2)."""
    kernel_init: Literal["xavier", "normal"] = "xavier"
    """Xavier-uniform, or N(0, init_std^2)."""
    init_std: float = 0.02
    """Standard deviation of the normal initialisers."""

    dtype: DType = "float32"
    """Type of activations; softmax, norms and losses stay in float32."""
    param_dtype: DType = "float32"
    """Type in which parameters are stored."""
    attention_implementation: Literal["auto", "dense", "blockwise", "cudnn"] = "auto"
    """Kernel of ops.attention; it never changes what is computed."""
    scan_layers: bool = False
    """Run the layers of a stack as one lax.scan over stacked parameters: compile time flat in depth."""
    remat: Literal["none", "full", "dots"] = "none"
    """Recompute in the backward pass: nothing, whole layers, or all but the matrix products."""

    def __post_init__(self) -> None:
        for name in ("attention_pattern", "lora_targets"):
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        require_types("model", self)
        require_choices("model", self)
        require_positive("model", self, ("vocab_size", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim",
                                          "value_dim", "decoder_d_ff", "decoder_num_heads", "max_positions",
                                          "source_vocab_size", "norm_epsilon", "position_base", "attention_softcap",
                                          "logit_softcap", "rotary_dim", "shaw_distance", "lora_alpha", "init_std"))
        require_rates("model", self, ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate"))
        self._check_stacks()
        self._check_heads()
        self._check_positions()
        self._check_fine_tuning()

    def _check_stacks(self) -> None:
        for name in ("encoder_layers", "decoder_layers"):
            require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "it cannot be negative")
        require(self.encoder_layers + self.decoder_layers > 0, "model.encoder_layers", 0,
                "decoder_layers is 0 as well: one of the two must be above 0")
        require(len(self.attention_pattern) > 0, "model.attention_pattern", self.attention_pattern,
                "it needs at least one pattern")
        require(not self.norm_unit_offset or self.norm == "rms", "model.norm_unit_offset", True, "it needs norm='rms'")
        require(not (self.token_head or self.pooler) or self.is_encoder_only, "model.token_head or model.pooler", True,
                "only an encoder (decoder_layers=0) has it")
        shared = self.tie_embeddings in ("all", "inputs")
        require(self.source_vocab_size is None or not shared, "model.source_vocab_size", self.source_vocab_size,
                f"with tie_embeddings={self.tie_embeddings!r} source and target share one table")
        require(not (self.parallel_residual and self.norm_position == "post"), "model.parallel_residual", True,
                "it needs norm_position='pre'")

    def _check_heads(self) -> None:
        for heads_name in ("num_heads", "decoder_num_heads"):
            heads = getattr(self, heads_name)
            if heads is None:
                continue
            require(self.head_dim is not None or self.d_model % heads == 0, f"model.{heads_name}", heads,
                    f"d_model={self.d_model} is not divisible by it: choose a divisor or set model.head_dim")
            require(self.num_kv_heads is None or heads % self.num_kv_heads == 0, "model.num_kv_heads",
                    self.num_kv_heads, f"it must divide {heads_name}={heads}")

    def _check_positions(self) -> None:
        if self.position == "rotary":
            width = self.rotary_dim or self.resolved_head_dim
            require(width % 2 == 0 and width <= self.resolved_head_dim, "model.rotary_dim", width,
                    f"RoPE rotates pairs: it must be even and at most head_dim={self.resolved_head_dim}")
            scaling = self.rotary_scaling
            require(scaling is None or scaling.kind != "factors" or len(scaling.factors) == width // 2,
                    "model.rotary_scaling.factors", len(scaling.factors) if scaling else 0,
                    f"there must be one for each of the {width // 2} pairs of dimensions")
        require(self.rotary_scaling is None or self.position == "rotary", "model.rotary_scaling", self.rotary_scaling,
                "it needs position='rotary'")
        linear = any(pattern.kind == "linear" for pattern in self.attention_pattern)
        require(not (linear and self.position in ("shaw", "t5", "alibi")), "model.position", self.position,
                "linear attention has no scores to add a bias to: use sinusoidal, learned, rotary or none")
        require(not (linear and self.attention_softcap), "model.attention_softcap", self.attention_softcap,
                "linear attention has no scores to cap")
        only_linear = all(pattern.kind == "linear" for pattern in self.attention_pattern)
        require(not (only_linear and self.attention_dropout_rate and self.attention_pattern),
                "model.attention_dropout_rate", self.attention_dropout_rate, "linear attention has no weights to drop")
        require(self.position != "sinusoidal" or self.d_model % 2 == 0, "model.d_model", self.d_model,
                "sinusoidal positions need an even width, a sine and a cosine for each wavelength")
        require(self.position_offset >= 0, "model.position_offset", self.position_offset, "it cannot be negative")
        require(self.token_types >= 0, "model.token_types", self.token_types, "it cannot be negative")
        if self.position == "t5":
            require(self.t5_buckets >= 4 and self.t5_buckets % 2 == 0, "model.t5_buckets", self.t5_buckets,
                    "it must be even and at least 4")
            require(self.t5_max_distance > self.t5_buckets // 2, "model.t5_max_distance", self.t5_max_distance,
                    f"it must be above t5_buckets / 2 = {self.t5_buckets // 2}")

    def _check_fine_tuning(self) -> None:
        for name in ("num_classes", "lora_rank"):
            require(getattr(self, name) >= 0, f"model.{name}", getattr(self, name), "it cannot be negative")
        require(self.num_classes != 1, "model.num_classes", 1, "a classification needs at least 2")
        require(not self.num_classes or (self.is_encoder_only and not self.token_head and not self.logit_bias),
                "model.num_classes", self.num_classes,
                "only an encoder without a head for tokens (decoder_layers=0, token_head and logit_bias off) has them")
        for pattern in self.lora_targets if self.lora_rank else ():
            try:
                found = any(re.search(pattern, name) for name in self.projections)
            except re.error as error:
                raise ValueError(f"model.lora_targets: {pattern!r} is no regular expression: {error}") from error
            require(found, "model.lora_targets", pattern,
                    f"no projection matches it: there are {', '.join(self.projections)}")

    @property
    def projections(self) -> tuple[str, ...]:
        """The dense layers within a layer, as `lora_targets` sees them."""
        attentions = ("self_attention", "cross_attention") if self.is_encoder_decoder else ("self_attention",)
        inner = ("gate", "up", "down") if self.gated else ("up", "down")
        return (*(f"{part}/{name}" for part in attentions for name in ("query", "key", "value", "output")),
                *(f"feed_forward/{name}" for name in inner))

    @property
    def is_encoder_only(self) -> bool:
        return self.decoder_layers == 0

    @property
    def is_decoder_only(self) -> bool:
        return self.encoder_layers == 0

    @property
    def is_encoder_decoder(self) -> bool:
        return self.encoder_layers > 0 and self.decoder_layers > 0

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def resolved_value_dim(self) -> int:
        return self.value_dim or self.resolved_head_dim

    def pattern_of(self, layer: int) -> AttentionPattern:
        """Pattern of one layer: the tuple is repeated over the layers."""
        return self.attention_pattern[layer % len(self.attention_pattern)]

    def for_decoder(self) -> ModelConfig:
        """The config as the decoder's layers read it: with the decoder's own d_ff and heads."""
        if self.decoder_d_ff is None and self.decoder_num_heads is None:
            return self
        heads = self.decoder_num_heads or self.num_heads
        head_dim = self.head_dim or (self.d_model // heads if self.decoder_num_heads else None)
        return dataclasses.replace(self, d_ff=self.decoder_d_ff or self.d_ff, num_heads=heads, head_dim=head_dim,
                                   decoder_d_ff=None, decoder_num_heads=None)
