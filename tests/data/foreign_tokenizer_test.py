"""Tokenizers of foreign folders against transformers' own, from every kind of file."""

from __future__ import annotations

import json

import pytest
import sentencepiece
import tokenizers
import transformers

from tfm.data.foreign_files import load_foreign_tokenizer, save_foreign_tokenizer
from tfm.data.foreign_tokenizer import ForeignTokenizer
from tfm.data.tokenizer import ByteTokenizer, tokenizer_from_bytes

LINES = ["the cat sat on the mat", "a dog, the big dog!", "cats and dogs sit on mats", "Ünder the sea 1234"] * 20
TEXTS = ["the cat sat", "A dog and cats!", "dogs  on 42 mats", "über <extra_id_1> sea"]


def sentencepiece_model(path, size=60):
    (path / "text").write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(path / "text"), model_prefix=str(path / "made"), vocab_size=size, model_type="unigram", pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2)
    (path / "text").unlink()
    (path / "made.vocab").unlink()
    return (path / "made.model").rename(path / "spiece.model")


def wordpiece(path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "dog", "##s", "mat", "a", "!", "and", "on"]
    (path / "vocab.txt").write_text("\n".join(words))
    return transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})


def byte_pairs(path):
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(LINES, vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    made.save_model(str(path))
    return transformers.RobertaTokenizer.from_pretrained(path)


def tokenizer_json(path):
    theirs = byte_pairs(path)
    theirs.save_pretrained(path)
    return theirs


def t5(path):
    sentencepiece_model(path)
    return transformers.T5Tokenizer.from_pretrained(path, extra_ids=100)


def marian(path):
    model = sentencepiece_model(path)
    target = (path / "target.spm")
    target.write_bytes(model.read_bytes())
    model.rename(path / "source.spm")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(target))
    pieces = ["</s>", "<unk>", ">>de<<", *[processor.id_to_piece(i) for i in range(3, processor.vocab_size())], "<pad>"]
    (path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (path / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    return transformers.MarianTokenizer.from_pretrained(path)


@pytest.mark.parametrize("make", [wordpiece, byte_pairs, tokenizer_json, t5, marian])
def test_ids_with_their_surroundings_are_transformers_own(make, tmp_path):
    theirs = make(tmp_path)
    ours = load_foreign_tokenizer(tmp_path)
    for text in TEXTS[:3] + ([">>de<< the cat"] if make is marian else []):
        expected = theirs(text)["input_ids"]
        assert [*ours.before, *ours.encode(text), *ours.after] == expected
        assert ours.decode(expected).split() == theirs.decode(expected, skip_special_tokens=True).split()
    assert (ours.pad_id, ours.mask_id) == (theirs.pad_token_id, theirs.mask_token_id)
    again = tokenizer_from_bytes(ours.to_bytes())
    assert (again.encode(TEXTS[0]), again.before, again.after) == (ours.encode(TEXTS[0]), ours.before, ours.after)
    (tmp_path / "saved").mkdir()
    save_foreign_tokenizer(ours, tmp_path / "saved")
    saved = load_foreign_tokenizer(tmp_path / "saved")
    assert (saved.encode(TEXTS[1]), saved.before, saved.after) == (ours.encode(TEXTS[1]), ours.before, ours.after)
    assert (saved.pad_id, saved.eos_id, saved.mask_id) == (ours.pad_id, ours.eos_id, ours.mask_id)


def test_pieces_that_only_the_source_has_are_decoded_as_transformers_does(tmp_path):
    marian(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    vocabulary["\u2581zebra"] = len(vocabulary)
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    theirs, ours = transformers.MarianTokenizer.from_pretrained(tmp_path), load_foreign_tokenizer(tmp_path)
    zebra, rest = vocabulary["\u2581zebra"], ours.encode("the cat")
    for ids in ([zebra, *rest], [*rest, zebra, *rest, zebra]):
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_separate_vocabularies_come_back_in_transformers(tmp_path):
    marian(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    plain = [piece for piece in vocabulary if piece not in ("</s>", "<unk>", "<pad>")]
    target = {**vocabulary, **{piece: vocabulary[other] for piece, other in zip(plain, plain[::-1], strict=True)}}
    (tmp_path / "target_vocab.json").write_text(json.dumps(target))
    ours = load_foreign_tokenizer(tmp_path)
    (tmp_path / "saved").mkdir()
    save_foreign_tokenizer(ours, tmp_path / "saved")
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path / "saved", source_lang="en", target_lang="de")
    ids = ours.encode_target("the cat")
    assert theirs(text_target="the cat")["input_ids"] == [*ids, ours.eos_id]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_sentinels_of_t5_count_down_from_the_end(tmp_path):
    theirs = t5(tmp_path)
    ours = load_foreign_tokenizer(tmp_path)
    assert ours.sentinel_ids[:2] == tuple(theirs.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"]))
    assert ours.sentinel_ids[1] in ours.encode(TEXTS[3])


def test_a_folder_without_a_tokenizer_and_one_with_shifted_ids(tmp_path):
    assert load_foreign_tokenizer(tmp_path) is None
    sentencepiece_model(tmp_path).rename(tmp_path / "sentencepiece.bpe.model")
    with pytest.raises(ValueError, match=r"only sentencepiece\.bpe\.model"):
        load_foreign_tokenizer(tmp_path)


def test_plain_bytes_go_to_a_file_of_our_own(tmp_path):
    tokenizer = ForeignTokenizer(ByteTokenizer(["<mask>"]), {"bos_id": 0}, before=(1,), after=(2,))
    save_foreign_tokenizer(tokenizer, tmp_path)
    back = load_foreign_tokenizer(tmp_path)
    assert back.encode("ä") == tokenizer.encode("ä") and back.mask_id == tokenizer.mask_id
    assert (back.bos_id, back.before, back.after) == (0, (1,), (2,))


@pytest.mark.parametrize("file, content, message", [
    ("tokenizer.json", "{", r"tokenizer\.json is damaged"), ("tokenizer.json", "{}", r"tokenizer\.json is damaged"),
    ("tokenizer_config.json", "{", r"tokenizer_config\.json is not JSON"),
    ("tokenizer_config.json", '{"eos_token": 5}', "a special token is 5, but it must be a text"),
    ("added_tokens.json", '{"a": "x"}', r"added_tokens\.json: a is 'x', but a token's id is a whole number"),
    ("added_tokens.json", "[1]", r"added_tokens\.json is \[1\], but it must hold a JSON object")])
def test_a_damaged_file_is_named(tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_foreign_tokenizer(tmp_path)


def test_a_special_token_spelled_out_is_plain_text_to_sentencepiece_alone(tmp_path):
    (tmp_path / "text").write_text("\n".join(LINES))
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"),
                                             vocab_size=300, byte_fallback=True, hard_vocab_limit=False,
                                             minloglevel=2)
    alone = load_foreign_tokenizer(tmp_path)
    assert alone.eos_id not in alone.encode("a</s>b") and alone.decode(alone.encode("a</s>b")) == "a</s>b"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"</s>": alone.eos_id}))
    assert alone.eos_id in load_foreign_tokenizer(tmp_path).encode("a</s>b")
