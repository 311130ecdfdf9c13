"""Flax Linen modules: the leaves that models are made of, each usable alone in another Flax model.

None of them needs a `ModelConfig`; `Layer` and the functions that read one do.
"""

from tfm.nn.attention import MultiHeadAttention as MultiHeadAttention
from tfm.nn.cache import Cache as Cache
from tfm.nn.cache import cache_bytes as cache_bytes
from tfm.nn.cache import init_cache as init_cache
from tfm.nn.dropout import Dropout as Dropout
from tfm.nn.embeddings import Embedding as Embedding
from tfm.nn.embeddings import LearnedPositions as LearnedPositions
from tfm.nn.feed_forward import FeedForward as FeedForward
from tfm.nn.layers import Layer as Layer
from tfm.nn.norms import Normalize as Normalize
from tfm.nn.positions import Rotary as Rotary
from tfm.nn.projection import Projection as Projection
