"""Claim: attention is kernel regression, and one step of a Hopfield network whose energy it lowers.

    python examples/claims/kernel_and_memory.py [--quick] [--output FOLDER]

Nadaraya (1964) and Watson (1964): with the kernel exp(-|x - x_i|^2 / 2 h^2) the estimate is attention; expected: an
error that is smallest at a bandwidth between too small (noise) and too large (bias). Ramsauer et al. (2020), theorems
1, 3 and 4: the energy falls with every step, one step retrieves a stored pattern, and the number of patterns that can
be stored grows exponentially with the width; expected: at twice the width far more patterns are brought back.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tfm.analysis.claim import Claim, Tables, run_claim, select
from tfm.analysis.hopfield import hopfield_energy, hopfield_step, kernel_regression, retrieved_share


def regression(quick: bool) -> list[dict[str, Any]]:
    """Error of the estimate of a sine from 200 noisy points, at several bandwidths."""
    point_key, noise_key = jax.random.split(jax.random.key(0))
    points = jax.random.uniform(point_key, (200, 1), minval=-3.0, maxval=3.0)
    values = jnp.sin(2 * points) + 0.3 * jax.random.normal(noise_key, points.shape)
    grid = jnp.linspace(-2.5, 2.5, 201)[:, None]
    rows = []
    for bandwidth in (0.02, 0.2, 2.0) if quick else (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0):
        estimate = kernel_regression(grid, points, values, bandwidth=bandwidth)
        rows.append({"bandwidth": bandwidth,
                     "root mean square error": float(jnp.sqrt(jnp.mean((estimate - jnp.sin(2 * grid)) ** 2)))})
    return rows


def energy() -> list[dict[str, Any]]:
    """Energy and cosine with the true pattern along the steps, for a width of 32 and a low temperature."""
    keys = jax.random.split(jax.random.key(1))
    patterns = jax.random.normal(keys[0], (64, 32))
    state, rows = patterns[:1] + 1.5 * jax.random.normal(keys[1], (1, 32)), []
    for step in range(6):
        cosine = jnp.vdot(state, patterns[0]) / jnp.linalg.norm(state) / jnp.linalg.norm(patterns[0])
        rows.append({"step": step, "energy": float(hopfield_energy(state, patterns, beta=0.5)[0]),
                     "cosine with the pattern": float(cosine)})
        state = hopfield_step(state, patterns, beta=0.5)
    return rows


def measure(quick: bool) -> Tables:
    widths, counts = ((16, 32), (16, 256)) if quick else ((16, 24, 32, 48, 64), (16, 64, 256, 1024))
    retrieval = [{"width": width, "patterns": count, "retrieved": retrieved_share(count, width, noise=0.3)}
                 for width in widths for count in counts]
    return {"kernel regression of a noisy sine": regression(quick), "a Hopfield network's steps": energy(),
            "share of patterns that one attention step brings back": retrieval}


def draw(figure: Any, tables: Tables) -> None:
    regression_rows, energy_rows, retrieval = tables.values()
    left, middle, right = figure.subplots(1, 3)
    left.plot(*select(regression_rows, "bandwidth", "root mean square error"), marker="o")
    left.set(xscale="log", yscale="log", xlabel="bandwidth", ylabel="error", title="attention as kernel regression")
    middle.plot(*select(energy_rows, "step", "energy"), marker="o", label="energy")
    middle.set(xlabel="step", ylabel="energy", title="a Hopfield network")
    twin = middle.twinx()
    twin.plot(*select(energy_rows, "step", "cosine with the pattern"), marker="s", color="tab:orange")
    twin.set(ylabel="cosine with the pattern (squares)", ylim=(0, 1.05))
    for width in sorted({row["width"] for row in retrieval}):
        right.plot(*select(retrieval, "patterns", "retrieved", width=width), marker="o", label=f"width {width}")
    right.set(xscale="log", xlabel="stored patterns", ylabel="share retrieved", title="one step brings back")
    right.legend()


CLAIM = Claim("kernel_and_memory", __doc__ or "", measure, draw)

if __name__ == "__main__":
    run_claim(CLAIM)
