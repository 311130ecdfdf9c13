"""Training steps of torch and Hugging Face models, as `benchmarks/train.py` measures them."""

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

PAD, BOS, EOS = 0, 1, 2
Step = Callable[[int], float]


def make_peer(name: str, work: dict, batches: list[dict[str, Any]]) -> tuple[Step, int]:
    """The step of `torch-eager`, `torch-compile` or `huggingface`, with `-bf16` under autocast."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    if name.startswith("huggingface"):
        model = HUGGINGFACE[work["kind"]](work)
    elif work["kind"] == "translation":
        model = TorchTranslation(work)
    else:
        raise ImportError(f"torch itself has no {work['kind']}: use huggingface")
    optimizer = torch.optim.Adam(model.parameters(), lr=work["learning_rate"], betas=work["betas"], eps=work["epsilon"],
                                 fused=True if "compile" in name else None)

    def loss_of(inputs: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in name):
            logits = model(*inputs)
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(),
                                               label_smoothing=work["smoothing"])

    if "compile" in name:
        loss_of = torch.compile(loss_of, dynamic=False)
    tensors = [{key: torch.from_numpy(x).long() for key, x in batch.items()} for batch in batches]
    model.train()

    def step(number: int) -> float:
        batch = tensors[number % len(tensors)]
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of([x for key, x in batch.items() if key != "labels"], batch["labels"])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, sum(p.numel() for p in model.parameters())


class TorchTranslation(nn.Module):
    """`torch.nn.Transformer` between one tied table."""

    def __init__(self, work: dict) -> None:
        super().__init__()
        width, length = work["d_model"], work["length"]
        self.table = nn.Embedding(work["vocab"], width)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        self.layers = nn.Transformer(width, work["heads"], work["layers"], work["layers"], work["d_ff"],
                                     work["dropout"], batch_first=True)
        self.dropout = nn.Dropout(work["dropout"])
        angle = np.arange(length)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
        waves = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(length, width)
        self.register_buffer("waves", torch.tensor(waves, dtype=torch.float32))
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[B, T] -> [B, T, M]."""
        return self.dropout(self.table(ids) * math.sqrt(self.table.embedding_dim) + self.waves)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V]."""
        padding = source.eq(PAD)
        hidden = self.layers(self.embed(source), self.embed(target), tgt_mask=self.later, tgt_is_causal=True,
                             src_key_padding_mask=padding, tgt_key_padding_mask=target.eq(PAD),
                             memory_key_padding_mask=padding)
        return nn.functional.linear(hidden, self.table.weight)


class Logits(nn.Module):
    """A Hugging Face model as a function from ids to logits, with the masks of a padded batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, T, V]."""
        given = {} if target is None else dict(decoder_input_ids=target, decoder_attention_mask=target.ne(PAD))
        return self.model(input_ids=source, attention_mask=source.ne(PAD), **given).logits


def marian(work: dict) -> nn.Module:
    """MarianMTModel of the case's size."""
    from transformers import MarianConfig, MarianMTModel

    return Logits(MarianMTModel(MarianConfig(
        vocab_size=work["vocab"], d_model=work["d_model"], encoder_layers=work["layers"],
        decoder_layers=work["layers"], encoder_attention_heads=work["heads"], decoder_attention_heads=work["heads"],
        encoder_ffn_dim=work["d_ff"], decoder_ffn_dim=work["d_ff"], activation_function="relu", dropout=work["dropout"],
        attention_dropout=work["dropout"], activation_dropout=work["dropout"], scale_embedding=True, use_cache=False,
        max_position_embeddings=work["length"], pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=BOS,
        share_encoder_decoder_embeddings=True, tie_word_embeddings=True)))


def gpt2(work: dict) -> nn.Module:
    """GPT2LMHeadModel of the case's size."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(GPT2LMHeadModel(GPT2Config(
        vocab_size=work["vocab"], n_embd=work["d_model"], n_layer=work["layers"], n_head=work["heads"],
        n_inner=work["d_ff"], use_cache=False, bos_token_id=BOS, eos_token_id=EOS)))


def bert(work: dict) -> nn.Module:
    """BertForMaskedLM of the case's size."""
    from transformers import BertConfig, BertForMaskedLM

    return Logits(BertForMaskedLM(BertConfig(
        vocab_size=work["vocab"], hidden_size=work["d_model"], num_hidden_layers=work["layers"],
        num_attention_heads=work["heads"], intermediate_size=work["d_ff"], pad_token_id=PAD)))


HUGGINGFACE = {"translation": marian, "gpt2": gpt2, "bert": bert}
