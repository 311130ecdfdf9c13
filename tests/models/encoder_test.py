"""The encoder alone: token types, embedding norm, pooler and token head."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tfm.models import build, output_matrix


def bert(small, **changes):
    return small.config(**{"decoder_layers": 0, "position": "learned", "token_types": 2, "embedding_norm": True,
                           "activation": "gelu", "token_head": True, "pooler": True, "logit_bias": True, **changes})


def test_token_types_default_to_zero_and_change_the_result(small):
    config = bert(small)
    model, variables, ids = build(config), {"params": small.params(config)}, small.ids(0, (2, 4))
    zeros = model.apply(variables, ids, token_types=jnp.zeros((2, 4), jnp.int32))
    np.testing.assert_array_equal(model.apply(variables, ids), zeros)
    ones = model.apply(variables, ids, token_types=jnp.ones((2, 4), jnp.int32))
    assert np.abs(np.asarray(ones - zeros)).max() > 1e-2


def test_token_logits_are_the_output_matrix_times_the_transformed_hidden_vectors(small):
    config = bert(small, logit_scale=0.5)
    params, ids = small.params(config), small.ids(0, (2, 4))
    hidden = build(config).apply({"params": params}, ids, method="hidden")
    matrix, bias = output_matrix(config, params)
    logits = build(config).apply({"params": params}, ids, method="token_logits")
    np.testing.assert_allclose(logits, np.float64(hidden) @ np.float64(matrix).T + np.float64(bias), atol=2e-5)
    last = build(config).apply({"params": params}, ids)
    assert np.abs(np.asarray(last - hidden)).max() > 1e-2


def test_the_pooler_reads_the_first_vector(small):
    config = bert(small)
    params, hidden = small.params(config), np.random.default_rng(0).normal(size=(2, 4, 16)).astype(np.float32)
    pooled = build(config).apply({"params": params}, jnp.asarray(hidden), method="pool")
    dense = params["pooler"]
    expected = np.tanh(hidden[:, 0].astype(np.float64) @ np.float64(dense["kernel"]) + np.float64(dense["bias"]))
    np.testing.assert_allclose(pooled, expected, atol=1e-5)


def test_output_matrix_of_every_kind_of_tie(small):
    for tie, name in (("all", "token_embedding"), ("inputs", "output"), ("decoder", "target_embedding"),
                      ("none", "output")):
        config = small.config(tie_embeddings=tie)
        params, ids = small.params(config), small.ids(0, (2, 4))
        matrix, bias = output_matrix(config, params)
        assert bias is None and matrix is params[name]["table"]
        hidden = build(config).apply({"params": params}, ids, ids, method="hidden")
        logits = build(config).apply({"params": params}, ids, ids)
        np.testing.assert_allclose(logits, np.float64(hidden) @ np.float64(matrix).T, atol=2e-5)
