"""Texts of TensorFlow Datasets, read by index through `tfds.data_source`: TensorFlow is needed to prepare them only."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from tfm.config import DataConfig
from tfm.data.source import Texts

_FILE_FORMAT = "array_record"  # the one that can be read by index


class _Feature(Sequence[str]):
    """One feature of a split as text."""

    def __init__(self, records: Any, name: str) -> None:
        self._records, self._name = records, name

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        value = self._records[range(len(self))[index]][self._name]
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def load_tfds(config: DataConfig) -> tuple[Texts, Texts, Texts]:
    """Open a builder's splits, or a folder that was prepared before.

    Args:
      config: `tfds_name` such as `wmt14_translate/de-en`, or a folder with `dataset_info.json`; `tfds_features` such as
        ("en", "de"), by default the builder's own pair; `train`, `valid` and `test` name splits.

    Returns:
      The three splits.

    Raises:
      ValueError: TFDS is not installed, the data is not prepared and TensorFlow is missing, or a split or feature is
        unknown.
    """
    builder = _open_builder(config)
    features = _features(builder, config)
    splits = []
    for field, default in (("train", "train"), ("valid", "validation"), ("test", "test")):
        chosen = getattr(config, field)
        name = chosen[0] if chosen else default
        if not chosen and builder.info.splits and default not in builder.info.splits:
            splits.append(Texts(()))
            continue
        splits.append(_open_split(builder, field, name, features))
    return splits[0], splits[1], splits[2]


def _import_tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ValueError('data.source is \'tfds\', which needs TensorFlow Datasets: pip install "tfm[tfds]"') from error
    return tensorflow_datasets


def _open_builder(config: DataConfig) -> Any:
    tfds = _import_tfds()
    folder = Path(config.tfds_name)
    if (folder / "dataset_info.json").is_file():
        return tfds.builder_from_directory(folder)
    try:
        builder = tfds.builder(config.tfds_name, data_dir=config.tfds_dir, file_format=_FILE_FORMAT)
    except tfds.core.registered.DatasetNotFoundError:
        raise ValueError(f"data.tfds_name is {config.tfds_name!r}, but no folder with dataset_info.json nor known "
                         f"builder is called that{_hint()}") from None
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(f"data.tfds_name is {config.tfds_name!r}: {_first_line(error)}") from error
    if not _is_prepared(builder):
        _prepare(builder)
    return builder


def _is_prepared(builder: Any) -> bool:
    try:
        builder.as_data_source(split="train[:0]")
    except Exception:  # whatever it lacks: preparing says it better
        return bool(builder.info.splits) and builder.data_path.exists()
    return True


def _prepare(builder: Any) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        raise ValueError(f"data.tfds_name: {builder.info.full_name} is not prepared in {builder.data_dir}, and "
                         'preparing it needs TensorFlow: pip install "tfm[tfds]"')
    builder.download_and_prepare(file_format=_FILE_FORMAT)


def _features(builder: Any, config: DataConfig) -> tuple[str, ...]:
    known = tuple(builder.info.features)
    needed = 2 if config.task in ("translate", "classify") else 1
    names = config.tfds_features or (builder.info.supervised_keys or known)[:needed]
    if len(names) != needed or not all(name in known for name in names):
        raise ValueError(f"data.tfds_features is {tuple(names)!r}, but task={config.task!r} needs {needed} of the "
                         f"features {known!r}")
    return tuple(names)


def _open_split(builder: Any, field: str, name: str, features: tuple[str, ...]) -> Texts:
    try:
        records = builder.as_data_source(split=name)
    except (ValueError, KeyError) as error:
        raise ValueError(f"data.{field} is {name!r}, but {builder.info.full_name} has the splits "
                         f"{sorted(builder.info.splits)}: {_first_line(error)}") from error
    except NotImplementedError as error:
        raise ValueError(f"data.tfds_name: {builder.info.full_name} was prepared in a format that cannot be read by "
                         f"index: prepare it with file_format={_FILE_FORMAT!r} ({_first_line(error)})") from error
    info = builder.info
    sizes = ",".join(f"{split}:{info.splits[split].num_examples}" for split in sorted(info.splits))
    parts = (info.full_name, str(builder.data_dir), sizes, name, *features)
    fingerprint = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
    return Texts([_Feature(records, feature) for feature in features], fingerprint)


def _hint() -> str:
    if importlib.util.find_spec("tensorflow") is not None:
        return ""
    return ' (builders that are not prepared yet need TensorFlow: pip install "tfm[tfds]")'


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
