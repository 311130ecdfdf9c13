"""The pseudo-perplexity, against a loop that masks one token after the other."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from tfm import Config, DataConfig, ModelConfig, build, init_params
from tfm.bundle import Bundle
from tfm.data import Splits, Texts
from tfm.data.tokenizer import ByteTokenizer
from tfm.evaluation import pseudo_perplexity


def test_each_token_is_masked_in_its_turn():
    tokenizer = ByteTokenizer(["<mask>"])
    model = ModelConfig(tokenizer.vocab_size, d_model=16, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=0,
                        logit_bias=True)
    params = jax.jit(lambda: init_params(model, jax.random.key(0)))()
    params["output"]["bias"] = 0.5 * jax.random.normal(jax.random.key(1), (tokenizer.vocab_size,))
    texts = Texts([["abc", "hello", "never counted"]])
    config = Config(model, DataConfig(task="masked_lm", source="text", train="x", max_length=16, tokens_per_batch=64,
                                      buckets=1))
    bundle = Bundle(config, params, tokenizer)
    apply = jax.jit(lambda ids, mask: build(model).apply({"params": params}, ids, mask=mask, method="token_logits"))
    total = 0.0
    for text in ("abc", "hello"):
        ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
        for i in range(1, len(ids) - 1):
            masked = np.zeros((1, 16), np.int32)
            masked[0, :len(ids)] = [*ids[:i], tokenizer.mask_id, *ids[i + 1:]]
            logits = apply(jnp.array(masked), jnp.arange(16)[None] < len(ids))
            total += float(jax.nn.log_softmax(logits[0, i])[ids[i]])
    found = pseudo_perplexity(bundle, Splits(texts, texts, texts), texts, tokens=8)
    assert found["pseudo_tokens"] == 8
    np.testing.assert_allclose(found["pseudo_perplexity"], math.exp(-total / 8), rtol=1e-5)
