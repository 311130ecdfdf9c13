"""Classifiers of BERT and RoBERTa against torch, by their labels, and there and back again."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import torch
import transformers

import tfm
from tfm.interop import from_huggingface, to_huggingface

SIZES = {"vocab_size": 41, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3,
         "intermediate_size": 20, "max_position_embeddings": 14, "id2label": {0: "bad", 1: "good", 2: "odd"}}
MODELS = {
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
    "roberta": lambda: transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SIZES)),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_labels_and_a_round_trip(name, randomized, inputs, tmp_path):
    model = randomized(MODELS[name]())
    model.save_pretrained(tmp_path / "theirs")
    config, params = from_huggingface(tmp_path / "theirs")
    batch = inputs(config, model.config.pad_token_id)
    ours = jax.jit(lambda ids, mask: tfm.build(config).apply({"params": params}, ids, mask=mask,
                                                             method="class_logits"))(batch.ids, batch.mask)
    with torch.no_grad():
        theirs = model(**batch.torch()).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert tfm.load(tmp_path / "theirs").config.data.labels == ("bad", "good", "odd")
    to_huggingface(config, params, tmp_path / "ours")
    back = type(model).from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_allclose(back(**batch.torch()).logits.numpy(), theirs, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_padding_on_the_left_changes_nothing(name, randomized, tmp_path):
    model = randomized(MODELS[name]())
    model.save_pretrained(tmp_path)
    config, params = from_huggingface(tmp_path)
    rows = np.random.default_rng(0).integers(4, 41, (3, 6))
    mask = np.arange(6) >= np.array([[0], [2], [5]])
    ids = np.where(mask, rows, model.config.pad_token_id)
    ours = jax.jit(lambda ids, mask: tfm.build(config).apply({"params": params}, ids, mask=mask,
                                                             method="class_logits"))(ids, mask)
    with torch.no_grad():
        theirs = [model(torch.tensor(row[real])[None]).logits[0].numpy()
                  for row, real in zip(rows, mask, strict=True)]
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_a_head_that_no_foreign_model_has_is_refused(tmp_path):
    config = tfm.presets.bert_base(11, d_model=8, d_ff=8, num_heads=2, encoder_layers=1, token_head=False,
                                   logit_bias=False, pooler=False, num_classes=2, class_pooling="mean",
                                   token_types=0)
    with pytest.raises(ValueError, match=r"the nearest, bert, differs in model\.token_types=0 \(there 1\), "
                                         r"model\.pooler=False "
                                         r"\(there True\), model\.class_pooling='mean' \(there 'first'\)$"):
        to_huggingface(config, {}, tmp_path)


@pytest.mark.parametrize("names", [{"1": "bad", "2": "good", "3": "odd"}, {"bad": "0", "good": "1", "odd": "2"},
                                   {"0": 1, "1": 2, "2": 3}])
def test_names_that_do_not_count_the_classes_from_0_are_refused(names, tmp_path):
    MODELS["bert"]().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "id2label": names}))
    with pytest.raises(ValueError, match=r"config\.json: id2label is \{.*it must name the 3 classes .* '0' to '2'$"):
        tfm.load(tmp_path)


@pytest.mark.parametrize("pooler, message", [(False, "left over: classifier.bias, classifier.weight"),
                                             (True, "architectures is 'BertForTokenClassification'")])
def test_a_head_that_labels_tokens_is_no_classifier_of_texts(pooler, message, tmp_path):
    model = transformers.BertForTokenClassification(transformers.BertConfig(**SIZES))
    if pooler:  # older files have one that is not used
        model.bert.pooler = transformers.BertModel(model.config).pooler
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        from_huggingface(tmp_path)
