from functools import partial

import jax
import numpy as np
import pytest

from tfm.decoding import Beam, DiverseBeam, Greedy, Sample, Session, beam_search, diverse_beam_search, greedy

EOS = 2
PROMPTS = np.array([[1, 3], [4, 4], [0, 8], [7, 5], [6, 6], [8, 1], [3, 0], [5, 2]])
LIMITS = np.array([3, 24, 6, 10, 8, 2, 5, 24])


@pytest.mark.parametrize("groups", [None, 2])
def test_pieces_and_dropped_rows_change_nothing(toy, make_toy_step, groups):
    model = toy(vocab=9, seed=3)
    if groups is None:
        search = Beam(eos_ids=(EOS,), beam_size=3, n_best=2)
        run = model.jit(beam_search, eos_id=EOS, beam_size=3, n_best=2, buffer_length=24)
    else:
        search = DiverseBeam(eos_ids=(EOS,), beam_size=2, n_best=2, groups=groups)
        run = model.jit(diverse_beam_search, eos_id=EOS, beam_size=4, n_best=2, groups=groups, buffer_length=24)
    whole = run(PROMPTS, max_length=LIMITS)
    session = Session(search, make_toy_step, model.arrays, None, model.cache(8), PROMPTS, max_length=LIMITS)
    sizes = [session.size]
    while not session.done.all():
        session.advance(4)
        session.compact([1, 2, 4])
        sizes.append(session.size)
    assert sizes[0] == 8 and sizes == sorted(sizes, reverse=True) and sizes[-1] < 8
    found = session.result()
    np.testing.assert_array_equal(found.ids, whole.ids)
    np.testing.assert_array_equal(found.finished, whole.finished)
    np.testing.assert_allclose(found.scores, whole.scores, atol=1e-5)
    np.testing.assert_allclose(found.log_probs, whole.log_probs, atol=1e-5)


@pytest.mark.parametrize("search", [Greedy((EOS,)), Sample((EOS,), temperature=1.5)])
def test_token_searches_run_in_pieces_too(toy, make_toy_step, search):
    model = toy(vocab=9, seed=4)
    keys = jax.random.split(jax.random.key(0), 8)
    start = partial(Session, search, make_toy_step, model.arrays, None, model.cache(8), PROMPTS, keys=keys)
    whole = start(max_length=LIMITS).run(24)
    pieces = start(max_length=LIMITS).run(3, sizes=[4, 2, 1])
    np.testing.assert_array_equal(pieces.ids, whole.ids)
    np.testing.assert_array_equal(pieces.finished, whole.finished)
    if isinstance(search, Greedy):
        expected = model.jit(greedy, eos_id=EOS, buffer_length=24)(PROMPTS, max_length=LIMITS)
        np.testing.assert_array_equal(whole.ids, expected.ids)


def test_streams_growing_prefixes_and_stops_rows(toy, make_toy_step):
    model = toy(vocab=9, seed=3)
    session = Session(Greedy(()), make_toy_step, model.arrays, None, model.cache(8), PROMPTS, max_length=20)
    lengths = []
    for found in session.stream(5):
        lengths.append(found.lengths.tolist())
        if len(lengths) == 2:
            session.stop(np.arange(8) < 3)
    assert [row[7] for row in lengths] == [5, 10, 15, 20]
    assert [row[0] for row in lengths] == [5, 10, 10, 10]
    whole = model.jit(greedy, eos_id=None, max_length=20)(PROMPTS)
    np.testing.assert_array_equal(found.ids[3:], whole.ids[3:])
    np.testing.assert_array_equal(found.ids[:3, :10], whole.ids[:3, :10])


def test_a_few_programs_serve_any_number_of_finished_rows(toy, make_toy_step):
    model = toy(vocab=9, seed=5)
    traces = []

    def make_step(weights, rows):
        traces.append(1)
        return make_toy_step(weights, rows)

    for seed in range(4):
        limits = np.random.default_rng(seed).integers(1, 24, 8)
        session = Session(
            Greedy(()), make_step, model.arrays, None, model.cache(8), PROMPTS, max_length=limits, buffer_length=24
        )
        found = session.run(2, sizes=[2, 4])
        assert found.lengths.tolist() == limits.tolist()
    assert len(traces) <= 1 + 3  # the start, and one loop for each size


def test_refuses_what_would_never_end_or_never_begin(toy, make_toy_step):
    model = toy(vocab=9, seed=3)

    def session(max_length):
        return Session(Greedy(()), make_toy_step, model.arrays, None, model.cache(8), PROMPTS, max_length=max_length)

    with pytest.raises(ValueError, match="max_length is 0"):
        session(0)
    for call in (lambda: next(session(4).stream(0)), lambda: session(4).run(0)):
        with pytest.raises(ValueError, match="steps is 0"):
            call()
