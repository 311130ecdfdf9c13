"""Claim: without the factor 1/sqrt(d_k) the softmax saturates, its gradient vanishes, and learning stalls.

    python examples/claims/scaling.py [--quick] [--output FOLDER]

Vaswani et al. (2017), section 3.2.1: for large d_k "the dot products grow large in magnitude, pushing the softmax
function into regions where it has extremely small gradients"; additive attention "outperforms dot product attention
without scaling for larger values of d_k", while dot-product attention is "much faster and more space-efficient in
practice". Expected: the variance of the scores is d_k without the factor and 1 with it; the gradient falls with d_k
without it and stays with it; an unscaled head of large d_k learns to look a symbol up far later than a scaled or an
additive one, at small d_k all three learn alike.
"""

from typing import Any

from tfm.analysis.claim import Claim, Tables, run_claim, select
from tfm.analysis.scaling import KINDS, attention_seconds, learn_lookup, softmax_saturation


def measure(quick: bool) -> Tables:
    widths = (4, 64, 1024) if quick else (4, 16, 64, 256, 1024)
    saturation = [{"scores": "scaled" if scaled else "not scaled", "d_k": d_k, **softmax_saturation(d_k, scaled=scaled)}
                  for scaled in (True, False) for d_k in widths]
    steps = 100 if quick else 400
    learning = []
    for kind in KINDS:
        for d_k in (16, 512) if quick else (16, 64, 256, 1024):
            losses = learn_lookup(kind, d_k, steps=steps)
            learning.append({"attention": kind, "d_k": d_k, "first loss": losses[0],
                             "last loss": sum(losses[-20:]) / 20})
    speed = [{"attention": kind, "tokens": length, "milliseconds": 1e3 * attention_seconds(kind, length=length, d_k=64)}
             for kind in ("scaled dot", "additive") for length in ((64, 128) if quick else (128, 256, 512))]
    return {"saturation of the softmax over 64 random keys": saturation,
            f"looking a symbol up, {steps} updates (uniform weights: about 1.2)": learning,
            "one head of width 64, forward": speed}


def draw(figure: Any, tables: Tables) -> None:
    saturation, learning, speed = tables.values()
    left, middle, right = figure.subplots(1, 3)
    for scores in ("scaled", "not scaled"):
        left.plot(*select(saturation, "d_k", "gradient", scores=scores), marker="o", label=scores)
    left.set(xscale="log", xlabel="d_k", ylabel="norm of the softmax's Jacobian", title="gradient through the softmax")
    for kind in KINDS:
        middle.plot(*select(learning, "d_k", "last loss", attention=kind), marker="o", label=kind)
    middle.set(xscale="log", xlabel="d_k", ylabel="loss at the end", title="learning to look up")
    for kind in ("scaled dot", "additive"):
        right.plot(*select(speed, "tokens", "milliseconds", attention=kind), marker="o", label=kind)
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title="time of one head")
    for axes in (left, middle, right):
        axes.legend()


CLAIM = Claim("scaling", __doc__ or "", measure, draw)

if __name__ == "__main__":
    run_claim(CLAIM)
