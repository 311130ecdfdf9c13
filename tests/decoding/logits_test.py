import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from tfm.decoding import History, beam_search, greedy
from tfm.decoding import logits as rules

V, P, L = 9, 3, 5
TOKENS = np.random.default_rng(0).integers(0, 4, (6, P + L)).astype(np.int32)
LOGITS = np.random.default_rng(1).normal(size=(6, V)).astype(np.float32)


def history(length):
    tokens = np.where(np.arange(P + L) < length, TOKENS, -1)
    return History(jnp.array(tokens), jnp.int32(length), P, V)


def theirs(processor, length):
    return processor(torch.tensor(TOKENS[:, :length]).long(), torch.tensor(LOGITS)).numpy()


@pytest.mark.parametrize("length", [P, P + 2, P + L - 1])
@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty, length):
    ours = rules.RepetitionPenalty(penalty)(jnp.array(LOGITS), history(length))
    np.testing.assert_allclose(ours, theirs(hf.RepetitionPenaltyLogitsProcessor(penalty), length), rtol=1e-6)


@pytest.mark.parametrize("length", [P, P + 4])
def test_count_penalty_counts_generated_tokens(length):
    ours = rules.CountPenalty(presence=0.5, frequency=0.25)(jnp.array(LOGITS), history(length))
    expected = LOGITS.copy()
    for row in range(6):
        for token in set(TOKENS[row, P:length].tolist()):
            expected[row, token] -= 0.5 + 0.25 * np.sum(TOKENS[row, P:length] == token)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("length", [P, P + 1, P + L - 2, P + L - 1])
def test_forced_tokens_are_those_of_transformers(length):
    forced = rules.Forced(first=(4,), last=(6, 7))
    limits = jnp.full(6, L)
    ours = forced(jnp.array(LOGITS), dataclasses.replace(history(length), limit=limits))
    first = hf.ForcedBOSTokenLogitsProcessor(4)  # it looks for the second token of all: the prompt is one to it
    last = hf.ForcedEOSTokenLogitsProcessor(P + L, [6, 7])
    tokens = torch.tensor(TOKENS[:, P - 1 : length]).long()
    expected = last(torch.tensor(TOKENS[:, :length]).long(), first(tokens, torch.tensor(LOGITS)))
    np.testing.assert_array_equal(ours, expected.numpy())


def test_the_forced_end_goes_by_the_limit_of_the_row():
    limits = jnp.array([1, 2, 3, 2, 5, 1])
    ours = rules.Forced(last=(6,))(jnp.array(LOGITS), dataclasses.replace(history(P + 1), limit=limits))
    assert (np.isinf(np.asarray(ours)).sum(axis=1) == [0, V - 1, 0, V - 1, 0, 0]).all()


def test_a_least_length_may_count_the_prompt():
    tokens = jnp.array([[-1, 2, 3, 4, -1, -1], [1, 2, 3, 4, -1, -1]])  # prompts of 2 and 3, one new token
    ours = rules.MinLength(4, (0,), prompt=True)(History(tokens, jnp.int32(4), 3, V))
    assert ours[:, 0].tolist() == [False, True] and bool(jnp.all(ours[:, 1:]))


def test_logit_bias_is_that_of_transformers():
    biases = ((1, 0.5), (7, -3.0))
    ours = rules.LogitBias(biases)(jnp.array(LOGITS), history(P))
    other = hf.SequenceBiasLogitsProcessor([[[i], b] for i, b in biases])
    np.testing.assert_allclose(ours, theirs(other, P), rtol=1e-6)


@pytest.mark.parametrize("length", [P, P + 1, P + 2, P + L - 1])
@pytest.mark.parametrize(
    ("ours", "other"),
    [
        (rules.Suppress((1, 4)), hf.SuppressTokensLogitsProcessor([1, 4])),
        (rules.MinLength(2, (0, 5)), hf.MinNewTokensLengthLogitsProcessor(P, 2, [0, 5])),
        (rules.NoRepeatNgram(1), hf.NoRepeatNGramLogitsProcessor(1)),
        (rules.NoRepeatNgram(2), hf.NoRepeatNGramLogitsProcessor(2)),
        (rules.NoRepeatNgram(3), hf.NoRepeatNGramLogitsProcessor(3)),
        (rules.BadWords(((3,), (1, 2), (2, 0, 1))), hf.NoBadWordsLogitsProcessor([[3], [1, 2], [2, 0, 1]])),
    ],
)
def test_forbidding_rules_are_those_of_transformers(ours, other, length):
    allowed = np.broadcast_to(ours(history(length)), (6, V))
    np.testing.assert_array_equal(allowed, theirs(other, length) > -np.inf)


def test_repeats_are_found_only_among_real_tokens():
    tokens = jnp.array([[-1, -1, 2, 3, -1, -1, -1]])
    allowed = rules.NoRepeatNgram(3)(History(tokens, jnp.int32(4), 4, 5))
    assert np.all(allowed)


def test_forced_tokens_come_first(toy):
    model = toy(vocab=6, seed=0)
    prompt = jnp.array([[1], [4]])
    free = model.jit(greedy, max_length=4, eos_id=2)([[1, 3, 5], [4, 3, 5]])
    first = model.jit(greedy, max_length=6, eos_id=2, allow=(rules.ForceFirst((3, 5)),))(prompt)
    assert first.ids[:, :2].tolist() == [[3, 5], [3, 5]]
    np.testing.assert_array_equal(first.ids[:, 2:], free.ids)
    prefix = rules.ForcePrefix(jnp.array([[3, 5, 0], [5, -1, -1]]))
    found = model.jit(beam_search, beam_size=3, n_best=3, max_length=5, eos_id=2, allow=(prefix,))(prompt)
    assert np.all(found.ids[0, :, :3] == jnp.array([3, 5, 0]))
    assert np.all(found.ids[1, :, 0] == 5)
    assert len(set(np.asarray(found.ids[1, :, 1]).tolist())) > 1


def test_one_of_finds_the_best_of_the_given_sequences(toy):
    model = toy(vocab=6, seed=3)
    sequences = [(3, 5, 2), (3, 2), (0, 1, 1, 2), (5, 4, 2)]
    padded = jnp.array([[*s, *[-1] * (4 - len(s))] for s in sequences])
    options = {"beam_size": 4, "n_best": 4, "alpha": 1.0, "max_length": 6, "eos_id": 2}
    found = model.jit(beam_search, allow=(rules.OneOf(padded),), **options)([[1]])
    expected = sorted(((model.log_probs([1], s).sum() / ((5 + len(s)) / 6), s) for s in sequences), reverse=True)
    got = [tuple(y[:n].tolist()) for y, n in zip(np.asarray(found.ids[0]), found.lengths[0].tolist(), strict=True)]
    assert got == [s for _, s in expected]
    np.testing.assert_allclose(found.scores[0], [s for s, _ in expected], atol=1e-4)


def test_ids_past_the_vocabulary_are_never_drawn(toy):
    model = toy(vocab=8, seed=1)
    prompt = jnp.arange(5)[:, None]
    free = model.jit(greedy, max_length=8, eos_id=None)(prompt)
    assert int(free.ids.max()) > 4
    found = model.jit(greedy, max_length=8, eos_id=None, allow=(rules.BelowSize(5),))(prompt)
    assert int(found.ids.max()) <= 4


def test_beams_rank_by_reweighted_and_report_own_log_probabilities(toy):
    model = toy(vocab=4, seed=2)
    bias = rules.LogitBias(((0, 1.5), (3, -1.0)))
    options = {"beam_size": 27, "max_length": 3, "eos_id": 2, "alpha": 1.0}
    found = model.jit(beam_search, reweight=(bias,), **options)([[1]])

    class Biased(type(model)):
        def logits(self, tokens):
            return super().logits(tokens) + np.array([1.5, 0, 0, -1.0])

    score, ids = Biased(4, 2).finished([1], 3, 2, 1.0)[0]
    assert tuple(found.ids[0, 0, : len(ids)].tolist()) == ids
    np.testing.assert_allclose(found.scores[0, 0], score, atol=1e-4)
    np.testing.assert_allclose(found.log_probs[0, 0, : len(ids)], model.log_probs([1], ids), atol=1e-4)


def test_equal_settings_compile_once():
    traces = []

    @jax.jit
    def run(x):
        traces.append(1)
        return x

    jitted = jax.jit(lambda rule, x: run(rule(x, history(P))), static_argnums=0)
    jitted(rules.LogitBias(((1, 0.5),)), LOGITS)
    jitted(rules.LogitBias(((1, 0.5),)), LOGITS)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.RepetitionPenalty(0.0), "repetition_penalty is 0.0"),
        (lambda: rules.NoRepeatNgram(0), "no_repeat_ngram is 0"),
        (lambda: rules.BadWords(((),)), "bad_words holds an empty sequence"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()
