"""Ragged rows through compiled decoding: the same result in any company, few programs, scores that add up."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from tfm import batching, inference
from tfm.config import ModelConfig
from tfm.decoding import session
from tfm.decoding.logits import Suppress
from tfm.inference import Search, bucket, embed, generate, score_pairs, stream
from tfm.models import build, init_params
from tfm.models.stepper import prepare

EOS, START = 2, 1
TRANSLATOR = ModelConfig(vocab_size=31, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1)
WRITER = replace(TRANSLATOR, encoder_layers=0, position="rotary")


def sharp_params(config):
    """Initial parameters, scaled up so that the distributions are far from uniform."""
    return jax.tree.map(lambda x: 2.5 * x, init_params(config, jax.random.key(1)))


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(0)
    return [random.integers(3, 31, n).tolist() for n in (3, 9, 5, 1)]


def run(config, rows, search, **options):
    limits = [len(row) + 6 for row in rows]
    return generate(config, sharp_params(config), rows, search, limits=limits, start_id=START, **options)


def ids(results):
    return [[h.ids for h in row] for row in results]


def log_softmax64(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def forced(config, row, target):
    """log p of target by one uncached pass over this row alone, softmax in float64 NumPy."""
    module, variables = build(config), {"params": sharp_params(config)}
    if config.is_encoder_decoder:
        logits = module.apply(variables, np.array([row]), np.array([[START, *target[:-1]]]))[0]
    else:
        logits = module.apply(variables, np.array([row + target[:-1]]))[0][len(row) - 1 :]
    return log_softmax64(logits)[np.arange(len(target)), target]


@pytest.mark.parametrize(("config", "beam_size"), [(TRANSLATOR, 3), (WRITER, 1)], ids=["translator", "writer"])
def test_a_row_gives_the_same_alone_in_any_batch_and_in_any_order(config, beam_size, rows):
    search = Search(beam_size=beam_size, n_best=min(2, beam_size), eos_ids=(EOS,))
    together = run(config, rows, search)
    order = [3, 0, 2, 1]
    shuffled = run(config, [rows[i] for i in order], search, batch_size=2)
    assert ids(shuffled) == [ids(together)[i] for i in order]
    assert ids(run(config, rows[1:2], search)) == ids(together)[1:2]


@pytest.mark.parametrize(("config", "beam_size"), [(TRANSLATOR, 3), (WRITER, 1)], ids=["translator", "writer"])
def test_scores_are_those_of_teacher_forcing_in_float64(config, beam_size, rows):
    search = Search(beam_size=beam_size, n_best=min(2, beam_size), eos_ids=(EOS,))
    for row, (best, *_) in zip(rows, run(config, rows, search), strict=True):
        target = best.ids + [EOS] * best.finished
        expected = forced(config, row, target)
        np.testing.assert_allclose(best.log_probs, expected, atol=1e-4)
        assert best.score == pytest.approx(expected.sum() / ((5 + len(target)) / 6) ** 0.6, abs=1e-4)
        assert len(target) <= len(row) + 6
        (scored,) = score_pairs(config, sharp_params(config), [row], [target], start_id=START)
        np.testing.assert_allclose(scored, expected, atol=1e-4)


def test_greedy_takes_the_most_probable_token_each_time(rows):
    (best,) = run(WRITER, rows, Search(eos_ids=(EOS,)))[0]
    module, variables = build(WRITER), {"params": sharp_params(WRITER)}
    logits = module.apply(variables, np.array([rows[0] + best.ids]))[0, len(rows[0]) - 1 : -1]
    assert best.ids == np.argmax(logits, axis=-1).tolist()


def test_prompt_lookup_and_streams_write_what_greedy_search_writes(rows):
    search = Search(eos_ids=(EOS,))
    plain = run(WRITER, rows, search)
    assert ids(run(WRITER, rows, replace(search, lookup=3))) == ids(plain)
    pieces = list(stream(WRITER, sharp_params(WRITER), rows[0], search, limit=len(rows[0]) + 6, start_id=START))
    assert pieces[-1].ids == plain[0][0].ids
    assert all(later.ids[: len(piece.ids)] == piece.ids for piece, later in pairwise(pieces))


@pytest.mark.parametrize("search", [Search(eos_ids=(EOS,)), Search(temperature=1.0, eos_ids=(EOS,))])
def test_without_probabilities_the_same_is_written(search, rows):
    lean = run(TRANSLATOR, rows, replace(search, scored=False))
    assert ids(lean) == ids(run(TRANSLATOR, rows, search))
    for ((found,), row) in zip(lean, rows, strict=True):
        assert len(found.log_probs) == len(found.ids) + found.finished <= len(row) + 6
        assert np.isnan([found.score, *found.log_probs]).all()


def test_sampling_repeats_with_its_seed_and_does_not_depend_on_the_batch(rows):
    search = Search(temperature=1.0, eos_ids=(EOS,))
    first = ids(run(TRANSLATOR, rows, search, seed=3))
    assert ids(run(TRANSLATOR, rows[:2], search, seed=3)) == first[:2]
    assert ids(run(TRANSLATOR, rows, search, seed=4)) != first


def test_two_hundred_lengths_compile_a_few_programs():
    lengths = range(1, 201)
    buckets = {bucket(n) for n in lengths}
    assert len(buckets) == 10
    assert all(bucket(n) >= n for n in lengths)
    before = inference._score_tokens._cache_size()
    config = replace(WRITER, d_model=8, d_ff=8)
    params = init_params(config, jax.random.key(0))
    for n in lengths:
        score_pairs(config, params, [[3]], [[3] * n], start_id=START)
    assert inference._score_tokens._cache_size() - before <= 10


@pytest.mark.slow
@pytest.mark.parametrize("beam_size", [1, 3])
def test_two_hundred_lengths_decode_with_a_few_programs_and_memory_stays_flat(beam_size):
    config = replace(TRANSLATOR, d_model=8, d_ff=8)
    params = prepare(config, init_params(config, jax.random.key(0)))
    search = Search(beam_size=beam_size, eos_ids=(EOS,))
    programs = (inference._search, session._start, session._advance)

    def compiled():
        return [*(p.compiled for p in programs), inference._start._cache_size(), session._result._cache_size()]

    def one_pass():
        for n in range(1, 201):
            generate(config, params, [[3] * n], search, limits=[4 + n % 5], start_id=START)
        return compiled(), len(jax.live_arrays())

    before = compiled()
    after, arrays = one_pass()
    assert all(b - a <= 10 for a, b in zip(before, after, strict=True))  # one for each bucket of sources
    assert one_pass() == (after, arrays)


def test_rows_that_leave_the_batch_and_caches_that_grow_change_nothing(monkeypatch):
    random = np.random.default_rng(5)
    rows = [random.integers(3, 31, 4).tolist() for _ in range(16)]
    limits = [24 if i % 5 == 0 else 2 + i % 3 for i in range(16)]
    sizes = []
    compact = session.Session.compact
    monkeypatch.setattr(session.Session, "compact", lambda self, of: (compact(self, of), sizes.append(self.size)))
    monkeypatch.setattr(inference, "STEPS", 6)
    monkeypatch.setattr(inference, "ROOM", 5)
    slots = []
    widen = inference.widen
    monkeypatch.setattr(inference, "widen", lambda cache, more: (slots.append(more), widen(cache, more))[1])

    def decode():
        return generate(TRANSLATOR, sharp_params(TRANSLATOR), rows, Search(beam_size=2, n_best=2), limits=limits,
                        start_id=START)

    left = decode()
    assert min(sizes) == 8
    assert slots == [2 * 5, 2 * 14]  # two hypotheses a row; room for 5, 10 and, once no rows can leave, all 24 tokens
    monkeypatch.setattr(inference, "SIZES", ())
    stayed = decode()
    assert ids(left) == ids(stayed)
    assert [len(h.ids) for row in left for h in row] == [n for n in limits for _ in range(2)]
    for one, other in zip(left, stayed, strict=True):
        np.testing.assert_allclose([h.score for h in one], [h.score for h in other], atol=1e-5)


@pytest.mark.parametrize("search", [
    Search(eos_ids=(EOS,)),
    Search(beam_size=2, n_best=2, eos_ids=(EOS,)),
    Search(temperature=1.0, eos_ids=(EOS,)),
    Search(lookup=2, eos_ids=(EOS,)),
], ids=["greedy", "beam", "sample", "lookup"])
def test_halves_of_a_batch_in_two_threads_change_nothing(monkeypatch, search):
    random = np.random.default_rng(6)
    rows = [random.integers(3, 31, 1 + i % 12).tolist() for i in range(40)]

    def decode(cores):
        monkeypatch.setattr(batching.os, "cpu_count", lambda: cores)
        done, counts = [], []
        found = run(WRITER, rows, search, seed=3, batch_size=16, progress=done.append, accepted=counts.append)
        assert done == sorted(done) and done[-1] == 40
        assert len(counts) == (len(done) if search.lookup else 0)
        return found, len(done)

    (one, batches), (two, halves) = decode(1), decode(2)
    assert halves > batches
    assert ids(one) == ids(two)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose([h.score for h in a], [h.score for h in b], atol=1e-5)


def test_an_interrupt_ends_what_another_thread_decodes_after_a_few_tokens(monkeypatch):
    monkeypatch.setattr(batching.os, "cpu_count", lambda: 2)
    advance, steps, once = session.Session.advance, [], threading.Event()

    def slowly(self, count):
        steps.append(count)
        if len(self.done) == 16 and once.is_set():
            time.sleep(0.05)
        advance(self, count)

    def interrupt(done):
        once.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(session.Session, "advance", slowly)
    with pytest.raises(KeyboardInterrupt):  # rows of 1 token are done first; those of 9 would take 2,000 more
        generate(WRITER, sharp_params(WRITER), [[3]] * 16 + [[3] * 9] * 16, Search(), limits=[1] * 16 + [2_000] * 16,
                 start_id=START, batch_size=32, progress=interrupt)
    assert len(steps) < 100


@pytest.mark.slow
def test_batches_spread_over_two_devices_change_nothing():
    script = """
import jax, numpy as np
from tfm.config import ModelConfig
from tfm.inference import Search, generate
from tfm.models import init_params
from tfm import batching
config = ModelConfig(vocab_size=31, d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1)
params = jax.tree.map(lambda x: 2.5 * x, init_params(config, jax.random.key(1)))
random = np.random.default_rng(0)
rows = [random.integers(3, 31, n).tolist() for n in (3, 5, 4, 2, 9)]
found = []
for spread in (True, False):
    if not spread:
        batching.data_mesh, generate.__globals__["data_mesh"] = None, lambda params: None
    for beam in (1, 3):
        search = Search(beam_size=beam, eos_ids=(2,))
        for row in generate(config, params, rows, search, limits=[8] * 5, start_id=1):
            found.append(row[0])
assert len(jax.devices()) == 2
assert [h.ids for h in found[:10]] == [h.ids for h in found[10:]]
scores = np.array([h.score for h in found])
np.testing.assert_allclose(scores[:10], scores[10:], atol=1e-5)
assert len(set(scores[:10].round(3))) >= 5
"""
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@pytest.mark.parametrize("how", [{}, {"beam_size": 3, "n_best": 2}, {"beam_size": 2, "length_penalty": 1.0}])
def test_where_no_token_is_possible_a_row_has_one_empty_result(how, rows):
    nothing = Suppress(tuple(range(TRANSLATOR.vocab_size)))
    found = run(TRANSLATOR, rows, Search(eos_ids=(EOS,), allow=(nothing,), **how))
    assert [[(h.ids, h.log_probs, h.finished) for h in row] for row in found] == [[([], [], False)]] * len(rows)


def test_embeddings_do_not_depend_on_neighbours_and_have_length_one(rows):
    config = replace(TRANSLATOR, decoder_layers=0, encoder_layers=1)
    params = init_params(config, jax.random.key(0))
    together = embed(config, params, rows)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)
    np.testing.assert_allclose(embed(config, params, rows[3:4])[0], together[3], atol=1e-5)
    hidden = np.asarray(build(config).apply({"params": params}, np.array([rows[0]]))[0], np.float64).mean(0)
    np.testing.assert_allclose(together[0], hidden / np.linalg.norm(hidden), atol=1e-5)


def test_a_learned_position_table_bounds_prompt_and_output():
    config = replace(WRITER, position="learned", max_positions=10)
    (best,) = generate(config, init_params(config, jax.random.key(0)), [[3] * 7], Search(), limits=[50],
                       start_id=START)[0]
    assert len(best.ids) == 3
    assert all(np.isfinite(best.log_probs))
    with pytest.raises(ValueError, match=r"length of row 0 is 11.*10 positions"):
        generate(config, {}, [[3] * 11], Search(), limits=[1], start_id=START)


def test_only_what_a_model_can_read_is_scored():
    config = replace(WRITER, position="learned", max_positions=10)
    params = sharp_params(config)
    (fits,) = score_pairs(config, params, [[3] * 6], [[4] * 4], start_id=START)
    assert np.isfinite(fits).all()
    with pytest.raises(ValueError, match=r"length of row 0 is 11.*10 positions"):
        score_pairs(config, params, [[3] * 6], [[4] * 5], start_id=START)
    with pytest.raises(ValueError, match=r"model.decoder_layers is 0, but scoring needs a decoder"):
        score_pairs(replace(TRANSLATOR, decoder_layers=0), {}, [[3]], [[4]], start_id=START)
    with pytest.raises(ValueError, match=r"targets is 2, but there are 1 sources"):
        score_pairs(config, params, [[3]], [[4], [5]], start_id=START)


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": 1.0, "beam_size": 2}, "temperature is 1.0.*beam_size=2"),
    ({"top_k": 5}, "top_k.*temperature above 0"),
    ({"n_best": 2}, "n_best is 2.*beam_size=1"),
    ({"lookup": 2, "beam_size": 4}, "lookup is 2.*beam_size=4"),
    ({"lookup": 2, "draft": 2}, "lookup is 2.*draft=2"),
    ({"coverage": 0.1}, "coverage is 0.1.*beam_size above 1"),
    ({"coverage": 0.1, "beam_size": 2, "length_penalty": 1.0}, "coverage is 0.1.*length_penalty"),
    ({"scored": False, "beam_size": 2}, "scored is False.*beams and drafts need probabilities"),
    ({"scored": False, "lookup": 2}, "scored is False.*beams and drafts need probabilities"),
    ({"temperature": -1.0}, "temperature is -1.0"),
])
def test_options_that_cannot_work_together_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Search(**options)


@pytest.mark.parametrize(("rows", "message"), [([[]], "row 0"), ([[3], [31]], r"row 1.*\[0, 31\)"), ([[-1]], "row 0")])
def test_rows_that_no_model_can_read_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        run(WRITER, rows, Search())
