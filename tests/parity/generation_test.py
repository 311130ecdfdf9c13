"""Greedy and beam search through `tfm.load`, token by token against `generate` of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers

import tfm

END = 2
ROWS = [[5, 9, 12, 30, 8, 2], [14, 6, 2], [5, 9, 14, 2]]
WRITTEN = [[21, 30, 11, 9], [33, 12], [21, 14, 8, 35, 30]]
"""What the models are taught for a few steps, so that their texts end and their beams compete."""
PAIR = {"vocab_size": 41, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 14, "max_position_embeddings": 40,
        "pad_token_id": 3, "decoder_start_token_id": 3, "eos_token_id": END, "forced_eos_token_id": None}


def marian():
    config = transformers.MarianConfig(**PAIR, bad_words_ids=[[3], [13]], scale_embedding=True)
    return transformers.MarianMTModel(config)


def mbart():
    model = transformers.MBartForConditionalGeneration(transformers.MBartConfig(**PAIR))
    model.generation_config.forced_bos_token_id = 17
    model.generation_config.suppress_tokens = [21, 33]
    model.generation_config.no_repeat_ngram_size = 2
    return model


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**PAIR))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=41, d_model=24, d_kv=10, num_heads=3, d_ff=20, num_layers=2, num_decoder_layers=1, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=END))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=41, n_embd=24, n_layer=2, n_head=3, n_positions=40, eos_token_id=END, bos_token_id=1,
        pad_token_id=0))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(
        vocab_size=41, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
        intermediate_size=20, sliding_window=4, eos_token_id=END, pad_token_id=0))


def teach(model, steps=150):
    """A few steps of Adam on ROWS -> WRITTEN, one pair at a time."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        row, written = ROWS[step % 3], [*WRITTEN[step % 3], END]
        if model.config.is_encoder_decoder:
            ids, target = torch.tensor([row]), torch.tensor([[model.config.decoder_start_token_id, *written[:-1]]])
            logits = model(input_ids=ids, decoder_input_ids=target).logits[0]
        else:
            logits = model(torch.tensor([row + written[:-1]])).logits[0, len(row) - 1:]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.tensor(written)).backward()
        optimizer.step()


def their_ids(model, row, beams):
    found = model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.long),
                           num_beams=beams, do_sample=False, max_new_tokens=24, length_penalty=0.0,
                           early_stopping="never" if beams > 1 else False)[0].tolist()
    new = found[1:] if model.config.is_encoder_decoder else found[len(row):]
    return new[:new.index(END)] if END in new else new


@pytest.mark.parametrize("make", [marian, mistral, *[pytest.param(make, marks=pytest.mark.slow)
                                                     for make in (mbart, bart, t5, gpt2)]])
def test_same_tokens(make, randomized, tmp_path):
    torch.manual_seed(0)
    model = randomized(make())
    teach(model)
    model.save_pretrained(tmp_path)
    bundle = tfm.load(tmp_path)
    for beams in (1, 3):
        theirs = [their_ids(model, row, beams) for row in ROWS]
        assert all(0 < len(row) < 24 for row in theirs)
        assert bundle.generate_ids(ROWS, beam_size=beams, alpha=0.0, max_length=24) == theirs
