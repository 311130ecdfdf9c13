"""From a config to a module, and to initial parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tfm.config import Config, ModelConfig
from tfm.models.decoder import DecoderLM
from tfm.models.encoder import Encoder
from tfm.models.transformer import Transformer


def build(config: ModelConfig | Config) -> nn.Module:
    """The Flax module of a config: `Transformer`, `DecoderLM` or `Encoder`.

    Example:
        >>> type(build(ModelConfig(vocab_size=10, encoder_layers=0))).__name__
        'DecoderLM'
    """
    if isinstance(config, Config):
        config = config.model
    if config.is_encoder_only:
        return Encoder(config)
    return DecoderLM(config) if config.is_decoder_only else Transformer(config)


def init_params(config: ModelConfig, key: jax.Array) -> Any:
    """Initial parameters: a nested dict of arrays. Use `jax.eval_shape` around it for the shapes alone.

    Example:
        >>> config = ModelConfig(vocab_size=10, d_model=8, d_ff=16, num_heads=2, encoder_layers=0, decoder_layers=1)
        >>> sorted(init_params(config, jax.random.key(0)))
        ['decoder', 'token_embedding']
    """
    ids = jnp.zeros((1, 1), jnp.int32)
    module = build(config)
    if config.is_encoder_decoder:
        variables = module.init(key, ids, ids)
    elif config.is_decoder_only:
        variables = module.init(key, ids)
    else:
        variables = module.init(key, ids, method="class_logits" if config.num_classes else "token_logits")
    return variables["params"]


def count_params(config: ModelConfig) -> int:
    """Number of parameters, from shapes alone.

    Example:
        >>> count_params(ModelConfig(vocab_size=37000))
        63045632
    """
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
