"""The folder of a run: its config and tokenizer, and what it refuses to go on with."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tfm.config import Config, require
from tfm.config_json import config_diff, load_config, save_config
from tfm.training.checkpoint import describe_diff

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.model", "generation_config.json"
LOCK = "train.lock"
KINDS = {"translate": "encoder-decoder", "span_corruption": "encoder-decoder", "infilling": "encoder-decoder",
         "causal_lm": "decoder", "prefix_lm": "decoder", "masked_lm": "encoder", "classify": "encoder"}
"""Task -> the kind of model that learns it."""
FREE = ("train.eval_every", "train.checkpoint_every", "train.log_every", "train.keep", "train.eval_sentences",
        "train.samples", "decode.", "data.cache_dir")
"""Fields that may change while a run goes on: none of them changes its parameters."""


def resolve_config(config: Config, vocab_size: int, labels: Sequence[str] = ()) -> Config:
    """The config with what a config file need not know: the size of the vocabulary and the classes.

    Args:
        config: as a config file and the command line give it.
        vocab_size: rows of the embedding table, such as the size of the tokenizer's vocabulary.
        labels: of a classification, the names of the classes.

    Returns:
        config with `model.vocab_size`, and for a classification `data.labels` and a model whose head for tokens is
        replaced by one for `model.num_classes`.

    Raises:
        ValueError: the model is not of the kind that the task needs, its parameters are too narrow for the optimizer,
            sequences of `data.max_length` do not fit its learned positions, or there are fewer than two classes.
    """
    model, length, task = config.model, config.data.max_length, config.data.task
    kind = "encoder-decoder" if model.is_encoder_decoder else "encoder" if model.is_encoder_only else "decoder"
    require(KINDS[task] == kind, "data.task", task, f"its kind of model is {KINDS[task]}, and this one is {kind} "
            f"(model.encoder_layers={model.encoder_layers}, decoder_layers={model.decoder_layers})")
    rule = config.optimizer.name
    require(model.param_dtype != "float16" or rule == "sgd", "model.param_dtype", "float16",
            f"the squares of gradients that {rule} keeps are 0 in it: train with float32 or bfloat16")
    if task == "classify":
        require(len(labels) > 1, "data.labels", tuple(labels), "a classification needs at least two")
        model = dataclasses.replace(model, num_classes=len(labels), token_head=False, logit_bias=False,
                                    pooler=model.pooler and model.class_pooling == "first")
        config = config.replace(data=dataclasses.replace(config.data, labels=tuple(labels)))
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


class RunLock:
    """Keeps two commands from training in one run folder: each would remove what the other is writing.

    The kernel gives the lock up when the process ends, however it ends. Where it knows no such locks, there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Lock the folder, which must exist.

        Raises:
            ValueError: another command trains in it; the message says which process on which host.
        """
        try:
            import fcntl
        except ImportError:
            return
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"{self._path.parent} is in use by {file.read().strip() or 'another process'}: wait until "
                             "it has ended, or choose another --workdir") from None
        except OSError:
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let others train in the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
