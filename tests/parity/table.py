"""Print the table of families in Markdown: sizes of the presets, and how far each model is from torch's.

    python tests/parity/table.py             # all families
    python tests/parity/table.py gpt2 t5     # some

Small models of random weights, taught a few sentences so that their texts end, go through a checkpoint folder. Logits
and gradients (of the summed cross-entropy, over the largest entry of the tensor where that is above 1) are the largest
differences over ragged, padded rows; generated are three rows, greedily and by three beams with all three hypotheses.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import transformers
from conftest import gradient_differences, jax_logits, make_batch, randomize, torch_logits
from generation_test import MODELS, SETTINGS, make_taught, our_results, their_results

from tfm import count_params, presets
from tfm.interop import from_huggingface

ENCODER = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
           "intermediate_size": 20, "max_position_embeddings": 16, "pad_token_id": 0}
ENCODERS: dict[str, Callable] = {
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**ENCODER)),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(
        vocab_size=41, dim=24, n_layers=2, n_heads=3, hidden_dim=20, max_position_embeddings=16)),
}
PUBLISHED: dict[str, tuple] = {
    "BERT-base": (presets.bert_base,
                  lambda: transformers.BertForPreTraining(transformers.BertConfig()), "110M",
                  "the head for pairs of sentences"),
    "GPT-2": (presets.gpt2, lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()), "117M"),
    "T5-small": (presets.t5_small, lambda: transformers.T5ForConditionalGeneration(transformers.T5Config()), "60M"),
    "BART-base": (presets.bart_base, lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(
        encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072, encoder_attention_heads=12,
        decoder_attention_heads=12, d_model=768)), "140M", "final_logits_bias, a buffer there"),
    "Llama-2-7B": (presets.llama, lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        max_position_embeddings=4096)), "6.7B"),
    "Mistral-7B": (presets.mistral, lambda: transformers.MistralForCausalLM(transformers.MistralConfig()), "7.3B"),
}


def size_rows() -> None:
    """Parameters of the presets by `eval_shape`, of the published models on torch's meta device, and the papers'."""
    print("| model | parameters of the preset | of transformers' model | the paper says | difference |")
    print("|---|---|---|---|---|")
    for name, (preset, make, said, *why) in PUBLISHED.items():
        ours = count_params(preset())
        with torch.device("meta"):
            theirs = sum(p.numel() for p in make().parameters())
        reason = f" ({why[0]})" if why else ""
        print(f"| {name} | {ours:,} | {theirs:,} | {said} | {ours - theirs:+,}{reason} |", flush=True)


def family_row(name: str) -> None:
    """Compare one family."""
    generates = name in MODELS
    torch.manual_seed(0)
    model = make_taught(name, randomize) if generates else randomize(ENCODERS[name]())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config, params = from_huggingface(folder)
        batch = make_batch(config, model.config.pad_token_id or 0)
        model.zero_grad()
        theirs, their_gradients = torch_logits(model, batch)
        ours, our_gradients = jax_logits(config, params, batch)
    logits = float(np.max(np.abs(ours - theirs)[batch.label_mask]))
    gradients = max(gradient_differences(config, model, our_gradients, their_gradients).values())
    same = [generation(model, kind) for kind in ("greedy", "beams", "rules")] if generates else ["-"] * 3
    print(f"| {name} | {logits:.1e} | {gradients:.1e} | {' | '.join(same)} |", flush=True)


def generation(model: torch.nn.Module, kind: str) -> str:
    """Whether all ids are equal under one set of settings."""
    theirs = their_results(model, SETTINGS[kind])
    model.generation_config.num_return_sequences = None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ours = our_results(folder, SETTINGS[kind])
    return "equal" if [[ids for ids, _ in row] for row in ours] == [[ids for ids, _ in row] for row in theirs] else \
        "different"


def main(names: list[str]) -> None:
    """Print the tables."""
    if not names:
        size_rows()
    print("\n| family | logits | gradients | greedy | beams | beams with rules |\n|---|---|---|---|---|---|")
    for name in names or [*ENCODERS, *MODELS]:
        family_row(name)


if __name__ == "__main__":
    main(sys.argv[1:])
