"""What every parity test does: random weights in a torch model, the same numbers out of ours."""

from __future__ import annotations

import dataclasses

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

torch.set_num_threads(1)  # the models are tiny, and several threads wait for each other on a busy machine
LENGTHS = (7, 4, 1)
TARGET_LENGTHS = (5, 4, 1)
"""Ragged rows, padded on the right."""


@dataclasses.dataclass
class Batch:
    """Ids [B, S] with their mask, labels [B, T], and what an encoder-decoder or BERT takes besides."""

    ids: np.ndarray
    mask: np.ndarray
    labels: np.ndarray
    target: np.ndarray | None = None
    target_mask: np.ndarray | None = None
    token_types: np.ndarray | None = None

    @property
    def label_mask(self):
        return self.mask if self.target_mask is None else self.target_mask

    def torch(self):
        named = {"input_ids": self.ids, "attention_mask": self.mask, "decoder_input_ids": self.target,
                 "decoder_attention_mask": self.target_mask, "token_type_ids": self.token_types}
        return {name: torch.tensor(value).long() for name, value in named.items() if value is not None}


def make_batch(config, pad=0, token_types=False):
    random = np.random.default_rng(0)

    def rows(lengths, vocab):
        mask = np.arange(lengths[0])[None] < np.array(lengths)[:, None]
        return np.where(mask, random.integers(4, vocab, mask.shape), pad).astype(np.int32), mask

    ids, mask = rows(LENGTHS, config.source_vocab_size or config.vocab_size)
    target, target_mask = rows(TARGET_LENGTHS, config.vocab_size) if config.is_encoder_decoder else (None, None)
    labels, _ = rows(LENGTHS if target is None else TARGET_LENGTHS, config.vocab_size)
    types = random.integers(0, 2, ids.shape).astype(np.int32) if token_types else None
    return Batch(ids, mask, labels, target, target_mask, types)


def randomize(model):
    """Every parameter and buffer of logits away from its neutral value; the scales of norms around 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.requires_grad or name == "final_logits_bias":
                is_scale = name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name)
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator) + is_scale)
    return model.eval()


@pytest.fixture
def randomized():
    return randomize


@pytest.fixture
def inputs():
    return make_batch


@pytest.fixture
def check_parity(tmp_path):
    """A function of a torch model that compares logits, gradients and a round trip; returns config and params."""

    def check(model, *, pad=0, token_types=False):
        randomize(model)
        model.save_pretrained(tmp_path / "theirs")
        config, params = from_huggingface(tmp_path / "theirs")
        batch = make_batch(config, pad, token_types)
        theirs, their_gradients = torch_logits(model, batch)
        ours, our_gradients = jax_logits(config, params, batch)
        np.testing.assert_allclose(ours[batch.label_mask], theirs[batch.label_mask], atol=2e-4, rtol=0)
        compare_gradients(config, model, our_gradients, their_gradients)
        to_huggingface(config, params, tmp_path / "ours")
        compare_files(model, tmp_path / "theirs", tmp_path / "ours")
        assert from_huggingface(tmp_path / "ours")[0] == config
        return config, params

    return check


def torch_logits(model, batch):
    """Logits, and the gradient of the summed cross-entropy by the name of the parameter."""
    logits = model(**batch.torch()).logits
    picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(batch.labels).long()[..., None])[..., 0]
    (-(picked * torch.tensor(batch.label_mask)).sum()).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().numpy(), gradients


def jax_logits(config, params, batch):
    """The same from our model."""
    module = tfm.build(config)

    def loss(params):
        variables = {"params": params}
        if config.is_encoder_decoder:
            logits = module.apply(variables, batch.ids, batch.target, source_mask=batch.mask,
                                  target_mask=batch.target_mask)
        elif config.is_encoder_only:
            logits = module.apply(variables, batch.ids, mask=batch.mask, token_types=batch.token_types,
                                  method="token_logits")
        else:
            logits = module.apply(variables, batch.ids, mask=batch.mask)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.labels[..., None], -1)[..., 0]
        return -jnp.sum(picked * batch.label_mask), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return np.asarray(logits), gradients


def compare_gradients(config, model, ours, theirs):
    """No gradient differs by more than 2e-4 of its tensor's largest entry (or of 1)."""
    wrong = {path: found for path, found in gradient_differences(config, model, ours, theirs).items() if found > 2e-4}
    assert not wrong


def gradient_differences(config, model, ours, theirs):
    """The largest difference of each parameter's gradient, over its largest entry where that is above 1.

    Torch's gradients go through the same table as its weights, since every layout is linear.
    """
    family = family_of_type(model.config.model_type)
    absent = {name: np.zeros(tuple(p.shape), np.float32) for name, p in model.state_dict().items()
              if name not in theirs and name not in family.aliases(config)}
    expected = flatten(load_params(config, family, {**absent, **theirs}, "gradients")[1])
    buffers = {"output/bias"} if "final_logits_bias" in absent else set()
    found = {}
    for path, gradient in flatten(ours).items():
        if path not in buffers:
            scale = max(1.0, float(np.max(np.abs(expected[path]))))
            found[path] = float(np.max(np.abs(gradient - expected[path]))) / scale
    return found


def compare_files(model, theirs, ours):
    """Both folders hold the same tensors, bit for bit, but for copies and tables that follow from the config."""
    old, new = open_tensors(theirs), open_tensors(ours)
    derived = {"marian": "embed_positions", "bert": "decoder.bias", "roberta": "decoder.bias"}
    part = derived.get(model.config.model_type, "nothing")
    different = [name for name in set(old) ^ set(new) if part not in name]
    assert not different
    for name in set(old) & set(new):
        np.testing.assert_array_equal(old[name], new[name], err_msg=name)
