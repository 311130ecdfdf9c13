"""Multi-head attention against torch's with the same weights, and against equations written out in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.config import AttentionPattern, ModelConfig
from tfm.masks import Causal, Padding
from tfm.nn import MultiHeadAttention
from tfm.nn.attention import make_attention

M, H, D, T, S = 12, 4, 3, 5, 7
PADDED = np.array([[True] * S, [True] * 4 + [False] * 3])


def array(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def initialized(module, x):
    params = module.init(jax.random.key(0), x)["params"]
    return jax.tree.map(lambda p: p + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape), params)


def torch_twin(torch, params):
    theirs = torch.nn.MultiheadAttention(M, H, bias=True, batch_first=True)
    parts = [params[name] for name in ("query", "key", "value")]
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.tensor(np.concatenate([p["kernel"].T for p in parts])))
        theirs.in_proj_bias.copy_(torch.tensor(np.concatenate([p["bias"] for p in parts])))
        theirs.out_proj.weight.copy_(torch.tensor(np.asarray(params["output"]["kernel"]).T))
        theirs.out_proj.bias.copy_(torch.tensor(np.asarray(params["output"]["bias"])))
    return theirs


@pytest.mark.parametrize("use", ["self", "causal", "cross"])
def test_values_and_gradients_of_torch(use):
    torch = pytest.importorskip("torch")
    module = MultiHeadAttention(M, H, H, D, D, use_bias=True, output_bias=True)
    memory = array(1, 2, S, M)
    x = array(2, 2, T, M) if use == "cross" else memory
    params = initialized(module, memory)
    theirs = torch_twin(torch, params)
    tx, tm = (torch.tensor(np.asarray(a), requires_grad=True) for a in (x, memory))
    causal = torch.triu(torch.ones(S, S, dtype=torch.bool), 1) if use == "causal" else None
    expected, _ = theirs(tx, *((tm, tm) if use == "cross" else (tx, tx)), attn_mask=causal,
                         key_padding_mask=torch.tensor(~PADDED), need_weights=False)
    torch.sin(expected).sum().backward()

    def ours(params, x, memory):
        mask = Padding(jnp.asarray(PADDED)) & Causal() if use == "causal" else Padding(jnp.asarray(PADDED))
        projected = None
        if use == "cross":
            projected = module.apply({"params": params}, memory, method="project_memory")
        y = module.apply({"params": params}, x, projected, mask=mask)
        return jnp.sin(y).sum(), y

    (_, y), (dparams, dx, _) = jax.value_and_grad(ours, (0, 1, 2), has_aux=True)(params, x, memory)
    np.testing.assert_allclose(y, expected.detach().numpy(), atol=2e-6)
    np.testing.assert_allclose(dx, tx.grad.numpy(), atol=1e-5)
    fused = np.concatenate([dparams[name]["kernel"].T for name in ("query", "key", "value")])
    np.testing.assert_allclose(fused, theirs.in_proj_weight.grad.numpy(), atol=2e-5)
    np.testing.assert_allclose(dparams["output"]["bias"], theirs.out_proj.bias.grad.numpy(), atol=2e-5)


def heads_by_hand(params, x, kv_heads, value_dim, scale, softcap=None, shaw=None):
    """softmax(cap(q k^T * scale)) v, head by head in float64, without a mask."""
    x = np.asarray(x, np.float64)
    weights = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    q, k, v = (x @ weights[name]["kernel"] for name in ("query", "key", "value"))
    outputs = []
    for head in range(H):
        group = head // (H // kv_heads)
        qh = q[..., head * D:(head + 1) * D]
        kh, vh = k[..., group * D:(group + 1) * D], v[..., group * value_dim:(group + 1) * value_dim]
        scores = np.einsum("btd,bsd->bts", qh, kh)
        distance = np.clip(np.arange(x.shape[1]) - np.arange(x.shape[1])[:, None], -shaw, shaw) + shaw if shaw else None
        if shaw:
            scores = scores + np.einsum("btd,tsd->bts", qh, weights["relative_keys"][distance])
        scores = scores * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        w = np.exp(scores - scores.max(-1, keepdims=True))
        w /= w.sum(-1, keepdims=True)
        y = np.einsum("bts,bsd->btd", w, vh)
        if shaw:
            y = y + np.einsum("bts,tsd->btd", w, weights["relative_values"][distance])
        outputs.append(y)
    return np.concatenate(outputs, -1) @ weights["output"]["kernel"]


@pytest.mark.parametrize(("kv_heads", "value_dim", "scale", "softcap", "shaw"), [
    (4, 3, None, None, None), (2, 3, None, None, None), (1, 5, 1.0, None, None), (4, 2, 0.7, 0.5, None),
    (4, 3, None, None, 2), (2, 4, 1.0, None, 1)])
def test_equations_by_hand(kv_heads, value_dim, scale, softcap, shaw):
    module = MultiHeadAttention(M, H, kv_heads, D, value_dim, scale=scale, softcap=softcap, shaw_distance=shaw)
    x = array(3, 2, T, M)
    params = initialized(module, x)
    expected = heads_by_hand(params, x, kv_heads, value_dim, D**-0.5 if scale is None else scale, softcap, shaw)
    np.testing.assert_allclose(module.apply({"params": params}, x), expected, atol=2e-5)


def test_grouped_heads_are_full_heads_with_repeated_keys():
    """Query heads 0 .. G-1 use key head 0."""
    grouped, full = (MultiHeadAttention(M, H, heads, D, D) for heads in (2, 4))
    x = array(4, 2, T, M)
    params = initialized(grouped, x)

    def repeat(kernel):
        return jnp.repeat(kernel.reshape(M, 2, D), 2, axis=1).reshape(M, H * D)

    wide = {**params, **{name: {"kernel": repeat(params[name]["kernel"])} for name in ("key", "value")}}
    np.testing.assert_allclose(grouped.apply({"params": params}, x), full.apply({"params": wide}, x), atol=1e-5)


def test_queries_and_keys_are_normalised_head_by_head():
    """With qk_norm the length of x changes nothing in the weights, only in the values."""
    module = MultiHeadAttention(M, H, H, D, D, qk_norm_epsilon=1e-9)
    x = array(5, 1, T, M)
    params = initialized(module, x)
    assert params["query_norm"]["scale"].shape == params["key_norm"]["scale"].shape == (D,)
    once, twice = (module.apply({"params": params}, a) for a in (x, 2 * x))
    np.testing.assert_allclose(2 * once, twice, atol=1e-4)


def test_dropout_acts_on_the_weights_after_the_softmax():
    """With values of one, an output is the sum of the kept weights over 1 - rate: not always 1, but 1 in the mean."""
    module = MultiHeadAttention(M, H, H, D, D, dropout_rate=0.5)
    x = array(6, 8, 40, M)
    params = initialized(module, x)
    ones = params["value"]["kernel"] * 0
    params = {**params, "value": {"kernel": ones}, "output": {"kernel": jnp.eye(M)}}
    projected = module.apply({"params": params}, x, method="project_memory")
    projected = projected.replace(value=jnp.ones_like(projected.value))
    keys = jax.random.split(jax.random.key(0), 16)
    y = jax.vmap(lambda key: module.apply({"params": params}, x, projected, deterministic=False,
                                          rngs={"dropout": key}))(keys)
    assert np.std(np.asarray(y)) > 0.05
    np.testing.assert_allclose(np.mean(np.asarray(y)), 1.0, atol=0.02)
    np.testing.assert_allclose(module.apply({"params": params}, x, projected), np.ones(x.shape), atol=1e-5)


def test_a_query_with_nothing_to_see_gives_the_output_bias_alone():
    module = MultiHeadAttention(M, H, H, D, D, output_bias=True)
    x = array(7, 2, T, M)
    params = initialized(module, x)
    nothing = Padding(jnp.zeros((2, T), bool))
    y, vjp = jax.vjp(lambda x: module.apply({"params": params}, x, mask=nothing), x)
    np.testing.assert_array_equal(y, jnp.broadcast_to(params["output"]["bias"], y.shape))
    np.testing.assert_array_equal(vjp(jnp.ones_like(y))[0], jnp.zeros_like(x))


def linear_by_hand(q, k, v, causal, valid):
    """sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j) in float64, phi(x) = elu(x) + 1."""
    phi = [np.where(a > 0, a + 1, np.exp(np.minimum(a, 0))) for a in (np.float64(q), np.float64(k))]
    k, v = (np.repeat(np.float64(a), q.shape[2] // k.shape[2], axis=2) for a in (phi[1], v))
    weights = np.einsum("bthd,bshd->bhts", phi[0], k) * np.asarray(valid)[:, None, None]
    weights = np.tril(weights) if causal else weights
    return np.einsum("bhts,bshd->bthd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_by_hand(causal):
    module = MultiHeadAttention(M, H, 2, D, D, linear=True, causal=causal)
    x, valid = array(8, 2, S, M), jnp.asarray(PADDED)
    params = initialized(module, x)
    q = (x @ params["query"]["kernel"]).reshape(2, S, H, D)
    k, v = ((x @ params[name]["kernel"]).reshape(2, S, 2, D) for name in ("key", "value"))
    expected = linear_by_hand(q, k, v, causal, PADDED).reshape(2, S, M) @ np.asarray(params["output"]["kernel"])
    actual = module.apply({"params": params}, x, key_mask=valid)
    np.testing.assert_allclose(np.asarray(actual)[PADDED], expected[PADDED], atol=2e-5)


def test_a_config_gives_cross_attention_no_position_scheme():
    config = ModelConfig(vocab_size=8, position="rotary", num_heads=4, d_model=8)
    assert make_attention(config, pattern=AttentionPattern()).rotary is not None
    assert make_attention(config).rotary is None
    shaw = ModelConfig(vocab_size=8, position="shaw", shaw_distance=3)
    assert make_attention(shaw, pattern=AttentionPattern()).shaw_distance == 3
    assert make_attention(shaw).shaw_distance is None
