"""BERT against torch: with the token head, without any head, and as published files spell it."""

from __future__ import annotations

import jax
import numpy as np
import transformers
from safetensors.numpy import load_file, save_file

import tfm
from tfm.interop import from_huggingface

SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 20, "max_position_embeddings": 11, "type_vocab_size": 3}


def test_masked_lm(check_parity):
    foreign = transformers.BertConfig(**SIZES, hidden_act="gelu_new", layer_norm_eps=1e-3)
    config, _ = check_parity(transformers.BertForMaskedLM(foreign), token_types=True)
    assert config.token_head and not config.pooler


def test_model_without_head_and_its_pooler(randomized, inputs, tmp_path):
    model = randomized(transformers.BertModel(transformers.BertConfig(**SIZES)))
    model.save_pretrained(tmp_path)
    config, params = from_huggingface(tmp_path)
    assert config.pooler and not config.token_head
    batch, module = inputs(config), tfm.build(config)
    theirs = model(**batch.torch())
    hidden = module.apply({"params": params}, batch.ids, mask=batch.mask)
    pooled = module.apply({"params": params}, hidden, method="pool")
    np.testing.assert_allclose(hidden[batch.mask], theirs.last_hidden_state.detach().numpy()[batch.mask], atol=2e-4)
    np.testing.assert_allclose(pooled, theirs.pooler_output.detach().numpy(), atol=2e-4)


def test_old_spellings_and_the_sentence_head_are_read(randomized, tmp_path):
    model = randomized(transformers.BertForPreTraining(transformers.BertConfig(**SIZES)))
    model.save_pretrained(tmp_path)
    _, expected = from_huggingface(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "cls.seq_relationship.weight" in tensors
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
           for name, value in tensors.items()}
    save_file(old, tmp_path / "model.safetensors")
    config, params = from_huggingface(tmp_path)
    assert config.pooler and config.token_head
    jax.tree.map(np.testing.assert_array_equal, params, expected)
