"""Post-LN and Pre-LN at initialisation: the directions of Xiong et al. (2020), theorem 1."""

from __future__ import annotations

import numpy as np
import pytest

from tfm.analysis.propagation import gradient_norms, growth, learn_repeats


@pytest.mark.slow
def test_last_layers_gradient_falls_with_depth_only_for_pre_norm():
    depths = [6, 32]
    exponents = {position: growth(depths, [gradient_norms(position, depth, 64)[-1] for depth in depths])
                 for position in ("post", "pre")}
    assert -0.75 < exponents["pre"] < -0.25, "theorem 1: -1/2"
    assert abs(exponents["post"]) < 0.2, "theorem 1: 0"


def test_norms_are_those_of_finite_differences():
    """The derivative along the gradient, by central differences in the loss, is the gradient's norm."""
    import jax
    import jax.numpy as jnp

    from tfm.analysis.propagation import VOCABULARY, next_token_loss, stack_config
    from tfm.models import init_params

    config = stack_config("pre", 2, 16)
    init_key, token_key = jax.random.split(jax.random.split(jax.random.key(0), 1)[0])
    tokens = jax.random.randint(token_key, (8, 17), 0, VOCABULARY)
    params = init_params(config, init_key)
    loss = jax.jit(lambda params: next_token_loss(config, params, tokens))
    kernels = params["decoder"]["layers"]["feed_forward"]["down"]["kernel"]
    direction = jax.grad(loss)(params)["decoder"]["layers"]["feed_forward"]["down"]["kernel"][1]
    direction /= jnp.linalg.norm(direction)

    def moved(step):
        changed = jax.tree.map(lambda x: x, params)
        changed["decoder"]["layers"]["feed_forward"]["down"]["kernel"] = kernels.at[1].add(step * direction)
        return float(loss(changed))

    slope = (moved(0.1) - moved(-0.1)) / 0.2
    np.testing.assert_allclose(gradient_norms("pre", 2, 16, draws=1)[1], slope, rtol=0.02)


@pytest.mark.slow
def test_deep_post_norm_needs_warmup():
    """Section 4: Pre-LN learns without warmup what Post-LN learns only with it, or not at all."""
    post, pre = (np.mean(learn_repeats(position, 8, warmup=0, steps=200)[-20:]) for position in ("post", "pre"))
    assert pre < post - 0.3
