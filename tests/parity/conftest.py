"""What every parity test does: random weights in a torch model, the same numbers out of ours."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tfm
from tfm.interop import from_huggingface, to_huggingface
from tfm.interop.checkpoint import flatten, load_params
from tfm.interop.families import family_of_type
from tfm.interop.tensor_files import open_tensors

BATCH, LENGTHS = 3, (7, 4, 1)
"""Ragged rows, padded on the right."""


def randomize(model, seed=0):
    """Every parameter and buffer of logits away from its neutral value; norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.requires_grad and name != "final_logits_bias":
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            is_scale = "norm" in name.lower() and name.endswith("weight") or ".ln_" in name and name.endswith("weight")
            tensor.copy_(1 + 0.3 * noise if is_scale else 0.3 * noise)
    return model.eval()


def ids_and_mask(seed, vocab, length=max(LENGTHS), pad=0):
    random = np.random.default_rng(seed)
    mask = np.arange(length)[None] < np.minimum(np.array(LENGTHS), length)[:, None]
    ids = random.integers(4, vocab, (BATCH, length))
    return np.where(mask, ids, pad).astype(np.int32), mask


def summed_loss(logits, labels, mask):
    """Summed cross-entropy of the real places, in JAX."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    return -jnp.sum(picked * mask)


@pytest.fixture
def check_parity(tmp_path):
    """A function (torch model, extra inputs) that compares logits, gradients and a round trip; returns the config."""

    def check(model, *, pad=0, token_types=False, apply=None, run=None):
        vocab = model.config.vocab_size
        randomize(model)
        model.save_pretrained(tmp_path / "theirs")
        config, params = from_huggingface(tmp_path / "theirs")
        inputs = make_inputs(config, vocab, pad, token_types)
        theirs, their_gradients = torch_logits(model, inputs, run)
        ours, our_gradients = jax_logits(config, params, inputs, apply)
        mask = inputs["label_mask"]
        np.testing.assert_allclose(ours[mask], theirs[mask], atol=2e-4, rtol=0)
        compare_gradients(config, model, our_gradients, their_gradients)
        to_huggingface(config, params, tmp_path / "ours")
        compare_files(tmp_path / "theirs", tmp_path / "ours")
        again, _ = from_huggingface(tmp_path / "ours")
        assert again == config
        return config, params

    return check


def make_inputs(config, vocab, pad, token_types):
    ids, mask = ids_and_mask(0, vocab, pad=pad)
    inputs = {"ids": ids, "mask": mask}
    if config.is_encoder_decoder:
        inputs["target"], inputs["label_mask"] = ids_and_mask(1, vocab, length=5, pad=pad)
        inputs["ids"] = ids_and_mask(0, config.source_vocab_size or vocab, pad=pad)[0]
    else:
        inputs["label_mask"] = mask
    inputs["labels"], _ = ids_and_mask(2, vocab, length=inputs["label_mask"].shape[1])
    if token_types:
        inputs["token_types"] = np.random.default_rng(3).integers(0, 2, ids.shape).astype(np.int32)
    return inputs


def torch_logits(model, inputs, run):
    """Logits, and the gradient of the summed loss by the name of the parameter."""
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    arguments = {"input_ids": tensors["ids"], "attention_mask": tensors["mask"].long()}
    if "target" in tensors:
        arguments |= {"decoder_input_ids": tensors["target"], "decoder_attention_mask": tensors["label_mask"].long()}
    if "token_types" in tensors:
        arguments["token_type_ids"] = tensors["token_types"]
    model.zero_grad()
    logits = run(model, arguments) if run else model(**arguments).logits
    picked = torch.log_softmax(logits, -1).gather(-1, tensors["labels"].long()[..., None])[..., 0]
    (-(picked * tensors["label_mask"]).sum()).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().numpy(), gradients


def jax_logits(config, params, inputs, apply):
    module = tfm.build(config)

    def forward(params):
        variables = {"params": params}
        if apply:
            return apply(module, variables, inputs)
        if config.is_encoder_decoder:
            return module.apply(variables, inputs["ids"], inputs["target"], source_mask=inputs["mask"],
                                target_mask=inputs["label_mask"])
        method = "token_logits" if config.is_encoder_only else "__call__"
        types = {"token_types": inputs["token_types"]} if "token_types" in inputs else {}
        return module.apply(variables, inputs["ids"], mask=inputs["mask"], method=method, **types)

    def loss(params):
        logits = forward(params)
        return summed_loss(logits, inputs["labels"], inputs["label_mask"]), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return np.asarray(logits), gradients


def compare_gradients(config, model, ours, theirs):
    """Torch's gradients go through the same table as its weights: every layout is linear."""
    family = family_of_type(model.config.model_type)
    absent = {name: np.zeros(tuple(p.shape), np.float32) for name, p in model.state_dict().items()
              if name not in theirs and not any(name == alias for alias in family.aliases(config))}
    _, expected = load_params(config, family, {**absent, **theirs}, "gradients")
    expected, ours = flatten(expected), flatten(ours)
    for path, gradient in ours.items():
        if path in ("output/bias",) and not np.any(expected[path]):
            continue  # a buffer there, which has no gradient
        scale = max(1.0, float(np.max(np.abs(expected[path]))))
        np.testing.assert_allclose(gradient / scale, expected[path] / scale, atol=2e-4, rtol=0, err_msg=path)


def compare_files(theirs, ours):
    """The exported folder holds the same tensors, bit for bit, but for copies and buffers that only one side writes."""
    old, new = open_tensors(theirs), open_tensors(ours)
    shared = set(old) & set(new)
    assert len(shared) >= min(len(old), len(new)) - 3
    for name in shared:
        np.testing.assert_array_equal(old[name], new[name], err_msg=name)
