import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.decoding import (
    beam_search,
    diverse_beam_search,
    greedy,
    length_penalty,
    lexical_beam_search,
    score,
)
from tfm.decoding.logits import counts
from tfm.decoding.power_beam import power_beam_search

EOS = 2


def tokens_of(ids, length):
    return tuple(int(i) for i in ids[:length])


def run(model, prompt, **options):
    arrays = {name: options.pop(name) for name in list(options) if isinstance(options[name], np.ndarray)}
    return model.jit(beam_search, eos_id=EOS, **options)(prompt, **arrays)


def test_length_penalty_is_the_formula_of_wu_et_al():
    np.testing.assert_allclose(length_penalty(jnp.array([1, 7, 25]), 0.6), [1.0, 2**0.6, 5**0.6], rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0, -0.5])
def test_equals_exhaustive_search(toy, alpha):
    prompts = [[1], [0], [3], [2]]
    for seed in range(3):
        model = toy(vocab=4, seed=seed)
        found = run(model, prompts, beam_size=81, n_best=6, alpha=alpha, max_length=4)
        for row, prompt in enumerate(prompts):
            expected = model.finished(prompt, 4, EOS, alpha)[:6]
            np.testing.assert_allclose(found.scores[row], [s for s, _ in expected], atol=1e-4)
            assert [tokens_of(found.ids[row, i], found.lengths[row, i]) for i in range(6)] == [y for _, y in expected]
            assert np.all(found.finished[row])


def reference_search(model, prompt, size, n_best, alpha, limit):
    """Beam search without early stopping, in float64: every live hypothesis goes on to the limit."""
    live, ended = [(0.0, ())], []
    for n in range(1, limit + 1):
        grown = sorted(((total + model.log_probs(prompt, (*ids, token))[-1], (*ids, token))
                        for total, ids in live for token in range(model.vocab)), reverse=True)
        ended += [(total / ((5 + n) / 6) ** alpha, ids) for total, ids in grown[:size] if ids[-1] == EOS]
        live = [new for new in grown if new[1][-1] != EOS][:size]
    cut = [(total / ((5 + limit) / 6) ** alpha, ids) for total, ids in live]
    return (sorted(ended, reverse=True) + sorted(cut, reverse=True))[:n_best]


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_stops_early_only_where_nothing_changes(toy, alpha):
    limits = [3, 12, 7, 9]
    prompts = [[1, 3], [0, 4], [3, 0], [4, 4]]
    for seed in range(4):
        model = toy(vocab=5, seed=seed, sharpness=1.5)
        found = run(model, prompts, beam_size=3, n_best=3, alpha=alpha, max_length=np.array(limits), buffer_length=12)
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            expected = reference_search(model, prompt, 3, 3, alpha, limit)
            ids = [tokens_of(found.ids[row, i], found.lengths[row, i]) for i in range(3)]
            assert ids == [y for _, y in expected]
            np.testing.assert_allclose(found.scores[row], [s for s, _ in expected], atol=1e-4)
            assert [bool(f) for f in found.finished[row]] == [y[-1] == EOS for y in ids]


def test_scores_are_teacher_forced_log_probabilities(toy):
    model = toy(vocab=7, seed=5)
    prompt = jnp.array([[1], [3], [6]])
    found = run(model, prompt, beam_size=4, n_best=4, alpha=0.6, max_length=8)
    for row in range(3):
        for i in range(4):
            n = int(found.lengths[row, i])
            expected = model.log_probs([int(prompt[row, 0])], tokens_of(found.ids[row, i], n))
            np.testing.assert_allclose(found.log_probs[row, i, :n], expected, atol=1e-4)
            np.testing.assert_allclose(found.scores[row, i], expected.sum() / ((5 + n) / 6) ** 0.6, atol=1e-4)
    mask = jnp.arange(8) < found.lengths[..., None]
    again, log_probs = model.jit(score, alpha=0.6)(prompt, targets=found.ids, mask=mask)
    np.testing.assert_allclose(again, found.scores, atol=1e-4)
    np.testing.assert_allclose(log_probs, found.log_probs, atol=1e-4)


def test_results_are_distinct_and_sorted(toy):
    for seed in range(5):
        found = run(toy(vocab=4, seed=seed), [[1], [3]], beam_size=6, n_best=6, max_length=6)
        for row in range(2):
            ids = {tokens_of(y, n) for y, n in zip(found.ids[row], found.lengths[row], strict=True)}
            assert len(ids) == 6
            for kind in (True, False):
                scores = np.asarray(found.scores[row])[np.asarray(found.finished[row]) == kind]
                assert np.all(np.diff(scores) <= 0)
            assert np.all(np.diff(np.asarray(found.finished[row]).astype(int)) <= 0)


def test_beam_of_one_is_greedy(toy):
    for seed in range(3):
        model = toy(vocab=6, seed=seed)
        prompt = jnp.array([[1], [3], [5]])
        one = run(model, prompt, beam_size=1, alpha=0.6, max_length=9)
        other = model.jit(greedy, max_length=9, eos_id=EOS, alpha=0.6)(prompt)
        np.testing.assert_array_equal(one.ids[:, 0], other.ids)
        np.testing.assert_array_equal(one.scores[:, 0], other.scores)
        np.testing.assert_array_equal(one.finished[:, 0], other.finished)


def test_results_do_not_depend_on_the_batch(toy):
    model = toy(vocab=9, seed=3)
    prompts = np.array([[1, 3], [4, 4], [0, 8], [7, 5], [6, 6]])
    limits = np.array([3, 10, 6, 10, 8])
    search = jax.jit(
        lambda p, m: beam_search(
            model.last_step, model.cache(len(p)), p, eos_id=EOS, beam_size=3, n_best=2, max_length=m, buffer_length=10
        )
    )
    whole = search(prompts, limits)
    for row in range(5):
        alone = search(prompts[row : row + 1], limits[row : row + 1])
        np.testing.assert_array_equal(alone.ids[0], whole.ids[row])
        np.testing.assert_allclose(alone.scores[0], whole.scores[row], atol=1e-5)
    order = np.array([4, 2, 0, 3, 1])
    turned = search(prompts[order], limits[order])
    np.testing.assert_array_equal(turned.ids, np.asarray(whole.ids)[order])


def test_ties_go_to_the_smaller_beam_and_id():
    def step(tokens, cache):
        return jnp.zeros((*tokens.shape, 4)), cache

    options = {"beam_size": 3, "n_best": 3, "alpha": 0.0, "max_length": 2, "eos_id": 3}
    found = jax.jit(lambda p: beam_search(step, None, p, **options))(jnp.array([[1]]))
    assert [tokens_of(y, n) for y, n in zip(found.ids[0], found.lengths[0], strict=True)] == [(3,), (0, 3), (1, 3)]


def test_without_an_end_the_beam_is_returned_unfinished(toy):
    model = toy(vocab=4, seed=1)
    found = model.jit(beam_search, beam_size=64, n_best=4, max_length=3, eos_id=None)([[1]])
    every = [(model.log_probs([1], y).sum() / (8 / 6) ** 0.6, y) for y in np.ndindex(4, 4, 4)]
    expected = sorted(every, reverse=True)[:4]
    assert [tuple(int(i) for i in y) for y in found.ids[0]] == [y for _, y in expected]
    np.testing.assert_allclose(found.scores[0], [s for s, _ in expected], atol=1e-4)
    assert not np.any(found.finished)


def test_several_ends(toy):
    model = toy(vocab=5, seed=2)
    found = model.jit(beam_search, beam_size=60, alpha=0.6, max_length=3, eos_id=(2, 4))([[1]])
    best = max(
        (model.log_probs([1], y).sum() / ((5 + len(y)) / 6) ** 0.6, y)
        for n in range(3)
        for head in np.ndindex(*[5] * n)
        for y in [(*head, 2), (*head, 4)]
        if not {2, 4} & set(head)
    )
    np.testing.assert_allclose(found.scores[0, 0], best[0], atol=1e-4)
    assert tokens_of(found.ids[0, 0], found.lengths[0, 0]) == best[1]


def test_fewer_hypotheses_than_asked_for():
    def step(tokens, cache):  # only the end may follow
        return jnp.log(jnp.array([0.0, 0.0, 1.0])) + jnp.zeros((*tokens.shape, 1)), cache

    options = {"beam_size": 3, "n_best": 2, "max_length": 4, "eos_id": 2}
    found = jax.jit(lambda p: beam_search(step, None, p, **options))(jnp.array([[1]]))
    assert found.ids[0].tolist() == [[2, 0, 0, 0], [0, 0, 0, 0]]
    assert found.lengths[0].tolist() == [1, 0]
    assert found.scores[0].tolist() == [0.0, -np.inf]
    assert found.finished[0].tolist() == [True, False]


@pytest.mark.parametrize("search, settings", [
    (beam_search, {"alpha": 1.0}), (power_beam_search, {"power": 1.0}), (diverse_beam_search, {"groups": 2}),
    (lexical_beam_search, {"phrases": jnp.zeros((2, 1, 1), jnp.int32)})])
def test_where_the_rules_allow_no_further_token_the_text_so_far_is_given(search, settings):
    """Of three words none may come twice, and the end is forbidden: each beam gets stuck at a permutation of them."""
    probabilities = jnp.log(jnp.array([0.5, 0.3, 0.1, 0.1]))

    def step(tokens, cache):
        return probabilities + jnp.zeros((*tokens.shape, 1)), cache

    def once(history):
        return (counts(history.tokens, 4) == 0) & (jnp.arange(4) < 3)

    found = jax.jit(lambda p: search(step, None, p, beam_size=4, n_best=2, max_length=6, eos_id=3, allow=(once,),
                                     seen=jnp.full((2, 1), -1), **settings))(jnp.array([[3], [3]]))
    assert found.lengths.tolist() == [[3, 3]] * 2 and not found.finished.any()
    assert np.sort(found.ids[..., :3], axis=-1).tolist() == [[[0, 1, 2]] * 2] * 2
    np.testing.assert_allclose(found.log_probs.sum(-1), np.log(0.5 * 0.3 * 0.1), atol=1e-5)
    nothing = search(step, None, jnp.array([[3], [3]]), beam_size=4, n_best=2, max_length=6, eos_id=3,
                     allow=(lambda history: jnp.zeros((1, 4), bool),), **settings)
    assert nothing.lengths.tolist() == [[0, 0]] * 2 and (nothing.scores == -np.inf).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 2, "n_best": 3}, "beam_size is 2, n_best 3"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_length": np.array([3, 4])}, r"max_length has shape \[2\]"),
        ({"prompt": jnp.zeros((1,), jnp.int32)}, r"prompt is int32\[1\]"),
        ({"prompt": jnp.zeros((1, 1))}, "prompt is float32"),
        ({"seen": jnp.ones((2, 2), int)}, r"seen has shape \[2, 2\]"),
        ({"buffer_length": 3}, "buffer_length is 3"),
        ({"max_length": 2.5}, "max_length is 2.5"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"eos_id": 4}, r"eos_id is \[4\]: expected ids below 4"),
    ],
)
def test_refuses(toy, options, message):
    model = toy(vocab=4, seed=0)
    arguments = {"prompt": jnp.array([[1]]), "max_length": 4, "eos_id": EOS, **options}
    for search in (beam_search, greedy):
        if search is beam_search or not {"beam_size", "n_best"} & set(options):
            with pytest.raises(ValueError, match=message):
                search(model.step, model.cache(1), **arguments)


def test_a_negative_end_is_none(toy):
    model = toy(vocab=4, seed=0)
    found = [
        beam_search(model.step, model.cache(1), jnp.array([[1]]), max_length=4, eos_id=end).ids for end in (-1, None)
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("eos_id", [np.int64(EOS), jnp.int32(EOS), np.array([EOS]), (EOS,)])
def test_the_end_may_come_in_an_array(toy, eos_id):
    model = toy(vocab=4, seed=0)
    found = [
        beam_search(model.step, model.cache(1), jnp.array([[1]]), max_length=4, eos_id=end).ids for end in (EOS, eos_id)
    ]
    np.testing.assert_array_equal(*found)


def test_an_improbable_end_does_not_compete():
    """The end alone has the best score of all whole outputs, 0.02, but is never among the two best candidates."""

    def step(tokens, cache):
        early, late = jnp.array([0.49, 0.49, 0.02]), jnp.array([0.05, 0.05, 0.9])  # two words and the end
        return jnp.log(jnp.where((cache >= 8)[:, None], late, early))[:, None], cache + 1

    @jax.jit
    def search():
        ids, _, finished = beam_search(step, jnp.zeros(1, jnp.int32), jnp.array([[0]]), beam_size=2, alpha=0.0,
                                       max_length=20, eos_id=2)
        return ids, finished

    ids, finished = search()
    assert finished[0, 0]
    assert ids[0, 0].tolist().index(2) == 8
