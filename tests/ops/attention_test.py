"""Every implementation against attention written out in torch's float64, values and gradients, and against the
libraries' own attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm import masks
from tfm.masks import Causal, Global, Padding, Prefix, Segments, Window
from tfm.ops import attention, attention_weights, merge
from tfm.ops.dropout import keep_mask
from tfm.positions import Alibi, Shaw, T5Bias, alibi_slopes, t5_bucket

B, H, K, D, DV = 2, 4, 2, 8, 5
RANDOM = np.random.default_rng(0)
KEY = jax.random.key(7)
VALID = RANDOM.random((B, 22)) < 0.7
VALID[1, :9] = False


def arrays(T: int, S: int, seed: int = 0, dtype=np.float32) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, DV), (B, T, H, DV)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def written_out(query, key, value, *, seen, bias=None, soft_cap=None, keep=None, relative=None, scale=D**-0.5):
    """Attention in torch's float64, all matrices written out; seen, bias, keep: [B, H, T, S]."""
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", query, key)
    if relative is not None:
        offsets, key_table, value_table = relative
        scores = scores + torch.einsum("bthd,tsd->bhts", query, key_table[offsets])
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    seen = torch.from_numpy(np.broadcast_to(seen, scores.shape).copy())
    shown = torch.where(seen.any(-1, keepdim=True), seen, True)
    weights = torch.softmax(scores.masked_fill(~shown, -torch.inf), -1) * seen
    if keep is not None:
        weights = weights * torch.from_numpy(keep)
    output = torch.einsum("bhts,bshd->bthd", weights, value)
    if relative is not None:
        output = output + torch.einsum("bhts,tsd->bthd", weights, value_table[offsets])
    return output


def leaf(x) -> torch.Tensor:
    return torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True)


TABLE = RANDOM.standard_normal((8, H)).astype(np.float32)
MATRIX = RANDOM.standard_normal((H, 22, 22)).astype(np.float32)
KEYS, VALUES = (RANDOM.standard_normal((7, n)).astype(np.float32) for n in (D, DV))

# name: lengths, rule, bias (ours, torch's from its arrays), other options
CASES = {
    "no mask": ((13, 22), None, None, {}),
    "causal": ((22, 22), Causal(), None, {}),
    "more queries than keys": ((22, 13), Causal(), None, {}),
    "one query": ((1, 22), Padding(VALID), None, {}),
    "window and padding, empty rows": ((22, 22), Window(3, 0) & Padding(VALID), "alibi", {}),
    "everything": ((22, 22), Prefix(np.array([4, 9])) | Causal(), "t5", dict(soft_cap=2.0, dropout_rate=0.3)),
    "everything, sparse": (
        (22, 22),
        masks.longformer(4, tokens=[9, 17], dilation=(1, 1, 3, 3)) & Padding(VALID),
        "matrix",
        dict(soft_cap=1.5, dropout_rate=0.3),
    ),
    "relative vectors": ((22, 22), Window(6, None), "alibi", dict(relative=True, dropout_rate=0.2, soft_cap=3.0)),
    "segments": ((22, 22), Segments(np.arange(44).reshape(2, 22) // 7, np.arange(44).reshape(2, 22) // 7), None, {}),
}


def bias_rule(name: str | None, array):
    return {None: None, "alibi": Alibi(array), "t5": T5Bias(array, True, 20), "matrix": array}[name]


def torch_bias(name: str, array: torch.Tensor, T: int, S: int) -> torch.Tensor:
    distance = torch.arange(S)[None] - torch.arange(T)[:, None]
    if name == "alibi":
        return -array[:, None, None] * distance.abs()
    if name == "t5":
        buckets = np.array(t5_bucket(distance.numpy(), bidirectional=True, num_buckets=8, max_distance=20))
        return array[torch.from_numpy(buckets).long()].permute(2, 0, 1)
    return array[:, :T, :S]


@functools.cache
def expected(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    (T, S), rule, bias, options = CASES[name]
    *inputs, cotangent = arrays(T, S)
    array = dict(alibi=np.array(alibi_slopes(H)), t5=TABLE, matrix=MATRIX).get(bias, np.zeros(0))
    free = [leaf(x) for x in (*inputs, array, KEYS, VALUES)]
    seen = np.ones((1, 1, T, S), bool) if rule is None else np.asarray(rule.dense(np.arange(T), np.arange(S)))
    keep = None
    if rate := options.get("dropout_rate"):
        at = np.ix_(*(np.arange(n) for n in (B, H, T, S)))
        keep = np.asarray(keep_mask(KEY, rate, *at)) / (1 - rate)
    offsets = (torch.arange(S)[None] - torch.arange(T)[:, None]).clamp(-3, 3) + 3
    output = written_out(
        *free[:3],
        seen=seen,
        bias=None if bias is None else torch_bias(bias, free[3], T, S),
        soft_cap=options.get("soft_cap"),
        keep=keep,
        relative=(offsets, *free[4:]) if "relative" in options else None,
    )
    output.backward(torch.from_numpy(cotangent.astype(np.float64)))
    return output.detach().numpy(), [np.zeros(x.shape) if x.grad is None else x.grad.numpy() for x in free]


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, implementation):
    (T, S), rule, bias, options = CASES[name]
    *inputs, cotangent = arrays(T, S)
    array = dict(alibi=np.array(alibi_slopes(H)), t5=TABLE, matrix=MATRIX).get(bias, np.zeros(0, np.float32))
    options = dict(options, dropout_key=KEY if "dropout_rate" in options else None)
    use_relative = options.pop("relative", False)

    def attend(query, key, value, array, keys, values):
        relative = Shaw(keys, values) if use_relative else None
        return attention(
            query,
            key,
            value,
            mask=rule,
            bias=bias_rule(bias, array),
            relative=relative,
            implementation=implementation,
            block_size=8,
            **options,
        )

    @jax.jit
    def run(cotangent, *arguments):
        output, pull = jax.vjp(attend, *arguments)
        return output, pull(cotangent)

    output, gradients = run(cotangent, *inputs, array, KEYS, VALUES)
    want, want_gradients = expected(name)
    np.testing.assert_allclose(output, want, atol=2e-6, rtol=1e-5)
    for got, expected_gradient in zip(gradients, want_gradients, strict=True):
        np.testing.assert_allclose(got, expected_gradient, atol=3e-5, rtol=1e-4)


TRACED = given(
    seed=st.integers(0, 2**16),
    lengths=st.tuples(st.integers(0, 22), st.integers(0, 22)),
    prefix=st.integers(0, 22),
    cuts=st.lists(st.integers(1, 21), max_size=3),
)


@settings(max_examples=25)
@TRACED
def test_rules_of_traced_arrays(seed, lengths, prefix, cuts):
    compare_traced(seed, lengths, prefix, cuts)


@pytest.mark.slow
@settings(max_examples=400)
@TRACED
def test_many_rules_of_traced_arrays(seed, lengths, prefix, cuts):
    compare_traced(seed, lengths, prefix, cuts)


def compare_traced(seed, lengths, prefix, cuts):
    """One compilation, many rules: their arrays are arguments, so the empty blocks are found at run time."""
    query, key, value, cotangent = arrays(22, 22, seed)
    valid = np.arange(22) < np.array(lengths)[:, None]
    ids = np.broadcast_to(np.searchsorted(np.sort(cuts), np.arange(22), side="right"), (B, 22)).astype(np.int32)
    output, gradients = run_traced(query, key, value, cotangent, valid, ids, np.int32([prefix]))
    place = np.arange(22)
    seen = valid[:, None, None, :] & (ids[:, None, :, None] == ids[:, None, None, :])
    seen = seen & ((place <= place[:, None]) | (place < prefix))
    free = [leaf(x) for x in (query, key, value)]
    want = written_out(*free, seen=seen)
    want.backward(torch.from_numpy(cotangent.astype(np.float64)))
    np.testing.assert_allclose(output, want.detach().numpy(), atol=2e-6, rtol=1e-5)
    for got, x in zip(gradients, free, strict=True):
        np.testing.assert_allclose(got, x.grad.numpy(), atol=3e-5, rtol=1e-4)
    empty = ~np.broadcast_to(seen, (B, H, 22, 22)).any(-1).swapaxes(1, 2)
    assert not np.asarray(output)[empty].any()
    assert not np.asarray(gradients[0])[empty].any()
    assert not np.asarray(gradients[1])[~valid].any()
    assert not np.asarray(gradients[2])[~valid].any()


@jax.jit
def run_traced(query, key, value, cotangent, valid, ids, prefix):
    rule = Padding(valid) & Segments(ids, ids) & (Causal() | Prefix(prefix))

    def attend(*inputs):
        return attention(*inputs, mask=rule, implementation="blockwise", block_size=8)

    output, pull = jax.vjp(attend, query, key, value)
    return output, pull(cotangent)


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data(), lengths=st.sampled_from([(22, 22), (13, 22), (22, 9), (1, 22)]), seed=st.integers(0, 99))
def test_drawn_rules(data, lengths, seed):
    T, S = lengths
    rules = st.sampled_from(
        [
            Causal(),
            Window(2, 3),
            Window(None, 1),
            Window(2, 2, 3),
            Window(1, 1, (1, 2, 2, 4)),
            Window(1, 1, (2, 2, 4, 4)),
            Global([1, 8]),
            Prefix(3),
            Padding(VALID[:, :S]),
            masks.bigbird(22, block_size=2, num_heads=H, seed=seed),
        ]
    )
    rule = data.draw(rules)
    for _ in range(data.draw(st.integers(0, 2))):
        other = data.draw(rules)
        rule = rule & other if data.draw(st.booleans()) else rule | other
    *inputs, cotangent = arrays(T, S, seed)
    dtype = data.draw(st.sampled_from([jnp.float32, jnp.bfloat16]))
    block = data.draw(st.sampled_from([2, 4, 8, 32]))
    inputs = [jnp.asarray(x, dtype) for x in inputs]

    def attend(*inputs):
        return attention(*inputs, mask=rule, implementation="blockwise", block_size=block).astype(jnp.float32)

    output, pull = jax.vjp(attend, *inputs)
    gradients = pull(jnp.asarray(cotangent))
    free = [leaf(x.astype(jnp.float32)) for x in inputs]
    want = written_out(*free, seen=np.asarray(rule.dense(np.arange(T), np.arange(S))))
    want.backward(torch.from_numpy(cotangent.astype(np.float64)))
    tolerance = 3e-5 if dtype == jnp.float32 else 6e-2
    np.testing.assert_allclose(output, want.detach().numpy(), atol=tolerance)
    for got, x in zip(gradients, free, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), x.grad.numpy(), atol=2 * tolerance)


def test_rules_of_keys_alone():
    """They say nothing of queries; blocks of an even size."""
    made = arrays(8, 8)[:3]
    valid = np.array([[True] * 5 + [False] * 3, [True] * 7 + [False]])
    output = attention(*made, mask=Padding(valid), implementation="blockwise", block_size=4)
    right = written_out(*(torch.from_numpy(x).double() for x in made), seen=valid[:, None, None])
    np.testing.assert_allclose(output, right, atol=2e-6)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 0.02), (jnp.float16, 0.003)])
def test_half_precision_in_float32_sums(implementation, dtype, tolerance):
    *inputs, _ = arrays(22, 22)
    inputs = [jnp.asarray(x, dtype) for x in inputs]
    output = attention(*inputs, mask=Causal(), implementation=implementation, block_size=8)
    assert output.dtype == dtype
    exact = written_out(*(leaf(x.astype(jnp.float32)) for x in inputs), seen=np.tril(np.ones((22, 22), bool)))
    np.testing.assert_allclose(output.astype(jnp.float32), exact.detach().numpy(), atol=tolerance)


def test_double_precision():
    with jax.enable_x64(True):
        *inputs, _ = arrays(22, 22, dtype=np.float64)
        output = attention(*map(jnp.asarray, inputs), mask=Causal(), implementation="blockwise", block_size=8)
        exact = written_out(*map(leaf, inputs), seen=np.tril(np.ones((22, 22), bool))).detach().numpy()
        assert output.dtype == jnp.float64
        np.testing.assert_allclose(output, exact, atol=1e-14)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_torch_has_the_same_attention(implementation):
    query, key, value, _ = arrays(22, 22)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x).swapaxes(1, 2) for x in (query, key, value)), is_causal=True, enable_gqa=True
    )
    ours = attention(query, key, value, mask=Causal(), implementation=implementation, block_size=8)
    np.testing.assert_allclose(ours, theirs.swapaxes(1, 2).numpy(), atol=2e-6)


def test_blocks_of_any_size_drop_the_same_weights():
    query, key, value, _ = arrays(22, 22)
    drop = dict(dropout_rate=0.5, dropout_key=KEY, mask=Causal())
    dense = attention(query, key, value, implementation="dense", **drop)
    for size in (4, 32):
        block = attention(query, key, value, implementation="blockwise", block_size=size, **drop)
        np.testing.assert_allclose(block, dense, atol=2e-6)
    other = attention(query, key, value, implementation="dense", **dict(drop, dropout_key=jax.random.key(8)))
    assert np.abs(np.asarray(other) - np.asarray(dense)).max() > 0.1


def test_worked_weights():
    scores = np.float32([1.2, 2.4, 0.3])
    query = np.float32([1, 0, 0, 0]).reshape(1, 1, 1, 4)
    key = np.zeros((1, 3, 1, 4), np.float32)
    key[0, :, 0, 0] = scores
    weights = attention_weights(query, key, scale=0.5)  # 1 / sqrt(4)
    np.testing.assert_allclose(weights[0, 0, 0], [0.289, 0.527, 0.184], atol=6e-4)


def test_weights_sum_to_one_or_to_zero():
    query, key, _, _ = arrays(22, 22)
    weights = attention_weights(query, key, mask=Window(2, 0) & Padding(VALID))
    seen = (Window(2, 0) & Padding(VALID)).dense(np.arange(22), np.arange(22)).any(-1)
    np.testing.assert_allclose(weights.sum(-1), np.broadcast_to(seen, (B, H, 22)), atol=1e-6)


def test_pieces_of_the_keys_merge():
    query, key, value, cotangent = arrays(22, 22)

    def part(value, first, last):
        return attention(
            query,
            key[:, first:last],
            value[:, first:last],
            mask=Window(3, None) & Padding(VALID[:, first:last]),
            key_positions=np.arange(first, last),
            implementation="blockwise",
            block_size=8,
            return_lse=True,
        )

    def joined(value):
        return merge([part(value, 0, 5), part(value, 5, 22)])

    @jax.jit
    def both(value, cotangent):
        results, pull = jax.vjp(joined, value)
        whole, pull_whole = jax.vjp(lambda value: part(value, 0, 22), value)
        cotangents = cotangent, jnp.zeros_like(whole[1])
        return (*results, *pull(cotangents)), (*whole, *pull_whole(cotangents))

    for got, want in zip(*both(value, cotangent), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_log_sum_exp_has_its_gradient():
    query, key, value, _ = arrays(22, 22)

    def total(query):
        lse = attention(query, key, value, mask=Causal(), return_lse=True, implementation="blockwise", block_size=8)[1]
        return jnp.sin(lse).sum(), lse

    (_, lse), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(query)
    free = leaf(query)
    keys = leaf(key).detach().repeat_interleave(H // K, 2)
    scores = torch.einsum("bthd,bshd->bhts", free, keys) * D**-0.5
    exact = scores.masked_fill(torch.ones(22, 22).triu(1).bool(), -torch.inf).logsumexp(-1)
    exact.sin().sum().backward()
    np.testing.assert_allclose(lse, exact.detach().numpy(), atol=2e-6)
    np.testing.assert_allclose(gradient, free.grad.numpy(), atol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("lengths", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_to_attend_to_or_from(lengths, implementation):
    batch, T, S = lengths
    query, key, value = jnp.ones((batch, T, H, D)), jnp.ones((batch, S, K, D)), jnp.ones((batch, S, K, DV))

    def attend(*inputs):
        return attention(*inputs, mask=Causal(), implementation=implementation, return_lse=True)

    output, lse = attend(query, key, value)
    assert output.shape == (batch, T, H, DV) and lse.shape == (batch, H, T)
    assert not output.any() or S > 0
    for gradient in jax.grad(lambda *x: attend(*x)[0].sum(), (0, 1, 2))(query, key, value):
        assert not gradient.any() or 0 not in lengths


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("low", [-np.inf, np.finfo(np.float32).min])
def test_a_bias_of_minus_infinity_hides(low, block_size, implementation):
    query, key, value, cotangent = arrays(22, 22)
    seen = np.ones((22, 22), bool)
    seen[3], seen[4, 5:] = False, False
    bias = np.where(seen, 0, low).astype(np.float32)

    def attend(query, key, value):
        return attention(
            query, key, value, bias=bias, implementation=implementation, block_size=block_size, return_lse=True
        )

    @jax.jit
    def run(*inputs):
        (output, lse), pull = jax.vjp(attend, *inputs)
        return output, lse, pull((cotangent, jnp.zeros_like(lse)))

    output, lse, gradients = run(query, key, value)
    free = [leaf(x) for x in (query, key, value)]
    want = written_out(*free, seen=seen)
    want.backward(torch.from_numpy(cotangent.astype(np.float64)))
    np.testing.assert_allclose(output, want.detach().numpy(), atol=2e-6)
    np.testing.assert_array_equal(np.isinf(lse), np.broadcast_to(~seen.any(-1), lse.shape))
    for got, x in zip(gradients, free, strict=True):
        np.testing.assert_allclose(got, x.grad.numpy(), atol=2e-5)


def test_a_scale_in_an_array_is_that_of_its_call_alone():
    query, key, value, _ = arrays(22, 22)
    for scale in (np.float32(0.25), jnp.float32(0.5), 0.75):
        output = attention(query, key, value, scale=scale, implementation="blockwise", block_size=8)
        want = written_out(*map(leaf, (query, key, value)), seen=np.ones((22, 22), bool), scale=float(scale))
        np.testing.assert_allclose(output, want.detach().numpy(), atol=2e-6)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_unsigned_positions_have_distances_to_both_sides(implementation):
    query, key, value, _ = arrays(22, 22)
    places, slopes = np.arange(22, dtype=np.uint32), np.array(alibi_slopes(H))
    output = attention(query, key, value, bias=Alibi(slopes), query_positions=places, key_positions=places,
                       implementation=implementation, block_size=8)
    want = written_out(*map(leaf, (query, key, value)), seen=np.ones((22, 22), bool),
                       bias=torch_bias("alibi", leaf(slopes), 22, 22))
    np.testing.assert_allclose(output, want.detach().numpy(), atol=2e-6)
