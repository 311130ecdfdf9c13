"""Parameter counts of the presets against closed forms and the published models."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tfm.models import count_params, init_params
from tfm.models.presets import (
    bart_base,
    bert_base,
    gpt2,
    llama,
    marian,
    mistral,
    t5_small,
    tiny,
    transformer_base,
    transformer_big,
)


def by_hand(vocab, layers=6, width=512, d_ff=2048, key_width=512, value_width=512):
    """Section 3 of the paper: a shared table, no biases in attention."""
    feed_forward, norm = 2 * width * d_ff + d_ff + width, 2 * width
    attention = 2 * width * key_width + 2 * width * value_width
    return vocab * width + layers * (attention + feed_forward + 2 * norm
                                     + 2 * attention + feed_forward + 3 * norm)


def test_base_model():
    vocab, norm, feed_forward = 37000, 2 * 512, 2 * 512 * 2048 + 2048 + 512
    expected = (vocab * 512 + 6 * (4 * 512**2 + feed_forward + 2 * norm) + 6 * (8 * 512**2 + feed_forward + 3 * norm))
    assert count_params(transformer_base(vocab_size=vocab)) == expected == by_hand(vocab)


def test_big_model():
    count = count_params(transformer_big(vocab_size=37000))
    assert count == by_hand(37000, width=1024, d_ff=4096, key_width=1024, value_width=1024)
    assert count == pytest.approx(213e6, rel=0.01)


TABLE_3 = {  # row of Table 3 (Vaswani et al., 2017): changes of the base model, its parameters in millions
    "base": ({}, 65),
    "A 1": ({"num_heads": 1}, 65), "A 4": ({"num_heads": 4}, 65),
    "A 16": ({"num_heads": 16}, 65), "A 32": ({"num_heads": 32}, 65),
    "B 16": ({"head_dim": 16, "value_dim": 64}, 58), "B 32": ({"head_dim": 32, "value_dim": 64}, 60),
    "C N=2": ({"encoder_layers": 2, "decoder_layers": 2}, 36),
    "C N=4": ({"encoder_layers": 4, "decoder_layers": 4}, 50),
    "C N=8": ({"encoder_layers": 8, "decoder_layers": 8}, 80),
    "C 256": ({"d_model": 256, "head_dim": 32}, 28), "C 1024": ({"d_model": 1024, "head_dim": 128}, 168),
    "C ff 1024": ({"d_ff": 1024}, 53), "C ff 4096": ({"d_ff": 4096}, 90),
    "D 0.0": ({"dropout_rate": 0.0}, 65), "D 0.2": ({"dropout_rate": 0.2}, 65),
    "E": ({"position": "learned"}, 65),
}


@pytest.mark.parametrize("row", TABLE_3)
def test_rows_of_table_3(row):
    """The paper rounds to millions and gives the vocabulary as "about 37000"; 41,000 gives its 65 million."""
    changes, millions = TABLE_3[row]
    config = transformer_base(vocab_size=41000, **changes)
    count = count_params(config)
    if row == "E":
        count -= 2 * config.max_positions * 512  # a table for each stack; the paper's count leaves them out
    assert abs(count / 1e6 - millions) <= 0.75


@pytest.mark.parametrize(("preset", "published"), [
    (bert_base(), 109_482_240 + 768 * 768 + 768 + 2 * 768 + 30522),  # BertModel and the masked-LM head's own
    (gpt2(), 124_439_808), (t5_small(), 60_506_624), (llama(), 6_738_415_616), (mistral(), 7_241_732_096)])
def test_published_counts(preset, published):
    assert count_params(preset) == published


def test_bart_and_marian_near_the_published_counts():
    """Published: 139,420,416 (BART-base) with a norm bias and tables of 1,026 positions, all of which we have."""
    assert count_params(bart_base()) == 139_420_416 + 50265
    base = by_hand(58101) + 12 * 4 * 512 + 6 * 4 * 512 + 58101  # biases in attention and on the logits
    assert count_params(marian()) == base


def test_initial_values_are_of_unit_scale_where_the_paper_wants_them():
    """Embeddings times sqrt(d_model) have variance 1, norms start as identities, biases at 0."""
    params = jax.jit(lambda key: init_params(tiny(vocab_size=2000, d_model=64), key))(jax.random.key(0))
    table = np.asarray(params["token_embedding"]["table"])
    np.testing.assert_allclose(table.std() * 8, 1.0, rtol=0.02)
    layer = params["encoder"]["layers_1"]
    assert (np.asarray(layer["feed_forward_norm"]["scale"]) == 1).all()
    assert not np.asarray(layer["feed_forward_norm"]["bias"]).any()
    assert not np.asarray(layer["feed_forward"]["up"]["bias"]).any()
    limit = np.sqrt(6 / (64 + 32))
    assert 0.95 * limit < np.abs(layer["feed_forward"]["up"]["kernel"]).max() <= limit
    first, second = (np.asarray(params["encoder"][f"layers_{i}"]["feed_forward"]["up"]["kernel"]) for i in (0, 1))
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1
