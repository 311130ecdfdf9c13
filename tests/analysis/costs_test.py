"""Closed forms against hand counts, brute force, the traced program and the compiler's own analysis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.analysis.costs import (
    PARTS,
    cache_variants,
    forward_flops,
    kernel_memory,
    kv_cache_bytes,
    layer_types,
    parameter_counts,
    score_matrix_bytes,
    training_flops,
    visited_pairs,
)
from tfm.analysis.program import matmul_flops
from tfm.config import AttentionPattern, ModelConfig
from tfm.models import build, count_params, init_params, presets
from tfm.models.adapters import join_params, split_params, trainable
from tfm.models.stack import pattern_rule
from tfm.nn.cache import cache_bytes
from tfm.ops.masks import Causal

PATTERNS = (AttentionPattern(), AttentionPattern("window", window=1), AttentionPattern("window", window=5),
            AttentionPattern("window", window=100), AttentionPattern("longformer", window=4),
            AttentionPattern("longformer", window=6, dilation=3, global_tokens=(0, 7, 8, 99)),
            AttentionPattern("bigbird", block_size=4, random_blocks=2))
SMALL = {"vocab_size": 40, "d_model": 16, "d_ff": 24, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 3}
MODELS = {
    "encoder-decoder": {},
    "decoder": {"encoder_layers": 0, "gated": True, "num_kv_heads": 2, "norm": "rms", "position": "rotary"},
    "encoder": {"decoder_layers": 0, "token_head": True, "head_dim": 6, "value_dim": 3},
    "T5's, decoder of its own size": {"position": "t5", "decoder_d_ff": 8, "decoder_num_heads": 2,
                                      "norm_position": "pre", "tie_embeddings": "none"},
    "classifier": {"decoder_layers": 0, "num_classes": 3, "pooler": True},
    "classifier of means": {"decoder_layers": 0, "num_classes": 5, "pooler": True, "class_pooling": "mean"},
    "linear": {"decoder_layers": 0, "attention_pattern": (AttentionPattern("linear"),)},
}


def call_of(config, source=12, target=7):
    """(function of params and ids, abstract params, abstract ids)"""
    shapes = [jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (source, target)]
    method = "class_logits" if config.num_classes else "token_logits" if config.is_encoder_only else "__call__"

    def call(params, *ids):
        return build(config).apply({"params": params}, *ids, method=method)

    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return call, params, shapes if config.is_encoder_decoder else shapes[:1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_visited_pairs_by_brute_force(pattern, causal):
    for length in (1, 3, 13, 40):
        config = ModelConfig(vocab_size=2, max_positions=40)
        rule = Causal() if pattern.kind == "full" else pattern_rule(pattern, config, causal=causal)
        dense = np.broadcast_to(np.asarray(rule.dense(np.arange(length), np.arange(length)))[0, 0], (length, length))
        if pattern.kind == "full" and not causal:
            dense = np.ones((length, length), bool)
        if causal:
            dense = dense & np.tri(length, dtype=bool)
        assert visited_pairs(length, pattern, causal=causal, max_positions=40) == dense.sum()


def test_the_numbers_of_long_documents():
    """By hand: 512 * 513 / 2; 131072 * 131073 / 2 over 512 * 131072 - 512 * 511 / 2; 131072^2 * 2 bytes."""
    window = AttentionPattern("window", window=512)
    assert visited_pairs(512, causal=True) == visited_pairs(512, window, causal=True) == 131_328
    assert visited_pairs(131_072, window, causal=True) == 66_978_048
    ratio = visited_pairs(131_072, causal=True) / visited_pairs(131_072, window, causal=True)
    assert round(ratio, 1) == 128.3
    assert round(score_matrix_bytes(131_072) / 1e9, 2) == 34.36


@pytest.mark.parametrize("name", MODELS)
def test_forward_flops_are_those_of_the_traced_program(name):
    config = ModelConfig(**{**SMALL, **MODELS[name]})
    call, params, ids = call_of(config)
    flops = forward_flops(config, 2, 12, target_length=7, dense=True)
    products = sum(flops[part] for part in PARTS if part != "softmax")
    assert products == matmul_flops(call, params, *ids)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_training_flops_are_those_of_the_traced_program(remat):
    """But for what depends on no parameter or is needed no more: the gradient of the embedded ids is a look-up."""
    config = ModelConfig(**{**SMALL, "remat": remat, "encoder_layers": 0, "tie_embeddings": "none"})
    call, params, ids = call_of(config)
    flops = training_flops(config, 2, 12, dense=True)
    products = sum(flops[part] for part in PARTS if part != "softmax")
    counted = matmul_flops(jax.grad(lambda params, *ids: call(params, *ids).sum()), params, *ids)
    last = 2 * 2 * 12 * (4 * 16 * 16 + 2 * 16 * 24) + 2 * 2 * 2 * 12 * 12 * 16  # one layer's forward pass
    assert 0 <= products - counted <= (last if remat == "full" else 0)


def test_training_flops_with_adapters_are_those_of_the_compiled_program():
    """Frozen weights have no gradient, and nothing before the first adapter has one."""
    config = ModelConfig(vocab_size=400, d_model=256, d_ff=512, num_heads=4, encoder_layers=0, decoder_layers=3,
                         lora_rank=1)
    call, params, ids = call_of(config)
    adapters, frozen = split_params(params, trainable(config))

    def loss(adapters, frozen, *ids):
        return call(join_params(adapters, frozen), *ids).sum()

    counted = jax.jit(jax.grad(loss)).lower(adapters, frozen, *ids).compile().cost_analysis()["flops"]
    assert counted == pytest.approx(sum(training_flops(config, 2, 12, dense=True).values()), rel=0.1)


def test_compiled_program_agrees_within_its_elementwise_work():
    config = ModelConfig(vocab_size=500, d_model=256, d_ff=1024, num_heads=4, encoder_layers=1, decoder_layers=0)
    call, params, ids = call_of(config, source=32)
    counted = jax.jit(call).lower(params, *ids).compile().cost_analysis()["flops"]
    flops = sum(forward_flops(config, 2, 32).values())
    assert flops < counted < 1.03 * flops


def test_flops_of_base_by_hand():
    """One token pair through the paper's base model: 2 FLOPs for each weight that multiplies, but the look-ups."""
    flops = forward_flops(presets.transformer_base(), 1, 1)
    assert flops["projections"] == 2 * (6 + 12) * 4 * 512**2
    assert flops["feed-forward"] == 2 * 12 * 2 * 512 * 2048
    assert flops["scores"] == 2 * 18 * 2 * 512
    assert flops["softmax"] == 5 * 18 * 8


@pytest.mark.parametrize(("preset", "published"), [
    (presets.bert_base, 110e6), (presets.gpt2, 124e6), (presets.t5_small, 60e6), (presets.llama, 6.74e9),
    (presets.mistral, 7.24e9), (presets.bart_base, 139e6)])
def test_parameters_by_part_sum_to_the_published_size(preset, published):
    counts = parameter_counts(preset())
    assert sum(counts.values()) == count_params(preset())
    assert sum(counts.values()) == pytest.approx(published, rel=0.02)


def test_parameters_of_llama_by_hand():
    counts = parameter_counts(presets.llama())
    assert counts == {"embeddings": 32000 * 4096, "output": 32000 * 4096, "decoder norms": 65 * 4096,
                      "decoder self-attention": 32 * 4 * 4096**2, "decoder feed-forward": 32 * 3 * 4096 * 11008}


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}, {"num_kv_heads": 2},
                                     {"attention_pattern": (AttentionPattern("window", window=6), AttentionPattern())}])
def test_kv_cache_is_that_of_the_decoder(changes):
    """The real cache has for each slot of a kind a position (4 bytes) and a flag (1), for each row two counters."""
    config = ModelConfig(**{**SMALL, **changes})
    kinds = {len(changes.get("attention_pattern", ())) > 1 and 6, 20} - {False}
    extra = 3 * (sum(5 * slots + 4 for slots in kinds) + 4)
    assert kv_cache_bytes(config, 3, 20, bytes_per_element=4) + extra == cache_bytes(config, 3, 20)


def test_cache_variants_by_hand():
    sizes = {name: kv_cache_bytes(config, 1, 131_072) for name, config in cache_variants(presets.llama(), 512).items()}
    assert list(sizes.values()) == [2 * 32 * 131_072 * 4096 * 2, 2 * 32 * 131_072 * 8 * 128 * 2,
                                    2 * 32 * 131_072 * 128 * 2, 2 * 32 * 512 * 4096 * 2]


def test_table_1_for_the_base_model():
    rows = {row.name: (row.complexity, row.sequential, row.path) for row in layer_types(70, 512, neighbourhood=10)}
    assert rows == {"self-attention": (70 * 70 * 512, 1, 1), "recurrent": (70 * 512 * 512, 70, 70),
                    "convolutional": (3 * 70 * 512 * 512, 1, 4), "restricted": (10 * 70 * 512, 1, 7)}


def test_our_kernel_grows_with_the_length_not_its_square():
    sizes = [kernel_memory(length, head_dim=8).temporaries for length in (1024, 4096)]
    assert sizes[1] < 6 * sizes[0]
    assert sizes[1] < score_matrix_bytes(4096) / 2
