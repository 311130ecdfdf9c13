"""Exact attention against its approximations: one decoder for each pattern, equal in parameters."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tfm.analysis.fit import fit
from tfm.config import AttentionPattern, ModelConfig
from tfm.models import build, init_params
from tfm.models.stack import pattern_rule
from tfm.ops.attention import attention
from tfm.ops.linear import linear_attention
from tfm.ops.masks import Causal

LENGTH, VOCABULARY, ROWS = 64, 12, 16
PATTERNS = {
    "full": AttentionPattern(),
    "window": AttentionPattern("window", window=16),
    "longformer": AttentionPattern("longformer", window=32, global_tokens=(0, 1, 2, 3)),
    "bigbird": AttentionPattern("bigbird", block_size=8, random_blocks=1),
    "linear": AttentionPattern("linear"),
}
"""Causal, as decoders use them: the window sees 16 keys, Longformer's 17 and 4 global ones."""


def pattern_config(name: str) -> ModelConfig:
    """A decoder of two layers; only the pattern differs, which has no parameters."""
    return ModelConfig(vocab_size=VOCABULARY, d_model=32, d_ff=64, num_heads=4, encoder_layers=0, decoder_layers=2,
                       norm_position="pre", position="rotary", dropout_rate=0.0, max_positions=LENGTH,
                       attention_pattern=(PATTERNS[name],))


def draw_echo(distance: int, key: jax.Array) -> jax.Array:
    """Sequences [ROWS, LENGTH + 1] in which each token is that of `distance` places before, after a random start."""
    start = jax.random.randint(key, (ROWS, distance), 0, VOCABULARY)
    return jnp.tile(start, (1, -(-(LENGTH + 1) // distance)))[:, : LENGTH + 1]


def echo_loss(config: ModelConfig, distance: int, params: Any, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy over the tokens that can be known."""
    logits: Any = build(config).apply({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, distance - 1 :], tokens[:, distance:]).mean()


def learn_echo(name: str, distance: int, *, steps: int, seed: int = 0) -> float:
    """Loss at the end of learning the echo, the mean of the last 20 updates; ln 12 = 2.48 without learning."""
    config = pattern_config(name)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
    _, losses = fit(partial(echo_loss, config, distance), init_params(config, jax.random.key(seed)),
                    partial(draw_echo, distance), steps=steps, seed=seed, learning_rate=schedule)
    return float(losses[-20:].mean())


def blockwise_difference(name: str, length: int, *, seed: int = 0) -> float:
    """Greatest difference between blockwise and dense attention under a pattern, on random arrays."""
    arrays = [jax.random.normal(key, (1, length, 2, 16)) for key in jax.random.split(jax.random.key(seed), 3)]
    rule = _rule(name, length)
    outputs: list[Any] = [attention(*arrays, mask=rule, implementation="dense"),
                          attention(*arrays, mask=rule, implementation="blockwise", block_size=32)]
    return float(jnp.abs(outputs[0] - outputs[1]).max())


def _rule(name: str, length: int) -> Any:
    pattern = PATTERNS[name]
    if pattern.kind == "full":
        return Causal()
    return Causal() & pattern_rule(pattern, ModelConfig(vocab_size=1, max_positions=length), causal=True)


def forward_cost(name: str, length: int, *, repeats: int = 9) -> dict[str, float]:
    """Time and memory of the forward pass of one layer's attention: 4 heads of width 16, one row.

    Args:
        name: of `PATTERNS`, or "dense": full attention with its matrix written out.
        length: tokens.
        repeats: runs, of which the fastest counts.

    Returns:
        "milliseconds", and "megabytes" of temporaries by the compiler's analysis.
    """
    arrays = [jax.random.normal(key, (1, length, 4, 16)) for key in jax.random.split(jax.random.key(0), 3)]

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        if name == "linear":
            return linear_attention(query, key, value, causal=True)
        rule = _rule("full" if name == "dense" else name, length)
        return attention(query, key, value, mask=rule, implementation="dense" if name == "dense" else "blockwise",
                         block_size=None if name == "dense" else min(256, length))

    compiled = jax.jit(run).lower(*arrays).compile()
    stats: Any = compiled.memory_analysis()
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - start)
    return {"milliseconds": 1e3 * min(times), "megabytes": stats.temp_size_in_bytes / 1e6}
