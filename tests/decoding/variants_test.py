"""Coverage penalty, diverse groups, lexical constraints: against exhaustive search and references in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.decoding import beam_search, diverse_beam_search, lexical_beam_search
from tfm.decoding.lexical import matched

EOS = 2


def tokens_of(found, row, i):
    return tuple(np.asarray(found.ids)[row, i, : int(found.lengths[row, i])].tolist())


def attention(token):
    """Attention of one step to 3 source tokens, by the last token fed."""
    return np.roll(np.array([0.8, 0.15, 0.05]), token)


def test_coverage_penalty_equals_exhaustive_search(toy):
    model, beta, alpha, limit = toy(vocab=4, seed=1), 0.7, 0.6, 4
    table = jnp.asarray(np.stack([attention(i) for i in range(4)]), jnp.float32)

    def step(tokens, cache):
        return *model.step(tokens, cache), table[tokens[:, -1]]

    mask = jnp.array([[True, True, True], [True, True, False]])
    found = jax.jit(
        lambda p: beam_search(
            step, model.cache(2), p, beam_size=27, n_best=4, alpha=alpha, max_length=limit, eos_id=EOS, coverage=beta,
            source_mask=mask,
        )
    )(jnp.array([[1], [3]]))  # fmt: skip
    for row, prompt in enumerate([1, 3]):
        expected = []
        for score, ids in model.finished([prompt], limit, EOS, alpha):
            attended = sum(attention(i) for i in (prompt, *ids[:-1]))[np.asarray(mask[row])]
            expected.append((score + beta * np.log(np.minimum(attended, 1)).sum(), ids))
        expected = sorted(expected, reverse=True)[:4]
        np.testing.assert_allclose(found.scores[row], [s for s, _ in expected], atol=1e-4)
        assert [tokens_of(found, row, i) for i in range(4)] == [y for _, y in expected]


def diverse_reference(model, prompt, groups, size, diversity, limit):
    """Algorithm 1 in NumPy, every group going on to the limit: the best `size` finished ones of each group."""
    live, ended = [[(0.0, ())] for _ in range(groups)], [[] for _ in range(groups)]
    for _ in range(limit):
        used = np.zeros(model.vocab)
        for g in range(groups):
            grown, ends = [], []
            for total, ids in live[g]:
                for token in range(model.vocab):
                    new = (total + model.log_probs(prompt, (*ids, token))[-1], (*ids, token))
                    if token == EOS:
                        ends.append(new)
                    else:
                        grown.append((new[0] - diversity * used[token], *new))
            live[g] = [(total, ids) for _, total, ids in sorted(grown, reverse=True)[:size]]
            ended[g] += [end for end in ends if sum(other[0] > end[0] for other in live[g] + ends) < size]
            for _, ids in live[g]:
                used[ids[-1]] += 1
    return [sorted(pool, reverse=True)[:size] for pool in ended]


def test_diverse_groups_follow_the_algorithm(toy):
    for seed in range(4):
        model = toy(vocab=6, seed=seed, sharpness=0.5)
        run = model.jit(
            diverse_beam_search, beam_size=6, groups=3, diversity=0.8, n_best=3, alpha=0.0, max_length=5, eos_id=EOS
        )
        found = run([[1], [4]])
        for row, prompt in enumerate([1, 4]):
            taken = []
            pools = diverse_reference(model, [prompt], 3, 2, 0.8, 5)
            for pool in pools:
                taken += [h for h in pool if h[1] not in [ids for _, ids in taken]][:1]
            whole = {tokens_of(found, row, i): found.scores[row, i] for i in range(3) if found.finished[row, i]}
            best = [ids for _, ids in sorted(taken, reverse=True)]
            assert [ids for ids in whole if ids in best] == best
            every = {ids: total for pool in pools for total, ids in pool}  # further ones fill up for empty groups
            for ids, score in whole.items():
                np.testing.assert_allclose(score, every[ids], atol=1e-4)


def test_one_group_is_beam_search(toy):
    model = toy(vocab=6, seed=0)
    options = {"beam_size": 3, "n_best": 3, "max_length": 6, "eos_id": EOS}
    one = model.jit(diverse_beam_search, groups=1, **options)([[1], [4]])
    other = model.jit(beam_search, **options)([[1], [4]])
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)


def occurs(phrase, ids):
    return any(tuple(ids[i : i + len(phrase)]) == phrase for i in range(len(ids)))


def test_lexical_constraints_equal_exhaustive_search(toy):
    model, limit = toy(vocab=4, seed=2), 5
    phrases = [[(3, 0), (1,)], [(0, 0, 3)]]
    padded = np.full((2, 2, 3), -1)
    for row, wanted in enumerate(phrases):
        for c, phrase in enumerate(wanted):
            padded[row, c, : len(phrase)] = phrase
    run = model.jit(lexical_beam_search, beam_size=81, n_best=4, alpha=0.6, max_length=limit, eos_id=EOS)
    found = run([[1], [3]], phrases=padded)
    for row, prompt in enumerate([1, 3]):
        every = model.finished([prompt], limit, EOS, 0.6)
        expected = [h for h in every if all(occurs(phrase, h[1]) for phrase in phrases[row])][:4]
        assert [tokens_of(found, row, i) for i in range(4)] == [y for _, y in expected]
        np.testing.assert_allclose(found.scores[row], [s for s, _ in expected], atol=1e-4)


def test_a_small_beam_still_finds_improbable_phrases(toy):
    run = None
    for seed in range(5):
        model = toy(vocab=12, seed=seed)
        rng = np.random.default_rng(seed)
        padded = rng.integers(3, 12, (3, 2, 2))
        run = model.jit(lexical_beam_search, beam_size=5, max_length=16, eos_id=EOS)
        found = run([[1], [3], [5]], phrases=padded)
        for row in range(3):
            ids = tokens_of(found, row, 0)
            assert bool(found.finished[row, 0]) and all(occurs(tuple(p), ids) for p in padded[row].tolist())
            expected = model.log_probs([[1], [3], [5]][row], ids)
            np.testing.assert_allclose(found.log_probs[row, 0, : len(ids)], expected, atol=1e-4)


def test_matched_counts_whole_phrases_anywhere_and_beginnings_at_the_end():
    text = jnp.array([[[7, 8, 9, 1, 7, 8, -1, -1]]])
    phrases = jnp.array([[[7, 8, 9], [8, 9, 1], [9, 7, -1], [7, 8, 1], [8, 7, -1], [5, -1, -1], [-1, -1, -1]]])
    assert matched(text, jnp.int32(6), phrases)[0, 0].tolist() == [3, 3, 0, 2, 1, 0, 0]


@pytest.mark.parametrize(
    ("search", "options", "message"),
    [
        (beam_search, {"coverage": 0.2}, "coverage is 0.2: it needs source_mask, and a step that returns"),
        (beam_search, {"coverage": 0.2, "beam_size": 1}, "coverage is 0.2 and beam_size 1"),
        (beam_search, {"coverage": -1.0}, "coverage is -1.0"),
        (diverse_beam_search, {"groups": 3}, "beam_size is 4: expected a multiple of groups, 3"),
        (diverse_beam_search, {"n_best": 3}, "n_best is 3: expected a multiple of groups, 2"),
        (diverse_beam_search, {"diversity": -1.0}, "diversity is -1.0"),
        (lexical_beam_search, {"phrases": jnp.ones((2, 1, 1), int)}, r"phrases has shape \[2, 1, 1\]"),
        (lexical_beam_search, {"phrases": jnp.ones((1, 1, 1), int), "beam_size": 1}, "beam_size is 1: phrases need"),
    ],
)
def test_refuses(toy, search, options, message):
    model = toy(vocab=4, seed=0)
    with pytest.raises(ValueError, match=message):
        search(model.step, model.cache(1), jnp.array([[1]]), max_length=3, eos_id=EOS, **options)
