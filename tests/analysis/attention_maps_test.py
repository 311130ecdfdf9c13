"""The maps are the weights of the forward pass: times the values they give the layer's own output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tfm.analysis.attention_maps import AttentionMaps, attention_maps, attention_rollout, head_entropy
from tfm.config import AttentionPattern, ModelConfig
from tfm.models import build, init_params
from tfm.models.scanned import stack_layers
from tfm.nn.attention import MultiHeadAttention

SOURCE, TARGET = [3, 1, 4, 1, 5, 9, 2], [1, 6, 5, 3, 5]
CASES = {
    "post-norm, sinusoidal": {},
    "T5 bias": {"position": "t5", "norm": "rms", "norm_position": "pre", "attention_scale": 1.0, "t5_buckets": 8,
                "t5_max_distance": 16},
    "ALiBi": {"position": "alibi", "norm_position": "pre"},
    "Shaw": {"position": "shaw", "shaw_distance": 2},
    "RoPE, grouped heads, normalised heads": {"position": "rotary", "num_kv_heads": 2, "qk_norm": True},
    "one key head, soft cap": {"num_kv_heads": 1, "attention_softcap": 0.2},
    "window": {"attention_pattern": (AttentionPattern("window", window=2),)},
    "longformer, bigbird": {"attention_pattern": (AttentionPattern("longformer", window=2, global_tokens=(1,)),
                                                  AttentionPattern("bigbird", block_size=2, random_blocks=1)),
                            "max_positions": 8},
}
FAMILIES = {"encoder-decoder": {}, "decoder": {"encoder_layers": 0}, "encoder": {"decoder_layers": 0}}


def config_of(**changes):
    fields = {"vocab_size": 11, "d_model": 16, "d_ff": 16, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    return ModelConfig(**{**fields, **changes})


def params_of(config, seed=0):
    """Large enough that the weights are far from uniform."""
    params, random = init_params(config, jax.random.key(seed)), np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x) + 0.3 * random.normal(size=x.shape), x.dtype), params)


def inputs(config):
    return (SOURCE, TARGET) if config.is_encoder_decoder else (SOURCE,)


def heads_and_values(config, params):
    """(part, layer) -> the values that went into the layer's attention and the heads' outputs that came out."""
    @jax.jit
    def run(params):
        seen = {}

        def record(next_method, args, kwargs, context):
            output = next_method(*args, **kwargs)
            stored = context.method_name == "attend_stored"
            if isinstance(context.module, MultiHeadAttention) and (stored or context.method_name == "attend"):
                stack, layer, name = context.module.path
                part = "cross" if name == "cross_attention" else stack
                tables = context.module.relative_values if context.module.shaw_distance is not None else None
                seen[f"{part} {layer[-1]}"] = args[1].by_token()[1] if stored else args[2], output, tables
            return output

        with nn.intercept_methods(record):
            build(config).apply({"params": params}, *(jnp.asarray([ids]) for ids in inputs(config)), method="hidden")
        return seen

    return {(name[:-2], int(name[-1])): jax.tree.map(np.asarray, found) for name, found in run(params).items()}


@pytest.mark.parametrize(("case", "family"), [*((case, "encoder-decoder") for case in CASES),
                                              ("window", "decoder"), ("T5 bias", "encoder")])
def test_weights_times_values_are_the_layers_output(case, family):
    config = config_of(**CASES[case], **FAMILIES[family])
    params = params_of(config)
    maps = attention_maps(config, params, *inputs(config))
    seen = heads_and_values(config, params)
    assert len(seen) == sum(len(maps.layers(part)) for part in maps.parts)
    assert max(weights.std(-1).max() for part in maps.parts for weights in maps.layers(part)) > 0.02, "all alike"
    for (part, layer), (value, output, tables) in seen.items():
        weights = maps.layers(part)[layer]
        values = np.repeat(value[0], weights.shape[0] // value.shape[2], axis=1)  # [S, H, D]
        expected = np.einsum("HTS,SHD->THD", weights, values)
        if tables is not None:
            distances = np.arange(weights.shape[2])[None] - np.arange(weights.shape[1])[:, None]
            reach = len(tables) // 2
            expected += np.einsum("HTS,TSD->THD", weights, tables[np.clip(distances, -reach, reach) + reach])
        np.testing.assert_allclose(output[0], expected, atol=1e-5)
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)


def test_decoders_look_back_only_and_windows_no_further_than_their_width():
    config = config_of(encoder_layers=0, attention_pattern=(AttentionPattern(), AttentionPattern("window", window=2)))
    full, window = attention_maps(config, params_of(config), SOURCE).decoder
    visible = np.tri(7, dtype=bool)
    assert (full[:, visible] > 0).all() and (full[:, ~visible] == 0).all()
    near = visible & ~np.tri(7, k=-2, dtype=bool)
    assert (window[:, near] > 0).all() and (window[:, ~near] == 0).all()


def test_one_layer_of_one_part_equals_that_of_all():
    config = config_of()
    params = params_of(config)
    maps = attention_maps(config, params, SOURCE, TARGET)
    one = attention_maps(config, params, SOURCE, TARGET, part="cross", layer=1)
    assert one.parts == ("cross",) and one.first_layer == 1 and len(one.cross) == 1
    np.testing.assert_allclose(one.cross[0], maps.cross[1], atol=1e-6)


def test_one_layer_needs_the_memory_of_one_layer():
    """4 layers of [1, 1, 1024, 1024] float32 are 16 MiB; the program that gives one of them stays far below."""
    from tfm.analysis.attention_maps import _places, _weights

    config = config_of(vocab_size=5, d_model=4, d_ff=4, num_heads=1, encoder_layers=4, decoder_layers=0,
                       attention_implementation="blockwise")
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def needed(layer):
        stats = _weights.lower(config, tuple(_places(config, "encoder", layer)), params, ids, None).compile()
        stats = stats.memory_analysis()
        return (stats.output_size_in_bytes + stats.temp_size_in_bytes) / 2**22

    assert needed(2) < 3.5 < 4 <= needed(None)


def test_scanned_layers_and_rematerialisation_change_nothing():
    config, scanned = config_of(), config_of(scan_layers=True, remat="full")
    params = params_of(config)
    maps = attention_maps(config, params, SOURCE, TARGET)
    same = attention_maps(scanned, stack_layers(params, config), SOURCE, TARGET)
    for part in ("encoder", "decoder", "cross"):
        np.testing.assert_allclose(np.stack(same.layers(part)), np.stack(maps.layers(part)), atol=1e-6)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
def test_linear_attention_has_weights_too(family):
    pytest.importorskip("tfm.ops.linear")
    config = config_of(**FAMILIES[family], attention_pattern=(AttentionPattern("linear"),), num_kv_heads=2)
    params = params_of(config)
    seen = {}

    def record(next_method, args, kwargs, context):
        output = next_method(*args, **kwargs)
        if context.method_name == "attend_linearly":
            seen[int(context.module.path[1][-1])] = np.asarray(args[2]), np.asarray(output[0])
        return output

    with nn.intercept_methods(record):
        build(config).apply({"params": params}, jnp.asarray([SOURCE]), method="hidden")
    maps = attention_maps(config, params, SOURCE)
    for layer, (value, output) in seen.items():
        weights = maps.layers(family)[layer]
        np.testing.assert_allclose(output[0], np.einsum("HTS,SHD->THD", weights, np.repeat(value[0], 2, axis=1)),
                                   atol=1e-5)


def test_tokens_name_queries_and_keys():
    config = config_of()
    maps = attention_maps(config, params_of(config), SOURCE[:2], TARGET[:1])
    assert maps.tokens("cross") == (("0",), ("0", "1"))
    maps = maps.with_tokens(["a", "b"], ["x"])
    assert maps.tokens("encoder") == (("a", "b"), ("a", "b"))
    assert maps.tokens("decoder") == (("x",), ("x",))
    assert maps.tokens("cross") == (("x",), ("a", "b"))
    alone = AttentionMaps(decoder=maps.encoder).with_tokens(["a", "b"])
    assert alone.tokens("decoder") == (("a", "b"), ("a", "b"))


def test_rollout_of_two_layers_by_hand():
    """Abnar and Zuidema's equation 1 written out for two tokens and two heads."""
    first = np.array([[[1, 0], [0, 1]], [[0, 1], [1, 0]]], float)  # mean 0.5 everywhere
    second = np.array([[[1, 0], [1, 0]], [[1, 0], [1, 0]]], float)
    np.testing.assert_allclose(attention_rollout([first]), [[0.75, 0.25], [0.25, 0.75]])
    np.testing.assert_allclose(attention_rollout([first, second]), [[0.75, 0.25], [0.5, 0.5]])


def test_entropy_of_uniform_and_of_pointed_weights():
    uniform, pointed = np.full((5, 8), 1 / 8), np.eye(8)[:5]
    empty = np.concatenate([np.full((1, 8), 1 / 8), np.zeros((4, 8))])
    np.testing.assert_allclose(head_entropy(np.stack([uniform, pointed, empty])), [np.log(8), 0, np.log(8)], rtol=1e-6)


@pytest.mark.parametrize(("arguments", "choice", "message"), [
    (([],), {}, "source_ids"), (([1, 99],), {}, r"\[0, 11\)"), (([1],), {"part": "cross"}, "part"),
    (([1],), {"layer": 7}, "layers are 0 to 1"), (([1], [2]), {}, "target_ids")])
def test_mistakes_are_named(arguments, choice, message):
    config = config_of(encoder_layers=0)
    with pytest.raises(ValueError, match=message):
        attention_maps(config, init_params(config, jax.random.key(0)), *arguments, **choice)
