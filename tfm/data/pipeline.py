"""Endless training batches and single passes over held-out text, on grain.

Batches are planned from token counts alone, so the state of an iterator is a few numbers, and the same state gives
the same batches on any machine.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfm.config import Config, DataConfig
from tfm.data.batch import IDS, Batch, BatchShape, batch_shapes, choose_lengths, choose_sides, pad_batch, padding_of
from tfm.data.cache import cached_tokens
from tfm.data.examples import Examples, LabelledExamples, PairExamples, TextExamples
from tfm.data.packing import pack_dataset, packed_sides, packing_bins
from tfm.data.plan import BucketPlan, EpochOrder
from tfm.data.source import Splits, Texts
from tfm.data.tokenizer import Tokenizer

_ENDLESS = 1 << 60
_PREFETCH = 4
_HELD_OUT_BUCKETS = 6  # where the config leaves their number open
_LITTLE_PADDING = 0.1
_MANY_EXAMPLES = 20_000  # are enough to tell how much padding a number of buckets leaves


@dataclass(frozen=True)
class Packer:
    """What packs a run's examples, `bins` rows at a time."""

    make: Callable[[int], Any]  # bins -> dataset
    bins: int
    bins_before: int  # what a state without `bins` counts in


class TrainIterator(Iterator[Batch]):
    """Endless batches, made ahead in a background thread.

    Attributes:
      shapes: every shape of a batch that can come.
      counts: what became of the training texts.
      batches_per_epoch: None where it is not known in advance (packing).
      padding_share: share of padding among the positions: planned with buckets, measured so far with packing.
    """

    def __init__(self, dataset: Any, examples: Examples, shapes: list[BatchShape], plan: BucketPlan | None,
                 text: str | None, packer: Packer | None = None) -> None:
        self._iterator: Any = iter(dataset)
        self._packer = packer
        self._text = text  # hash of the content of text files
        self.counts = examples.counts
        self.shapes = shapes
        self.batches_per_epoch = plan.batches_per_epoch if plan else None
        self._planned_padding = 1 - int(examples.sides.sum()) / plan.padded_positions if plan else None
        self._positions, self._valid = 0, 0
        _ITERATORS.add(self)

    def __next__(self) -> Batch:
        batch: Batch = next(self._iterator)
        for name in ("mask", "source_mask", "target_mask"):
            if name in batch:
                self._positions += batch[name].size
                self._valid += int(batch[name].sum())
        return batch

    @property
    def padding_share(self) -> float:
        if self._planned_padding is not None:
            return self._planned_padding
        return 1 - self._valid / self._positions if self._positions else 0.0

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch given out, as plain JSON data."""
        state: dict[str, Any] = copy.deepcopy(self._iterator.get_state())
        if self._packer is not None:
            state["bins"] = self._packer.bins
        return state if self._text is None else {"text": self._text, **state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state, bit for bit.

        Raises:
          ValueError: it is a position in another text.
        """
        place = copy.deepcopy(state)
        if place.pop("text", self._text) != self._text:
            raise ValueError("data.train is not the text that this run was trained on so far: put that back, or let a "
                             "new run start from this one with --init-from")
        if self._packer is not None:
            self._pack_by(place.pop("bins", self._packer.bins_before))
        self._iterator.set_state(place)

    def _pack_by(self, bins: int) -> None:
        """Pack so many rows at a time from now on: a position counts the rows of those packed together."""
        assert self._packer is not None
        if bins != self._packer.bins:
            self._iterator.close()
            self._packer = dataclasses.replace(self._packer, bins=bins)
            self._iterator = iter(self._packer.make(bins))

    def close(self) -> None:
        """Stop the background thread; the iterator gives nothing more."""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None  # released now: grain's own clean-up fails once the interpreter is going down


_ITERATORS: weakref.WeakSet[TrainIterator] = weakref.WeakSet()


@atexit.register
def _close_iterators() -> None:
    for iterator in list(_ITERATORS):
        iterator.close()


def make_train_iterator(config: Config, tokenizer: Tokenizer, splits: Splits, *, process_index: int = 0,
                        process_count: int = 1, multiple_of: int = 1,
                        cache_dir: str | Path | None = None) -> TrainIterator:
    """Batches of the train split, shuffled anew each epoch, every example exactly once an epoch.

    Args:
      config: of the run; the order follows from `train.seed`.
      tokenizer: what made the ids of the model.
      splits: the texts.
      process_index, process_count: which share of the rows of each batch this process gets.
      multiple_of: rows of the whole batch (all processes) are a multiple of it. Rows of padding fill it up, so that
        devices and processes do not change which examples make a batch.
      cache_dir: where tokens are kept. None: `data.cache_dir`; nothing is kept where that is None, too.

    Returns:
      The iterator, with `get_state` and `set_state`.

    Raises:
      ValueError: no example is left, or a batch cannot hold the rows.
    """
    import grain

    rows_of = multiple_of * process_count // np.gcd(multiple_of, process_count)
    data, seed = config.data, config.train.seed
    text = splits.train.fingerprint if data.source == "text" else None
    examples = make_examples(config, tokenizer, splits, splits.train, "train", cache_dir)
    _require_examples(examples, data.max_length, "data.train")
    if data.batching == "pack":
        batch_shapes([[data.max_length]], data.tokens_per_batch, int(rows_of))  # refuses a batch with less rows
        sides = packed_sides(examples.sides, data.max_length, data.tokens_per_batch)
        shape = batch_shapes([sides], data.tokens_per_batch)[0]
        rows = -(-shape.rows // int(rows_of)) * int(rows_of) // process_count
        part = range(process_index * rows, (process_index + 1) * rows)
        pack = functools.partial(pack_dataset, examples, EpochOrder(len(examples.sides), seed), shape, tokenizer, seed,
                                 part)
        packer = Packer(pack, packing_bins(shape.rows), packing_bins(shape.rows, None))
        return TrainIterator(pack(packer.bins), examples, [BatchShape(rows, *sides)], None, text, packer)
    shapes = batch_shapes(choose_buckets(examples.sides, data, data.buckets), data.tokens_per_batch)
    plan = BucketPlan(examples.sides, shapes, seed)
    maker = _BatchMaker(examples, plan, tokenizer.pad_id, process_index, process_count, int(rows_of))
    dataset = grain.MapDataset.range(_ENDLESS).map(maker).to_iter_dataset(
        grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH))
    used = [s for s, n in zip(shapes, plan.batches_per_shape, strict=True) if n]
    return TrainIterator(dataset, examples, [BatchShape(maker.rows(s), *s.sides) for s in used], plan, text)


def choose_buckets(sides: np.ndarray, data: DataConfig, count: int | None) -> list[tuple[int, ...]]:
    """Lengths of the buckets' sides for examples of these lengths [N, sides].

    Args:
      sides: lengths.
      data: its `max_length` bounds them.
      count: most buckets; None: of 1, 2, 4, ... 32 the first number that keeps padding under a tenth, or 32.
    """
    count = _enough_buckets(sides, data) if count is None else count
    if sides.shape[1] == 2:
        return [*choose_sides(sides, count)]
    return [(length,) for length in choose_lengths(sides[:, 0], count, data.max_length)]


def _enough_buckets(sides: np.ndarray, data: DataConfig) -> int:
    some = sides[::len(sides) // _MANY_EXAMPLES + 1]
    for count in (1, 2, 4, 8, 16):
        if padding_of(some, choose_buckets(some, data, count)) < _LITTLE_PADDING:
            return count
    return 32


class _BatchMaker:
    """Batch number -> this process's rows of it."""

    def __init__(self, examples: Examples, plan: BucketPlan, pad_id: int, process_index: int = 0,
                 process_count: int = 1, multiple_of: int = 1) -> None:
        self._examples, self._plan, self._pad_id = examples, plan, pad_id
        self._process_index, self._process_count, self._multiple_of = process_index, process_count, multiple_of

    def rows(self, shape: BatchShape) -> int:
        """Rows of this process in a batch of the plan, those of padding included."""
        return -(-shape.rows // self._multiple_of) * self._multiple_of // self._process_count

    def __call__(self, index: int) -> Batch:
        epoch, shape, numbers = self._plan[int(index)]
        rows = self.rows(shape)
        mine = numbers[self._process_index * rows:(self._process_index + 1) * rows]
        made = [self._examples.make(int(number), epoch) for number in mine]
        local = BatchShape(rows, *shape.sides)
        if made:
            return pad_batch(made, local, self._pad_id)
        first = self._examples.make(int(numbers[0]), epoch)
        return _blank(pad_batch([first], local, self._pad_id), self._pad_id)


def _blank(batch: Batch, pad_id: int) -> Batch:
    """The same arrays with no valid row, for a process that the last batch of an epoch leaves without examples."""
    return {name: np.full_like(array, pad_id if name in IDS and array.ndim > 1 else 0) for name, array in batch.items()}


class EvalBatches:
    """Batches of a held-out split: each example once, in few shapes, as often as they are iterated.

    Attributes:
      counts: what became of the texts.
      shapes: the shapes that come.
    """

    def __init__(self, examples: Examples, shapes: list[BatchShape], pad_id: int, multiple_of: int = 1) -> None:
        self.counts = examples.counts
        self._plan = BucketPlan(examples.sides, shapes, shuffle=False)
        self._make = _BatchMaker(examples, self._plan, pad_id, multiple_of=multiple_of)
        used = [s for s, n in zip(shapes, self._plan.batches_per_shape, strict=True) if n]
        self.shapes = [BatchShape(self._make.rows(s), *s.sides) for s in used]

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> Batch:
        return self._make(index)

    def __iter__(self) -> Iterator[Batch]:
        return (self._make(index) for index in range(len(self._plan)))


def make_eval_batches(config: Config, tokenizer: Tokenizer, splits: Splits, texts: Texts, *, multiple_of: int = 1,
                      cache_dir: str | Path | None = None) -> EvalBatches:
    """Batches of a held-out split under the run's objective, the same at every call.

    Args:
      config: of the run.
      tokenizer: as in training.
      splits: all splits; labels are numbered by `data.labels`, or else by the train split.
      texts: which texts, such as `splits.valid`.
      multiple_of: rows are a multiple of it; rows that are missing have weight 0.
      cache_dir: as for `make_train_iterator`.

    Returns:
      The batches, each example exactly once.

    Raises:
      ValueError: no example is left.
    """
    data = config.data
    examples = make_examples(config, tokenizer, splits, texts, "held-out text", cache_dir)
    _require_examples(examples, data.max_length, "the held-out text")
    buckets = choose_buckets(examples.sides, data, data.buckets or _HELD_OUT_BUCKETS)
    return EvalBatches(examples, batch_shapes(buckets, data.tokens_per_batch), tokenizer.pad_id, multiple_of)


def make_examples(config: Config, tokenizer: Tokenizer, splits: Splits, texts: Texts, name: str,
                  cache_dir: str | Path | None = None) -> Examples:
    """Tokenise a split (or read its tokens from the cache) and number its examples."""
    data = config.data
    folder = data.cache_dir if cache_dir is None else cache_dir
    if data.task == "translate":
        source, target = cached_tokens(texts, 2, tokenizer, folder, name=name)
        return PairExamples(source, target, tokenizer, data)
    (tokens,) = cached_tokens(texts, 1, tokenizer, folder, name=name)
    if data.task == "classify":
        labels = texts.columns[1] if len(texts) else ()
        return LabelledExamples(tokens, labels, tokenizer, data, data.labels or class_names(splits))
    return TextExamples(tokens, tokenizer, data, config.train.seed)


def class_names(splits: Splits) -> list[str]:
    """The classes of a classification task: the distinct labels of the train split, sorted; class i is name i."""
    return sorted({label for label in splits.train.columns[1] if label})


def _require_examples(examples: Examples, max_length: int, name: str) -> None:
    counts = examples.counts
    if not counts.examples:
        raise ValueError(f"{name}: of {counts.texts} examples none is left: {counts.empty} are empty, "
                         f"{counts.skipped} longer than max_length={max_length}")
