"""Attention by the vendors' own kernels, where they have the rule: cuDNN on NVIDIA GPUs, splash attention on TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from tfm.ops.dense import Scoring
from tfm.ops.masks import And, Causal, Rule, Window
from tfm.ops.tokens import Tokens, varying_axes

Reach = tuple[int | None, int | None]  # keys before and after the query that it sees; None: all

Call = tuple[jax.Array, jax.Array, jax.Array, Scoring, tuple[Tokens, Tokens], bool]
"""Query, key, value, scoring, the tokens of both sides, and whether the log-sum-exp is wanted."""


def vendor_kernel(*call: *Call) -> str | None:
    """The kernel that this device's vendor has for a call, "cudnn" or "splash"; None where there is none."""
    platform = target().platform
    if platform == "gpu" and cudnn_lacks(*call) is None:
        return "cudnn"
    return "splash" if platform == "tpu" and splash_has(*call) else None


def cudnn_lacks(*call: *Call) -> str | None:
    """What cuDNN's fused attention, or this device, lacks for a call, in words; None where nothing."""
    query, key, value, scoring, *_ = call
    lacking = _both_lack(*call)
    if lacking is not None:
        return lacking
    left, right = reach(scoring.rule) or (None, None)
    if right != 0 and (left, right) != (None, None):
        return "windows that see what comes later"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype}, {key.dtype} and {value.dtype}: it has bfloat16 or float16, alike for all three"
    capability = cuda_capability()
    if capability < (8, 0):
        return "this device: it has NVIDIA GPUs from compute capability 8.0"
    widths, widest = {query.shape[3], value.shape[3]}, 256 if capability >= (9, 0) else 128
    if len(widths) > 1 or max(widths) > widest or max(widths) % 8:
        return f"heads of width {sorted(widths)}: it has multiples of 8 up to {widest}, alike for keys and values"
    return None


def splash_has(*call: *Call) -> bool:
    """Whether splash attention has a call: a rule, lengths and widths that it knows, arrays of one device."""
    query, key, value, *_ = call
    width = query.shape[3]
    fits = width == value.shape[3] and not any(size % 128 for size in (query.shape[1], key.shape[1], width))
    return fits and _both_lack(*call) is None and _on_one_device(query, key, value)


def target() -> jax.Device:
    """The device for which programs are compiled where nothing else is said."""
    chosen: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]


def cuda_capability() -> tuple[int, int]:
    """The compute capability of the NVIDIA GPU that programs are compiled for; (0, 0) on another device."""
    device = target()
    if device.platform != "gpu" or "cuda" not in device.client.platform_version:
        return 0, 0
    major, minor = map(int, device.compute_capability.split("."))
    return major, minor


def _on_one_device(*arrays: jax.Array) -> bool:
    """Whether a kernel sees one device's arrays alone, and none that say over which axes of a mesh they vary."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = jax.device_count() == 1 if mesh.empty else mesh.size == 1
    return (alone or set(mesh.axis_types) == {AxisType.Manual}) and not any(map(varying_axes, arrays))


def _both_lack(query: jax.Array, key: jax.Array, value: jax.Array, scoring: Scoring, tokens: tuple[Tokens, Tokens],
               wants_lse: bool) -> str | None:
    """What both vendors' kernels lack for a call, whatever the device."""
    if reach(scoring.rule) is None:
        return f"a rule like {type(scoring.rule).__name__}: it has Causal, Window without dilation, and both"
    if scoring.bias is not None or scoring.relative is not None or scoring.soft_cap is not None:
        return "bias rules, relative vectors and soft caps"
    if scoring.dropout_rate:
        return "dropout of the weights"
    if wants_lse:
        return "the log-sum-exp as a result"
    if not all(map(_is_range, tokens)) or query.shape[1] != key.shape[1]:
        return "positions other than 0, 1, 2, ... on both sides, as many queries as keys"
    return None


def _is_range(tokens: Tokens) -> bool:
    positions = tokens.positions
    return isinstance(positions, np.ndarray) and bool((positions == np.arange(positions.shape[1])).all())


def reach(rule: Rule | None) -> Reach | None:
    """How far a rule sees to both sides, or None for a rule of another kind.

    Example:
      >>> reach(Causal() & Window(3, 3))
      (3, 0)
    """
    if rule is None:
        return None, None
    if isinstance(rule, Causal):
        return None, 0
    if isinstance(rule, Window) and rule.dilations == (1,):
        return rule.left, rule.right
    if isinstance(rule, And):
        first, second = reach(rule.first), reach(rule.second)
        if first is not None and second is not None:
            left, right = (_least(a, b) for a, b in zip(first, second, strict=True))
            return left, right
    return None


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, scoring: Scoring) -> jax.Array:
    """cuDNN's fused attention, through `jax.nn.dot_product_attention`; see `cudnn_lacks` for what it has."""
    left, right = reach(scoring.rule) or (None, None)
    window = query.shape[1] if left is None else left, query.shape[1] if right is None else right
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        scale=scoring.scale,
        is_causal=right == 0,
        local_window_size=None if left is None and right in (None, 0) else window,
        implementation="cudnn",
    )


def splash_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, scoring: Scoring, *, interpret: bool = False
) -> jax.Array:
    """Pallas' splash attention for TPUs; see `splash_has` for what it has."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (T, H), S = query.shape[1:3], key.shape[1]
    left, right = reach(scoring.rule) or (None, None)
    mask: splash_attention_mask.Mask
    if left is None and right is None:
        mask = splash_attention_mask.FullMask((T, S))
    elif left is None and right == 0:
        mask = splash_attention_mask.CausalMask((T, S))
    else:
        mask = splash_attention_mask.LocalMask((T, S), (left, right), 0)
    group = H // key.shape[2]
    kernel = splash_attention_kernel.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([mask] * group), head_shards=1, q_seq_shards=1, interpret=interpret
    )
    q, k, v = (x.swapaxes(1, 2) for x in (query * jnp.asarray(scoring.scale, query.dtype), key, value))
    q = q.reshape(q.shape[0], -1, group, *q.shape[2:])  # [B, K, G, T, D]; k and v are [B, K, S, D]
    return jax.vmap(jax.vmap(kernel))(q, k, v).reshape(q.shape[0], H, T, -1).swapaxes(1, 2)
