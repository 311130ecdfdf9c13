from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.decoding import greedy, sample, score, token_mask

EOS = 2


def reference(model, prompt, limit):
    ids = []
    while len(ids) < limit and (not ids or ids[-1] != EOS):
        ids.append(int(np.argmax(model.logits([*prompt, *ids]))))
    return ids


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_takes_the_most_probable_token(toy, chunk):
    prompts = np.array([[1, 3, 5], [0, 0, 4], [6, 1, 1], [3, 3, 3]])
    limits = np.array([9, 4, 1, 7])
    for seed in range(3):
        model = toy(vocab=7, seed=seed)
        found = model.jit(greedy, eos_id=EOS, pad_id=6, buffer_length=10, prefill_chunk=chunk)(
            prompts, max_length=limits
        )
        for row in range(4):
            expected = reference(model, prompts[row], limits[row])
            n = len(expected)
            assert found.ids[row].tolist() == expected + [6] * (10 - n)
            assert found.lengths[row] == n
            assert bool(found.finished[row]) == (expected[-1] == EOS)
            np.testing.assert_allclose(found.log_probs[row, :n], model.log_probs(prompts[row], expected), atol=1e-4)
            np.testing.assert_allclose(found.scores[row], model.log_probs(prompts[row], expected).sum(), atol=1e-4)


def test_last_logits_alone_give_the_same(toy):
    model = toy(vocab=7, seed=1)
    prompt = jnp.array([[1, 3], [4, 4]])
    every = model.jit(greedy, max_length=6, eos_id=EOS)(prompt)
    last = jax.jit(lambda p: greedy(model.last_step, model.cache(2), p, max_length=6, eos_id=EOS))(prompt)
    assert every.ids.tolist() == last.ids.tolist()


@pytest.mark.parametrize("settings", [None, {"temperature": 0.7, "key": jax.random.key(3)}], ids=["greedy", "sample"])
def test_what_nobody_asks_for_is_not_computed(toy, settings):
    model, search = toy(vocab=300, seed=1), greedy if settings is None else sample
    options = {"max_length": 6, "eos_id": EOS, **(settings or {})}

    def find(prompt, log_probs):
        return search(model.step, model.cache(2), prompt, log_probs=log_probs, **options)

    prompt = jnp.array([[1, 3], [4, 4]])
    plain, lean = (jax.jit(partial(find, log_probs=asked))(prompt) for asked in (True, False))
    assert (lean.ids.tolist(), lean.finished.tolist()) == (plain.ids.tolist(), plain.finished.tolist())
    assert lean.lengths.tolist() == plain.lengths.tolist()
    assert np.isnan(lean.log_probs).all() and np.isnan(lean.scores).all() and np.isfinite(plain.scores).all()
    sums = [str(jax.make_jaxpr(partial(find, log_probs=asked))(prompt)).count("exp ") for asked in (True, False)]
    assert sums[1] < sums[0] and (settings or sums[1] == 0)


def test_stops_unfinished_where_nothing_is_allowed(toy):
    model = toy(vocab=5, seed=0)

    def two_tokens(history):
        return jnp.full((1, 5), history.length < 3).at[:, EOS].set(False)

    found = model.jit(greedy, max_length=6, eos_id=EOS, allow=(two_tokens,))([[1]])
    assert found.lengths.tolist() == [2] and found.finished.tolist() == [False]
    np.testing.assert_allclose(found.scores[0], model.log_probs([1], found.ids[0, :2].tolist()).sum(), atol=1e-4)


def test_rules_see_the_text_they_are_given():
    seen = []

    def step(tokens, cache):
        return jnp.zeros((*tokens.shape, 4)), cache

    def rule(history):
        seen.append((history.prompt_length, history.vocab_size, history.tokens.shape))
        return jnp.arange(4) == history.tokens[:, :1]

    text = jnp.array([[3, -1, 1]])
    options = {"max_length": 2, "eos_id": None, "seen": text, "allow": [rule]}
    found = jax.jit(lambda p: greedy(step, None, p, **options))(jnp.array([[1]]))
    assert found.ids.tolist() == [[3, 3]]
    assert seen[0] == (3, 4, (1, 5))


@pytest.mark.parametrize("form", ["step", "last_step"])
def test_score_is_the_teacher_forced_log_probability(toy, form):
    model = toy(vocab=7, seed=4)
    prompt, targets = np.array([[1, 3], [4, 0]]), np.array([[5, 6, EOS, 0], [3, 3, 1, 4]])
    mask = token_mask(jnp.array(targets), EOS)
    assert mask.tolist() == [[True, True, True, False], [True] * 4]
    run = jax.jit(lambda p, t: score(getattr(model, form), model.cache(2), p, t, mask=mask, alpha=1.0))
    scores, log_probs = run(prompt, targets)
    for row, n in enumerate([3, 4]):
        expected = model.log_probs(prompt[row], targets[row, :n])
        np.testing.assert_allclose(log_probs[row, :n], expected, atol=1e-4)
        np.testing.assert_allclose(scores[row], expected.sum() / ((5 + n) / 6), atol=1e-4)
    assert log_probs[0, 3] == 0


def test_score_refuses_shapes_that_do_not_fit(toy):
    model = toy(vocab=4, seed=0)
    with pytest.raises(ValueError, match=r"\[2, 1\], \[3, 2\]"):
        score(model.step, model.cache(2), jnp.ones((2, 1), int), jnp.ones((3, 2), int))
    with pytest.raises(ValueError, match=r"prompt is int32\[2, 0\]"):
        score(model.step, model.cache(2), jnp.ones((2, 0), int), jnp.ones((2, 2), int))
    with pytest.raises(ValueError, match=r"targets has shape \[2, 0\]"):
        score(model.step, model.cache(2), jnp.ones((2, 1), int), jnp.ones((2, 0), int))
