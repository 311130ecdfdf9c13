from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.decoding import ModelDraft, PromptLookup, greedy, speculate
from tfm.decoding import logits as rules
from tfm.decoding.speculative import look_up

EOS = 2


def stacked_step(weights, tokens, store):
    """A recurrent model whose cache keeps every state, so that it can be rewound: {"h": [B, S, D], "n": [B]}."""
    a, e, u = weights

    def one(carry, token):
        h, n = carry
        new = jnp.tanh(h[:, n[0]] @ a + e[token])
        return (jax.lax.dynamic_update_slice_in_dim(h, new[:, None], n[0] + 1, axis=1), n + 1), new @ u

    (h, n), logits = jax.lax.scan(one, (store["h"], store["n"]), tokens.T)
    return logits.swapaxes(0, 1), {"h": h, "n": n}


def rewind(store, n):
    return {"h": store["h"], "n": store["n"] - n}


def empty(batch, size=40):
    return {"h": jnp.zeros((batch, size, 6)), "n": jnp.zeros(batch, jnp.int32)}


@cache
def compiled(kind, settings):
    def run(weights, small, prompt, arrays):
        if kind == "model":
            draft = ModelDraft(partial(stacked_step, small), empty(len(prompt)), rewind)
        else:
            draft = PromptLookup(2)
        step = partial(stacked_step, weights)
        return speculate(step, empty(len(prompt)), prompt, draft=draft, rewind=rewind, **dict(settings), **arrays)

    return jax.jit(run)


def run(kind, model, small, prompt, arrays=None, **settings):
    return compiled(kind, tuple(settings.items()))(model.arrays, small.arrays, jnp.array(prompt), arrays or {})


PROMPTS = np.array([[1, 3, 1], [4, 0, 4], [0, 6, 0], [5, 5, 5]])
RULES = (rules.MinLength(4, (EOS,)), rules.NoRepeatNgram(3))


@pytest.mark.parametrize("kind", ["model", "lookup"])
@pytest.mark.parametrize("allow", [(), RULES])
def test_gives_exactly_the_greedy_tokens(toy, kind, allow):
    rates = []
    for seed in range(4):
        model, small = toy(vocab=7, seed=seed), toy(vocab=7, seed=seed if seed % 2 else 9)
        limits = np.array([9, 24, 24, 5])
        options = {"eos_id": EOS, "buffer_length": 24, "allow": allow}
        found, counts = run(kind, model, small, PROMPTS, {"max_length": limits}, draft_length=3, **options)
        expected = model.jit(greedy, **options)(PROMPTS, max_length=limits)
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.finished, expected.finished)
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
        rates.append(float(counts.rate))
    if kind == "model":
        assert rates[1] == rates[3] == 1.0 and rates[0] < 1.0


@pytest.mark.parametrize("kind", ["model", "lookup"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 3}])
def test_keeps_exactly_the_distribution_of_sampling(toy, kind, settings):
    model, small = toy(vocab=4, seed=0, sharpness=1.0), toy(vocab=4, seed=1, sharpness=1.0)
    settings = {"temperature": 1.0, **settings}
    n, rows, limit = 3000, 2, 3
    seen = jnp.array([[0, 3, 1, 0, 1]] * rows)
    runs = compiled(kind, (*settings.items(), ("draft_length", 2), ("max_length", limit), ("eos_id", EOS)))
    keys = jax.random.split(jax.random.key(5), n)
    prompt = jnp.ones((rows, 1), int)
    found, counts = jax.jit(
        lambda w, s: jax.lax.map(lambda key: runs(w, s, prompt, {"key": key, "seen": seen}), keys, batch_size=500)
    )(model.arrays, small.arrays)
    assert 0 < float(counts.accepted.sum() / counts.drafted.sum()) < 1
    possible = [y for k in range(1, limit + 1) for y in np.ndindex(*[4] * k)]
    possible = [y for y in possible if EOS not in y[:-1] and (y[-1] == EOS or len(y) == limit)]
    p = np.array([np.prod([probability(model, settings, y[:i], y[i]) for i in range(len(y))]) for y in possible])
    np.testing.assert_allclose(p.sum(), 1)
    got = {}
    for ids, length in zip(found.ids.reshape(-1, limit).tolist(), found.lengths.reshape(-1).tolist(), strict=True):
        got[tuple(ids[:length])] = got.get(tuple(ids[:length]), 0) + 1
    total = n * rows
    assert set(got) <= {y for y, q in zip(possible, p, strict=True) if q > 0}
    chi2 = sum((got.get(y, 0) - total * q) ** 2 / (total * q) for y, q in zip(possible, p, strict=True) if q > 0)
    free = (p > 0).sum() - 1
    assert chi2 < free + 4 * np.sqrt(2 * free)


def probability(model, settings, head, token):
    logits = model.logits([1, *head]) / settings["temperature"]
    if "top_k" in settings:
        logits = np.where(logits >= np.sort(logits)[-settings["top_k"]], logits, -np.inf)
    p = np.exp(logits - logits.max())
    return (p / p.sum())[token]


def test_sampling_a_row_does_not_depend_on_the_batch(toy):
    model, small = toy(vocab=7, seed=0), toy(vocab=7, seed=9)
    keys = jax.random.split(jax.random.key(1), 4)
    options = {"temperature": 1.2, "max_length": 12, "eos_id": EOS, "draft_length": 3}
    whole, _ = run("model", model, small, PROMPTS, {"key": keys}, **options)
    for row in range(4):
        alone, _ = run("model", model, small, PROMPTS[row : row + 1], {"key": keys[row : row + 1]}, **options)
        np.testing.assert_array_equal(alone.ids[0], whole.ids[row])


def test_a_certain_draft_is_always_taken(toy):
    def step(tokens, cache):  # the next token is the last one plus 1, modulo 5
        return jax.nn.one_hot((tokens + 1) % 5, 5) * 9.0, cache

    text = jnp.array([[0, 1, 2, 3, 4, 0, 1]])
    found, counts = speculate(
        step,
        None,
        jnp.array([[1]]),
        draft=PromptLookup(3),
        rewind=lambda cache, n: cache,
        draft_length=4,
        max_length=11,
        eos_id=None,
        seen=text,
    )
    assert found.ids.tolist() == [[2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]]
    assert counts.drafted == counts.accepted == 8


def test_look_up_takes_the_longest_and_latest_occurrence():
    tokens = [[1, 2, 3, 9, 2, 3, 7, 5, 3, 1, 2, 3, -1], [5, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, -1]]
    once = [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 0, 3, -1]  # only its last token came before
    found = look_up(jnp.array([*tokens, once]), jnp.int32(12), 3, 3)
    assert found.tolist() == [[9, 2, 3], [4, 5, 6], [-1, -1, -1]]
    assert look_up(jnp.array(tokens), jnp.int32(4), 3, 2).tolist() == [[-1, -1], [-1, -1]]


def test_what_is_refused_is_drafted_seldom():
    """The model goes on as the prompt does for 20 tokens, then no longer."""

    def step(tokens, cache):  # the next is 1 more, modulo 5; from the 20th on by a rule of its place
        place = cache[:, None] + jnp.arange(tokens.shape[1])
        more = 1 + (place * place // 7 % 3) * (place > 20)
        return 9.0 * jax.nn.one_hot((tokens + more) % 5, 5), cache + tokens.shape[1]

    options = {"rewind": lambda cache, n: cache - n, "draft_length": 4, "max_length": 120, "eos_id": None}
    found, counts = speculate(step, jnp.zeros(1, jnp.int32), jnp.array([[1]]), draft=PromptLookup(3),
                              seen=jnp.array([[0, 1, 2, 3, 4, 0, 1]]), **options)
    expected = greedy(step, jnp.zeros(1, jnp.int32), jnp.array([[1]]), max_length=120, eos_id=None)
    assert found.ids.tolist() == expected.ids.tolist()
    assert int(counts.accepted) >= 16
    assert int(counts.drafted) <= 4 * (5 + 5 + 3)  # accepted, until the credit is spent, and in 100 ordinary steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_length": 0}, "draft_length is 0"),
        ({"temperature": 0.5}, "temperature is 0.5, which draws tokens, but key is None"),
        ({"temperature": 0.5, "key": jax.random.key(0), "top_k": 0}, "top_k is 0"),
    ],
)
def test_refuses(toy, options, message):
    model = toy(vocab=4, seed=0)
    step = partial(stacked_step, model.arrays)
    options = {"draft": PromptLookup(), "rewind": rewind, "max_length": 3, "eos_id": EOS, **options}
    with pytest.raises(ValueError, match=message):
        speculate(step, empty(1), jnp.ones((1, 1), int), **options)


def test_refuses_a_step_without_every_position(toy):
    model = toy(vocab=4, seed=0)
    options = {"draft": PromptLookup(), "rewind": rewind, "max_length": 3, "eos_id": EOS}
    with pytest.raises(ValueError, match="speculation needs every position"):
        speculate(model.last_step, model.cache(1), jnp.ones((1, 1), int), **options)
