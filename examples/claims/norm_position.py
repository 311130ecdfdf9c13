"""Claim: at initialisation the last layers of a Post-LN Transformer have large gradients at any depth, those of a
Pre-LN Transformer smaller ones the deeper it is; so Post-LN needs warmup and Pre-LN does not.

    python examples/claims/norm_position.py [--quick] [--output FOLDER]

Xiong et al. (2020), theorem 1 and figure 3: the gradient of the last layer's feed-forward matrix is O(d sqrt(ln d)) for
Post-LN, whatever the depth L, and O(d sqrt(ln d / L)) for Pre-LN (for d x d matrices whose entries have variance 1/d,
as here). Section 4: with Pre-LN, training without warmup reaches what training with it reaches; with Post-LN it does
not. Expected: exponents of the depth near 0 and near -1/2; deep Post-LN stacks without warmup end with the greatest
loss.
"""

from typing import Any

from tfm.analysis.claim import Claim, Tables, run_claim, select
from tfm.analysis.propagation import gradient_norms, growth, learn_repeats


def measure(quick: bool) -> Tables:
    depths, widths = ((2, 6, 12), (32, 64)) if quick else ((2, 4, 6, 8, 12, 16, 24, 32), (32, 64, 128, 256))
    layers, last, exponents = [], [], []
    for position in ("post", "pre"):
        found = {depth: gradient_norms(position, depth, 64) for depth in depths}
        deepest = depths[-1]
        layers += [{"norm": position, "layer": i, "gradient": norm} for i, norm in enumerate(found[deepest])]
        last += [{"norm": position, "depth": depth, "gradient": norms[-1]} for depth, norms in found.items()]
        wide = [gradient_norms(position, 6, width)[-1] for width in widths]
        exponents.append({"norm": position,
                          "exponent of the depth": growth(list(depths), [norms[-1] for norms in found.values()]),
                          "exponent of the width": growth(list(widths), wide)})
    steps = 200 if quick else 800
    training = [{"norm": position, "depth": depth, "warmup": warmup,
                 "last loss": sum(learn_repeats(position, depth, warmup=warmup, steps=steps)[-20:]) / 20}
                for position in ("post", "pre") for depth in ((8,) if quick else (2, 6, 12))
                for warmup in (0, steps // 4)]
    return {"gradient of the last layer's second feed-forward matrix, width 64": last,
            "its growth as a power of depth and of width": exponents,
            f"gradient by layer, depth {depths[-1]}": layers,
            f"loss after {steps} updates of learning to repeat (nothing learnt: 2.77)": training}


def draw(figure: Any, tables: Tables) -> None:
    last, _, layers, training = tables.values()
    left, middle, right = figure.subplots(1, 3)
    for position in ("post", "pre"):
        left.plot(*select(last, "depth", "gradient", norm=position), marker="o", label=f"{position}-LN")
        middle.plot(*select(layers, "layer", "gradient", norm=position), marker=".", label=f"{position}-LN")
        for warmup in sorted({row["warmup"] for row in training}):
            right.plot(*select(training, "depth", "last loss", norm=position, warmup=warmup),
                       marker="o", linestyle="-" if warmup else "--", label=f"{position}-LN, warmup {warmup}")
    left.set(xscale="log", yscale="log", xlabel="depth", ylabel="gradient norm", title="last layer at initialisation")
    middle.set(yscale="log", xlabel="layer", ylabel="gradient norm", title="every layer of the deepest")
    right.set(xlabel="depth", ylabel="loss at the end", title="training")
    for axes in (left, middle, right):
        axes.legend()


CLAIM = Claim("norm_position", __doc__ or "", measure, draw)

if __name__ == "__main__":
    run_claim(CLAIM)
