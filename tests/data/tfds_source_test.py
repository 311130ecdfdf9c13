"""TensorFlow Datasets: mock data, a folder that the test prepares, and what is said when something is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tfm.config import DataConfig
from tfm.data import load_splits

tfds = pytest.importorskip("tensorflow_datasets")

PAIRS = {"train": [("a 😀", "ä"), ("b", "ß"), ("c", "ç")], "test": [("d", "đ")]}


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """A folder as `download_and_prepare(file_format="array_record")` leaves it."""
    module = pytest.importorskip("array_record.python.array_record_module")
    folder = tmp_path / "mine" / "1.0.0"
    folder.mkdir(parents=True)
    features = tfds.features.FeaturesDict({"de": tfds.features.Text(), "en": tfds.features.Text()})
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder,
        dataset_name="mine",
        filetype_suffix="array_record",
        template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    )
    splits = []
    for split, pairs in PAIRS.items():
        writer = module.ArrayRecordWriter(str(folder / f"mine-{split}.array_record-00000-of-00001"), "group_size:1")
        for english, german in pairs:
            writer.write(features.serialize_example({"en": english, "de": german}))
        writer.close()
        splits.append(
            tfds.core.SplitInfo(name=split, shard_lengths=[len(pairs)], num_bytes=1, filename_template=template)
        )
    tfds.folder_dataset.write_metadata(data_dir=folder, features=features, split_infos=splits, check_data=False)
    return folder


def test_a_prepared_folder(prepared: Path) -> None:
    splits = load_splits(DataConfig(source="tfds", tfds_name=str(prepared), tfds_features=("en", "de")))
    assert list(splits.train) == PAIRS["train"] and list(splits.test) == PAIRS["test"] and len(splits.valid) == 0
    assert splits.train[1:] == PAIRS["train"][1:]
    chosen = load_splits(
        DataConfig(source="tfds", tfds_name=str(prepared), tfds_features=("de", "en"), train=("train[1:]",))
    )
    assert list(chosen.train) == [(b, a) for a, b in PAIRS["train"][1:]]
    assert chosen.train.fingerprint != splits.train.fingerprint
    assert "tensorflow" not in sys.modules


def test_bad_splits_and_features(prepared: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.valid is 'dev', but .*\['test', 'train'\]"):
        load_splits(DataConfig(source="tfds", tfds_name=str(prepared), tfds_features=("en", "de"), valid=("dev",)))
    with pytest.raises(ValueError, match=r"data\.tfds_features is \('en', 'fr'\)"):
        load_splits(DataConfig(source="tfds", tfds_name=str(prepared), tfds_features=("en", "fr")))


def test_mock_data() -> None:
    with tfds.testing.mock_data(num_examples=6):
        splits = load_splits(DataConfig(source="tfds", tfds_name="ted_hrlr_translate/pt_to_en"))
        english_first = load_splits(
            DataConfig(source="tfds", tfds_name="ted_hrlr_translate/pt_to_en", tfds_features=("en", "pt"))
        )
        assert len(splits.train) == len(splits.valid) == 6
        source, target = splits.train[3]
        assert isinstance(source, str) and source and english_first.train[3] == (target, source)
        single = load_splits(
            DataConfig(source="tfds", task="causal_lm", tfds_name="ted_hrlr_translate/pt_to_en", tfds_features=("en",))
        )
        assert single.train[3] == target


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tfds_name is 'no_such_set'"):
        load_splits(DataConfig(source="tfds", tfds_name="no_such_set", tfds_dir=str(tmp_path)))


def test_preparing_needs_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "tensorflow" else find_spec(name, *rest)
    )
    with pytest.raises(ValueError, match=r'not prepared in .* pip install "tfm\[tfds\]"'):
        load_splits(DataConfig(source="tfds", tfds_name="ted_hrlr_translate/pt_to_en", tfds_dir=str(tmp_path)))
