"""Label-smoothed cross-entropy: of logits, and fused with the output matrix so that no [B, T, V] array exists."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tfm.ops.arguments import float_array, integer_array
from tfm.ops.products import contract, row_product
from tfm.ops.tokens import vary_alike


def label_smoothed_cross_entropy(logits: jax.Array, targets: jax.Array, *, smoothing: float = 0.0,
                                 weights: jax.Array | None = None) -> jax.Array:
    """Cross-entropy against a one-hot target of which a part is spread over the whole vocabulary.

        q(v) = (1 - smoothing) [v = target] + smoothing / V
        loss = -sum_v q(v) log softmax(logits)(v) = logsumexp(z) - (1 - smoothing) z(target) - smoothing mean_v z(v)

    Args:
        logits: [..., V] float; the loss is computed in float32, or float64 where they are.
        targets: [...] int ids in 0 .. V - 1. Another one counts as the nearest of these: give it a weight of 0.
        smoothing: the part that is spread over all V classes, the target among them; in [0, 1).
        weights: [...] float that multiply the losses, 0 for padding; ones where None.

    Returns:
        [...] float32 losses in nats, one a token, each multiplied by its weight.

    Raises:
        ValueError: shapes that do not fit, targets that are no integers, or smoothing outside [0, 1).

    Example:
        >>> loss = label_smoothed_cross_entropy(jnp.zeros((2, 8)), jnp.array([1, 2]), smoothing=0.1)
        >>> [round(x, 4) for x in loss.tolist()]  # log(8)
        [2.0794, 2.0794]

    Reference: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, section 7; Vaswani
    et al., "Attention Is All You Need", 2017, section 5.4.
    """
    logits, targets, weights = jnp.asarray(logits), integer_array(targets, "targets"), _or_none(weights)
    _check(logits.shape[:-1], targets, weights, smoothing)
    loss = _losses(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), targets, smoothing)
    return loss if weights is None else loss * weights.astype(loss.dtype)


def fused_cross_entropy(hidden: jax.Array, embedding: jax.Array, targets: jax.Array, *, smoothing: float = 0.0,
                        weights: jax.Array | None = None, bias: jax.Array | None = None,
                        softcap: float | None = None, chunk_size: int = 1024) -> jax.Array:
    """Cross-entropy of `hidden @ embedding.T + bias`, one loss a token, a chunk of tokens at a time.

    Equal in value and gradient to `label_smoothed_cross_entropy` of those logits, but no more than one chunk of
    them exists at any time: the backward pass makes them again. Where only the weighted sum of the losses is
    wanted, as in training, `fused_cross_entropy_sum` saves that second product.

    Args:
        hidden: [..., M] float; products use its dtype for the operands and float32 for the sums.
        embedding: [V, M] float.
        targets: [...] int ids, as for `label_smoothed_cross_entropy`.
        smoothing: see `label_smoothed_cross_entropy`.
        weights: [...] float that multiply the losses; ones where None.
        bias: [V] float, added to the logits.
        softcap: logits become softcap * tanh(logits / softcap).
        chunk_size: tokens a chunk, about, over the whole batch: a chunk holds chunk_size * V logits.

    Returns:
        [...] float32 losses in nats, each multiplied by its weight.

    Raises:
        ValueError: shapes or types that do not fit, smoothing outside [0, 1), a softcap or chunk size not above 0.

    Example:
        >>> hidden, embedding = jnp.ones((2, 5, 4)), jnp.ones((8, 4))
        >>> loss = fused_cross_entropy(hidden, embedding, jnp.zeros((2, 5), jnp.int32))
        >>> loss.shape, round(float(loss[0, 0]), 4)
        ((2, 5), 2.0794)
    """
    hidden, embedding = float_array(hidden, "hidden"), float_array(embedding, "embedding")
    targets, weights, bias = integer_array(targets, "targets"), _or_none(weights), _or_none(bias)
    _check_fused(hidden, embedding, targets, weights, bias, smoothing, softcap, chunk_size)
    form = _Form(smoothing, softcap, chunk_size)
    loss = _per_token(*vary_alike((hidden, embedding, bias, targets)), form)
    return loss if weights is None else loss * weights.astype(loss.dtype)


def fused_cross_entropy_sum(hidden: jax.Array, embedding: jax.Array, targets: jax.Array, *, smoothing: float = 0.0,
                            weights: jax.Array | None = None, bias: jax.Array | None = None,
                            softcap: float | None = None, chunk_size: int = 1024,
                            parts: tuple[int, int] = (1, 1)) -> jax.Array:
    """Sum of the weighted losses of `fused_cross_entropy`, whose gradients are made in the forward pass.

    The gradients of a sum need nothing from the backward pass but one number to multiply them by, so each chunk of
    logits gives its losses and its gradients at once: three products with the embedding in place of four.

    Args:
        hidden, embedding, targets, smoothing, weights, bias, softcap, chunk_size: see `fused_cross_entropy`.
        parts: numbers of equal parts into which devices split the [B, T] tokens along each axis. Each part has chunks
            of its own and sums its own gradient of the embedding: devices exchange it once, and not once a chunk.

    Returns:
        scalar float32, in nats; divide it by the sum of the weights to get the mean.

    Raises:
        ValueError: as `fused_cross_entropy`.

    Example:
        >>> hidden, embedding = jnp.ones((2, 5, 4)), jnp.ones((8, 4))
        >>> loss = fused_cross_entropy_sum(hidden, embedding, jnp.zeros((2, 5), jnp.int32))
        >>> round(float(loss) / 10, 4)
        2.0794
    """
    hidden, embedding = float_array(hidden, "hidden"), float_array(embedding, "embedding")
    targets, weights, bias = integer_array(targets, "targets"), _or_none(weights), _or_none(bias)
    _check_fused(hidden, embedding, targets, weights, bias, smoothing, softcap, chunk_size)
    if parts != (1, 1) and (targets.ndim != 2 or targets.shape[0] % parts[0] or targets.shape[1] % parts[1]):
        raise ValueError(f"parts are {parts}, but they must divide the shape {targets.shape} of the tokens")
    form = _Form(smoothing, softcap, chunk_size, parts)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    weights = jnp.ones(targets.shape, wide) if weights is None else weights.astype(wide)
    return _summed(*vary_alike((hidden, embedding, bias, weights, targets)), form)


def _or_none(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else jnp.asarray(x)


class _Form(NamedTuple):
    """What is fixed when a loss is compiled."""

    smoothing: float
    softcap: float | None
    chunk_size: int
    parts: tuple[int, int] = (1, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _per_token(hidden: jax.Array, embedding: jax.Array, bias: jax.Array | None, targets: jax.Array,
               form: _Form) -> jax.Array:
    return _scan_losses(hidden, embedding, bias, targets, form)


def _per_token_forward(hidden: jax.Array, embedding: jax.Array, bias: jax.Array | None, targets: jax.Array,
                       form: _Form) -> tuple[jax.Array, tuple]:
    return _scan_losses(hidden, embedding, bias, targets, form), (hidden, embedding, bias, targets)


def _per_token_backward(form: _Form, saved: tuple, cotangent: jax.Array) -> tuple:
    hidden, embedding, bias, targets = saved
    _, gradients = _scan_gradients(hidden, embedding, bias, cotangent, targets, form)
    return *gradients, None


_per_token.defvjp(_per_token_forward, _per_token_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _summed(hidden: jax.Array, embedding: jax.Array, bias: jax.Array | None, weights: jax.Array, targets: jax.Array,
            form: _Form) -> jax.Array:
    return jnp.sum(_scan_losses(hidden, embedding, bias, targets, form) * weights)


def _summed_forward(hidden: jax.Array, embedding: jax.Array, bias: jax.Array | None, weights: jax.Array,
                    targets: jax.Array, form: _Form) -> tuple[jax.Array, tuple]:
    losses, gradients = _parted_gradients(hidden, embedding, bias, weights, targets, form)
    return jnp.sum(losses * weights), (*gradients, losses)


def _summed_backward(form: _Form, gradients: tuple, cotangent: jax.Array) -> tuple:
    return *jax.tree.map(lambda x: (x * cotangent).astype(x.dtype), gradients), None


_summed.defvjp(_summed_forward, _summed_backward)


def _scan_losses(hidden: jax.Array, embedding: jax.Array, bias: jax.Array | None, targets: jax.Array,
                 form: _Form) -> jax.Array:
    """[...] losses, one chunk after the other."""
    matrix = embedding.astype(hidden.dtype)

    def one(_: None, chunk: tuple) -> tuple:
        h, ids = chunk
        return None, _losses(_logits(h, matrix, bias, form.softcap), ids, form.smoothing)

    chunks = _split((hidden, targets), targets.shape, form.chunk_size)
    return _join(jax.lax.scan(one, None, chunks)[1], targets.shape)


def _scan_gradients(hidden: jax.Array, embedding: jax.Array, bias: jax.Array | None, weights: jax.Array,
                    targets: jax.Array, form: _Form) -> tuple[jax.Array, tuple]:
    """[...] losses, and the gradients of their weighted sum by hidden, embedding and bias.

    The gradient by a token's logits is w (softmax(z) - q). Its dense part is kept as exp(z - max z), of which the
    token's factor w / sum(exp) moves into the smaller operand of each product; the target and the uniform part of q
    are a row of the embedding and the sum of its rows. So the logits are read twice and written once, not more.
    """
    matrix = embedding.astype(hidden.dtype)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    uniform = form.smoothing / embedding.shape[0] * weights if form.softcap is None else jnp.zeros_like(weights)
    # A product with ones reads a narrow matrix as it is; of one row it would not be shared by a CPU's cores.
    rows_sum = contract(jnp.ones((8, embedding.shape[0]), matrix.dtype), matrix, (1, 0))[0]

    def one(carry: tuple, chunk: tuple) -> tuple:
        d_matrix, d_bias = carry
        shape = chunk[-1].shape
        h, w, u, ids = (x.reshape(-1, *x.shape[2:]) for x in chunk)
        logits = _logits(h, matrix, bias, form.softcap)
        losses, dense, scale, gold = _loss_parts(logits, ids, w, form)
        if bias is not None:
            d_bias += jnp.sum(dense * scale, axis=0)
        dense = dense.astype(hidden.dtype)
        d_h = contract(dense, matrix, (1, 0)) * scale - u[:, None] * rows_sum
        d_h -= gold[:, None] * matrix[ids]
        d_matrix += row_product(dense, (scale * h).astype(hidden.dtype))
        return (d_matrix, d_bias), tuple(x.reshape(*shape, *x.shape[1:]) for x in (losses, gold, d_h.astype(h.dtype)))

    start = jnp.broadcast_to(-jnp.einsum("...,...M->M", uniform, hidden), embedding.shape).astype(wide)
    carry = (start, None if bias is None else jnp.broadcast_to(-jnp.sum(uniform), bias.shape).astype(wide))
    targets = jnp.clip(targets, 0, embedding.shape[0] - 1)
    chunks = _split((hidden, weights, uniform, targets), targets.shape, form.chunk_size)
    parts: tuple[jax.Array, ...]
    (d_matrix, d_bias), parts = jax.lax.scan(one, carry, chunks)
    losses, gold, d_hidden = (_join(x, targets.shape) for x in parts)
    d_matrix = d_matrix.at[targets].add(-gold[..., None] * hidden)
    if bias is not None and d_bias is not None:
        d_bias = d_bias.at[targets].add(-gold).astype(bias.dtype)
    return losses, (d_hidden, d_matrix.astype(embedding.dtype), d_bias)


def _parted_gradients(hidden: jax.Array, embedding: jax.Array, bias: jax.Array | None, weights: jax.Array,
                      targets: jax.Array, form: _Form) -> tuple[jax.Array, tuple]:
    """`_scan_gradients`, each part of the tokens by itself; gradients of embedding and bias are summed at the end."""
    rows, columns = form.parts
    if rows * columns == 1:
        return _scan_gradients(hidden, embedding, bias, weights, targets, form)

    def cut(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [rows, columns, B / rows, T / columns, ...]
        x = x.reshape(rows, x.shape[0] // rows, columns, x.shape[1] // columns, *x.shape[2:])
        return jnp.moveaxis(x, 2, 1)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 1, 2)
        return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], *x.shape[4:])

    one = functools.partial(_scan_gradients, form=form)
    each = jax.vmap(jax.vmap(lambda h, w, t: one(h, embedding, bias, w, t)))
    losses, (d_hidden, d_embedding, d_bias) = each(cut(hidden), cut(weights), cut(targets))
    d_bias = None if d_bias is None else jnp.sum(d_bias, axis=(0, 1))
    return join(losses), (join(d_hidden), jnp.sum(d_embedding, axis=(0, 1)), d_bias)


def _loss_parts(logits: jax.Array, targets: jax.Array, weights: jax.Array, form: _Form) -> tuple[jax.Array, ...]:
    """Losses [N] of logits [N, V], and their gradient by the uncapped logits as dense [N, V] * scale [N, 1], less the
    uniform part where there is no soft cap, less gold [N] at the target."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    dense = jnp.exp(logits - top)
    total = jnp.sum(dense, axis=-1, keepdims=True)
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=-1, mode="clip")
    losses = top + jnp.log(total) - (1.0 - form.smoothing) * at_target
    if form.smoothing:
        losses -= form.smoothing * jnp.mean(logits, axis=-1, keepdims=True)
    scale, gold = weights[:, None] / total, (1.0 - form.smoothing) * weights[:, None]
    if form.softcap is not None:
        dense = (dense * scale - form.smoothing / logits.shape[-1] * weights[:, None])
        dense *= 1.0 - jnp.square(logits / form.softcap)
        scale, gold = jnp.ones_like(scale), gold * (1.0 - jnp.square(at_target / form.softcap))
    return losses[:, 0], dense, scale, gold[:, 0]


def _logits(hidden: jax.Array, matrix: jax.Array, bias: jax.Array | None, softcap: float | None) -> jax.Array:
    """[..., V], in float32 at least."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("...M,VM->...V", hidden, matrix, preferred_element_type=wide)
    if bias is not None:
        logits += bias.astype(wide)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _losses(logits: jax.Array, targets: jax.Array, smoothing: float) -> jax.Array:
    gold = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - (1.0 - smoothing) * gold
    return loss - smoothing * jnp.mean(logits, axis=-1) if smoothing else loss


def _split(arrays: tuple[jax.Array, ...], shape: tuple[int, ...], chunk_size: int) -> tuple[jax.Array, ...]:
    """Cut [B, T, ...] arrays along T into [chunks, B, t, ...]; the batch axis stays whole, as its sharding does."""
    batch, length = _batch_length(shape)
    chunks = math.ceil(length / max(1, chunk_size // max(batch, 1)))
    size = math.ceil(length / max(chunks, 1))

    def one(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, length, *x.shape[len(shape):])
        x = jnp.pad(x, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, chunks, size, *x.shape[2:]), 1, 0)

    return tuple(one(x) for x in arrays)


def _join(chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of _split."""
    batch, length = _batch_length(shape)
    whole = jnp.moveaxis(chunks, 0, 1)
    whole = whole.reshape(batch, whole.shape[1] * whole.shape[2], *whole.shape[3:])[:, :length]
    return whole.reshape(*shape, *whole.shape[2:])


def _batch_length(shape: tuple[int, ...]) -> tuple[int, int]:
    """The [B, T] that leading axes are seen as."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _check(leading: tuple[int, ...], targets: jax.Array, weights: jax.Array | None, smoothing: float) -> None:
    if targets.shape != leading:
        raise ValueError(f"targets must have the shape {leading} of the tokens, got {targets.shape}")
    if weights is not None and weights.shape != leading:
        raise ValueError(f"weights must have the shape {leading} of the tokens, got {weights.shape}")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")


def _check_fused(hidden: jax.Array, embedding: jax.Array, targets: jax.Array, weights: jax.Array | None,
                 bias: jax.Array | None, smoothing: float, softcap: float | None, chunk_size: int) -> None:
    _check(hidden.shape[:-1], targets, weights, smoothing)
    if embedding.ndim != 2 or embedding.shape[1:] != hidden.shape[-1:]:
        raise ValueError(f"embedding must be [V, {hidden.shape[-1]}] for this hidden, got {embedding.shape}")
    if bias is not None and bias.shape != embedding.shape[:1]:
        raise ValueError(f"bias must have the shape {embedding.shape[:1]}, got {bias.shape}")
    if softcap is not None and softcap <= 0.0:
        raise ValueError(f"softcap must be above 0, got {softcap}")
    if chunk_size <= 0:
        raise ValueError(f"chunk_size must be above 0, got {chunk_size}")
