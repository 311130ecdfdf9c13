"""Norms against float64 arithmetic and torch, in float32 and bfloat16."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.nn import Normalize

M, EPSILON = 24, 1e-5


def data(seed=0, shape=(3, 5, M)):
    random = np.random.default_rng(seed)
    return random.normal(3.0, 2.0, shape), random.normal(1.0, 0.5, M), random.normal(size=M)


def in_float64(kind, x, scale, bias):
    if kind == "rms":
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + EPSILON) * scale + (0 if bias is None else bias)


def apply(kind, x, scale, bias):
    params = {"scale": jnp.asarray(scale, jnp.float32)}
    if bias is not None:
        params["bias"] = jnp.asarray(bias, jnp.float32)
    return Normalize(kind, EPSILON, use_bias=bias is not None).apply({"params": params}, x)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_float64_arithmetic(kind, with_bias, offset):
    x, scale, bias = data()
    x = (x + offset).astype(np.float32)
    bias = bias if with_bias and kind == "layer" else None
    expected = in_float64(kind, x.astype(np.float64), scale, bias)
    np.testing.assert_allclose(apply(kind, jnp.asarray(x), scale, bias), expected, atol=5e-4 if offset else 3e-6)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_statistics_of_bfloat16_rows_are_taken_in_float32(kind):
    x, scale, bias = data(1)
    bias = bias if kind == "layer" else None
    x = jnp.asarray(x + 100.0, jnp.bfloat16)
    exact = in_float64(kind, np.asarray(x, np.float64), np.float32(scale), None if bias is None else np.float32(bias))
    y = apply(kind, x, scale, bias)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_values_and_gradients_of_torch(kind):
    torch = pytest.importorskip("torch")
    x, scale, bias = data(2)
    norm = torch.nn.LayerNorm(M, EPSILON) if kind == "layer" else torch.nn.RMSNorm(M, EPSILON)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(scale))
        if kind == "layer":
            norm.bias.copy_(torch.tensor(bias))
    tx = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    torch.sin(norm(tx)).sum().backward()

    def total(x, scale, bias):
        return jnp.sin(apply(kind, x, scale, bias if kind == "layer" else None)).sum()

    gradients = jax.grad(total, (0, 1, 2))(*(jnp.asarray(a, jnp.float32) for a in (x, scale, bias)))
    expected = [tx.grad, norm.weight.grad] + ([norm.bias.grad] if kind == "layer" else [])
    for ours, theirs in zip(gradients, expected, strict=False):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_constant_row_is_finite(kind, dtype):
    """Its variance is zero, and its square overflows float16."""
    x = jnp.full((1, M), 1234.0, jnp.dtype(dtype))
    bias = np.full(M, 0.5) if kind == "layer" else None
    y, vjp = jax.vjp(lambda x: apply(kind, x, np.ones(M), bias), x)
    np.testing.assert_allclose(np.asarray(y, np.float32), 0.5 if kind == "layer" else 1.0, atol=1e-2)
    assert np.isfinite(np.asarray(vjp(jnp.ones_like(y))[0], np.float32)).all()


def test_parameters():
    x = jnp.ones((2, M))
    shapes = {name: jax.tree.map(jnp.shape, module.init(jax.random.key(0), x)["params"]) for name, module in {
        "layer": Normalize("layer"), "no bias": Normalize("layer", use_bias=False), "rms": Normalize("rms")}.items()}
    assert shapes == {"layer": {"scale": (M,), "bias": (M,)}, "no bias": {"scale": (M,)}, "rms": {"scale": (M,)}}


def test_refuses_an_unknown_kind():
    with pytest.raises(ValueError, match="kind is 'batch'"):
        Normalize("batch").init(jax.random.key(0), jnp.ones((1, M)))
