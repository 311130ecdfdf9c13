"""`tfm convert SOURCE TARGET`: a run as a Hugging Face checkpoint, or a foreign checkpoint as a run folder."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from tfm.cli.decode_options import checkpoint_choice
from tfm.cli.errors import run_main
from tfm.cli.options import parse
from tfm.config import Config, DataConfig, DecodeConfig, ModelConfig, require
from tfm.foreign import Foreign, left_to_the_caller, open_foreign, run_settings
from tfm.models.adapters import split_params

TOLERANCE = 2e-4
"""Largest difference of logits that --verify accepts, both sides in float32."""


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a checkpoint: a run to Hugging Face's form, and anything else to a run folder."""

    source: tyro.conf.Positional[Path]
    """Run folder, Hugging Face checkpoint folder, or .gguf file."""
    target: tyro.conf.Positional[Path]
    """Folder to write; it must not exist, or be empty."""
    to: Literal["huggingface", "run", "peft"] | None = None
    """Form of the target; peft: the adapters of a run alone. Default: huggingface for a run, run for all else."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the parameters. Default: as they are stored (GGUF: float32)."""
    allow_pickle: bool = False
    """Read pytorch_model.bin, with torch's loader for weights only."""
    checkpoint: str = "newest"
    """Of a run: a step, newest, or best."""
    verify: bool = False
    """Compare the logits with those of torch, through the transformers package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: run_conversion(parse(ConvertOptions, arguments, prog="tfm convert")))


def run_conversion(options: ConvertOptions) -> int:
    """Convert as the options say; give the exit code."""
    is_run = (options.source / "checkpoints").is_dir()
    form = options.to or ("huggingface" if is_run else "run")
    target = options.target
    require(not target.exists() or (target.is_dir() and not any(target.iterdir())), "TARGET", str(target),
            "it must not exist, or be an empty folder")
    if form == "peft":
        return _write_adapters(options)
    found = _open_run(options) if is_run else open_foreign(options.source, dtype=options.dtype,
                                                           allow_pickle=options.allow_pickle)
    config, params = found.config, found.params
    if options.dtype is not None:
        params = jax.tree.map(lambda x: x.astype(options.dtype), params)
        config = dataclasses.replace(config, param_dtype=options.dtype, dtype=options.dtype)
        found = dataclasses.replace(found, config=config, params=params)
    if form == "huggingface":
        _write_huggingface(found, target)
    else:
        _write_run(found, target)
    _report(config, params, options.source, target, form)
    if left := left_to_the_caller(found.settings):
        print(left)
    if options.verify:
        folder = target if form == "huggingface" else options.source
        require(folder.is_dir(), "--verify", str(folder), "torch reads a Hugging Face folder: add --to huggingface")
        difference = verify(config, params, folder)
        require(difference <= TOLERANCE, "the largest difference of logits to torch", difference,
                f"it must be at most {TOLERANCE}: do not use {target}")
        print(f"logits differ from torch's by at most {difference:.1e}")
    return 0


def verify(config: ModelConfig, params: Any, folder: Path) -> float:
    """The largest difference of logits (hidden vectors where there is no head) to torch on random ids.

    Args:
        config: of the model.
        params: its parameters.
        folder: the same model as a Hugging Face checkpoint.

    Raises:
        ValueError: torch or transformers is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError("--verify needs torch and transformers: pip install torch transformers") from error
    from tfm.models import build

    kinds = {"encoder-decoder": "AutoModelForSeq2SeqLM", "decoder": "AutoModelForCausalLM",
             "token head": "AutoModelForMaskedLM", "classes": "AutoModelForSequenceClassification",
             "encoder": "AutoModel"}
    kind = ("encoder-decoder" if config.is_encoder_decoder else "decoder" if config.is_decoder_only
            else "token head" if config.token_head else "classes" if config.num_classes else "encoder")
    theirs = getattr(transformers, kinds[kind]).from_pretrained(folder, dtype=torch.float32).eval()
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    module = build(dataclasses.replace(config, dtype="float32", param_dtype="float32"))
    rows = min(config.vocab_size, config.source_vocab_size or config.vocab_size)
    ids = np.random.default_rng(0).integers(0, rows, (2, min(16, config.max_positions)), np.int32)
    tensor = torch.tensor(ids).long()
    inputs = {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}
    with torch.no_grad():
        if config.is_encoder_decoder:
            ours = module.apply({"params": params}, ids, ids)
            found = theirs(**inputs, decoder_input_ids=tensor).logits
        else:
            method = {"token head": "token_logits", "classes": "class_logits"}.get(kind, "__call__")
            ours = module.apply({"params": params}, ids, method=method)
            found = theirs(**inputs)[0]
    return float(np.max(np.abs(np.asarray(ours) - found.numpy())))


def _open_run(options: ConvertOptions) -> Foreign:
    from tfm.bundle import load
    from tfm.data.foreign_tokenizer import ForeignTokenizer
    from tfm.interop.generation import GenerationSettings

    bundle = load(options.source, checkpoint=checkpoint_choice(options.checkpoint))
    special, tokenizer = bundle.special, bundle.tokenizer
    if (options.source / "generation_config.json").is_file():  # it was converted once
        settings = run_settings(options.source, bundle.model)
        return Foreign(bundle.model, bundle.params, tokenizer, settings, labels=bundle.config.data.labels)
    start = special.start_id if bundle.model.is_encoder_decoder else None
    settings = GenerationSettings(eos_ids=special.eos_ids, pad_id=special.pad_id, decoder_start_id=start,
                                  bos_id=None if tokenizer is None else tokenizer.bos_id)
    if tokenizer is not None:
        tokenizer = ForeignTokenizer(tokenizer, {}, before=special.before, after=special.after)
    return Foreign(bundle.model, bundle.params, tokenizer, settings, labels=bundle.config.data.labels)


def _write_huggingface(found: Foreign, target: Path) -> None:
    from tfm.data.foreign_files import save_foreign_tokenizer
    from tfm.interop import to_huggingface
    from tfm.interop.generation import settings_attributes

    attributes = settings_attributes(found.settings, pair=found.config.is_encoder_decoder)
    names: dict[str, Any] = {}
    if found.config.num_classes:
        numbers = {name: i for i, name in enumerate(found.labels)}
        names = {"id2label": dict(enumerate(found.labels)), "label2id": numbers}
    to_huggingface(found.config, found.params, target, extra={**attributes, **names})
    (target / "generation_config.json").write_text(json.dumps(attributes, indent=2) + "\n", encoding="utf-8")
    if found.tokenizer is not None:
        save_foreign_tokenizer(found.tokenizer, target)


def _write_run(found: Foreign, target: Path) -> None:
    from tfm.config_json import save_config
    from tfm.interop.generation import settings_attributes
    from tfm.training.checkpoint import Checkpoints
    from tfm.training.step import TrainState

    config, tokenizer = found.config, found.tokenizer
    if tokenizer is None:
        raise ValueError("SOURCE has no tokenizer, but a run folder needs one")
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(target / "tokenizer.model")
    task: Any = "translate" if config.is_encoder_decoder else "causal_lm" if config.is_decoder_only else \
        "classify" if config.num_classes else "masked_lm"
    whole = Config(model=config, data=DataConfig(task=task, labels=found.labels, tokenizer="file",
                                                 tokenizer_path=str(target / "tokenizer.model")),
                   decode=DecodeConfig(beam_size=found.settings.num_beams))
    save_config(whole, target / "config.json")
    attributes = settings_attributes(found.settings, pair=config.is_encoder_decoder)
    (target / "generation_config.json").write_text(json.dumps(attributes, indent=2) + "\n", encoding="utf-8")
    checkpoints = Checkpoints(target, keep=1)
    key = jax.random.key_data(jax.random.key(0))
    checkpoints.save(TrainState(jnp.zeros((), jnp.int32), found.params, (), None, key), config=whole, data_state=None,
                     scores={})
    checkpoints.close()


def _write_adapters(options: ConvertOptions) -> int:
    """Write the adapters of a run as the peft package reads them."""
    from tfm.interop import to_peft
    from tfm.training.checkpoint import find_checkpoint, load_checkpoint_config, load_checkpoint_params

    require((options.source / "checkpoints").is_dir(), "SOURCE", str(options.source),
            "adapters are those of a run folder")
    checkpoint = find_checkpoint(options.source, checkpoint_choice(options.checkpoint))
    config = load_checkpoint_config(checkpoint)
    params = load_checkpoint_params(checkpoint)
    to_peft(config.model, params, options.target, base=config.train.init_from or "")
    count = sum(x.size for x in jax.tree.leaves(split_params(params, r"(^|/)lora_[ab]$")[0]))
    print(f"{options.source} -> {options.target} (peft): {count:,} parameters of adapters of rank "
          f"{config.model.lora_rank}, for {config.train.init_from or 'this model'}")
    return 0


def _report(config: ModelConfig, params: Any, source: Path, target: Path, form: str) -> None:
    """Print what was mapped, one line for each kind of tensor."""
    from tfm.interop.checkpoint import mapping, unused_tensors

    for line in summarize(mapping(config, params)):
        print(line)
    left = unused_tensors(source) if source.is_dir() and (source / "config.json").is_file() and form == "run" else []
    if left:
        print(f"left out, since nothing computes with them: {', '.join(left)}")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{source} -> {target} ({form}): {count:,} parameters in {config.param_dtype}")


def summarize(pairs: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[str]:
    """Lines `foreign -> ours shape`, those of layers together.

    Example:
        >>> summarize([("h.0.w", "layers_0/kernel", (2, 3)), ("h.1.w", "layers_1/kernel", (2, 3))])
        ['h.*.w -> layers_*/kernel [2, 3]  (2 tensors)']
    """
    groups: dict[str, int] = {}
    for foreign, ours, shape in pairs:
        line = f"{re.sub(r'[.]([0-9]+)[.]', '.*.', foreign, count=1)} -> {re.sub('layers_[0-9]+', 'layers_*', ours)}"
        line += f" {list(shape)}"
        groups[line] = groups.get(line, 0) + 1
    return [f"{line}  ({count} tensors)" if count > 1 else line for line, count in groups.items()]
