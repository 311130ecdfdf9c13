"""Rules against their definitions written out pair by pair, and block maps against the drawn rules."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm import masks
from tfm.masks import Blocks, Causal, Global, Matrix, Padding, Prefix, Segments, Window
from tfm.ops.attention import attention
from tfm.ops.masks import EMPTY, FULL, static_bounds
from tfm.ops.order import dilation_groups, token_order
from tfm.ops.tokens import Tokens

RANDOM = np.random.default_rng(0)
VALID = RANDOM.random((2, 22)) < 0.7
IDS = np.sort(RANDOM.integers(0, 4, (2, 22)), axis=1)
ARRAY = RANDOM.random((2, 3, 22, 22)) < 0.5
CELLS = RANDOM.random((3, 6, 6)) < 0.4

X = jnp.asarray(np.random.default_rng(3).standard_normal((2, 40, 1, 4)), jnp.float32)


class Loose(masks.Rule):
    """A rule that JAX does not know."""


# Each rule beside the question "may query q see key k", of batch row b and head h.
RULES = {
    "causal": (Causal(), lambda b, h, q, k: k <= q),
    "window": (Window(3, 1), lambda b, h, q, k: q - 3 <= k <= q + 1),
    "open window": (Window(None, 2), lambda b, h, q, k: k <= q + 2),
    "dilated": (Window(2, 1, 3), lambda b, h, q, k: k - q in (-6, -3, 0, 3)),
    "dilated by head": (Window(1, 1, (1, 2, 4)), lambda b, h, q, k: k - q in (-(2**h), 0, 2**h)),
    "sliding window": (masks.sliding_window(4), lambda b, h, q, k: 0 <= q - k < 4),
    "padding": (Padding(VALID), lambda b, h, q, k: VALID[b, k]),
    "segments": (Segments(IDS, IDS), lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
    "prefix": (Prefix(5), lambda b, h, q, k: k < 5),
    "prefix by row": (Prefix(np.array([3, 7])), lambda b, h, q, k: k < (3, 7)[b]),
    "global": (Global([2, 9]), lambda b, h, q, k: q in (2, 9) or k in (2, 9)),
    "global by row": (Global(VALID), lambda b, h, q, k: VALID[b, q] or VALID[b, k]),
    "blocks": (Blocks(CELLS, 4), lambda b, h, q, k: CELLS[h, q // 4, k // 4]),
    "array": (Matrix(ARRAY), lambda b, h, q, k: ARRAY[b, h, q, k]),
    "longformer": (masks.longformer(4, tokens=[0, 7]), lambda b, h, q, k: abs(q - k) <= 2 or {q, k} & {0, 7}),
}


def written_out(name: str, T: int = 22, S: int = 22) -> np.ndarray:
    sees = RULES[name][1]
    return np.array(
        [[[[bool(sees(b, h, q, k)) for k in range(S)] for q in range(T)] for h in range(3)] for b in range(2)]
    )


def draw(rule: masks.Rule, T: int = 22, S: int = 22) -> np.ndarray:
    return np.broadcast_to(rule.dense(np.arange(T), np.arange(S)), (2, 3, T, S))


@pytest.mark.parametrize("name", RULES)
def test_rule_is_its_definition(name):
    np.testing.assert_array_equal(draw(RULES[name][0]), written_out(name))


@settings(max_examples=60)
@given(
    first=st.sampled_from(sorted(RULES)),
    second=st.sampled_from(sorted(RULES)),
    both=st.booleans(),
    blocks=st.tuples(st.sampled_from([1, 3, 4, 8, 22, 30]), st.sampled_from([2, 4, 5, 16])),
)
def test_block_map_agrees_with_the_drawing(first, second, both, blocks):
    a, b = RULES[first][0], RULES[second][0]
    rule, seen = (a & b, draw(a) & draw(b)) if both else (a | b, draw(a) | draw(b))
    np.testing.assert_array_equal(draw(rule), seen)
    kinds = rule.block_map(22, 22, *blocks)
    assert kinds.shape == (-(-22 // blocks[0]), -(-22 // blocks[1]))
    for (i, j), kind in np.ndenumerate(kinds):
        block = seen[:, :, i * blocks[0] : (i + 1) * blocks[0], j * blocks[1] : (j + 1) * blocks[1]]
        assert kind != EMPTY or not block.any()
        assert kind != FULL or block.all()


@pytest.mark.parametrize("name", ["causal", "window", "padding", "prefix", "global", "blocks", "array"])
def test_block_map_misses_no_empty_and_no_full_block(name):
    rule, seen = RULES[name][0], written_out(name)
    for (i, j), kind in np.ndenumerate(rule.block_map(22, 22, 4, 4)):
        block = seen[:, :, 4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
        assert kind == (FULL if block.all() else 1 if block.any() else EMPTY)


def test_traced_values_count_as_partial_and_known_ones_do_not():
    @jax.jit
    def maps(valid):
        rule = Causal() & Padding(valid)
        return jnp.asarray(rule.block_map(8, 8, 4, 4)), jnp.asarray(Causal().block_map(8, 8, 4, 4))

    traced, known = maps(jnp.zeros((1, 8), bool))
    assert traced.tolist() == [[1, 0], [1, 1]]
    assert known.tolist() == [[1, 0], [2, 1]]


def test_positions_may_be_offset_and_differ_by_row():
    queries, keys = np.array([[5, 6], [1, 2]]), np.array([[4, 5, 6], [0, 1, 2]])
    seen = (Causal() & Window(1, 0)).dense(queries, keys)
    assert seen[:, 0].astype(int).tolist() == [[[1, 1, 0], [0, 1, 1]], [[1, 1, 0], [0, 1, 1]]]


def test_arrays_join_rules_from_both_sides():
    array = np.array([[True, False], [True, True]])
    for rule in (Causal() & array, array & Causal(), jnp.asarray(array) & Causal()):
        assert rule.dense(np.arange(2), np.arange(2))[0, 0].tolist() == [[True, False], [True, True]]
    for rule in (Causal() | array, array | Causal(), jnp.asarray(array) | Causal()):
        assert rule.dense(np.arange(2), np.arange(2))[0, 0].tolist() == [[True, False], [True, True]]


def test_rules_pass_through_jit_and_keep_what_is_static():
    rule = (Window(2, 0) | Global([1])) & Padding(VALID) & Blocks(CELLS, 4)
    drawn = jax.jit(lambda rule: rule.dense(np.arange(22), np.arange(22)))(rule)
    np.testing.assert_array_equal(drawn, rule.dense(np.arange(22), np.arange(22)))
    assert jax.tree.structure(Window(2, 0)) != jax.tree.structure(Window(3, 0))
    assert not jax.tree.leaves(Window(2, 0, (1, 2)))


def test_worked_numbers_of_pairs():
    assert Causal().num_pairs(512, 512) == 131_328
    assert masks.sliding_window(512).num_pairs(512, 512) == 131_328
    assert Causal().num_pairs(131_072, 131_072) == 131_072 * 131_073 // 2  # 8.6 billion
    assert masks.sliding_window(512).num_pairs(131_072, 131_072) == 131_072 * 512 - 511 * 512 // 2  # 67 million
    rows = masks.sliding_window(4).dense(np.arange(6), np.arange(6))[0, 0].sum(-1)
    assert rows.tolist() == [1, 2, 3, 4, 4, 4]


def test_bigbird_has_the_published_counts_of_blocks():
    cells = masks.bigbird(2048, num_heads=2, seed=3).cells
    assert cells.shape == (2, 32, 32)
    assert cells[:, [0, 31]].all() and cells[:, :, [0, 31]].all()  # global: first and last block
    inner = cells[:, 2:30]
    for row in range(2, 30):
        assert cells[:, row, row - 1 : row + 2].all()
    assert (inner.sum(-1) == 2 + 3 + 3).all()  # global, window, random
    assert (cells[0] != cells[1]).any()
    np.testing.assert_array_equal(cells, masks.bigbird(2048, num_heads=2, seed=3).cells)
    assert (cells != masks.bigbird(2048, num_heads=2, seed=4).cells).any()


def test_dilated_window_costs_its_own_pairs():
    rule, length, block = Window(64, 64, 8), 4096, 128
    positions = np.arange(length)[None]
    order = token_order(rule, 0, positions, block)
    assert sorted(order[order < length].tolist()) == list(range(length))
    side = Tokens(positions[:, order], order)
    visited, _ = static_bounds(rule, side, side, block, block)
    band, _ = static_bounds(rule, Tokens(positions), Tokens(positions), block, block)
    pairs = rule.num_pairs(length, length)
    assert visited.sum() * block**2 <= 3 * pairs
    assert band.sum() >= 3 * visited.sum()


def test_global_tokens_come_first():
    order = token_order(Window(2, 2) | Global([5, 9]), 0, np.arange(12)[None], 4)
    assert order[:2].tolist() == [5, 9]
    assert token_order(Window(2, 2) | Global([0, 1]), 0, np.arange(12)[None], 4) is None


def test_heads_are_grouped_by_dilation_only_with_their_key_head():
    assert [x.tolist() for x in dilation_groups(Window(1, 1, (1, 1, 2, 2)), (4, 2))] == [[0, 1], [2, 3]]
    assert [x.tolist() for x in dilation_groups(Window(1, 1, (1, 2, 1, 2)), (4, 2))] == [[0, 1, 2, 3]]


def test_draw_as_text_and_as_picture(tmp_path):
    text = masks.draw(Causal() & Window(1, 1), 3, 4, path=tmp_path / "rule.png")
    assert text == "#...\n##..\n.##."
    assert (tmp_path / "rule.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Window(-1, 0), "Window.left is -1"),
        (lambda: Window(1, 0, 0), "Window.dilation is 0"),
        (lambda: masks.sliding_window(0), "size is 0"),
        (lambda: masks.longformer(3), "window is 3"),
        (lambda: masks.bigbird(64, num_window_blocks=2), "num_window_blocks is 2"),
        (lambda: Blocks(np.ones((1, 1), bool), 0), "block_size is 0"),
        (lambda: masks.bigbird(0), "length is 0"),
        (lambda: masks.bigbird(8, block_size=0), "block_size is 0"),
        (lambda: attention(X, X, X, mask=Loose()), "Loose is no pytree"),
        (lambda: Causal() | (Causal() & Loose()), "Loose is no pytree"),
        (lambda: Causal() & np.ones((2, 2)), "dtype float64"),
        (lambda: Blocks(np.ones((2, 2)), 2), "Blocks.block_map has dtype float64"),
        (lambda: Blocks(np.ones(2, bool), 2), r"Blocks.block_map has shape \(2,\)"),
        (lambda: Global([3, -1]), "position -1"),
        (lambda: Global(np.array([0, 5])).dense(np.arange(8), np.arange(8)), "Global.tokens has dtype int64"),
        (lambda: Global(np.array([0, 5])).block_map(8, 8, 4, 4), "Global.tokens has dtype int64"),
        (lambda: Padding(np.array([1.0, 0.0])).dense(np.arange(2), np.arange(2)), "Padding.valid has dtype float64"),
        (lambda: Causal().dense(np.zeros((1, 1, 2)), np.arange(2)), "query_positions has shape"),
    ],
)
def test_mistakes_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_rule_that_hides_all_gives_zeros():
    x = jnp.ones((1, 4, 1, 2))
    assert not attention(x, x, x, mask=Causal() & np.zeros((4, 4), bool)).any()


@pytest.mark.parametrize("dilation", [np.int64(2), [2, 2], np.array([2, 2])])
def test_dilations_are_numbers_whatever_holds_them(dilation):
    rule = Window(1, 1, dilation)
    assert hash(rule) == hash(Window(1, 1, 2 if np.ndim(dilation) == 0 else (2, 2)))
    assert rule.dense(np.arange(3), np.arange(3))[0, 0].tolist() == [[True, False, True], [False, True, False],
                                                                     [True, False, True]]


def test_integers_are_truth_values():
    positions = np.arange(4)
    numbers, truths = np.array([0, 2, 1, 1]), np.array([False, True, True, True])
    for join in (lambda rule: rule, lambda rule: rule & Causal(), lambda rule: Causal() | rule):
        found, expected = (join(Padding(x)).dense(positions, positions) for x in (numbers, truths))
        np.testing.assert_array_equal(found, expected)
    blocks = Blocks(np.array([[2, 0], [1, 1]]), 2) & Causal()
    assert blocks.dense(positions, positions)[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


@masks.register_rule
@dataclasses.dataclass(frozen=True)
class Every(masks.Rule):
    """Of the keys a query sees each `step`-th, counted from the `start`; nothing is said of blocks."""

    start: Any
    step: int = dataclasses.field(metadata={"static": True})

    def visible(self, query, key):
        return ((key.positions - self.start) % self.step == 0)[:, None, None, :]


@pytest.mark.parametrize("start", [2, np.int32(2), jnp.int32(2)])
def test_a_rule_of_ones_own_needs_nothing_but_visible(start):
    rule = Causal() & Every(start, 3)
    seen = np.tri(40, dtype=bool) & (np.arange(40) % 3 == 2)
    np.testing.assert_array_equal(rule.dense(np.arange(40), np.arange(40))[0, 0], seen)
    assert rule.num_pairs(40, 40) == seen.sum()
    for implementation in ("dense", "blockwise"):
        def attend(mask, x, implementation=implementation):
            return attention(x, x, x, mask=mask, implementation=implementation, block_size=16)

        expected = attention(X, X, X, mask=seen, implementation="dense")
        np.testing.assert_allclose(attend(rule, X), expected, atol=1e-5)
        np.testing.assert_allclose(jax.jit(attend)(rule, X), expected, atol=1e-5)
        gradient = jax.grad(lambda x, attend=attend: attend(rule, x).sum())(X)
        wanted = jax.grad(lambda x: attention(x, x, x, mask=seen, implementation="dense").sum())(X)
        np.testing.assert_allclose(gradient, wanted, atol=1e-4)
