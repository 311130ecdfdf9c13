"""The whole encoder-decoder against torch.nn.Transformer with the same weights: logits and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tfm.models import build

SOURCE_MASK = np.array([[True] * 6, [True] * 4 + [False] * 2])
B, S, T = 2, 6, 5


def sinusoids(length, width):
    """Section 3.5 of the paper, in float64."""
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, width, 2) / width)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, width)


def attention_tree(module, get):
    names = ("query", "key", "value")
    kernels, biases = np.split(get(module.in_proj_weight), 3), np.split(get(module.in_proj_bias), 3)
    tree = {name: {"kernel": k.T, "bias": b} for name, k, b in zip(names, kernels, biases, strict=True)}
    return {**tree, "output": dense_tree(module.out_proj, get)}


def dense_tree(module, get):
    return {"kernel": get(module.weight).T, "bias": get(module.bias)}


def norm_tree(module, get):
    return {"scale": get(module.weight), "bias": get(module.bias)}


def layer_tree(module, get):
    cross = hasattr(module, "multihead_attn")
    tree = {"self_attention": attention_tree(module.self_attn, get),
            "self_attention_norm": norm_tree(module.norm1, get),
            "feed_forward": {"up": dense_tree(module.linear1, get), "down": dense_tree(module.linear2, get)},
            "feed_forward_norm": norm_tree(module.norm3 if cross else module.norm2, get)}
    if cross:
        tree["cross_attention"] = attention_tree(module.multihead_attn, get)
        tree["cross_attention_norm"] = norm_tree(module.norm2, get)
    return tree


def stack_tree(module, get):
    tree = {f"layers_{i}": layer_tree(layer, get) for i, layer in enumerate(module.layers)}
    return tree if module.norm is None else {**tree, "final_norm": norm_tree(module.norm, get)}


def params_tree(transformer, table, get):
    return {"token_embedding": {"table": get(table)}, "encoder": stack_tree(transformer.encoder, get),
            "decoder": stack_tree(transformer.decoder, get)}


def torch_model(torch, config):
    torch.manual_seed(0)
    model = torch.nn.Transformer(config.d_model, config.num_heads, config.encoder_layers, config.decoder_layers,
                                 config.d_ff, dropout=0.0, batch_first=True, layer_norm_eps=config.norm_epsilon,
                                 norm_first=config.norm_position == "pre")
    if config.norm_position == "post":  # the paper has no norm after the last layer's own
        model.encoder.norm = model.decoder.norm = None
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model, torch.nn.Parameter(torch.randn(config.vocab_size, config.d_model) * 0.3)


def torch_logits(torch, model, table, source, target):
    width = table.shape[1]

    def embed(ids):
        positions = torch.tensor(sinusoids(ids.shape[1], width), dtype=torch.float32)
        return table[torch.tensor(np.asarray(ids))] * width**0.5 + positions

    padding = torch.tensor(~SOURCE_MASK)
    hidden = model(embed(source), embed(target), tgt_mask=torch.triu(torch.ones(T, T, dtype=torch.bool), 1),
                   src_key_padding_mask=padding, memory_key_padding_mask=padding)
    return hidden @ table.T


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_logits_and_gradients_of_torch(small, norm_position):
    torch = pytest.importorskip("torch")
    config = small.config(norm_position=norm_position, attention_bias=True, attention_output_bias=True)
    source, target, labels = small.ids(0, (B, S)), small.ids(1, (B, T)), small.ids(2, (B, T))
    model, table = torch_model(torch, config)
    expected = torch_logits(torch, model, table, source, target)
    torch.nn.functional.cross_entropy(expected.reshape(B * T, -1), torch.tensor(np.asarray(labels)).reshape(-1).long()
                                      ).backward()
    params = jax.tree.map(jnp.asarray, params_tree(model, table, lambda p: p.detach().numpy().copy()))

    def loss(params):
        logits = build(config).apply({"params": params}, source, target, source_mask=jnp.asarray(SOURCE_MASK))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=2e-5)
    theirs = params_tree(model, table, lambda p: p.grad.numpy())
    assert jax.tree.structure(theirs) == jax.tree.structure(gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), gradients, theirs)


@pytest.mark.parametrize(("tie", "tables"), [
    ("all", {"token_embedding"}), ("inputs", {"token_embedding", "output"}),
    ("decoder", {"source_embedding", "target_embedding"}),
    ("none", {"source_embedding", "target_embedding", "output"})])
def test_ties(small, tie, tables):
    config = small.config(tie_embeddings=tie, source_vocab_size=17 if tie in ("decoder", "none") else None)
    params = small.params(config)
    assert set(params) - {"encoder", "decoder"} == tables
    source = small.ids(0, (1, 3)).at[0, 0].set(16 if config.source_vocab_size else 1)
    logits = build(config).apply({"params": params}, source, small.ids(1, (1, 4)))
    assert logits.shape == (1, 4, 13) and np.isfinite(np.asarray(logits)).all()


def test_logit_bias_scale_and_softcap(small):
    plain = small.config(logit_bias=True)
    params, arguments = small.params(plain), (small.ids(0, (1, 3)), small.ids(1, (1, 4)))
    logits = build(plain).apply({"params": params}, *arguments)
    without = {**params, "output": {"bias": jnp.zeros(13)}}
    no_bias = build(plain).apply({"params": without}, *arguments)
    np.testing.assert_allclose(logits - no_bias, jnp.broadcast_to(params["output"]["bias"], logits.shape), atol=1e-5)
    scaled = build(small.config(logit_bias=True, logit_scale=0.5)).apply({"params": without}, *arguments)
    np.testing.assert_allclose(scaled, 0.5 * no_bias, atol=1e-5)
    capped = build(small.config(logit_bias=True, logit_softcap=2.0)).apply({"params": params}, *arguments)
    np.testing.assert_allclose(capped, 2 * np.tanh(np.asarray(logits) / 2), atol=1e-5)


def test_an_id_outside_the_vocabulary_gives_nan(small):
    config = small.config()
    source = small.ids(0, (2, 3)).at[1, 0].set(13)
    logits = build(config).apply({"params": small.params(config)}, source, small.ids(1, (2, 4)))
    assert np.isnan(np.asarray(logits[1])).all() and np.isfinite(np.asarray(logits[0])).all()


def test_wrong_ids_are_refused_by_name(small):
    config = small.config()
    params, good = small.params(config), small.ids(0, (2, 3))
    for source, target, name in ((good[0], good, "source"), (good, good.astype(jnp.float32), "target")):
        with pytest.raises(ValueError, match=name):
            build(config).apply({"params": params}, source, target)
    with pytest.raises(ValueError, match="segments"):
        build(config).apply({"params": params}, good, good, source_segments=jnp.ones((2, 3), jnp.int32))


@pytest.mark.parametrize("shape", [(0, 3, 4), (0, 3, 20), (2, 0, 4), (2, 3, 0)])
def test_no_rows_and_no_tokens(small, shape):
    """Rows, tokens of the source and of the target; up to 16 queries take another way through cross-attention."""
    config, (rows, source, target) = small.config(), shape
    logits = build(config).apply({"params": small.params(config)}, small.ids(0, (rows, source)),
                                 small.ids(1, (rows, target)))
    assert logits.shape == (rows, target, 13) and np.isfinite(np.asarray(logits)).all()


def test_bfloat16_activations_stay_near_float32(small):
    config = small.config(dtype="bfloat16")
    params, arguments = small.params(config), (small.ids(0, (2, 5)), small.ids(1, (2, 4)))
    exact = build(small.config()).apply({"params": params}, *arguments)
    narrow = build(config).apply({"params": params}, *arguments)
    assert narrow.dtype == jnp.float32
    assert 1e-4 < np.abs(np.asarray(narrow - exact)).max() < 0.05 * np.abs(np.asarray(exact)).max()
