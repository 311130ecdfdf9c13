"""Linear attention against its quadratic form in float64, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tfm.ops.linear import init_linear_state, linear_attention, linear_attention_step

B, T, H, K, D, DV = 2, 13, 4, 2, 6, 5
MASK = np.random.default_rng(1).random((B, T)) < 0.7
MASK[1, :4] = False


def arrays(seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = (B, T, H, D), (B, T, K, D), (B, T, K, DV), (B, T, H, DV)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def quadratic(query, key, value, causal, mask):
    """The definition: weights phi(q_i) . phi(k_j) over their sum."""
    key, value = key.repeat_interleave(H // K, 2), value.repeat_interleave(H // K, 2)
    similarity = torch.einsum("bthd,bshd->bhts", torch.nn.functional.elu(query) + 1, torch.nn.functional.elu(key) + 1)
    seen = torch.ones(T, T).tril() if causal else torch.ones(T, T)
    if mask is not None:
        seen = seen * torch.from_numpy(mask)[:, None, None, :]
    similarity = similarity * seen
    total = similarity.sum(-1, keepdim=True)
    return torch.einsum("bhts,bshd->bthd", similarity / torch.where(total == 0, 1, total), value)


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize(("causal", "chunk_size"), [(False, 128), (True, 4), (True, 128)])
def test_equals_the_quadratic_form(causal, chunk_size, mask):
    *inputs, cotangent = arrays()

    @jax.jit
    def run(cotangent, *inputs):
        output, pull = jax.vjp(
            lambda *x: linear_attention(*x, causal=causal, key_mask=mask, chunk_size=chunk_size), *inputs
        )
        return output, pull(cotangent)

    output, gradients = run(cotangent, *inputs)
    free = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in inputs]
    want = quadratic(*free, causal, mask)
    want.backward(torch.from_numpy(cotangent.astype(np.float64)))
    np.testing.assert_allclose(output, want.detach().numpy(), atol=3e-6)
    for got, x in zip(gradients, free, strict=True):
        np.testing.assert_allclose(got, x.grad.numpy(), atol=2e-5)


def test_steps_equal_the_whole():
    query, key, value, _ = (jnp.asarray(x) for x in arrays())
    whole = linear_attention(query, key, value, causal=True, key_mask=MASK)
    state = init_linear_state(B, K, D, DV)
    step = jax.jit(linear_attention_step)
    for first, last in ((0, 6), (6, 7), (7, 13)):
        part = slice(first, last)
        state, output = step(state, query[:, part], key[:, part], value[:, part], key_mask=MASK[:, part])
        np.testing.assert_allclose(output, whole[:, part], atol=3e-6)


def test_any_feature_map_may_change_the_width():
    query, key, value, _ = (jnp.asarray(x) for x in arrays())

    def squares(x):
        return jnp.concatenate([x, -x], -1) ** 2

    q, k = (np.asarray(squares(x), np.float64) for x in (query, key))
    similarity = np.einsum("bthd,bshd->bhts", q, np.repeat(k, 2, 2)) * np.tri(T)
    weights = similarity / similarity.sum(-1, keepdims=True)
    want = np.einsum("bhts,bshd->bthd", weights, np.repeat(np.asarray(value), 2, 2))
    np.testing.assert_allclose(
        linear_attention(query, key, value, causal=True, feature_map=squares, chunk_size=4), want, atol=3e-6
    )


def test_memory_of_the_gradient_is_linear():
    def extra(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)

        def gradients(query, key, value):
            return jax.grad(lambda *x: linear_attention(*x, causal=True).sum(), (0, 1, 2))(query, key, value)

        return jax.jit(gradients).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert extra(16_384) < 8.5 * extra(2048)


@pytest.mark.slow
def test_second_derivatives():
    query, key, value, _ = (jnp.asarray(x) for x in arrays())

    def loss(key):
        output = linear_attention(query, key, value, causal=True, chunk_size=4, feature_map=jax.nn.softplus)
        return (output**2).sum()

    direction = jax.random.normal(jax.random.key(0), key.shape)
    gradient = jax.grad(loss)
    curvature = jax.grad(lambda key: (gradient(key) * direction).sum())(key)
    change = (gradient(key + 1e-2 * direction) - gradient(key - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(curvature, change, atol=3e-2)


def test_mistakes_are_named():
    query, key, value, _ = arrays()
    with pytest.raises(ValueError, match="value has shape"):
        linear_attention(query, key[:, :4], value)
    with pytest.raises(ValueError, match="query has shape"):
        linear_attention(query[0], key[0], value[0])
    with pytest.raises(ValueError, match="key_mask has dtype float32"):
        linear_attention(query, key, value, key_mask=np.ones((B, T), np.float32))
    with pytest.raises(ValueError, match="chunk_size is 0"):
        linear_attention(query, key, value, causal=True, chunk_size=0)
    with pytest.raises(ValueError, match="13 queries for 4 keys"):
        linear_attention(query, key[:, :4], value[:, :4], causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_gives_nothing(shape, causal):
    query, key, value = (jnp.ones((*shape, n, w)) for n, w in ((H, D), (K, D), (K, DV)))
    assert linear_attention(query, key, value, causal=causal).shape == (*shape, H, DV)
