"""What a run starts from with `--init-from`: the parameters and the tokenizer of another model."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh

from tfm.config import Config, ModelConfig, require
from tfm.data import Tokenizer, check_symbols
from tfm.models import init_params
from tfm.models.adapters import merge_adapters
from tfm.models.scanned import stack_layers, unstack_layers
from tfm.parallel.rules import parameter_shardings
from tfm.training.checkpoint import find_checkpoint, load_checkpoint_config, load_checkpoint_params, verify
from tfm.training.run_folder import GENERATION, TOKENIZER

Params = Any
OWN = ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate", "dtype", "param_dtype",
       "attention_implementation", "scan_layers", "remat", "lora_rank", "lora_alpha", "lora_targets", "num_classes",
       "class_pooling", "embedding_init", "kernel_init", "init_std")
"""Fields of a model that a run may choose whatever it starts from."""


@dataclass(frozen=True)
class Source:
    """A model to start from."""

    path: Path
    model: ModelConfig
    """Its architecture, without adapters."""
    tokenizer: Tokenizer
    generation: dict[str, Any] | None
    """Its special ids and rules of generation, as `generation_config.json` has them; None: those of our own runs."""
    read: Callable[[Mesh], Params]
    """Reads the parameters."""

    def save_files(self, folder: Path) -> None:
        """Write its tokenizer and rules of generation to a run folder."""
        self.tokenizer.save(folder / TOKENIZER)
        if self.generation is not None:
            (folder / GENERATION).write_text(json.dumps(self.generation, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Fit:
    """How the parameters of a source and of a run go together, by their paths."""

    taken: dict[str, Any]
    """Path -> shape and type in the run."""
    new: list[str]
    """What the source lacks: it is initialised."""
    left: list[str]
    """What the run has no use for."""


@dataclass(frozen=True)
class Start:
    """A source, matched with the model of a run."""

    source: Source
    fit: Fit

    def shapes(self) -> Params:
        """Shapes and types of `params`."""
        return unflatten_dict(self.fit.taken, sep="/")

    def params(self, config: ModelConfig, mesh: Mesh) -> Params:
        """Read what was matched, in the run's types and on its devices: a nested dict of that alone."""
        params, theirs = self.source.read(mesh), self.source.model
        if theirs.scan_layers and not config.scan_layers:
            params = unstack_layers(params, theirs)
        elif config.scan_layers and not theirs.scan_layers:
            params = stack_layers(params, theirs)
        flat, taken = flatten_dict(params, sep="/"), self.fit.taken
        shardings = flatten_dict(parameter_shardings(self.shapes(), mesh), sep="/")
        return unflatten_dict({name: jax.device_put(_movable(flat[name]).astype(shape.dtype), shardings[name])
                               for name, shape in taken.items()}, sep="/")

    def rows(self, config: ModelConfig) -> list[tuple[str, str]]:
        """What becomes of the parameters, as rows of a table."""
        count = sum(math.prod(shape.shape) for shape in self.fit.taken.values())
        fields = differences(config, self.source.model)
        rows = [("from", str(self.source.path)), ("taken", f"{count:,} parameters in {len(self.fit.taken)} arrays"),
                ("new", _summary(self.fit.new)), ("left out", _summary(self.fit.left))]
        return [*rows, ("fields that differ", ", ".join(fields))] if fields else rows


def open_source(path: str | Path, say: Callable[[str], None]) -> Source:
    """Open what `train.init_from` names.

    Args:
        path: run folder, `RUN/checkpoints/<step>`, Hugging Face folder, or .gguf file.
        say: told about damaged checkpoints that were passed over.

    Raises:
        FileNotFoundError: it does not exist.
        ValueError: it is none of these, or it has no tokenizer.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"train.init_from {path} does not exist")
    if (path / "checkpoints").is_dir():
        return _open_run(path, path, find_checkpoint(path, say=say))
    if path.absolute().parent.name == "checkpoints":
        return _open_run(path, path.absolute().parents[1], verify(path))
    require(path.suffix == ".gguf" or (path / "config.json").is_file(), "train.init_from", str(path),
            "it must be a run folder, a checkpoint of one, a Hugging Face folder or a .gguf file")
    from tfm.foreign import open_foreign, training_tokenizer
    from tfm.interop.generation import id_attributes

    found = open_foreign(path)
    if found.tokenizer is None:
        raise ValueError(f"train.init_from {path} has no tokenizer, but a run needs one")
    tokenizer = training_tokenizer(found.config, found.settings, found.tokenizer)
    return Source(path, found.config, tokenizer, id_attributes(found.settings), lambda mesh: found.params)


def _open_run(path: Path, run: Path, checkpoint: Path) -> Source:
    from tfm.data import load_tokenizer

    model, tokenizer = load_checkpoint_config(checkpoint).model, load_tokenizer(run / TOKENIZER)
    generation = None
    if (run / GENERATION).is_file():
        from tfm.foreign import run_settings, training_tokenizer
        from tfm.interop.generation import id_attributes

        settings = run_settings(run, model)
        tokenizer, generation = training_tokenizer(model, settings, tokenizer), id_attributes(settings)

    def read(mesh: Mesh) -> Params:
        params = load_checkpoint_params(checkpoint, sharding=lambda shapes: parameter_shardings(shapes, mesh))
        return merge_adapters(model, params)[1]

    return Source(path, dataclasses.replace(model, lora_rank=0), tokenizer, generation, read)


def with_source(config: Config, model: ModelConfig) -> Config:
    """The config of a run that starts from a model: the vocabulary is that model's, and all else on request.

    Args:
        config: of the run.
        model: that it starts from.
    """
    if config.train.init_model == "source":
        own = {name: getattr(config.model, name) for name in OWN}
        ours = dataclasses.replace(model, **{**own, "num_classes": 0})
    else:
        ours = dataclasses.replace(config.model, vocab_size=model.vocab_size, source_vocab_size=model.source_vocab_size)
    return config.replace(model=ours)


def take_tokenizer(source: Source, config: Config) -> Tokenizer:
    """The source's tokenizer, which must have the symbols that the task needs.

    Raises:
        ValueError: it lacks them, or the config names a file of its own.
    """
    require(config.data.tokenizer != "file", "data.tokenizer", "file",
            f"train.init_from {source.path} brings its own tokenizer: leave data.tokenizer as it is by default")
    check_symbols(source.tokenizer, config.data, f"train.init_from {str(source.path)!r}")
    return source.tokenizer


def match(source: Source, config: ModelConfig) -> Fit:
    """Match the parameters of a source with those of a run's model by their paths; nothing is read for it.

    Raises:
        ValueError: shapes differ, or nothing matches; the message names parameters and fields of the config.
    """
    theirs = _shapes(dataclasses.replace(source.model, scan_layers=config.scan_layers))
    ours = _shapes(config)
    both = {name: shape for name, shape in ours.items() if name in theirs}
    wrong = [f"{name} is {theirs[name].shape} there and {shape.shape} here" for name, shape in both.items()
             if theirs[name].shape != shape.shape]
    if wrong or not both:
        what = "; ".join(wrong[:3]) if wrong else "no parameter of it has the path of one here"
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        fields = ", ".join(differences(config, source.model)) or "none"
        raise ValueError(f"train.init_from {source.path} does not fit this model: {what}{more}. Fields that differ: "
                         f"{fields}. Change them, or take its architecture with --train.init-model source")
    return Fit(both, [name for name in ours if name not in theirs], [name for name in theirs if name not in ours])


def _shapes(config: ModelConfig) -> dict[str, Any]:
    return flatten_dict(jax.eval_shape(lambda: init_params(config, jax.random.key(0))), sep="/")


def differences(config: ModelConfig, source: ModelConfig) -> list[str]:
    """Fields of two models that differ, but for those in `OWN`: `model.d_ff 64 (there 32)`."""
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in OWN]
    return [f"model.{name} {getattr(config, name)!r} (there {getattr(source, name)!r})" for name in names
            if getattr(config, name) != getattr(source, name)]


def _movable(x: Any) -> Any:
    """What every process holds whole goes through the host; what is spread over processes stays where it is."""
    return np.asarray(x) if getattr(x, "is_fully_addressable", True) else x


def _summary(paths: list[str]) -> str:
    """Paths with the numbers of layers taken out, each once."""
    short: Mapping[str, None] = dict.fromkeys(re.sub(r"layers_\d+", "layers_*", path) for path in paths)
    return ", ".join(short) or "nothing"
