"""Train a sentencepiece vocabulary on the train split, inside this process."""

from __future__ import annotations

import io
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence

from tfm.data.tokenizer import META_SYMBOL, SentencePieceTokenizer

_MOST_BYTES = 4000  # sentencepiece drops longer lines
_MOST_LINES = 200_000
_TOO_HIGH = re.compile(r"Please set it to a value <= (\d+)")
_TOO_LOW = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


def train_sentencepiece(texts: Iterable[str], *, kind: str, vocab_size: int, normalization: str = "identity",
                        symbols: Sequence[str] = ()) -> SentencePieceTokenizer:
    """Train a sentencepiece model with byte fallback that keeps every character and space.

    Args:
      texts: training texts.
      kind: "bpe" (Sennrich et al., 2016) or "unigram" (Kudo, 2018).
      vocab_size: number of pieces, with 4 special ones, 256 bytes and the reserved symbols.
      normalization: "identity", or "nfkc" for Unicode's compatibility composition before encoding.
      symbols: reserved symbols that no text is ever encoded to, such as `<mask>`.

    Returns:
      The tokenizer: padding 0, BOS 1, EOS 2, unknown 3, then the symbols.

    Raises:
      ValueError: no text, or a vocabulary size that the text cannot fill or that cannot hold its characters.

    Example:
      >>> tokenizer = train_sentencepiece(["a banana", "a bandana"] * 50, kind="bpe", vocab_size=270)
      >>> tokenizer.decode(tokenizer.encode("  ban\\tana \U0001F600"))
      '  ban\\tana 😀'

    Reference: T. Kudo and J. Richardson, "SentencePiece", 2018.
    """
    import sentencepiece

    lines = _training_lines(texts)
    first = next(lines, None)
    if first is None:
        raise ValueError("data.train holds no text to train a tokenizer on: every line is empty")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain([first], lines), model_writer=model, model_type=kind,
            vocab_size=vocab_size, byte_fallback=True, character_coverage=0.9999, normalization_rule_name=normalization,
            add_dummy_prefix=True, remove_extra_whitespaces=False, split_digits=True, pad_id=0, bos_id=1, eos_id=2,
            unk_id=3, control_symbols=list(symbols), max_sentence_length=2 * _MOST_BYTES, num_threads=4, minloglevel=4)
    except RuntimeError as error:
        raise _explain(error, vocab_size) from error
    return SentencePieceTokenizer(model.getvalue())


def _explain(error: RuntimeError, vocab_size: int) -> ValueError:
    message = str(error)
    if found := _TOO_HIGH.search(message):
        return ValueError(f"data.vocab_size is {vocab_size}, but the training text yields at most {found[1]} pieces: "
                          f"set it to {found[1]} or lower")
    if found := _TOO_LOW.search(message):
        return ValueError(f"data.vocab_size is {vocab_size}, but bytes, special pieces and the characters of the "
                          f"training text need {found[1]}: set it to {found[1]} or higher")
    return ValueError(f"data.vocab_size={vocab_size}: sentencepiece could not train a vocabulary: {message}")


def _training_lines(texts: Iterable[str]) -> Iterator[str]:
    """Non-empty lines of a length that sentencepiece takes, without the characters it reserves."""
    for text in texts:
        for line in text.split("\n"):
            line = line.replace(META_SYMBOL, " ").replace("\0", " ")
            if not line.strip():
                continue
            if len(line) * 4 <= _MOST_BYTES:
                yield line
            else:
                yield from (line[start:start + _MOST_BYTES // 4] for start in range(0, len(line), _MOST_BYTES // 4))


def sample_texts(columns: Sequence[Sequence[str]], *, seed: int) -> Iterator[str]:
    """All texts of a small corpus, or a random sample of a large one, the same for the same seed."""
    total = len(columns[0])
    rows: Iterable[int] = range(total)
    if total * len(columns) > _MOST_LINES:
        rows = sorted(random.Random(seed).sample(range(total), _MOST_LINES // len(columns)))
    for row in rows:
        for column in columns:
            yield column[row]
