"""The tokenizer that a config asks for: trained on the train split, plain bytes, or a given file."""

from __future__ import annotations

import os

from tfm.config import DataConfig
from tfm.data.objective import reserved_symbols
from tfm.data.source import Splits
from tfm.data.tokenizer import MASK_SYMBOL, ByteTokenizer, Tokenizer, load_tokenizer
from tfm.data.train_tokenizer import sample_texts, train_sentencepiece


def build_tokenizer(config: DataConfig, splits: Splits, path: str | os.PathLike[str] | None = None,
                    seed: int = 0) -> Tokenizer:
    """Make the tokenizer of a run and write it to the run folder.

    Args:
      config: kind, size and normalisation; the task decides which symbols are reserved.
      splits: texts to train on.
      path: file to write, such as `RUN/tokenizer.model`. None: nothing is written.
      seed: of the sample that a large train split is cut down to.

    Returns:
      The tokenizer.

    Raises:
      ValueError: a vocabulary that the text cannot fill, or a given file without the symbols that the task needs.
      FileNotFoundError: the given file is missing.
    """
    symbols = reserved_symbols(config)
    tokenizer: Tokenizer
    if config.tokenizer == "file":
        assert config.tokenizer_path is not None
        tokenizer = load_tokenizer(config.tokenizer_path)
        check_symbols(tokenizer, config, f"data.tokenizer_path {config.tokenizer_path!r}")
    elif config.tokenizer == "byte":
        tokenizer = ByteTokenizer(symbols)
    else:
        columns = splits.train.columns[:1] if config.task == "classify" else splits.train.columns
        tokenizer = train_sentencepiece(sample_texts(columns, seed=seed), kind=config.tokenizer, symbols=symbols,
                                        vocab_size=config.vocab_size, normalization=config.normalization)
    if path is not None:
        tokenizer.save(path)
    return tokenizer


def check_symbols(tokenizer: Tokenizer, config: DataConfig, where: str) -> None:
    """Refuse a tokenizer that lacks what the task needs.

    Args:
      tokenizer: that was given.
      config: names the task.
      where: where it comes from, for the message.

    Raises:
      ValueError: there is no mask, or there are too few sentinels.
    """
    symbols = reserved_symbols(config)
    lacks_mask = MASK_SYMBOL in symbols and tokenizer.mask_id is None
    sentinels = 0 if MASK_SYMBOL in symbols else len(symbols)
    if lacks_mask or len(tokenizer.sentinel_ids) < sentinels:
        needed = MASK_SYMBOL if lacks_mask else f"{sentinels} sentinels <extra_id_0>, <extra_id_1>, ..."
        raise ValueError(f"{where}: task={config.task!r} needs {needed}, which this tokenizer does not have")
