import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from tfm.decoding import Sample, greedy, sample, truncation

EOS = 2


@pytest.mark.parametrize("size", [13, 700])
@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("top_k", 1, hf.TopKLogitsWarper(1)),
        ("top_k", 5, hf.TopKLogitsWarper(5)),
        ("top_p", 0.3, hf.TopPLogitsWarper(0.3)),
        ("top_p", 0.9, hf.TopPLogitsWarper(0.9)),
        ("top_p", 1.0, hf.TopPLogitsWarper(1.0)),
        ("min_p", 0.2, hf.MinPLogitsWarper(0.2)),
        ("typical", 0.4, hf.TypicalLogitsWarper(0.4)),
        ("typical", 0.95, hf.TypicalLogitsWarper(0.95)),
    ],
)
def test_truncation_is_that_of_transformers(size, name, value, other):
    logits = np.random.default_rng(1).normal(size=(6, size)).astype(np.float32) * 3
    logits[:, ::4] = -np.inf
    logits[0, 1] = 30.0
    expected = other(None, torch.tensor(logits)).numpy()
    np.testing.assert_array_equal(getattr(truncation, name)(jnp.array(logits), value), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 6},
        {"top_p": 0.7},
        {"min_p": 0.1, "temperature": 1.5},
        {"typical_p": 0.6},
        {"top_k": 8, "top_p": 0.8, "temperature": 1.3},
    ],
)
def test_draws_have_the_distribution_of_transformers(settings):
    logits = np.random.default_rng(2).normal(size=12).astype(np.float32) * 2
    scores = torch.tensor(logits)[None] / settings.get("temperature", 1.0)
    for name, warper in [
        ("top_k", hf.TopKLogitsWarper),
        ("typical_p", hf.TypicalLogitsWarper),
        ("top_p", hf.TopPLogitsWarper),
        ("min_p", hf.MinPLogitsWarper),
    ]:
        if name in settings:
            scores = warper(settings[name])(None, scores)
    p = torch.softmax(scores[0].double(), -1).numpy()
    n = 20_000
    uniform = jax.random.uniform(jax.random.key(3), (n,))
    drawn = Sample((), **settings).draw(jnp.broadcast_to(logits, (n, 12)), uniform)
    counts = np.bincount(drawn, minlength=12)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    chi2 = ((counts - n * p)[kept] ** 2 / (n * p)[kept]).sum()
    free = kept.sum() - 1
    assert chi2 < free + 4 * np.sqrt(2 * free) + 4


def test_sequences_have_the_model_s_distribution(toy):
    model = toy(vocab=3, seed=0, sharpness=1.0)
    n = 4000
    found = model.jit(sample, max_length=3, eos_id=EOS)(np.ones((n, 1), int), key=jax.random.key(0))
    got = {}
    for ids, length in zip(np.asarray(found.ids).tolist(), found.lengths.tolist(), strict=True):
        got[tuple(ids[:length])] = got.get(tuple(ids[:length]), 0) + 1
    possible = [y for k in (1, 2, 3) for y in np.ndindex(*[3] * k) if EOS not in y[:-1] and (y[-1] == EOS or k == 3)]
    p = np.array([np.exp(model.log_probs([1], y).sum()) for y in possible])
    np.testing.assert_allclose(p.sum(), 1)
    chi2 = sum((got.pop(y, 0) - n * q) ** 2 / (n * q) for y, q in zip(possible, p, strict=True))
    assert not got
    assert chi2 < len(p) - 1 + 4 * np.sqrt(2 * len(p))
    for row in range(20):
        length = int(found.lengths[row])
        expected = model.log_probs([1], found.ids[row, :length].tolist())
        np.testing.assert_allclose(found.log_probs[row, :length], expected, atol=1e-4)


def test_a_row_with_its_own_key_does_not_depend_on_the_batch(toy):
    model = toy(vocab=9, seed=3)
    prompts = np.arange(5)[:, None]
    keys = jax.random.split(jax.random.key(7), 5)
    run = model.jit(sample, temperature=1.3, top_k=7, top_p=0.95, max_length=8, eos_id=EOS)
    whole = run(prompts, key=keys)
    order = np.array([3, 0, 4])
    part = run(prompts[order], key=keys[order])
    np.testing.assert_array_equal(part.ids, np.asarray(whole.ids)[order])
    again = run(prompts, key=keys)
    np.testing.assert_array_equal(again.ids, whole.ids)
    assert len({tuple(ids) for ids in np.asarray(run(np.ones((5, 1), int), key=keys).ids).tolist()}) > 1


@pytest.mark.parametrize("temperature", [1e-6, 1e-10, 1e-30])
def test_a_temperature_near_zero_takes_the_most_probable_token(temperature):
    logits = np.random.default_rng(0).normal(size=(64, 300)).astype(np.float32) * 5

    @jax.jit
    def search(logits):
        return sample(lambda tokens, cache: (logits, cache), None, jnp.ones((64, 1), jnp.int32), max_length=1,
                      key=jax.random.key(0), temperature=temperature, eos_id=None)

    np.testing.assert_array_equal(search(logits).ids[:, 0], logits.argmax(-1))


def test_temperature_zero_is_greedy(toy):
    model = toy(vocab=9, seed=3)
    prompts = np.arange(5)[:, None]
    cold = model.jit(sample, temperature=0, max_length=8, eos_id=EOS)(prompts, key=jax.random.key(0))
    best = model.jit(greedy, max_length=8, eos_id=EOS)(prompts)
    np.testing.assert_array_equal(cold.ids, best.ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"typical_p": 2.0}, "typical_p is 2.0"),
        ({"temperature": 0, "top_k": 4, "top_p": 0.5}, "temperature 0 is greedy and cannot work with top_k, top_p"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        Sample((), **settings)


def test_refuses_keys_of_another_batch(toy):
    model = toy(vocab=4, seed=0)
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=r"key has shape \[3\]"):
        sample(model.step, model.cache(2), jnp.ones((2, 1), int), key=keys, max_length=2, eos_id=None)


def test_refuses_what_is_no_key():
    with pytest.raises(ValueError, match="key is None"):
        sample(lambda tokens, cache: (jnp.zeros((1, 4)), cache), None, [[1]], key=None, max_length=2, eos_id=None)
