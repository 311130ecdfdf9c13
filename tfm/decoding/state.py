"""What the decoding loops share: the step function, prompts, limits, and moving the rows of a cache.

A step takes tokens [N, T] and a cache and returns the logits [N, T, V] of every position, or [N, V] of the last one
only, with the new cache. Every leaf of a cache starts with N, so tiling, gathering and dropping rows is one `tree.map`.
What a step only reads and all beams of a row share (the keys and values of the source) does not belong in the cache:
let the step close over it, and it is neither copied nor moved.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Cache = Any
Step = Callable[[jax.Array, Cache], tuple[Any, ...]]
NOTHING = -1  # stands in id buffers where no token is


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids", "scores", "finished", "lengths", "log_probs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Hypotheses:
    """What a search found. Unpacks as `ids, scores, finished`.

    Axes are [B, ...] after greedy search and sampling, [B, n_best, ...] after beam search.

    Attributes:
        ids: [..., L] int32, the new tokens only, EOS included where it came, then padding.
        scores: [...] float32, summed log-probability over the length penalty.
        finished: [...] bool, True where the hypothesis ended with EOS, False where its limit cut it off.
        lengths: [...] int32, number of new tokens, EOS counted.
        log_probs: [..., L] float32, the model's log-probability of each token, 0 on padding.
    """

    ids: jax.Array
    scores: jax.Array
    finished: jax.Array
    lengths: jax.Array
    log_probs: jax.Array

    def __iter__(self) -> Iterator[jax.Array]:
        return iter((self.ids, self.scores, self.finished))

    def __getitem__(self, item: int) -> jax.Array:
        return (self.ids, self.scores, self.finished)[item]

    def __len__(self) -> int:
        return 3


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "length", "limit"],
    meta_fields=["prompt_length", "vocab_size"],
)
@dataclass(frozen=True)
class History:
    """What rules about the next token may look at.

    Attributes:
        tokens: [N, W + L] int32, the prompt and what was generated so far; -1 where there is no token.
        length: int32 scalar, the number of columns in use.
        prompt_length: W.
        vocab_size: V.
        limit: [N] int32, most new tokens of each row; None where nobody says.
    """

    tokens: jax.Array
    length: jax.Array
    prompt_length: int
    vocab_size: int
    limit: jax.Array | None = None


def length_penalty(length: jax.typing.ArrayLike, alpha: float) -> jax.Array:
    """What a summed log-probability is divided by: ((5 + length) / 6)^alpha.

    Args:
        length: number of generated tokens, EOS counted, the prompt not.
        alpha: 0 compares sums, larger values favour longer hypotheses.

    Returns:
        float32 of the shape of length.

    Example:
        >>> float(length_penalty(7, 1.0))
        2.0

    Reference: Wu et al., 2016, "Google's Neural Machine Translation System", equation 14.
    """
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


def tile(tree: Cache, times: int) -> Cache:
    """Repeat each row of every leaf: [B, ...] -> [B * times, ...], copies of a row being neighbours."""
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), tree)


def take_rows(tree: Cache, rows: jax.Array, batch: int | None = None) -> Cache:
    """The given rows of every leaf, in that order: [B, ...], rows [C] -> [C, ...].

    Where `batch`, B, is given, leaves may also be [B * n, ...]: n neighbours a row.
    """

    def take(x: jax.Array) -> jax.Array:
        times = 1 if batch is None else x.shape[0] // batch
        return jnp.take(x, (rows[:, None] * times + jnp.arange(times)).reshape(-1), axis=0)

    return jax.tree.map(take, tree)


def gather_beams(tree: Cache, beams: jax.Array) -> Cache:
    """Move beams within their rows: leaves [B * K, ...], beams [B, J] of 0..K-1 -> leaves [B * J, ...]."""
    batch = beams.shape[0]

    def move(x: jax.Array) -> jax.Array:
        first = jnp.arange(batch)[:, None] * (x.shape[0] // batch)
        return x.at[(first + beams).reshape(-1)].get(mode="promise_in_bounds")

    return jax.tree.map(move, tree)


def prefill(step: Step, cache: Cache, prompt: jax.Array, chunk: int | None) -> tuple[Any, ...]:
    """Feed the prompt [B, P], at most `chunk` columns a call: what the last call to step returned."""
    chunk = prompt.shape[1] if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"prefill_chunk is {chunk}: expected at least 1, or None")
    outputs: tuple[Any, ...] = (None, cache)
    for start in range(0, prompt.shape[1], chunk):
        outputs = step(prompt[:, start : start + chunk], outputs[1])
    return outputs


def last_logits(logits: jax.Array) -> jax.Array:
    """The logits of the last position, [N, T, V] or [N, V] -> [N, V] float32."""
    return (logits if logits.ndim == 2 else logits[:, -1]).astype(jnp.float32)


def eos_ids(eos_id: int | Sequence[int] | None) -> tuple[int, ...]:
    """The ids that end a hypothesis as a tuple; negative ones, which no token has, are left out."""
    try:
        ids = () if eos_id is None else tuple(operator.index(i) for i in np.atleast_1d(np.asarray(eos_id, object)))
    except TypeError as error:
        raise ValueError(f"eos_id is {eos_id!r}: expected an id, some ids, or None") from error
    return tuple(i for i in ids if i >= 0)


def check_vocabulary(ids: tuple[int, ...], logits: jax.Array) -> None:
    """Refuses ids that end a hypothesis but have no logit in [..., V]: indices would be taken for the last one."""
    if any(i >= logits.shape[-1] for i in ids):
        raise ValueError(f"eos_id is {list(ids)}: expected ids below {logits.shape[-1]}, the logits of the step")


def is_eos(tokens: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    """Where tokens are one of the ids that end a hypothesis."""
    return jnp.any(tokens[..., None] == jnp.array(ids, jnp.int32), axis=-1) if ids else jnp.zeros(tokens.shape, bool)


def check_prompt(prompt: jax.Array, seen: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The prompt [B, P] and the tokens [B, W] that rules count as the text so far, as int32."""
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 2 or prompt.shape[1] < 1 or not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"prompt is {prompt.dtype}{list(prompt.shape)}: expected integers [B, P] with P at least 1")
    prompt = prompt.astype(jnp.int32)
    seen = prompt if seen is None else jnp.asarray(seen, jnp.int32)
    if seen.ndim != 2 or len(seen) != len(prompt):
        raise ValueError(f"seen has shape {list(seen.shape)}: expected [B, W] for the {len(prompt)} rows of prompt")
    return prompt, seen


def row_limits(max_length: jax.typing.ArrayLike, buffer_length: int | None, batch: int) -> tuple[jax.Array, int]:
    """Each row's limit [B] and the length L of the id buffers."""
    limit = jnp.asarray(max_length)
    if not jnp.issubdtype(limit.dtype, jnp.integer):
        raise ValueError(f"max_length is {max_length}: expected an integer, or one for each row")
    limit = limit.astype(jnp.int32)
    if limit.shape not in ((), (batch,)):
        raise ValueError(
            f"max_length has shape {list(limit.shape)}: expected one number or one for each of {batch} rows"
        )
    if isinstance(max_length, jax.core.Tracer):
        if buffer_length is None:
            raise ValueError("max_length is traced: give buffer_length, the largest limit there may be, as a number")
    else:
        smallest, largest = int(np.min(np.asarray(max_length))), int(np.max(np.asarray(max_length)))
        if smallest < 1:
            raise ValueError(f"max_length is {smallest}: expected at least 1")
        if buffer_length is not None and buffer_length < largest:
            raise ValueError(f"buffer_length is {buffer_length}: expected at least max_length, {largest}")
        buffer_length = largest if buffer_length is None else buffer_length
    return jnp.broadcast_to(jnp.minimum(limit, buffer_length), (batch,)), buffer_length


def write_column(buffer: jax.Array, column: jax.Array, place: jax.Array) -> jax.Array:
    """Put column [...] into buffer [..., L] at place."""
    return lax.dynamic_update_slice_in_dim(buffer, column[..., None].astype(buffer.dtype), place, axis=-1)
