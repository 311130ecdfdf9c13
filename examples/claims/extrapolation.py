"""Claim: with ALiBi a decoder that was trained on short texts reads long ones as well; with sinusoids it does not.

    python examples/claims/extrapolation.py [--quick] [--output FOLDER]

Press, Smith and Lewis (2022), section 2.2 and figure 1: beyond the trained length L the loss of sinusoidal positions
rises at once, that of rotary ones a little later, T5's later still, and ALiBi's not. Appendix B: longer windows without
overlap gain also because fewer tokens stand at the start of a window ("early token curse"); sliding windows take that
away, and then ALiBi's loss stays rather than falls. Expected here, on texts of local structure:
the same order. On a needle that stands 64 times further away than any in training, a bias that grows with the distance
hides it; without such a bias it fades only among the many other tokens.
"""

from typing import Any

from tfm.analysis.claim import Claim, Tables, run_claim, select
from tfm.analysis.extrapolation import SCHEMES, TRAINED, retrieval_accuracy, text_losses, train_scheme


def measure(quick: bool) -> Tables:
    schemes = ("sinusoidal", "alibi", "none") if quick else SCHEMES
    factors, steps = ((1, 8), 300) if quick else ((1, 2, 4, 8, 16), 1000)
    far = (1, 64) if quick else (1, 4, 16, 64)
    text, retrieval = [], []
    for scheme in schemes:
        params = train_scheme("text", scheme, steps=steps)
        text += [{"positions": scheme, "tokens": times * TRAINED, **text_losses(scheme, params, times)}
                 for times in factors]
        params = train_scheme("retrieval", scheme, steps=steps)
        retrieval += [{"positions": scheme, "tokens": times * TRAINED,
                       "accuracy": retrieval_accuracy(scheme, params, times)} for times in far]
    return {f"loss on texts, trained at {TRAINED} tokens": text,
            f"needles found in the first eighth, trained at {TRAINED} tokens (chance: 0.125)": retrieval}


def draw(figure: Any, tables: Tables) -> None:
    text, retrieval = tables.values()
    axes = figure.subplots(1, 3)
    for scheme in dict.fromkeys(row["positions"] for row in text):
        for place, way in zip(axes, ("non-overlapping", "sliding"), strict=False):
            place.plot(*select(text, "tokens", way, positions=scheme), marker="o", label=scheme)
            place.set(xscale="log", ylabel="loss in nats", title=f"text, {way} windows")
        axes[2].plot(*select(retrieval, "tokens", "accuracy", positions=scheme), marker="o", label=scheme)
    axes[2].set(xscale="log", ylabel="accuracy", title="needle in the first eighth")
    for place in axes:
        place.set_xlabel("tokens")
        place.legend()


CLAIM = Claim("extrapolation", __doc__ or "", measure, draw)

if __name__ == "__main__":
    run_claim(CLAIM)
