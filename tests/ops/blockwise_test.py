"""The blockwise kernel as a function of JAX: its transformations, its memory, the blocks and heads that it works on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import masks
from tfm.masks import Causal, Padding
from tfm.ops import attention
from tfm.ops.block import Chunk
from tfm.ops.blockwise import blockwise_attention
from tfm.ops.dense import Scoring
from tfm.ops.tokens import Tokens

D = 8
KEY = jax.random.key(7)


def arrays(length: int) -> list[jax.Array]:
    """Query of four heads, key and value of two."""
    random = np.random.default_rng(0)
    shapes = (2, length, 4, D), (2, length, 2, D), (2, length, 2, 5)
    return [jnp.asarray(random.standard_normal(shape).astype(np.float32)) for shape in shapes]


def blockwise(query, key, value):
    return attention(query, key, value, mask=Causal(), implementation="blockwise", block_size=8)


def test_transformations():
    query, key, value = arrays(22)
    plain = blockwise(query, key, value)
    assert np.array_equal(plain, blockwise(query, key, value))  # bit for bit
    stacked = jax.vmap(blockwise)(*(jnp.stack([x, 2 * x]) for x in (query, key, value)))
    np.testing.assert_allclose(stacked[0], plain, atol=2e-6)
    np.testing.assert_allclose(stacked[1], blockwise(2 * query, 2 * key, 2 * value), atol=4e-6)
    gradient = jax.grad(lambda q: blockwise(q, key, value).sum())
    again = jax.grad(lambda q: jax.checkpoint(blockwise)(q, key, value).sum())
    np.testing.assert_allclose(again(query), gradient(query), atol=1e-6)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(blockwise, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    np.testing.assert_allclose(sharded(query, key, value), plain, atol=2e-6)
    of_shards = jax.grad(lambda q: sharded(q, key, value).sum())
    np.testing.assert_allclose(of_shards(query), gradient(query), atol=1e-6)


def test_second_and_forward_mode_derivatives_need_dense():
    query, key, value = arrays(9)
    with pytest.raises(NotImplementedError, match="implementation='dense'"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(lambda q: blockwise(q, key, value).sum())(q).sum()), query)
    with pytest.raises(NotImplementedError, match="forward-mode derivatives; use implementation='dense'"):
        jax.jvp(lambda q: blockwise(q, key, value), (query,), (query,))

    def loss(q):
        return (attention(q, key, value, mask=Causal(), implementation="dense") ** 2).sum()

    direction = jax.random.normal(KEY, query.shape)
    gradient = jax.jit(jax.grad(loss))
    _, curvature = jax.jvp(gradient, (query,), (direction,))
    change = (gradient(query + 1e-2 * direction) - gradient(query - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(curvature, change, atol=2e-2)


def test_memory_grows_linearly():
    def extra(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)

        def both(query, key, value, cotangent):
            output, pull = jax.vjp(
                lambda *inputs: attention(*inputs, mask=Causal(), implementation="blockwise"), query, key, value
            )
            return output, pull(cotangent)

        return jax.jit(both).lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes

    short, long = extra(8192), extra(131_072)
    assert long < 16 * short
    assert long < 2 * 2**30


def test_window_visits_few_blocks():
    tokens = Tokens(np.arange(32_768, dtype=np.int32)[None])
    window = masks.sliding_window(512).block_map(32_768, 32_768, 512, 512)
    causal = Causal().block_map(32_768, 32_768, 512, 512)
    assert (window > 0).sum() == 64 + 63
    assert (causal > 0).sum() == 64 * 65 // 2
    x = jax.ShapeDtypeStruct((1, 32_768, 1, 8), jnp.float32)
    scoring = Scoring(masks.sliding_window(512), None, None, 1.0, None, 0.0)
    output, lse = jax.eval_shape(lambda x: blockwise_attention(x, x, x, scoring, tokens, tokens, None), x)
    assert output.shape == x.shape and lse.shape == (1, 1, 32_768)


@pytest.mark.parametrize(("rows", "heads", "key_heads"), [(2, 4, 4), (1, 16, 8)])
def test_heads_apart(rows, heads, key_heads, monkeypatch):
    """A long window with dropout and a bias of each head and key: eight lanes, and the same numbers as dense."""
    lanes = Chunk.lanes
    made = []
    monkeypatch.setattr(Chunk, "lanes", lambda chunk: made.append(lanes(chunk)) or made[-1])
    random = np.random.default_rng(5)
    shapes = [(rows, 330, n, D) for n in (heads, key_heads, key_heads)] + [(1, heads, 330, 330)]
    inputs = [jnp.asarray(random.standard_normal(x).astype(np.float32)) for x in shapes]
    valid = random.random((rows, 330)) < 0.9

    def loss(implementation, query, key, value, bias):
        rule = masks.sliding_window(32) & Padding(valid)
        how = dict(mask=rule, bias=bias, dropout_rate=0.1, dropout_key=KEY, implementation=implementation)
        size = dict(block_size=16) if implementation == "blockwise" else {}
        return (attention(query, key, value, **how, **size) * jnp.cos(query)).sum()

    want, got = (
        jax.jit(jax.value_and_grad(functools.partial(loss, x), argnums=(0, 1, 2, 3)))(*inputs)
        for x in ("dense", "blockwise")
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got[1], want[1])
    assert {len(x) for x in made} == {8}
