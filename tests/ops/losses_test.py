"""The losses against float64 arithmetic in NumPy and against torch, in value and gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tfm.ops.losses import fused_cross_entropy, fused_cross_entropy_sum, label_smoothed_cross_entropy

B, T, M, V = 3, 7, 8, 11
NAMES = ("hidden", "embedding", "bias", "weights")
FORMS = [
    dict(smoothing=0.0, softcap=None, with_bias=False),
    dict(smoothing=0.1, softcap=None, with_bias=True),
    dict(smoothing=0.3, softcap=2.0, with_bias=True),
    dict(smoothing=0.0, softcap=3.0, with_bias=False),
]


def _inputs(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return dict(
        hidden=rng.normal(size=(B, T, M)),
        embedding=rng.normal(size=(V, M)),
        bias=rng.normal(size=V),
        targets=rng.integers(0, V, (B, T)),
        weights=rng.uniform(0.0, 2.0, (B, T)) * (rng.random((B, T)) < 0.8),
        cotangent=rng.normal(size=(B, T)),
    )


def _smoothed(logits: np.ndarray, targets: np.ndarray, smoothing: float) -> np.ndarray:
    """Minus the expectation of log softmax under (1 - eps) one-hot + eps / V, written out."""
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    q = np.full(logits.shape, smoothing / logits.shape[-1])
    np.put_along_axis(q, targets[..., None], smoothing / logits.shape[-1] + 1.0 - smoothing, -1)
    return -(q * log_p).sum(-1)


def _logits(x: dict[str, np.ndarray], softcap: float | None, with_bias: bool) -> np.ndarray:
    logits = np.einsum("btm,vm->btv", x["hidden"], x["embedding"]) + (x["bias"] if with_bias else 0.0)
    return logits if softcap is None else softcap * np.tanh(logits / softcap)


def _torch_gradients(x: dict[str, np.ndarray], outer: np.ndarray, form: dict) -> tuple[np.ndarray, list]:
    """Losses times their weights, and the gradients of their sum weighted by `outer`, in float64 by torch."""
    tensors = {name: torch.tensor(x[name], requires_grad=True) for name in NAMES}
    logits = tensors["hidden"] @ tensors["embedding"].T + (tensors["bias"] if form["with_bias"] else 0.0)
    if form["softcap"] is not None:
        logits = form["softcap"] * torch.tanh(logits / form["softcap"])
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(x["targets"]).flatten(), label_smoothing=form["smoothing"], reduction="none"
    ).reshape(B, T)
    losses = losses * tensors["weights"]
    (losses * torch.tensor(outer)).sum().backward()
    return losses.detach().numpy(), [None if t.grad is None else t.grad.numpy() for t in tensors.values()]


@functools.partial(jax.jit, static_argnames=("function", "smoothing", "softcap", "with_bias", "chunk_size"))
def _value_and_gradients(x, outer, *, function, smoothing, softcap, with_bias, chunk_size):
    def run(hidden, embedding, bias, weights):
        return function(
            hidden,
            embedding,
            x["targets"],
            smoothing=smoothing,
            weights=weights,
            bias=bias if with_bias else None,
            softcap=softcap,
            chunk_size=chunk_size,
        )

    value, pull = jax.vjp(run, *(x[name] for name in NAMES))
    return value, pull(outer)


def _float32(x: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(y, jnp.int32 if name == "targets" else jnp.float32) for name, y in x.items()}


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_plain_loss_is_the_formula(smoothing: float) -> None:
    x = _inputs()
    logits = _logits(x, None, True)
    loss = label_smoothed_cross_entropy(
        jnp.asarray(logits, jnp.float32), x["targets"], smoothing=smoothing, weights=x["weights"]
    )
    np.testing.assert_allclose(loss, _smoothed(logits, x["targets"], smoothing) * x["weights"], rtol=2e-6, atol=1e-6)


def test_plain_loss_is_in_float32_and_finite_for_large_bfloat16_logits() -> None:
    logits = jnp.array([[1e4, 0.0, -1e4], [-3e38, 0.0, 1.0]], jnp.bfloat16)
    loss = label_smoothed_cross_entropy(logits, jnp.array([1, 2]))
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, [9984.0, np.log1p(np.exp(-1.0))], rtol=1e-6)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("chunk_size", [2, 9, 1000])
def test_fused_loss_of_each_token(form: dict, chunk_size: int) -> None:
    x = _inputs(1)
    losses, gradients = _torch_gradients(x, x["cotangent"], form)
    got, got_gradients = _value_and_gradients(
        _float32(x),
        jnp.asarray(x["cotangent"], jnp.float32),
        function=fused_cross_entropy,
        chunk_size=chunk_size,
        **form,
    )
    np.testing.assert_allclose(got, losses, rtol=1e-5, atol=1e-5)
    _compare(got_gradients, gradients)


@pytest.mark.parametrize("parts", [(1, 1), (B, 1), (1, T)])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_fused_sum(form: dict, parts: tuple[int, int]) -> None:
    x = _inputs(2)
    outer = np.float64(-0.37)
    losses, gradients = _torch_gradients(x, outer, form)
    function = functools.partial(fused_cross_entropy_sum, parts=parts)
    got, got_gradients = _value_and_gradients(_float32(x), jnp.float32(outer), function=function, chunk_size=9, **form)
    np.testing.assert_allclose(got, losses.sum(), rtol=1e-5)
    _compare(got_gradients, gradients)


def _compare(got: tuple, wanted: list) -> None:
    for name, ours, theirs in zip(NAMES, got, wanted, strict=True):
        expected = np.zeros_like(ours) if theirs is None else theirs
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=5e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    hidden, embedding = rng.normal(size=(*shape, M)), rng.normal(size=(V, M))
    targets = rng.integers(0, V, shape)
    loss = fused_cross_entropy(
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(embedding, jnp.float32),
        jnp.asarray(targets),
        smoothing=0.1,
        chunk_size=3,
    )
    logits = hidden @ embedding.T
    expected = _smoothed(logits.reshape(-1, V), targets.reshape(-1), 0.1).reshape(shape)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("function", [fused_cross_entropy, fused_cross_entropy_sum])
def test_no_tokens_have_no_loss_and_no_gradient(function, shape: tuple[int, int]) -> None:
    def total(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        return jnp.sum(function(hidden, embedding, jnp.zeros(shape, jnp.int32)))

    loss, (d_hidden, d_embedding) = jax.value_and_grad(total, (0, 1))(jnp.zeros((*shape, M)), jnp.ones((V, M)))
    assert loss == 0 and d_hidden.shape == (*shape, M) and not d_embedding.any()


def test_padding_has_no_say_whatever_its_target() -> None:
    x = _float32(_inputs(4))
    weights = jnp.ones((B, T)).at[:, 4:].set(0.0)
    outcomes = []
    for target in (0, V - 1, -100, 10**6):
        targets = x["targets"].at[:, 4:].set(target)
        value = jax.value_and_grad(
            lambda h, e, ids=targets: fused_cross_entropy_sum(h, e, ids, smoothing=0.1, weights=weights, chunk_size=9),
            argnums=(0, 1),
        )
        outcomes.append(jax.jit(value)(x["hidden"], x["embedding"]))
    for outcome in outcomes[1:]:
        jax.tree.map(np.testing.assert_array_equal, outcome, outcomes[0])
    assert not np.any(outcomes[0][1][0][:, 4:])
    np.testing.assert_allclose(
        outcomes[0][0], _smoothed(_logits(_inputs(4), None, False), _inputs(4)["targets"], 0.1)[:, :4].sum(), rtol=1e-5
    )


def test_bfloat16_operands_and_float32_sums() -> None:
    """The reference rounds only the operands: hidden and embedding to bfloat16, then float64."""
    x = _inputs(5)
    x["hidden"], x["embedding"] = (np.float64(jnp.asarray(x[name], jnp.bfloat16)) for name in ("hidden", "embedding"))
    form = FORMS[1]
    losses, gradients = _torch_gradients(x, np.float64(1.0), form)
    inputs = _float32(x) | {"hidden": jnp.asarray(x["hidden"], jnp.bfloat16)}
    got, got_gradients = _value_and_gradients(
        inputs, jnp.float32(1.0), function=fused_cross_entropy_sum, chunk_size=9, **form
    )
    np.testing.assert_allclose(got, losses.sum(), rtol=1e-5)
    assert [g.dtype for g in got_gradients] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]
    for ours, theirs in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(np.float64(ours), theirs, rtol=2e-2, atol=2e-2)


def test_no_array_of_batch_length_and_vocabulary() -> None:
    """Temporary memory of a step with gradients is a few chunks of logits, not all of them."""
    batch, length, width, vocabulary, chunk = 8, 64, 16, 4000, 64
    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in (
            ((batch, length, width), jnp.float32),
            ((vocabulary, width), jnp.float32),
            ((batch, length), jnp.int32),
        )
    ]
    for function in (fused_cross_entropy, fused_cross_entropy_sum):
        step = jax.jit(jax.grad(lambda h, e, t, f=function: jnp.sum(f(h, e, t, chunk_size=chunk)), argnums=(0, 1)))
        memory = step.lower(*shapes).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * (4 * chunk * vocabulary + 4 * vocabulary * width)
        assert memory.temp_size_in_bytes < 4 * batch * length * vocabulary


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(targets=jnp.zeros((B, T + 1), jnp.int32)), "targets must have the shape"),
        (dict(weights=jnp.zeros((B, 1))), "weights must have the shape"),
        (dict(smoothing=1.0), "smoothing must be in"),
        (dict(embedding=jnp.zeros((V, M + 1))), "embedding must be"),
        (dict(bias=jnp.zeros(V + 1)), "bias must have the shape"),
        (dict(softcap=0.0), "softcap must be above 0"),
        (dict(chunk_size=0), "chunk_size must be above 0"),
    ],
)
def test_wrong_arguments_are_named(changes: dict, message: str) -> None:
    arguments = dict(hidden=jnp.zeros((B, T, M)), embedding=jnp.zeros((V, M)), targets=jnp.zeros((B, T), jnp.int32))
    with pytest.raises(ValueError, match=message):
        fused_cross_entropy(**(arguments | changes))


@pytest.mark.parametrize("function", [fused_cross_entropy, fused_cross_entropy_sum])
def test_gradients_of_numpy_arrays(function) -> None:
    """As of parameters that were just read from a file, outside `jit`."""
    x = _inputs()
    x["weights"][:] = 1.0
    _, gradients = _torch_gradients(x, np.ones((B, T)), dict(smoothing=0.1, softcap=None, with_bias=True))
    hidden, embedding, bias = (x[name].astype(np.float32) for name in NAMES[:3])
    got = jax.grad(lambda *a: jnp.sum(function(*a[:2], x["targets"], bias=a[2], smoothing=0.1)), (0, 1, 2))(
        hidden, embedding, bias
    )
    for ours, theirs in zip(got, gradients[:3], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_double_precision() -> None:
    x = _inputs()
    want = _smoothed(_logits(x, None, True), x["targets"], 0.1) * x["weights"]
    with jax.enable_x64(True):
        options = dict(smoothing=0.1, weights=x["weights"])
        fused = fused_cross_entropy(x["hidden"], x["embedding"], x["targets"], bias=x["bias"], **options)
        plain = label_smoothed_cross_entropy(jnp.asarray(_logits(x, None, True)), x["targets"], **options)
        total = fused_cross_entropy_sum(x["hidden"], x["embedding"], x["targets"], bias=x["bias"], **options)
    np.testing.assert_allclose(fused, want, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(plain, want, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(total, want.sum(), rtol=1e-13)
