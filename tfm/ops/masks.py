"""Masks as rules: who may attend to whom, composed with `&` and `|`.

A rule is a small function of (query position, key position), or of the tokens' places in their arrays.  The same
rule is drawn as a matrix (`dense`), evaluated for one block of it (`visible`), and asked which blocks are empty or
full (`block_map`).  Rules are pytrees: their arrays pass through `jit`, `vmap` and `shard_map`, what is fixed (a
window's width) stays static.  True means: may attend.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tfm.ops.tokens import (
    Array,
    Spans,
    Tokens,
    array_module,
    as_batch,
    check_registered,
    known,
    pair_up,
    register_rule,
    spans,
)

EMPTY, PARTIAL, FULL = 0, 1, 2
_FAR = 1 << 30


@dataclasses.dataclass(frozen=True)
class Rule:
    """Says which queries see which keys.  Combine with `&` and `|`; boolean arrays join in.

    A rule of your own is a frozen dataclass under `register_rule` with `visible`, and `bounds` where blocks are to be
    skipped.
    """

    __array_ufunc__ = None  # so that `array & rule` comes to __rand__
    axes: ClassVar[dict[str, str]] = {}
    """Letters of the axes of the fields whose shapes `attention` checks, `*` for any length; a length of 1 fits all."""

    def visible(self, query: Tokens, key: Tokens) -> Array:
        """Evaluates the rule for some queries and keys: bool, broadcastable to [B, H, n, m]."""
        raise NotImplementedError

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        """Per pair of blocks: may some pair see, do all surely see; bool, broadcastable to [B, H, n, m].

        A rule that does not say is evaluated for all blocks.
        """
        return np.ones((1, 1, 1, 1), bool), np.zeros((1, 1, 1, 1), bool)

    def map_keys(self, move: Callable[[Array], Array]) -> "Rule":
        """The rule for keys moved elsewhere: `move` takes the arrays that go along with the key array."""
        return self

    def dense(self, query_positions: Array, key_positions: Array) -> Array:
        """Draws the rule as a matrix.

        Args:
          query_positions: [T] or [B, T] int.
          key_positions: [S] or [B, S] int.

        Returns:
          [B|1, H|1, T, S] bool, True where the query may attend to the key.

        Example:
          >>> Causal().dense(np.arange(3), np.arange(3))[0, 0].astype(int).tolist()
          [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        """
        query = Tokens(as_batch(query_positions, "query_positions"))
        key = Tokens(as_batch(key_positions, "key_positions"))
        seen = self.visible(query, key)
        seen = seen.reshape((1,) * (4 - seen.ndim) + seen.shape)
        shape = np.broadcast_shapes(seen.shape, (1, 1, query.positions.shape[1], key.positions.shape[1]))
        return jnp.broadcast_to(seen, shape)

    def block_map(self, T: int, S: int, block_q: int, block_k: int) -> np.ndarray:
        """Says of each pair of blocks whether it is empty (0), partial (1) or full (2), over all batches and heads.

        What depends on traced values counts as partial.

        Returns:
          [ceil(T / block_q), ceil(S / block_k)] int8.

        Example:
          >>> Causal().block_map(4, 4, 2, 2).tolist()
          [[1, 0], [2, 1]]
        """
        some, every = static_bounds(self, Tokens(np.arange(T)[None]), Tokens(np.arange(S)[None]), block_q, block_k)
        return np.where(every, FULL, np.where(some, PARTIAL, EMPTY)).astype(np.int8)

    def num_pairs(self, T: int, S: int) -> int:
        """Counts the pairs (query, key) that see each other, over the heads of a per-head rule.

        Example:
          >>> Causal().num_pairs(512, 512), Window(511, 0).num_pairs(512, 512)
          (131328, 131328)
        """
        size, total = 512, 0
        kinds = self.block_map(T, S, size, size)
        for i, j in np.argwhere(kinds != EMPTY):
            shape = min(size, T - i * size), min(size, S - j * size)
            # Of a full block one pair tells how many rows and heads the rule differs by.
            rows, columns = (np.arange(n) if kinds[i, j] == PARTIAL else np.arange(1) for n in shape)
            rows, columns = rows + i * size, columns + j * size
            seen = np.asarray(self.visible(Tokens(rows[None], rows), Tokens(columns[None], columns)))
            pairs = shape if kinds[i, j] == PARTIAL else (1, 1)
            total += int(np.broadcast_to(seen, np.broadcast_shapes(seen.shape, (1, 1, *pairs))).sum()) * (
                1 if kinds[i, j] == PARTIAL else shape[0] * shape[1]
            )
        return int(total)

    def __and__(self, other: "Rule | Array") -> "Rule":
        return And(self, as_rule(other))

    def __or__(self, other: "Rule | Array") -> "Rule":
        return Or(self, as_rule(other))

    def __rand__(self, other: Array) -> "Rule":
        return And(as_rule(other), self)

    def __ror__(self, other: Array) -> "Rule":
        return Or(as_rule(other), self)


def static_bounds(rule: Rule, query: Tokens, key: Tokens, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    """`Rule.bounds` over all batches and heads as NumPy arrays [nq, nk]; what is traced is (True, False)."""
    shape = -(-query.positions.shape[1] // block_q), -(-key.positions.shape[1] // block_k)
    if isinstance(rule, (And, Or)):
        (some, every), (other_some, other_every) = (
            static_bounds(r, query, key, block_q, block_k) for r in (rule.first, rule.second)
        )
        if isinstance(rule, And):
            return some & other_some, every & other_every
        return some | other_some, every | other_every
    leaves, structure = jax.tree.flatten(rule)
    *leaves, query_positions, key_positions = (known(x) for x in (*leaves, query.positions, key.positions))
    if query_positions is None or key_positions is None or any(x is None for x in leaves):
        return np.ones(shape, bool), np.zeros(shape, bool)
    some, every = jax.tree.unflatten(structure, leaves).bounds(
        spans(Tokens(query_positions, query.index), block_q), spans(Tokens(key_positions, key.index), block_k)
    )
    full = (1, 1, *shape)
    some = np.broadcast_to(some, np.broadcast_shapes(some.shape, full))
    every = np.broadcast_to(every, np.broadcast_shapes(every.shape, full))
    return np.asarray(some.any((0, 1))), np.asarray(every.all((0, 1)))


def as_bool(x: Array, name: str) -> Array:
    """An array of truth values; integers, as tokenizers give them, are true where they are not 0."""
    if not hasattr(x, "dtype"):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be a bool array")
    if x.dtype != bool and not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {x.dtype}; it must be bool")
    return x if x.dtype == bool else x != 0


def as_rule(mask: "Rule | Array") -> Rule:
    """A rule as it is; a boolean array, broadcastable to [B, H, T, S], as a `Matrix`."""
    if isinstance(mask, Rule):
        check_registered(mask, Rule)
        return mask
    mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
    if mask.dtype != bool:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be bool (True: may attend) or a rule")
    return Matrix(mask)


@register_rule
@dataclasses.dataclass(frozen=True)
class And(Rule):
    """Both rules allow it."""

    first: Rule
    second: Rule

    def map_keys(self, move: Callable[[Array], Array]) -> Rule:
        return type(self)(self.first.map_keys(move), self.second.map_keys(move))

    def visible(self, query: Tokens, key: Tokens) -> Array:
        return self.first.visible(query, key) & self.second.visible(query, key)

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        a, b = self.first.bounds(query, key), self.second.bounds(query, key)
        return a[0] & b[0], a[1] & b[1]


@register_rule
@dataclasses.dataclass(frozen=True)
class Or(Rule):
    """At least one of the rules allows it."""

    first: Rule
    second: Rule

    def map_keys(self, move: Callable[[Array], Array]) -> Rule:
        return type(self)(self.first.map_keys(move), self.second.map_keys(move))

    def visible(self, query: Tokens, key: Tokens) -> Array:
        return self.first.visible(query, key) | self.second.visible(query, key)

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        a, b = self.first.bounds(query, key), self.second.bounds(query, key)
        return a[0] | b[0], a[1] | b[1]


@register_rule
@dataclasses.dataclass(frozen=True)
class Causal(Rule):
    """A query sees the keys at its own position and before: key <= query."""

    def visible(self, query: Tokens, key: Tokens) -> Array:
        q, k = pair_up(query.positions, key.positions)
        return k <= q

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        q_low, k_low = pair_up(query.low, key.low)
        q_high, k_high = pair_up(query.high, key.high)
        return k_low <= q_high, k_high <= q_low


@register_rule
@dataclasses.dataclass(frozen=True)
class Window(Rule):
    """A query sees itself, `left` keys before it and `right` keys after it, `dilation` positions apart.

    Args:
      left: number of keys before the query, or None for all.
      right: number of keys after the query, or None for all.
      dilation: distance between neighbouring keys; a tuple gives one per head.

    Example:
      >>> Window(1, 1).dense(np.arange(3), np.arange(3))[0, 0].astype(int).tolist()
      [[1, 1, 0], [1, 1, 1], [0, 1, 1]]

    Reference: Beltagy, Peters and Cohan (2020), Longformer, section 3.1.
    """

    axes: ClassVar = {"dilations": "H"}
    left: int | None = dataclasses.field(metadata={"static": True})
    right: int | None = dataclasses.field(metadata={"static": True})
    dilation: int | tuple[int, ...] = dataclasses.field(default=1, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"Window.{name} is {value}; it must be 0 or more, or None for no limit")
        if not isinstance(self.dilation, int):
            object.__setattr__(self, "dilation", _numbers(self.dilation))
        if min(self.dilations) < 1:
            raise ValueError(f"Window.dilation is {self.dilation}; it must be 1 or more")

    @property
    def dilations(self) -> tuple[int, ...]:
        return (self.dilation,) if isinstance(self.dilation, int) else self.dilation

    def _reach(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Dilation and reach to both sides in positions, each [H|1, 1, 1]."""
        step = np.asarray(self.dilations, np.int32)[:, None, None]
        left, right = (np.full_like(step, _FAR) if n is None else n * step for n in (self.left, self.right))
        return step, left, right

    def visible(self, query: Tokens, key: Tokens) -> Array:
        q, k = pair_up(query.positions, key.positions)
        step, left, right = (query.per_head(x, 0) for x in self._reach())
        offset = k - q
        seen = (offset >= -left) & (offset <= right)
        return seen if self.dilations == (1,) else seen & (offset % step == 0)

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        q_low, k_low = pair_up(query.low, key.low)
        q_high, k_high = pair_up(query.high, key.high)
        step, left, right = self._reach()
        some = (k_high >= q_low - left) & (k_low <= q_high + right)
        every = (k_low >= q_high - left) & (k_high <= q_low + right)
        if self.dilations == (1,):
            return some, every
        (q_first, q_last), (k_first, k_last) = (_residues(x.positions, step) for x in (query, key))
        q_first, q_last = q_first[..., None], q_last[..., None]
        k_first, k_last = k_first[:, :, None], k_last[:, :, None]
        one = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        return some & (q_first <= k_last) & (k_first <= q_last), every & one


def _numbers(x: Array) -> int | tuple[int, ...]:
    """The integers of NumPy, or in a list, as those that compare and hash as what is static must."""
    return int(x) if np.ndim(x) == 0 else tuple(int(n) for n in x)


def _residues(positions: Array, step: np.ndarray) -> tuple[Array, Array]:
    """Least and greatest position modulo step in each block: [B, H, blocks]."""
    rest = positions[:, None] % step
    return rest.min(-1), rest.max(-1)


@register_rule
@dataclasses.dataclass(frozen=True)
class Padding(Rule):
    """A key is seen where it is a real token.

    Args:
      valid: [S] or [B, S] bool, True for a real token, in the order of the key array.
    """

    axes: ClassVar = {"valid": "BS"}
    valid: Array

    def _valid(self) -> Array:
        valid = as_bool(self.valid, "Padding.valid")
        return valid if valid.ndim == 2 else valid[None]

    def map_keys(self, move: Callable[[Array], Array]) -> Rule:
        return Padding(move(self.valid))

    def visible(self, query: Tokens, key: Tokens) -> Array:
        return key.rows(key.along(jnp.asarray(self._valid()), 1))[:, None, None, :]

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        some, every = (key.reduce(self._valid(), 1, how)[:, None, None, :] for how in ("max", "min"))
        return some, every


@register_rule
@dataclasses.dataclass(frozen=True)
class Segments(Rule):
    """A query sees the keys of its own segment: packed sequences stay apart.

    Args:
      query_ids: [T] or [B, T] int, in the order of the query array.
      key_ids: [S] or [B, S] int, in the order of the key array.
    """

    axes: ClassVar = {"query_ids": "BT", "key_ids": "BS"}
    query_ids: Array
    key_ids: Array

    def map_keys(self, move: Callable[[Array], Array]) -> Rule:
        return Segments(self.query_ids, move(self.key_ids))

    def visible(self, query: Tokens, key: Tokens) -> Array:
        q = query.rows(query.along(jnp.atleast_2d(self.query_ids), 1))
        k = key.rows(key.along(jnp.atleast_2d(self.key_ids), 1))
        q, k = pair_up(q, k)
        return q == k

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        q, k = (x if x.ndim == 2 else x[None] for x in (self.query_ids, self.key_ids))
        q_low, k_low = pair_up(query.reduce(q, 1, "min"), key.reduce(k, 1, "min"))
        q_high, k_high = pair_up(query.reduce(q, 1, "max"), key.reduce(k, 1, "max"))
        every = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return (q_low <= k_high) & (k_low <= q_high), every


@register_rule
@dataclasses.dataclass(frozen=True)
class Prefix(Rule):
    """Every query sees the keys at positions below `length`; `Causal() | Prefix(n)` is a prefix language model.

    Args:
      length: int, or [B] int.
    """

    axes: ClassVar = {"length": "B"}
    length: Array

    def _length(self) -> Array:
        length = np.asarray(self.length) if isinstance(self.length, int) else self.length
        return length.reshape(-1, 1, 1, 1)

    def visible(self, query: Tokens, key: Tokens) -> Array:
        return key.positions[:, None, None, :] < key.rows(self._length())

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        length = self._length()
        return key.low[:, None, None, :] < length, key.high[:, None, None, :] < length


@register_rule
@dataclasses.dataclass(frozen=True)
class Global(Rule):
    """Chosen tokens see all and are seen by all.

    Args:
      tokens: positions (a list, tuple or range of ints), or a boolean array [L] or [B, L] over positions 0..L-1.

    Example:
      >>> Global([0]).dense(np.arange(3), np.arange(3))[0, 0].astype(int).tolist()
      [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """

    axes: ClassVar = {"tokens": "B*"}
    tokens: Array

    def __post_init__(self) -> None:
        if type(self.tokens) in (list, tuple, range):
            if min(self.tokens, default=0) < 0:
                raise ValueError(f"Global.tokens has the position {min(self.tokens)}; positions must be 0 or more")
            chosen = np.zeros(max(self.tokens, default=-1) + 1, bool)
            chosen[list(self.tokens)] = True
            object.__setattr__(self, "tokens", chosen)

    def _tokens(self) -> Array:
        return self.tokens if self.tokens.ndim == 2 else self.tokens[None]

    def chosen(self, tokens: Array, positions: Array) -> Array:
        """[B, ...] bool: which positions are global ones."""
        if tokens.dtype != bool:  # integers may be meant as positions
            raise ValueError(f"Global.tokens has dtype {tokens.dtype}; it must be bool, or a list of positions")
        if not tokens.shape[1]:
            return positions < -_FAR
        xp = array_module(tokens, positions)
        inside = (positions >= 0) & (positions < tokens.shape[1])
        at = xp.clip(positions, 0, tokens.shape[1] - 1)
        rows = max(tokens.shape[0], positions.shape[0])
        at, tokens = xp.broadcast_to(at, (rows, *at.shape[1:])), xp.broadcast_to(tokens, (rows, tokens.shape[1]))
        found = xp.take_along_axis(tokens, at.reshape(rows, -1), axis=1).reshape(at.shape)
        return found & inside

    def visible(self, query: Tokens, key: Tokens) -> Array:
        chosen = query.rows(self._tokens())
        q, k = pair_up(self.chosen(chosen, query.positions), self.chosen(chosen, key.positions))
        return q | k

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        q, k = (self.chosen(self._tokens(), x.positions) for x in (query, key))
        (some_q, some_k), (every_q, every_k) = pair_up(q.any(-1), k.any(-1)), pair_up(q.all(-1), k.all(-1))
        return some_q | some_k, every_q | every_k


@register_rule
@dataclasses.dataclass(frozen=True)
class Matrix(Rule):
    """A mask written out.

    Args:
      mask: bool, broadcastable to [B, H, T, S], in the order of the query and key arrays.
    """

    axes: ClassVar = {"mask": "BHTS"}
    mask: Array

    def map_keys(self, move: Callable[[Array], Array]) -> Rule:
        raise ValueError("a mask that is an array cannot move with the keys; use rules over positions")

    def _four(self) -> Array:
        return self.mask.reshape((1,) * (4 - self.mask.ndim) + self.mask.shape)

    def visible(self, query: Tokens, key: Tokens) -> Array:
        return query.per_head(query.rows(key.along(query.along(self._four(), 2), 3)), 1)

    def bounds(self, query: Spans, key: Spans) -> tuple[Array, Array]:
        mask = self._four()
        return tuple(key.reduce(query.reduce(mask, 2, how), 3, how) for how in ("max", "min"))
