"""A run folder as a Bundle: texts in, texts out, and one clear error for each mistake."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

import tfm
from tfm.bundle import Bundle
from tfm.decoding.logits import LogitBias


@pytest.fixture(scope="module")
def bundle(tiny_run) -> Bundle:
    return tfm.load(tiny_run)


def test_a_bundle_holds_config_params_and_tokenizer(bundle):
    assert bundle.config.model.vocab_size == bundle.tokenizer.vocab_size
    assert bundle.params["token_embedding"]["table"].shape == (bundle.model.vocab_size, 16)
    assert bundle.source_ids("ab") == [*bundle.tokenizer.encode("ab"), bundle.tokenizer.eos_id]


def test_texts_keep_their_order_and_blank_ones_stay_blank(bundle):
    texts = ["one", "", "two", " "]
    written = bundle.translate(texts, max_length=5)
    assert len(written) == 4
    assert written[1] == written[3] == ""
    assert bundle.translate(texts[::-1], max_length=5) == written[::-1]
    many = bundle.translate(["one"], max_length=5, n_best=2, beam_size=3)
    assert len(many[0]) == 2
    assert len(set(many[0])) == 2


def test_generate_ids_leaves_the_end_off_and_keeps_its_limit(bundle):
    row = bundle.source_ids("abc")
    (plain,) = bundle.generate_ids([row], max_length=4)
    assert len(plain) <= 4
    assert bundle.tokenizer.eos_id not in plain
    first = plain[0]
    assert bundle.generate_ids([row], max_length=4, eos_id=first) == [[]]
    assert len(bundle.generate_ids([row], beam_size=2, n_best=2, max_length=3)[0]) == 2


def test_scores_are_sums_of_token_scores(bundle):
    sources, targets = ["a b", "c"], ["d", "e f"]
    tokens = bundle.token_scores(sources, targets)
    assert [len(row) for row in tokens] == [2, 4]
    np.testing.assert_allclose(bundle.score(sources, targets), [sum(row) for row in tokens], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"beam_size": 2}, {"lookup": 2}, {"temperature": 1.0, "mbr": 2}])
def test_results_carry_scores_unless_nobody_asks(bundle, options):
    rows = [bundle.source_ids("abc")]
    own = {name: value for name, value in options.items() if name != "mbr"}
    (asked,), (lean,) = (bundle.results(rows, max_length=4, scored=scored, **own)[0] for scored in (True, False))
    assert asked.ids == lean.ids == bundle.generate_ids(rows, max_length=4, **own)[0]
    assert np.isfinite([asked.score, *asked.log_probs]).all()
    assert np.isnan(lean.score) == ("beam_size" not in options and "lookup" not in options)
    assert bundle.generate(["abc"], max_length=4, **options) == [bundle.decode(asked.ids)] or "mbr" in options


def test_rules_hold(bundle):
    (text,) = bundle.generate(["abc"], prefix="Kind", max_length=8)
    assert text.startswith("Kind")
    assert bundle.generate(["abc"], prefix="Kind", max_length=8, stop=["nd"]) == ["Ki"]
    first = bundle.generate_ids([bundle.source_ids("abc")], max_length=3)[0][0]
    assert first not in bundle.generate_ids([bundle.source_ids("abc")], max_length=3, suppress=[first])[0]


def test_a_stream_is_the_text_in_pieces(bundle):
    assert "".join(bundle.stream("abc", prefix="Zoë grüßt", max_length=16)) == bundle.generate(
        ["abc"], prefix="Zoë grüßt", max_length=16)[0]


def test_a_checkpoint_can_be_chosen_and_averaged(tiny_run, bundle):
    last, mean = tfm.load(tiny_run, checkpoint=3), tfm.load(tiny_run, average=3)
    tables = [tfm.load(tiny_run, checkpoint=step).params["token_embedding"]["table"] for step in (1, 2, 3)]
    np.testing.assert_array_equal(last.params["token_embedding"]["table"], bundle.params["token_embedding"]["table"])
    np.testing.assert_allclose(mean.params["token_embedding"]["table"], np.mean(np.float64(tables), 0), atol=1e-7)


def test_mistakes_get_a_message_that_says_what_would_be_right(tiny_run, bundle, tmp_path):
    with pytest.raises(ValueError, match=r"put .* around it"):
        bundle.translate("one text")
    with pytest.raises(ValueError, match="did you mean beam_size"):
        bundle.generate(["a"], beam_sise=3)
    with pytest.raises(ValueError, match="targets is 1, but there are 2 sources"):
        bundle.score(["a", "b"], ["c"])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        tfm.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="neither a run folder"):
        tfm.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for option in ({"average": 2}, {"checkpoint": "best"}):
        with pytest.raises(ValueError, match=r"(average is 2|checkpoint is 'best'), but .* is no run folder"):
            tfm.load(tmp_path, **option)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7.*1, 2, 3"):
        tfm.load(tiny_run, checkpoint=7)
    with pytest.raises(ValueError, match=r"average is 9.*only 3 checkpoints"):
        tfm.load(tiny_run, average=9)


@pytest.mark.parametrize(("options", "message"), [
    ({"max_length": 2.5}, "generation.max_length is 2.5, but it must be a whole number or None"),
    ({"stop": "User:"}, "generation.stop is 'User:', but it must be a tuple"),
    ({"temperature": np.inf}, "generation.temperature is inf, but it must be a finite number"),
    ({"early_stopping": "always"}, "early_stopping is 'always', but it must be True, False or 'never'"),
    ({"early_stopping": True, "beam_size": 2}, "early_stopping is True, but it goes with length_penalty"),
    ({"cache_dtype": "float16"}, "cache_dtype is 'float16', but it must be"),
    ({"beam_size": 2, "groups": 0}, "groups is 0, but it must be above 0"),
    ({"beam_size": 2, "groups": 2, "n_best": 2, "diversity": -1.0}, "diversity is -1.0, but it cannot be negative"),
    ({"temperature": 1.0, "seed": 2**70}, "seed is 1180591620717411303424"),
    ({"phrases": [""], "beam_size": 2}, "phrases is .*, but it cannot hold an empty text"),
    ({"max_length": 10**10}, "max_length is 10000000000, but it must be below"),
    ({"suppress": [99999]}, r"suppress is \(99999,\), but ids must lie in \[0, "),
    ({"stop": ["a"]}, "stop is .*'a'.*, but it acts on texts, not ids: use generate"),
    ({"temperature": 1.0, "mbr": 3}, "mbr is 3, but it acts on texts, not ids: use generate"),
    ({"eos_id": "2"}, "eos_id is '2': expected an id, some ids, or None"),
])
def test_an_option_that_would_do_nothing_or_harm_is_named(bundle, options, message):
    with pytest.raises(ValueError, match=message):
        bundle.generate_ids([[5, 6]], **options)


@pytest.mark.parametrize(("name", "value"), [("prefix", "a"), ("bad_words", ["a"]), ("phrases", ["a"])])
def test_texts_among_the_options_need_a_tokenizer(bundle, name, value):
    with pytest.raises(ValueError, match=f"{name} is .*'a'.*, but it is a text, and this checkpoint has no tokenizer"):
        replace(bundle, tokenizer=None).generate_ids([[5, 6]], beam_size=2, **{name: value})


def test_numbers_may_be_numpy_s(bundle):
    plain = bundle.generate_ids([[5, 6]], max_length=4, beam_size=3, suppress=[7, 8], eos_id=9)
    assert plain == bundle.generate_ids([[5, 6]], max_length=np.int32(4), beam_size=np.int64(3),
                                        suppress=np.array([7, 8]), eos_id=np.int64(9))


def test_a_negative_end_is_none(bundle):
    last = bundle.model.vocab_size - 1  # where an index of -1 would point
    likely = replace(bundle, special=replace(bundle.special, reweight=(LogitBias(((last, 99.0),)),)))
    assert likely.generate_ids([[5, 6]], max_length=4, beam_size=2, eos_id=-1) == [[last] * 4]


def test_a_run_without_its_tokenizer_says_so(tiny_run, tmp_path):
    shutil.copytree(tiny_run, tmp_path / "run")
    (tmp_path / "run" / "tokenizer.model").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model does not exist"):
        tfm.load(tmp_path / "run")
