"""Tokenizers: any text comes back, reserved ids never come from text, bad sizes are refused with the right one."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from tfm.config import DataConfig
from tfm.data import Splits, Texts, build_tokenizer, load_tokenizer
from tfm.data.objective import reserved_symbols
from tfm.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from tfm.data.train_tokenizer import train_sentencepiece

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Zwölf Boxkämpfer jagen Viktor über den Sylter Deich.",
    "Hà Nội là thủ đô của Việt Nam",
    "12 apples, 345 pears  and\ttabs",
] * 20
HARD = [
    "",
    " ",
    "  two  spaces  ",
    "\ttab\t",
    "\u2028\u2029\x85",
    "\x00\x01\x1f\x7f",
    "😀👩‍👩‍👧 flags 🇩🇪",
    "\u2581",
    "a\u2581b \u2581\u2581 c ",
    "\u2581\ufdd0\ufdd1",
    "\ufeffBOM",
    "e\u0301 \u00e9",
    "<s></s><pad><unk><mask><extra_id_0><0x41>",
    "\r",
    "line\nbreak\r\n",
    "\U0010ffff\ufffd",
    "ﬁ ①",
]


@pytest.fixture(scope="module", params=["bpe", "unigram", "byte"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    symbols = ["<mask>", "<extra_id_0>", "<extra_id_1>"]
    if request.param == "byte":
        return ByteTokenizer(symbols)
    return train_sentencepiece(TEXTS, kind=request.param, vocab_size=320, symbols=symbols)


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "x"])[0] == tokenizer.encode(text)


@settings(max_examples=150)
@given(text=st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \u2581\n\t😀aé"))))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not tokenizer.is_special[ids].any()
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_special_ids_are_distinct_and_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.mask_id is not None and len(tokenizer.sentinel_ids) == 2
    special = [
        tokenizer.pad_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        tokenizer.mask_id,
        *tokenizer.sentinel_ids,
    ]
    assert len(set(special)) == 7
    assert np.flatnonzero(tokenizer.is_special).tolist() == sorted(special)
    without_unknown = [i for i in special if i != tokenizer.unk_id]
    text = tokenizer.encode("lazy")
    assert tokenizer.decode([*without_unknown, *text, *without_unknown]) == "lazy"


def test_saved_and_loaded(tokenizer: Tokenizer, tmp_path) -> None:
    tokenizer.save(tmp_path / "run" / "tokenizer.model")
    again = load_tokenizer(tmp_path / "run" / "tokenizer.model")
    assert [again.encode(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]
    assert again.fingerprint == tokenizer.fingerprint and again.sentinel_ids == tokenizer.sentinel_ids
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer.model"]


def test_ids_are_those_of_sentencepiece() -> None:
    tokenizer = train_sentencepiece(TEXTS, kind="bpe", vocab_size=340)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.to_bytes())
    for text in TEXTS[:4]:
        assert tokenizer.encode(text) == processor.encode(text)
        assert [tokenizer.piece(i) for i in tokenizer.encode(text)] == processor.encode(text, out_type=str)
    meta = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
    assert tokenizer.encode("\u2581")[1:] == meta  # the bytes of the character itself, not those of the stand-in


def test_digits_are_pieces_of_their_own() -> None:
    tokenizer = train_sentencepiece(["in 1998 and 1999"] * 30, kind="bpe", vocab_size=275)
    assert [tokenizer.piece(i) for i in tokenizer.encode("1998")][-4:] == ["1", "9", "9", "8"]


def test_words_and_sentence_ends(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("quick fox. Deich!")
    starts = tokenizer.starts_word[ids]
    assert starts.sum() == (2 if isinstance(tokenizer, ByteTokenizer) else 3)
    ends = tokenizer.ends_sentence[ids]
    assert [tokenizer.decode([i]).strip()[-1] for i, end in zip(ids, ends, strict=True) if end] == [".", "!"]
    assert tokenizer.ends_sentence[tokenizer.encode("a\n")][-1]


def test_nfkc_is_unicodes() -> None:
    tokenizer = train_sentencepiece(TEXTS, kind="bpe", vocab_size=340, normalization="nfkc")
    for text in ["ﬁsh", "①②", "Ｗｉｄｅ", "e\u0301"]:
        assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFKC", text)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_too_large_names_the_largest(kind: str) -> None:
    with pytest.raises(ValueError, match=r"data\.vocab_size is 5000.*at most (\d+) pieces") as caught:
        train_sentencepiece(TEXTS, kind=kind, vocab_size=5000)
    largest = int(str(caught.value).split("at most ")[1].split()[0])
    assert train_sentencepiece(TEXTS, kind=kind, vocab_size=largest).vocab_size == largest
    with pytest.raises(ValueError, match="at most"):
        train_sentencepiece(TEXTS, kind=kind, vocab_size=largest + 1)


def test_a_vocabulary_too_small_names_the_smallest() -> None:
    with pytest.raises(ValueError, match=r"data\.vocab_size is 100.*need (\d+)") as caught:
        train_sentencepiece(TEXTS, kind="bpe", vocab_size=100)
    smallest = int(str(caught.value).split("need ")[1].split(":")[0])
    assert train_sentencepiece(TEXTS, kind="bpe", vocab_size=smallest).vocab_size == smallest


@pytest.mark.parametrize("texts", [[], ["", " \n "], ["\u2581", "\0"]])
def test_no_text_is_an_error(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="no text"):
        train_sentencepiece(texts, kind="bpe", vocab_size=300)


def test_long_lines_are_learnt_from() -> None:
    tokenizer = train_sentencepiece(["unusually " * 3000], kind="bpe", vocab_size=280)
    assert len(tokenizer.encode("unusually")) < 4


def test_a_damaged_file_is_named(tmp_path) -> None:
    (tmp_path / "t.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"t\.model.*sentencepiece"):
        load_tokenizer(tmp_path / "t.model")
    with pytest.raises(FileNotFoundError, match=r"absent\.model"):
        load_tokenizer(tmp_path / "absent.model")


def test_a_given_file_must_have_what_the_task_needs(tmp_path) -> None:
    splits = Splits(Texts([TEXTS]), Texts(()), Texts(()))
    path = tmp_path / "given.model"
    build_tokenizer(DataConfig(task="causal_lm", vocab_size=340), splits, path)
    given_file = {"tokenizer": "file", "tokenizer_path": str(path)}
    assert build_tokenizer(DataConfig(task="causal_lm", **given_file), splits).vocab_size == 340
    with pytest.raises(ValueError, match="<mask>"):
        build_tokenizer(DataConfig(task="masked_lm", **given_file), splits)
    with pytest.raises(ValueError, match="sentinels"):
        build_tokenizer(DataConfig(task="span_corruption", **given_file), splits)


def test_reserved_symbols_follow_the_task() -> None:
    assert reserved_symbols(DataConfig(task="translate")) == []
    config = DataConfig(task="span_corruption", max_length=40, tokenizer="byte")
    tokenizer = build_tokenizer(config, Splits(Texts([TEXTS]), Texts(()), Texts(())))
    assert len(tokenizer.sentinel_ids) == len(reserved_symbols(config)) > 2
    assert tokenizer.vocab_size == 260 + len(tokenizer.sentinel_ids)


def test_a_tokenizer_json(tmp_path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<mask>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.mask_id, tokenizer.vocab_size) == (
        0,
        1,
        2,
        5,
        6,
    )
    assert tokenizer.encode("b a c") == [4, 3, 2] and tokenizer.decode([4, 3, 1]) == "b a"
    assert tokenizer.bos_id == tokenizer.eos_id  # it has none: EOS starts a text
