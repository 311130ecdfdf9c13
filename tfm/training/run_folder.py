"""The folder of a run: its config and tokenizer, and what it refuses to go on with."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tfm.config import Config
from tfm.config_json import config_diff, load_config, save_config
from tfm.training.checkpoint import describe_diff

CONFIG, TOKENIZER = "config.json", "tokenizer.model"
FREE = ("train.eval_every", "train.checkpoint_every", "train.log_every", "train.keep", "train.eval_sentences",
        "train.samples", "decode.", "data.cache_dir")
"""Fields that may change while a run goes on: none of them changes its parameters."""


def resolve_config(config: Config, vocab_size: int) -> Config:
    """The config with the tokenizer's vocabulary size, which a config file need not know.

    Args:
        config: as a config file and the command line give it.
        vocab_size: of the run's tokenizer.

    Returns:
        config whose `model.vocab_size` is that of the tokenizer.

    Raises:
        ValueError: sequences of `data.max_length` do not fit the model's learned positions.
    """
    model, length = config.model, config.data.max_length
    if model.position == "learned" and length > model.max_positions:
        raise ValueError(f"data.max_length is {length}, but model.max_positions={model.max_positions} is all that the "
                         "table of learned positions has: lower the one or raise the other")
    return config.replace(model=dataclasses.replace(model, vocab_size=vocab_size))


def open_run(folder: Path, config: Config) -> None:
    """Make a new run folder, or check that the one there is belongs to this config; write the config.

    Args:
        folder: run folder.
        config: resolved.

    Raises:
        ValueError: the folder's config differs in a field that matters; the message shows which.
    """
    if (folder / CONFIG).is_file():
        differences = {name: pair for name, pair in config_diff(load_config(folder / CONFIG), config).items()
                       if not name.startswith(_free_fields(config))}
        if differences:
            raise ValueError(f"{folder} is a run of another config: {describe_diff(differences)}. Choose another "
                             "--workdir, or the config of this one")
    folder.mkdir(parents=True, exist_ok=True)
    save_config(config, folder / CONFIG)


def _free_fields(config: Config) -> tuple[str, ...]:
    """The number of steps is free, too, where the learning rate does not depend on it."""
    return (*FREE, "train.steps") if config.optimizer.schedule in ("warmup_inverse_sqrt", "constant") else FREE
