"""The feed-forward layer against torch's linear layers and activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.nn import FeedForward

M, F = 6, 10


def initialized(**fields):
    module, x = FeedForward(F, **fields), jax.random.normal(jax.random.key(1), (2, 3, M))
    params = module.init(jax.random.key(0), x)["params"]
    return module, jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(2), p.shape), params), x


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("activation", "bias"),
                         [("relu", True), ("gelu", True), ("gelu_tanh", False), ("silu", False)])
def test_values_of_torch(activation, gated, bias):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    theirs = {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu,
              "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}[activation]
    module, params, x = initialized(activation=activation, gated=gated, use_bias=bias)

    def linear(name, x):
        layer = {key: torch.tensor(np.asarray(value)) for key, value in params[name].items()}
        return functional.linear(x, layer["kernel"].T, layer.get("bias"))

    tx = torch.tensor(np.asarray(x))
    inner = theirs(linear("gate", tx)) * linear("up", tx) if gated else theirs(linear("up", tx))
    np.testing.assert_allclose(module.apply({"params": params}, x), linear("down", inner).numpy(), atol=1e-6)


@pytest.mark.parametrize(("gated", "use_bias", "expected"), [
    (False, True, 2 * M * F + F + M), (True, False, 3 * M * F), (True, True, 3 * M * F + 2 * F + M)])
def test_number_of_parameters(gated, use_bias, expected):
    _, params, _ = initialized(gated=gated, use_bias=use_bias)
    assert sum(p.size for p in jax.tree.leaves(params)) == expected


def test_dropout_acts_between_activation_and_second_product():
    """With an identity as the second matrix, the outputs are the activations: some dropped, the others scaled."""
    module = FeedForward(M, use_bias=False, dropout_rate=0.5)
    params = {"up": {"kernel": jnp.eye(M)}, "down": {"kernel": jnp.eye(M)}}
    x = jnp.abs(jax.random.normal(jax.random.key(0), (4, 50, M))) + 0.1
    y = module.apply({"params": params}, x, deterministic=False, rngs={"dropout": jax.random.key(1)})
    kept = np.asarray(y) != 0
    np.testing.assert_allclose(np.asarray(y)[kept], 2 * np.asarray(x)[kept], rtol=1e-6)
    assert 0.45 < kept.mean() < 0.55
    np.testing.assert_array_equal(module.apply({"params": params}, x), x)


def test_products_in_bfloat16_stay_near_float32():
    module, params, x = initialized(gated=True)
    exact = module.apply({"params": params}, x)
    narrow = FeedForward(F, gated=True, dtype="bfloat16").apply({"params": params}, x)
    assert narrow.dtype == jnp.bfloat16
    assert 0 < np.abs(np.asarray(narrow, np.float32) - exact).max() < 0.03 * np.abs(exact).max()


def test_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="activation is 'swish'"):
        FeedForward(F, activation="swish").init(jax.random.key(0), jnp.ones((1, 2, M)))
