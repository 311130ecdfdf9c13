"""How programs are compiled."""

import jax
import jax.numpy as jnp
import numpy as np

from tfm.decoding.program import compiler_options


def test_the_options_are_those_of_the_backend(monkeypatch):
    assert compiler_options() == {"xla_cpu_prefer_vector_width": 512}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert compiler_options() is None


def test_wide_vectors_change_no_exponential():
    x = jnp.linspace(-87, 5, 4099)
    wide = jax.jit(jnp.exp, compiler_options=compiler_options())(x)
    np.testing.assert_allclose(wide, np.exp(np.asarray(x, np.float64)), rtol=2e-7)
