"""From text to batches: sources, tokenizers, objectives, batching.

    splits = load_splits(config.data, config.train.seed)
    tokenizer = build_tokenizer(config.data, splits, "RUN/tokenizer.model")
    batches = make_train_iterator(config, tokenizer, splits)
    batch = next(batches)                      # a dict of NumPy arrays of one of batches.shapes
    state = batches.get_state()                # plain JSON data; set_state goes on from there, bit for bit
"""

from tfm.data.batch import Batch, BatchShape
from tfm.data.build_tokenizer import build_tokenizer, check_symbols
from tfm.data.examples import Counts
from tfm.data.pipeline import (
    EvalBatches,
    TrainIterator,
    class_names,
    make_eval_batches,
    make_train_iterator,
)
from tfm.data.source import Splits, Texts, load_splits
from tfm.data.span_corruption import recover_text
from tfm.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "BatchShape",
    "Counts",
    "EvalBatches",
    "Splits",
    "Texts",
    "Tokenizer",
    "TrainIterator",
    "build_tokenizer",
    "check_symbols",
    "class_names",
    "load_splits",
    "load_tokenizer",
    "make_eval_batches",
    "make_train_iterator",
    "recover_text",
]
