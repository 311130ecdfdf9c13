"""Arrays and options that do not fit an attention are named before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm import masks
from tfm.masks import Causal, Global, Padding, Prefix, Segments, Window
from tfm.ops import attention
from tfm.ops.positions import Alibi, Shaw, T5Bias, alibi_slopes

X = jnp.ones((1, 4, 2, 8))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: attention(X[0], X, X), "query has shape"),
        (lambda: attention(X, X, X[:, :3]), "value has shape"),
        (lambda: attention(X, X[..., :4], X), "key has shape"),
        (lambda: attention(X, X[:, :, :1].repeat(3, 2), X[:, :, :1].repeat(3, 2)), "multiple of the key's 3"),
        (lambda: attention(X, X, X, implementation="flash"), "implementation is 'flash'"),
        (lambda: attention(X, X, X, dropout_rate=0.1), "needs a dropout_key"),
        (lambda: attention(X, X, X, dropout_rate=1.0, dropout_key=jax.random.key(7)), "must be in"),
        (lambda: attention(X, X, X, mask=np.ones((4, 4))), "dtype float64"),
        (lambda: attention(X, X, X, query_positions=np.arange(3)), "query_positions has shape"),
        (lambda: attention(X, X, X, implementation="cudnn", mask=Prefix(2)), "lacks a rule like Prefix"),
        (lambda: attention(X, X, X, implementation="cudnn", bias=np.zeros((4, 4))), "lacks bias"),
        (lambda: attention(X, X, X, implementation="cudnn", return_lse=True), "lacks the log-sum-exp"),
        (lambda: attention(X, X, jnp.ones((1, 4, 2, 8), jnp.int32)), "value has dtype int32"),
        (lambda: attention(X[:, :, :0], X[:, :, :0], X[:, :, :0]), "heads and width must be 1 or more"),
        (lambda: attention(X, X, X, bias=np.ones((4, 4), bool)), "bias has dtype bool"),
        (lambda: attention(X, X, X, bias=Causal()), r"bias is Causal\(\); it must be a rule of tfm.positions"),
        (lambda: attention(X, X, X, bias=Alibi), "bias is <class"),
        (lambda: attention(X, X, X, relative=Causal()), r"relative is Causal\(\)"),
        (lambda: attention(X, X, X, soft_cap=0.0), "soft_cap is 0.0"),
        (lambda: attention(X, X, X, block_size=0), "block_size is 0"),
        (lambda: jax.jit(lambda scale: attention(X, X, X, scale=scale))(0.5), "scale is traced"),
        (lambda: attention(X, X, X, relative=Shaw(jnp.ones((4, 8)))), "Shaw.key_table has 4 rows"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


SHORT, ONE_MORE = np.ones(3, bool), np.ones((2, 4), bool)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(mask=np.ones((4, 3), bool)), r"Matrix.mask has shape \(4, 3\)"),
        (dict(mask=np.ones((1, 3, 4, 4), bool)), "Matrix.mask has shape"),
        (dict(mask=np.ones((1, 1, 1, 4, 4), bool)), "Matrix.mask has shape"),
        (dict(mask=Padding(SHORT)), r"Padding.valid has shape \(3,\)"),
        (dict(mask=Causal() | Padding(ONE_MORE)), r"broadcastable to \[B = 1, S = 4\]"),
        (dict(mask=Causal() & Padding([True] * 4)), "Padding.valid is a list"),
        (dict(mask=Segments(SHORT, np.ones(4))), "Segments.query_ids has shape"),
        (dict(mask=Segments(np.ones(4), SHORT)), "Segments.key_ids has shape"),
        (dict(mask=Prefix(np.array([1, 2]))), "Prefix.length has shape"),
        (dict(mask=Window(1, 1, (1, 2, 3))), "Window.dilations has shape"),
        (dict(mask=Global(np.ones((2, 9), bool))), "Global.tokens has shape"),
        (dict(mask=masks.Blocks(np.ones((3, 2, 2), bool), 2)), "Blocks.cells has shape"),
        (dict(bias=np.zeros((4, 3), np.float32)), r"MatrixBias.bias has shape \(4, 3\)"),
        (dict(bias=Alibi(alibi_slopes(3))), "Alibi.slopes has shape"),
        (dict(bias=T5Bias(np.zeros((8, 3), np.float32), True)), "T5Bias.table has shape"),
        (dict(relative=Shaw(jnp.ones((3, 8)), jnp.ones((5, 8)))), "Shaw.value_table has shape"),
    ],
)
def test_arrays_that_do_not_fit_are_named(options, words, implementation):
    with pytest.raises(ValueError, match=words):
        attention(X, X, X, implementation=implementation, **options)
