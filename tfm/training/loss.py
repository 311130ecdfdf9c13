"""The loss of a batch: a sum over real target tokens and their number, never a mean of means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tfm.config import ModelConfig
from tfm.models.output import output_matrix
from tfm.ops.losses import fused_cross_entropy_sum, label_smoothed_cross_entropy
from tfm.parallel.sequence import AXIS, in_ring_order, mesh_parts

Params = Any
Batch = Mapping[str, Any]
LossFn = Callable[[Params, Batch, jax.Array | None], dict[str, jax.Array]]
"""(params, batch, dropout key or None) -> sums; `loss` and `weight` among them, and loss / weight is the mean."""

MODEL_INPUTS = ("source_mask", "target_mask", "source_positions", "target_positions", "source_segments",
                "target_segments", "mask", "positions", "segments", "prefix_length", "token_types")


def make_loss(model: nn.Module, config: ModelConfig, *, smoothing: float = 0.0) -> LossFn:
    """The loss function of a model: label-smoothed cross-entropy summed over the real target tokens.

        loss = sum_i weight_i loss_i,    weight = sum_i weight_i

    Dividing the two only after they are summed over all devices and micro-batches makes every token count the same.

    Args:
        model: module with a `hidden` method, as `tfm.build` makes it.
        config: its architecture.
        smoothing: share of the target probability spread over the vocabulary; 0 for evaluation.

    Returns:
        loss function: (params, batch, dropout key or None) -> {"loss": float32 sum in nats, "weight": float32 sum}.
        Where the model has a classification head, an example counts as one token, and "right" is the number of
        examples whose label is the most probable class.
    """

    def class_loss(params: Params, batch: Batch, key: jax.Array | None) -> dict[str, jax.Array]:
        logits: Any = model.apply({"params": params}, batch["tokens"], mask=batch["mask"], deterministic=key is None,
                                  rngs={} if key is None else {"dropout": key}, method="class_logits")
        weights = batch["weights"].astype(jnp.float32)
        losses = label_smoothed_cross_entropy(logits, batch["labels"], smoothing=smoothing, weights=weights)
        right = jnp.argmax(logits, axis=-1) == batch["labels"]
        return {"loss": jnp.sum(losses), "weight": jnp.sum(weights), "right": jnp.sum(right * weights)}

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> dict[str, jax.Array]:
        batch = right_padded_positions(batch) | dict(batch)
        if _any_order(config, key):
            batch = in_ring_order(batch)
        tokens = [batch[name] for name in ("source", "target", "tokens") if name in batch]
        given = {name: batch[name] for name in MODEL_INPUTS if name in batch}
        rngs = {} if key is None else {"dropout": key}
        hidden: Any = model.apply({"params": params}, *tokens, **given, deterministic=key is None, rngs=rngs,
                             method="hidden")
        matrix, bias = output_matrix(config, params)
        with jax.named_scope("loss"):
            total = fused_cross_entropy_sum(hidden, matrix, batch["labels"], smoothing=smoothing,
                                            weights=batch["weights"], bias=bias, softcap=config.logit_softcap,
                                            parts=_parts(batch["labels"].shape))
        return {"loss": total, "weight": jnp.sum(batch["weights"].astype(jnp.float32))}

    return class_loss if config.num_classes else loss


def _any_order(config: ModelConfig, key: jax.Array | None) -> bool:
    """Whether the tokens of a causal decoder may stand in any order: dropout and linear attention go by their places.
    """
    rates = config.dropout_rate, config.attention_dropout_rate, config.activation_dropout_rate
    linear = any(pattern.kind == "linear" for pattern in config.attention_pattern)
    return not config.is_encoder_only and not linear and (key is None or not any(rates))


def _parts(shape: tuple[int, ...]) -> tuple[int, int]:
    """Parts of rows and of positions that the current mesh makes of [B, T]."""
    rows, positions = mesh_parts("data", "fsdp"), mesh_parts(AXIS)
    return (rows, positions) if shape[0] % rows == shape[1] % positions == 0 else (1, 1)


def right_padded_positions(batch: Batch) -> dict[str, np.ndarray]:
    """Positions 0, 1, 2, ... of the sides of a batch that are not packed: training pads on the right.

    They are known before the program runs, so that position vectors are constants and masks know their empty blocks.

    Example:
        >>> right_padded_positions({"tokens": np.ones((2, 3), np.int32)})["positions"].tolist()
        [0, 1, 2]
    """
    names = {"source": "source_positions", "target": "target_positions", "tokens": "positions"}
    packed = {name for name in batch if name.endswith("segments")}
    return {} if packed else {positions: np.arange(batch[name].shape[1], dtype=np.int32)
                              for name, positions in names.items() if name in batch}
