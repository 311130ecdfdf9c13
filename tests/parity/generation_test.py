"""Generation through `tfm.load`, token by token against `generate` of transformers, by the checkpoint's settings."""

from __future__ import annotations

import numpy as np
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
DECODER = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 10,
           "num_key_value_heads": 2, "intermediate_size": 20, "eos_token_id": END, "bos_token_id": 1, "pad_token_id": 0}
T5 = {"vocab_size": 41, "d_model": 24, "d_kv": 10, "num_heads": 3, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 1,
      "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": END}
GPT2 = {"vocab_size": 41, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40, "eos_token_id": END,
        "bos_token_id": 1, "pad_token_id": 0}
NEOX = {**{name: value for name, value in DECODER.items() if name not in ("head_dim", "num_key_value_heads")},
        "num_attention_heads": 3}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "rope_theta": 100.0}
MODELS = {
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**PAIR, bad_words_ids=[[3], [13]],
                                                                           scale_embedding=True)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**PAIR)),
    "mbart": lambda: transformers.MBartForConditionalGeneration(transformers.MBartConfig(**PAIR)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "t5-1.1": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
        **T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**NEOX)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, rope_parameters=LLAMA3)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=4)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER)),
}
BEAMS = {"num_beams": 3, "num_return_sequences": 3}
SETTINGS = {
    "greedy": {},
    "beams": BEAMS,
    "rules": {**BEAMS, "length_penalty": 2.0, "early_stopping": True, "min_new_tokens": 3, "max_new_tokens": 5,
              "no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "forced_eos_token_id": END,
              "suppress_tokens": [33]},
    "renormalized": {**BEAMS, "renormalize_logits": True, "bad_words_ids": [[END], [8], [14, 11]], "min_length": 20,
                     "min_new_tokens": 3, "no_repeat_ngram_size": 2, "begin_suppress_tokens": [17, 21, 33],
                     "forced_eos_token_id": END},
}
QUICK = {("marian", "rules"), ("marian", "renormalized"), ("mistral", "greedy")}


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


def make_taught(name, randomize):
    """A small model of random weights that was taught a little."""
    torch.manual_seed(0)
    model = randomize(MODELS[name]())
    teach(model)
    return model


def their_results(model, settings):
    """(ids, score) of each hypothesis of each row, by the settings of the model."""
    model.generation_config.update(**{"max_new_tokens": 24, "do_sample": False, **settings})
    if model.config.is_encoder_decoder and "forced_eos_token_id" in settings:
        model.generation_config.forced_bos_token_id = 17
    results = []
    for row in ROWS:
        found = model.generate(torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.long),
                               output_scores=True, return_dict_in_generate=True)
        start = 1 if model.config.is_encoder_decoder else len(row)
        ids = [new[:new.index(END)] if END in new else new for new in found.sequences[:, start:].tolist()]
        scores = found.sequences_scores.tolist() if "num_beams" in settings else [None]
        results.append(list(zip(ids, scores, strict=True)))
    return results


def our_results(folder, settings):
    """The same from us, by what the folder says."""
    bundle = tfm.load(folder)
    return [[(result.ids, result.score) for result in row]
            for row in bundle.results(ROWS, n_best=settings.get("num_return_sequences", 1))]


def cases():
    for name in MODELS:
        for kind in SETTINGS:
            yield pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name, kind", cases())
def test_same_tokens_and_scores(name, kind, randomized, tmp_path):
    model, settings = make_taught(name, randomized), SETTINGS[kind]
    theirs = their_results(model, settings)
    model.generation_config.num_return_sequences = None
    model.save_pretrained(tmp_path)
    ours = our_results(tmp_path, settings)
    assert [[ids for ids, _ in row] for row in ours] == [[ids for ids, _ in row] for row in theirs]
    if kind != "greedy":
        np.testing.assert_allclose([[score for _, score in row] for row in ours],
                                   [[score for _, score in row] for row in theirs], atol=1e-4)


@pytest.mark.slow
def test_exact_beam_search_is_theirs_without_a_length_penalty(randomized, tmp_path):
    model = make_taught("bart", randomized)
    settings = {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"}
    theirs = [row[0][0] for row in their_results(model, settings)]
    model.save_pretrained(tmp_path)
    assert tfm.load(tmp_path).generate_ids(ROWS, beam_size=3, alpha=0.0, max_length=24) == theirs
