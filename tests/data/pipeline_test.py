"""The pipeline end to end: exactly once an epoch, resumable bit for bit, nothing read off the pad id."""

from __future__ import annotations

import collections
import json
from typing import Any

import jax
import numpy as np
import pytest

import tfm
from tfm.config import Config, DataConfig, ModelConfig, TrainConfig
from tfm.data import Batch, Splits, Texts, class_names, make_eval_batches, make_train_iterator
from tfm.data.objective import cut_pieces
from tfm.data.pipeline import choose_buckets
from tfm.data.tokenizer import ByteTokenizer

MODEL = ModelConfig(vocab_size=300, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1)
SYMBOLS = ["<mask>", *(f"<extra_id_{i}>" for i in range(40))]
TOKENIZER = ByteTokenizer(SYMBOLS)


class PadIsEos(ByteTokenizer):
    """As some published vocabularies have it: one id pads and ends."""

    def __init__(self) -> None:
        super().__init__(SYMBOLS)
        self.pad_id = self.eos_id


def make_config(**data: Any) -> Config:
    settings: dict[str, Any] = {"max_length": 32, "tokens_per_batch": 128, "buckets": 3} | data
    return Config(MODEL, DataConfig(**settings), train=TrainConfig(seed=7))


def make_splits(size: int = 23, *, columns: int = 2) -> Splits:
    rng = np.random.default_rng(0)
    texts = [[f"{i}:" + "ab cd"[side] * int(rng.integers(1, 24)) for i in range(size)] for side in range(columns)]
    return Splits(
        *(Texts(texts if name == "train" else [column[:9] for column in texts]) for name in ["train", "valid", "test"])
    )


def pairs_of(batch: Batch) -> list[tuple[str, str]]:
    """The texts of a bucketed batch, and that its arrays agree with one another."""
    found = []
    for i in np.flatnonzero(batch["target_mask"].any(axis=1)):
        source, target, labels = (
            batch[name][i][batch[f"{side}_mask"][i]].tolist()
            for name, side in (("source", "source"), ("target", "target"), ("labels", "target"))
        )
        assert source[-1] == labels[-1] == TOKENIZER.eos_id and target == [TOKENIZER.bos_id, *labels[:-1]]
        found.append((TOKENIZER.decode(source), TOKENIZER.decode(labels)))
    assert (batch["weights"] == batch["target_mask"]).all()
    return found


def same(first: Batch, second: Batch) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_buckets_give_every_pair_once_an_epoch(pad_is_eos: bool) -> None:
    splits = make_splits()
    batches = make_train_iterator(make_config(), PadIsEos() if pad_is_eos else TOKENIZER, splits)
    assert batches.batches_per_epoch is not None
    epochs = []
    for _ in range(3):
        made = [next(batches) for _ in range(batches.batches_per_epoch)]
        assert {batch["source"].shape for batch in made} == {(shape.rows, shape.length) for shape in batches.shapes}
        epochs.append([pair for batch in made for pair in pairs_of(batch)])
        assert sorted(epochs[-1]) == sorted(splits.train)
    assert epochs[0] != epochs[1] != epochs[2]
    positions = sum(batch["source"].size + batch["target"].size for batch in made)
    ids = sum(len(s) + len(t) + 2 for s, t in splits.train)
    assert batches.padding_share == pytest.approx(1 - ids / positions)


@pytest.mark.parametrize(
    "task, batching",
    [
        ("translate", "bucket"),
        ("translate", "pack"),
        ("causal_lm", "pack"),
        ("prefix_lm", "bucket"),
        ("masked_lm", "pack"),
        ("span_corruption", "bucket"),
        ("infilling", "bucket"),
    ],
)
def test_resuming_repeats_and_skips_nothing(task: str, batching: str) -> None:
    config, splits = make_config(task=task, batching=batching), make_splits(columns=2 if task == "translate" else 1)
    straight = make_train_iterator(config, TOKENIZER, splits)
    expected = [next(straight) for _ in range(30)]
    for stop in (0, 1, 7, 18):
        first = make_train_iterator(config, TOKENIZER, splits)
        for _ in range(stop):
            next(first)
        state = json.loads(json.dumps(first.get_state()))
        resumed = make_train_iterator(config, TOKENIZER, splits)
        resumed.set_state(state)
        assert all(same(next(resumed), batch) for batch in expected[stop:])
        next(first)
        first.set_state(state)  # and on an iterator that has run on
        assert same(next(first), expected[stop])


def test_a_state_from_before_packing_had_a_limit_goes_on_as_it_was() -> None:
    config, splits = make_config(task="causal_lm", batching="pack", tokens_per_batch=140 * 32), make_splits(columns=1)
    before = make_train_iterator(config, TOKENIZER, splits)
    state = before.get_state()
    assert state.pop("bins") == 4096
    before.set_state(state)  # which does not say it: 32 batches at a time
    for _ in range(31):
        next(before)
    state = before.get_state()
    assert state.pop("bins") == 32 * 140
    resumed = make_train_iterator(config, TOKENIZER, splits)
    resumed.set_state(state)
    assert all(same(next(resumed), next(before)) for _ in range(3))


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_a_state_belongs_to_one_text(batching: str) -> None:
    config, splits = make_config(batching=batching, source="text", train=("a", "b")), make_splits(60)
    state = make_train_iterator(config, TOKENIZER, splits).get_state()
    changed = [[*column[:-1], column[-1] + "!"] for column in splits.train.columns]
    other = make_train_iterator(config, TOKENIZER, Splits(Texts(changed), splits.valid, splits.test))
    with pytest.raises(ValueError, match=r"data.train is not the text that this run was trained on"):
        other.set_state(state)
    make_train_iterator(config, TOKENIZER, splits).set_state({n: x for n, x in state.items() if n != "text"})


def test_another_seed_is_another_order() -> None:
    config, splits = make_config(), make_splits()
    other = config.replace(train=TrainConfig(seed=8))
    assert not same(
        next(make_train_iterator(config, TOKENIZER, splits)), next(make_train_iterator(other, TOKENIZER, splits))
    )


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_processes_share_the_rows_of_each_batch(batching: str) -> None:
    config, splits = make_config(batching=batching), make_splits(90)
    whole = make_train_iterator(config, TOKENIZER, splits, multiple_of=2)
    parts = [
        make_train_iterator(config, TOKENIZER, splits, multiple_of=2, process_index=i, process_count=2)
        for i in range(2)
    ]
    for _ in range(25):
        batch, halves = next(whole), [next(part) for part in parts]
        assert len(batch["source"]) % 2 == 0
        assert same(batch, {name: np.concatenate([half[name] for half in halves]) for name in batch})


@pytest.mark.parametrize("batching", ["bucket", "pack"])
@pytest.mark.parametrize("task", ["translate", "causal_lm"])
def test_other_processes_and_devices_go_on_with_the_same_examples(batching: str, task: str) -> None:
    """From the state of the first of two processes; the rows behind those of one process are padding."""
    columns = 2 if task == "translate" else 1
    config, splits = make_config(batching=batching, task=task), make_splits(400, columns=columns)
    alone, first = (
        make_train_iterator(config, TOKENIZER, splits, process_count=number, multiple_of=number) for number in (1, 2)
    )
    for _ in range(70):
        next(alone), next(first)
    three = [
        make_train_iterator(config, TOKENIZER, splits, process_index=i, process_count=3, multiple_of=3)
        for i in range(3)
    ]
    for part in three:
        part.set_state(first.get_state())
    for _ in range(60):
        batch, parts = next(alone), [next(part) for part in three]
        together = {name: np.concatenate([part[name] for part in parts]) for name in batch}
        rows = len(batch["labels"])
        assert same(batch, {name: array[:rows] for name, array in together.items()})
        assert len(together["labels"]) % 3 == 0 and not together["weights"][rows:].any()
        assert (together["labels"][rows:] == TOKENIZER.pad_id).all()


def test_there_are_as_many_buckets_as_keep_padding_under_a_tenth() -> None:
    def share(lengths: list[int], buckets: list[tuple[int, ...]]) -> float:
        return 1 - sum(lengths) / sum(min(edge for (edge,) in buckets if edge >= n) for n in lengths)

    cases = ([30, 31, 32], 1), ([28, 30, 30, 31, 32], 1), ([8, 64], 2), ([8, 16, 32, 64, 128], 4)
    for lengths, number in cases:
        column = np.array(lengths)[:, None]
        found = choose_buckets(column, DataConfig(max_length=128), None)
        assert len(found) == number and share(lengths, found) < 0.1
    many = np.random.default_rng(0).integers(1, 60, (3000, 2))
    assert len(choose_buckets(many, DataConfig(), None)) == 32  # no number keeps these under a tenth


@pytest.mark.parametrize("processes", [1, 2])
def test_packing_gives_every_pair_once_an_epoch(processes: int) -> None:
    splits = make_splits(480)
    parts = [
        make_train_iterator(make_config(batching="pack"), TOKENIZER, splits, process_index=i, process_count=processes)
        for i in range(processes)
    ]
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for part in parts:
        seen = 0
        while seen < 3 * 480 // processes:
            for pair in unpack(next(part)):
                found[pair] += 1
                seen += 1
        assert 0.0 < part.padding_share < 0.6
    assert set(found) == set(splits.train)
    assert all(2 <= count <= 5 for count in found.values())  # three epochs, and the row groups around their ends


def unpack(batch: Batch) -> list[tuple[str, str]]:
    pairs = []
    for row in range(len(batch["source"])):
        for segment in range(1, int(batch["target_segments"][row].max()) + 1):
            sides = []
            for name, side in (("source", "source"), ("labels", "target"), ("target", "target")):
                places = np.flatnonzero(batch[f"{side}_segments"][row] == segment)
                assert np.array_equal(batch[f"{side}_positions"][row][places], np.arange(len(places)))
                assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
                sides.append(batch[name][row][places].tolist())
            assert sides[0][-1] == sides[1][-1] == TOKENIZER.eos_id and sides[2] == [TOKENIZER.bos_id, *sides[1][:-1]]
            pairs.append((TOKENIZER.decode(sides[0]), TOKENIZER.decode(sides[1])))
    for side in ("source", "target"):
        assert np.array_equal(batch[f"{side}_mask"], batch[f"{side}_segments"] > 0)
    assert np.array_equal(batch["weights"], batch["target_mask"])
    return pairs


def test_a_packed_pair_gives_the_logits_it_gives_alone() -> None:
    batch = next(make_train_iterator(make_config(batching="pack"), PadIsEos(), make_splits(24)))
    module = tfm.build(MODEL)
    params = jax.jit(module.init)(jax.random.key(0), batch["source"][:1], batch["target"][:1])["params"]
    run = jax.jit(lambda source, target, **rest: module.apply({"params": params}, source, target, **rest))
    inputs = {name: array for name, array in batch.items() if name not in ("labels", "weights", "source", "target")}
    packed = run(batch["source"], batch["target"], **inputs)
    row = int(batch["target_segments"].max(axis=1).argmax())
    segments = range(1, int(batch["target_segments"][row].max()) + 1)
    assert len(segments) >= 2
    alone: dict[str, np.ndarray] = {}
    for side in ("source", "target"):
        ids = np.zeros((len(segments), 32), np.int32)
        mask = np.zeros((len(segments), 32), bool)
        for i, segment in enumerate(segments):
            mine = batch[side][row][batch[f"{side}_segments"][row] == segment]
            ids[i, : len(mine)], mask[i, : len(mine)] = mine, True
        alone |= {side: ids, f"{side}_mask": mask}
    logits = run(**alone)
    for i, segment in enumerate(segments):
        places = np.flatnonzero(batch["target_segments"][row] == segment)
        np.testing.assert_allclose(packed[row][places], logits[i][: len(places)], atol=2e-5)


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_causal_lm_predicts_every_token_of_every_document_once(batching: str) -> None:
    texts = [chr(97 + i) * length for i, length in enumerate((1, 20, 31, 32, 33, 64, 65, 150))]
    splits = Splits(Texts([texts]), Texts([texts]), Texts(()))
    config = make_config(task="causal_lm", batching=batching)
    batches = make_eval_batches(config, TOKENIZER, splits, splits.valid)
    predicted: collections.Counter[int] = collections.Counter()
    for batch in batches:
        for tokens, labels, mask in zip(batch["tokens"], batch["labels"], batch["mask"], strict=True):
            predicted.update(labels[mask].tolist())
            assert (tokens[1:][mask[1:]] == labels[:-1][mask[1:]]).all()  # inputs are the labels, one later
    expected = collections.Counter(token for text in texts for token in [*TOKENIZER.encode(text), TOKENIZER.eos_id])
    assert predicted == expected
    assert batches.counts.texts == 8 and batches.counts.tokens == sum(expected.values())


def test_prefix_lm_weighs_what_follows_the_prefix() -> None:
    batch = next(make_train_iterator(make_config(task="prefix_lm"), TOKENIZER, make_splits(columns=1)))
    rows = np.flatnonzero(batch["mask"].any(axis=1))
    for row in rows:
        length, prefix = int(batch["mask"][row].sum()), int(batch["prefix_length"][row])
        assert 1 <= prefix <= length
        assert batch["weights"][row].tolist() == [
            float(prefix - 1 <= t < length) for t in range(len(batch["weights"][row]))
        ]


def test_objectives_change_from_epoch_to_epoch() -> None:
    splits = Splits(Texts([["one line of text to be masked"]]), Texts(()), Texts(()))
    batches = make_train_iterator(make_config(task="masked_lm"), TOKENIZER, splits)
    assert len({next(batches)["weights"].tobytes() for _ in range(10)}) > 5


def test_eval_gives_each_example_once_and_always_the_same() -> None:
    for task in ("translate", "masked_lm", "span_corruption"):
        config, splits = make_config(task=task), make_splits(columns=2 if task == "translate" else 1)
        batches = make_eval_batches(config, TOKENIZER, splits, splits.valid, multiple_of=4)
        first, second = list(batches), list(batches)
        assert len(first) == len(batches) and all(same(a, b) for a, b in zip(first, second, strict=True))
        assert all(len(batch["labels"]) % 4 == 0 for batch in first)
        masks = [batch["mask" if task == "masked_lm" else "target_mask"] for batch in first]
        assert sum(int(mask.any(axis=1).sum()) for mask in masks) == 9
        if task == "translate":
            assert sorted(pair for batch in first for pair in pairs_of(batch)) == sorted(splits.valid)


def test_eval_on_more_devices_than_rows() -> None:
    """As in training, rows of padding fill a batch up: 1,000 devices have the same pairs as one."""
    config, splits = make_config(), make_splits()
    one, many = (make_eval_batches(config, TOKENIZER, splits, splits.valid, multiple_of=n) for n in (1, 1000))
    for batch, filled in zip(one, many, strict=True):
        assert len(filled["labels"]) == 1000 and pairs_of(filled) == pairs_of(batch)
        assert filled["weights"].sum() == batch["weights"].sum()
    assert [(shape.rows, shape.sides) for shape in many.shapes] == [(1000, shape.sides) for shape in one.shapes]


@pytest.mark.parametrize("rule", ["skip", "cut"])
def test_long_and_empty_pairs_follow_the_rule_and_are_counted(rule: str) -> None:
    pairs = [("ab", "c"), ("", "x"), ("x", ""), ("y" * 31, "z"), ("y" * 32, "z"), ("y", "z" * 99)]
    splits = Splits(Texts(list(zip(*pairs, strict=True))), Texts(()), Texts(()))
    batches = make_train_iterator(make_config(too_long=rule), TOKENIZER, splits)
    found = sorted({pair for _ in range(8) for pair in pairs_of(next(batches))})
    assert (batches.counts.texts, batches.counts.empty) == (6, 2)
    if rule == "skip":
        assert found == [("ab", "c"), ("y" * 31, "z")] and (batches.counts.skipped, batches.counts.cut) == (2, 0)
    else:
        assert found == sorted([("ab", "c"), ("y" * 31, "z"), ("y", "z" * 31)])  # the fifth is cut to the fourth
        assert (batches.counts.skipped, batches.counts.cut, batches.counts.examples) == (0, 2, 4)


def test_no_example_left_is_an_error() -> None:
    splits = Splits(Texts([["x" * 50], ["y"]]), Texts(()), Texts(()))
    with pytest.raises(
        ValueError, match=r"data\.train: of 1 examples none is left: 0 are empty, 1 longer than max_length=32"
    ):
        make_train_iterator(make_config(), TOKENIZER, splits)


def test_held_out_text_without_an_example_left_is_an_error() -> None:
    splits = Splits(Texts([["x"], ["y"]]), Texts([["x" * 50, ""], ["y", "y"]]), Texts(()))
    with pytest.raises(ValueError, match=r"held-out text: of 2 .* 1 are empty, 1 longer than max_length=32"):
        make_eval_batches(make_config(), TOKENIZER, splits, splits.valid)


@pytest.mark.parametrize("task, least", [("translate", 2), ("classify", 3), ("masked_lm", 3), ("infilling", 2)])
def test_a_length_that_special_ids_fill_is_refused(task: str, least: int) -> None:
    splits = Splits(Texts([["some text"], ["a"]]), Texts(()), Texts(()))
    settings: dict[str, Any] = {"task": task, "too_long": "cut"}
    next(make_train_iterator(make_config(max_length=least, **settings), TOKENIZER, splits))
    with pytest.raises(ValueError, match=f"data.max_length is {least - 1}, but {task} needs at least {least}"):
        make_train_iterator(make_config(max_length=least - 1, **settings), TOKENIZER, splits)


def test_classification() -> None:
    splits = Splits(Texts([["good", "bad", "fine"], ["pos", "neg", "pos"]]), Texts([["odd"], ["meh"]]), Texts(()))
    assert class_names(splits) == ["neg", "pos"]
    config = make_config(task="classify")
    batch = next(iter(make_eval_batches(config, TOKENIZER, splits, splits.train)))
    rows = {
        TOKENIZER.decode(tokens[mask]): int(label)
        for tokens, mask, label in zip(batch["tokens"], batch["mask"], batch["labels"], strict=True)
        if mask.any()
    }
    assert rows == {"good": 1, "bad": 0, "fine": 1} and batch["weights"].sum() == 3
    with pytest.raises(ValueError, match=r"line 1 has the label 'meh', which is not among .*: neg, pos"):
        make_eval_batches(config, TOKENIZER, splits, splits.valid)
    with pytest.raises(ValueError, match=r"data\.batching is 'pack'"):
        make_train_iterator(make_config(task="classify", batching="pack"), TOKENIZER, splits)


def test_pieces_cover_documents() -> None:
    lengths = np.array([0, 1, 6, 7, 20])
    document, start, length = cut_pieces(lengths, 7)
    covered = [
        np.concatenate([np.arange(s, s + n) for d, s, n in zip(document, start, length, strict=True) if d == i] or [[]])
        for i in range(5)
    ]
    assert [c.tolist() for c in covered] == [list(range(n)) for n in lengths]
    assert length.max() <= 7
