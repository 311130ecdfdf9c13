"""Orders of the tokens in which a rule's blocks are few: attention does not mind the order, only positions count."""

from collections.abc import Iterator

import numpy as np

from tfm.ops.masks import And, Global, Or, Rule, Window
from tfm.ops.tokens import Array


def parts(rule: Rule | None) -> Iterator[Rule]:
    """The rules that `&` and `|` have joined."""
    if isinstance(rule, (And, Or)):
        yield from parts(rule.first)
        yield from parts(rule.second)
    elif rule is not None:
        yield rule


def dilation_groups(rule: Rule | None, heads: tuple[int, int]) -> list[np.ndarray]:
    """Query heads that share their dilation, group by group; all in one where key heads would have to be split.

    Example:
      >>> [x.tolist() for x in dilation_groups(Window(2, 2, (1, 1, 4, 1)), (4, 4))]
      [[0, 1, 3], [2]]
    """
    everyone = [np.arange(heads[0])]
    for part in parts(rule):
        if isinstance(part, Window) and len(set(part.dilations)) > 1:
            per_key_head = np.reshape(part.dilations, (heads[1], -1))
            if (per_key_head != per_key_head[:, :1]).any():
                return everyone
            dilations = np.asarray(part.dilations)
            return [np.flatnonzero(dilations == d) for d in np.unique(dilations)]
    return everyone


def token_order(rule: Rule | None, head: int, positions: Array, block: int) -> np.ndarray | None:
    """The order that brings the tokens of one residue together, and global ones to the front; None for their own.

    Args:
      rule: the rule.
      head: a query head; the order is for those with its dilation.
      positions: [B|1, L]; traced or differing ones keep their order.
      block: tokens per block.

    Returns:
      [n] int32, places of the tokens; L for filling, so that a residue begins with a block.

    Example:
      >>> token_order(Window(1, 1, 2), 0, np.arange(6)[None], 2).tolist()
      [0, 2, 4, 6, 1, 3, 5, 6]
    """
    if not isinstance(positions, np.ndarray) or len(positions) > 1:
        return None
    length, dilation = positions.shape[1], _dilation(rule, head)
    first = _global_tokens(rule, positions[0])
    if dilation == 1 and (not first.any() or first[: first.sum()].all()):
        return None
    residue = np.where(first, -1, positions[0] % dilation)
    order = np.lexsort((positions[0], residue)).astype(np.int32)
    if dilation == 1 or length // dilation < block:
        return order
    order = order[np.argsort(np.maximum(residue[order], 0), kind="stable")]
    classes = np.split(order, np.flatnonzero(np.diff(np.maximum(residue[order], 0))) + 1)
    return np.concatenate([np.pad(x, (0, -len(x) % block), constant_values=length) for x in classes])


def _dilation(rule: Rule | None, head: int) -> int:
    for part in parts(rule):
        if isinstance(part, Window) and max(part.dilations) > 1:
            return part.dilations[head % len(part.dilations)]
    return 1


def _global_tokens(rule: Rule | None, positions: np.ndarray) -> np.ndarray:
    """Which tokens are global, as far as it is known."""
    chosen = np.zeros(len(positions), bool)
    for part in parts(rule):
        if isinstance(part, Global) and isinstance(part.tokens, np.ndarray) and part.tokens.ndim == 1:
            chosen |= part.chosen(part.tokens[None], positions[None])[0]
    return chosen
