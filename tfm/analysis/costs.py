"""What a model costs, in closed form: parameters, FLOPs, score matrices, caches, and the paper's Table 1 in numbers.

A multiply and an add are 2 FLOPs. Counted are matrix products and the softmax; norms, activations, biases, residuals
and look-ups are left out (together about 1 % at the paper's widths).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from tfm.config import AttentionPattern, ModelConfig, require
from tfm.models import init_params
from tfm.ops.patterns import bigbird

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
SOFTMAX_FLOPS = 5
"""For each score: maximum, difference, exponential, sum, quotient."""
PARTS = ("projections", "scores", "softmax", "feed-forward", "vocabulary")


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Number of parameters of each part, from shapes alone.

    Args:
        config: the architecture.

    Returns:
        part -> count, such as "encoder self-attention"; the sum is the model's size.

    Example:
        >>> counts = parameter_counts(ModelConfig(vocab_size=37000))
        >>> counts["embeddings"], counts["encoder feed-forward"], sum(counts.values())
        (18944000, 12598272, 63045632)

    Reference: Vaswani et al. (2017), Table 3 (65 million for the base model, with its biases and rounding).
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        part = _part_of([str(key.key) for key in path])
        counts[part] = counts.get(part, 0) + math.prod(leaf.shape)
    order = ("embeddings", "encoder", "decoder", "output")
    return dict(sorted(counts.items(), key=lambda item: order.index(item[0].split()[0])))


def _part_of(path: Sequence[str]) -> str:
    if path[0].endswith("embedding"):
        return "embeddings"
    if path[0] not in ("encoder", "decoder"):
        return "output"
    stack, rest = path[0], "/".join(path[1:])
    if rest.startswith(("positions", "relative_bias", "token_types")) or "relative_keys" in rest or \
            "relative_values" in rest:
        return f"{stack} positions"
    if "norm" in rest:
        return f"{stack} norms"
    names = {"self_attention": "self-attention", "cross_attention": "cross-attention", "feed_forward": "feed-forward"}
    return f"{stack} {next(name for key, name in names.items() if key in rest)}"


def visited_pairs(length: int, pattern: AttentionPattern | None = None, *, causal: bool = False,
                  max_positions: int | None = None) -> int:
    """Number of (query, key) pairs that a pattern of self-attention looks at, exactly.

        full: n^2,    causal: n (n + 1) / 2,    causal window of w keys: w n - w (w - 1) / 2 for n >= w

    Args:
        length: number of tokens n.
        pattern: None: full.
        causal: keys after the query are hidden.
        max_positions: bigbird: the length that its random blocks are drawn for; None: n.

    Returns:
        the number; 0 for linear attention, which has no pairs.

    Example:
        >>> window = AttentionPattern("window", window=512)
        >>> visited_pairs(512, causal=True), visited_pairs(512, window, causal=True)
        (131328, 131328)
        >>> round(visited_pairs(131072, causal=True) / visited_pairs(131072, window, causal=True), 1)
        128.3
    """
    kind = "full" if pattern is None else pattern.kind
    if pattern is None or kind == "full":
        return length * (length + 1) // 2 if causal else length**2
    if kind == "linear":
        return 0
    if kind == "bigbird":
        return _bigbird_pairs(length, pattern, causal, max_positions or length)
    return _window_pairs(length, pattern, causal)


def _window_pairs(length: int, pattern: AttentionPattern, causal: bool) -> int:
    """Window and longformer, row by row."""
    rows, step = np.arange(length), pattern.dilation if pattern.kind == "longformer" else 1
    left = pattern.window - 1 if causal and pattern.kind == "window" else pattern.window // 2
    right = 0 if causal else pattern.window // 2
    seen = np.minimum(rows // step, left) + 1 + np.minimum((length - 1 - rows) // step, right)
    if pattern.kind == "longformer":
        tokens = np.unique([t for t in pattern.global_tokens if t < length]).astype(np.int64)
        for token in tokens:
            offset = token - rows
            near = (offset % step == 0) & (offset >= -left * step) & (offset <= right * step)
            seen = seen + (~near & ((offset <= 0) | (not causal)))
        seen[tokens] = tokens + 1 if causal else length
    return int(seen.sum())


def _bigbird_pairs(length: int, pattern: AttentionPattern, causal: bool, max_positions: int) -> int:
    cells = np.asarray(bigbird(max_positions, block_size=pattern.block_size, num_random_blocks=pattern.random_blocks,
                               seed=pattern.seed).cells)[0]
    count = -(-length // pattern.block_size)
    sizes = np.minimum(pattern.block_size, length - np.arange(count) * pattern.block_size)
    pairs = sizes[:, None] * sizes
    if causal:
        pairs = np.tril(pairs, -1) + np.diag(sizes * (sizes + 1) // 2)
    return int((pairs * cells[:count, :count]).sum())


def forward_flops(config: ModelConfig, batch: int, length: int, *, target_length: int | None = None,
                  dense: bool = False) -> dict[str, int]:
    """FLOPs of one forward pass by part.

    Args:
        config: the architecture.
        batch: rows.
        length: tokens of a row (of the source, for an encoder-decoder).
        target_length: tokens of a row of the target; None: as `length`.
        dense: count every pair of tokens, as a kernel that writes the whole matrix does; else only visited ones.

    Returns:
        part of `PARTS` -> FLOPs; of a classifier, the head for its classes stands under "vocabulary".

    Example:
        >>> flops = forward_flops(ModelConfig(vocab_size=37000), 1, 1)
        >>> flops["projections"] == 2 * 18 * 4 * 512 * 512, flops["vocabulary"] == 2 * 512 * 37000
        (True, True)
    """
    target = length if target_length is None else target_length
    total = dict.fromkeys(PARTS, 0)
    if config.encoder_layers:
        _add_stack(total, config, config.encoder_layers, length, None, False, dense)
    if config.decoder_layers:
        memory = length if config.is_encoder_decoder else None
        own = target if config.is_encoder_decoder else length
        _add_stack(total, config.for_decoder(), config.decoder_layers, own, memory, True, dense)
    total["vocabulary"] = _head_flops(config, target if config.is_encoder_decoder else length)
    return {part: batch * flops for part, flops in total.items()}


def _head_flops(config: ModelConfig, length: int) -> int:
    """FLOPs of a row's logits: of the vocabulary at each token, or of the classes once."""
    M = config.d_model
    if config.num_classes:
        pooling = 2 * length * M if config.class_pooling == "mean" else 2 * M**2 * config.pooler
        return pooling + 2 * M * config.num_classes
    return 2 * length * M * config.vocab_size + 2 * length * M**2 * config.token_head


def _add_stack(total: dict[str, int], config: ModelConfig, depth: int, length: int, memory: int | None, causal: bool,
               dense: bool) -> None:
    M, H, K = config.d_model, config.num_heads, config.num_kv_heads or config.num_heads
    D, Dv = config.resolved_head_dim, config.resolved_value_dim
    for layer in range(depth):
        pattern = config.pattern_of(layer)
        total["projections"] += 2 * length * M * (H * D + K * D + K * Dv + H * Dv)
        if pattern.kind == "linear":
            total["scores"] += 2 * length * (H + K) * D * (Dv + 1)  # sums over keys, then one product for each query
        else:
            pairs = length**2 if dense else visited_pairs(length, pattern, causal=causal,
                                                          max_positions=max(config.max_positions, length))
            _add_scores(total, pairs, H, D + Dv)
        total["feed-forward"] += 2 * length * M * config.d_ff * (3 if config.gated else 2)
        if memory is not None:
            total["projections"] += 2 * (length * M * H * (D + Dv) + memory * M * K * (D + Dv))
            _add_scores(total, length * memory, H, D + Dv)


def _add_scores(total: dict[str, int], pairs: int, heads: int, widths: int) -> None:
    total["scores"] += 2 * pairs * heads * widths
    total["softmax"] += SOFTMAX_FLOPS * pairs * heads


def training_flops(config: ModelConfig, batch: int, length: int, *, target_length: int | None = None,
                   dense: bool = False) -> dict[str, int]:
    """FLOPs of one training step by part: the forward pass and, for the gradients, twice as much again.

    One half of that is for the gradients of activations, one for those of weights, which training with adapters leaves
    out. With `config.remat="full"` the layers' forward pass runs once more; the optimizer is not counted.

    Args: as for `forward_flops`.

    Reference: Kaplan et al. (2020), section 2.1; Chowdhery et al. (2022), PaLM, appendix B.
    """
    forward = forward_flops(config, batch, length, target_length=target_length, dense=dense)
    passes = {part: 3 - bool(config.lora_rank) + (config.remat == "full" and part != "vocabulary") for part in forward}
    return {part: passes[part] * flops for part, flops in forward.items()}


def score_matrix_bytes(length: int, *, bytes_per_element: int = 2, heads: int = 1, layers: int = 1,
                       batch: int = 1) -> int:
    """Size of the scores if they were stored.

    Example:
        >>> score_matrix_bytes(131072)
        34359738368
    """
    return batch * layers * heads * length**2 * bytes_per_element


@dataclass(frozen=True)
class KernelMemory:
    """What one call of attention needs beside its inputs, in bytes, by the compiler's own analysis."""

    temporaries: int
    output: int


def kernel_memory(length: int, *, head_dim: int = 64, dtype: str = "bf16", causal: bool = True) -> KernelMemory:
    """Memory of our blockwise attention for one head of one layer. Compiles it; runs and allocates nothing.

    Args:
        length: tokens.
        head_dim: width D.
        dtype: of queries, keys and values: a key of `DTYPE_BYTES`.
        causal: under the causal mask.
    """
    from tfm.ops.attention import attention
    from tfm.ops.masks import Causal

    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    require(dtype in names, "dtype", dtype, f"attention runs in {', '.join(names)}")
    shape = jax.ShapeDtypeStruct((1, length, 1, head_dim), names[dtype])

    def call(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        return attention(query, key, value, mask=Causal() if causal else None, implementation="blockwise")

    stats: Any = jax.jit(call).lower(shape, shape, shape).compile().memory_analysis()
    return KernelMemory(stats.temp_size_in_bytes, stats.output_size_in_bytes)


def kv_cache_bytes(config: ModelConfig, batch: int, length: int, *, bytes_per_element: int = 2) -> int:
    """Keys and values that decoding keeps of `length` tokens, cross-attention's aside.

        2 * layers * min(length, window) * K * D * bytes

    Args:
        config: of a model with a decoder.
        batch: rows.
        length: tokens of each row.
        bytes_per_element: of the stored numbers.

    Example:
        >>> from tfm.models.presets import llama
        >>> kv_cache_bytes(llama(), 1, 4096) == 2 * 32 * 4096 * 4096 * 2
        True
    """
    config = config.for_decoder()
    heads = config.num_kv_heads or config.num_heads
    widths = config.resolved_head_dim + config.resolved_value_dim
    slots = 0
    for layer in range(config.decoder_layers):
        pattern = config.pattern_of(layer)
        if pattern.kind != "linear":
            slots += min(length, pattern.window) if pattern.kind == "window" else length
    return batch * slots * heads * widths * bytes_per_element


def cache_variants(config: ModelConfig, window: int) -> dict[str, ModelConfig]:
    """The same decoder with all, some and one key/value head, and with a window.

    "some" is the config's own number where it is one, or the divisor nearest to H / 4.
    """
    config = replace(config.for_decoder(), attention_pattern=(AttentionPattern(),))
    heads = config.num_heads
    some = config.num_kv_heads if config.num_kv_heads not in (None, 1, heads) else min(
        (k for k in range(1, heads + 1) if heads % k == 0), key=lambda k: abs(k - heads / 4))
    own = config.num_kv_heads or heads
    return {f"MHA, {heads} key heads": replace(config, num_kv_heads=heads),
            f"GQA, {some} key heads": replace(config, num_kv_heads=some),
            "MQA, 1 key head": replace(config, num_kv_heads=1),
            f"window of {window:,}, {own} key heads":
                replace(config, attention_pattern=(AttentionPattern("window", window=window),))}


@dataclass(frozen=True)
class LayerType:
    """A row of Table 1 in numbers."""

    name: str
    complexity: int
    """Operations of a layer, without the constant."""
    sequential: int
    """Operations that must follow each other."""
    path: int
    """Steps between the two tokens that are furthest apart."""


def layer_types(length: int, width: int, *, kernel: int = 3, neighbourhood: int = 512) -> list[LayerType]:
    """Complexity, sequential operations and longest path of four kinds of layers.

    Args:
        length: n.
        width: d.
        kernel: k, of (dilated) convolutions.
        neighbourhood: r, keys that restricted self-attention looks at.

    Example:
        >>> [(row.name, row.complexity, row.path) for row in layer_types(8, 4, neighbourhood=2)]
        [('self-attention', 256, 1), ('recurrent', 128, 8), ('convolutional', 384, 2), ('restricted', 64, 4)]

    Reference: Vaswani et al. (2017), section 4, Table 1.
    """
    steps, reach = 0, 1
    while reach < length:
        steps, reach = steps + 1, reach * kernel
    return [LayerType("self-attention", length**2 * width, 1, 1),
            LayerType("recurrent", length * width**2, length, length),
            LayerType("convolutional", kernel * length * width**2, 1, steps),
            LayerType("restricted", neighbourhood * length * width, 1, -(-length // neighbourhood))]
