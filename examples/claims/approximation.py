"""Claim: blockwise attention is exact; windows, Longformer, BigBird and linear attention are cheaper and see less.

    python examples/claims/approximation.py [--quick] [--output FOLDER]

Rabe and Staats (2021) and Dao et al. (2022): attention in blocks gives the same numbers with memory linear in the
length. Beltagy et al. (2020), Zaheer et al. (2020), Katharopoulos et al. (2020): sparse and linear attention cost less
at long lengths. Expected: on tokens that echo those of 8 places before all patterns learn; on an echo from 40 places
before a window of 16 cannot (two layers reach 31 places back), full attention can, and linear attention, which keeps a
state of fixed size, learns it worse. Time and memory: dense grows with the square of the length, blockwise's memory and
a window's time do not.
"""

from typing import Any

from tfm.analysis.approximation import PATTERNS, blockwise_difference, forward_cost, learn_echo
from tfm.analysis.claim import Claim, Tables, run_claim, select


def measure(quick: bool) -> Tables:
    names = ("full", "window") if quick else tuple(PATTERNS)
    exact = [{"pattern": name, "greatest difference": blockwise_difference(name, 128)}
             for name in names if name != "linear"]
    steps, distances = (200, (8, 40)) if quick else (1000, (8, 40))
    learning = [{"pattern": name, "distance": distance, "loss": learn_echo(name, distance, steps=steps)}
                for name in names for distance in distances]
    lengths = (512, 1024) if quick else (512, 1024, 2048, 4096)
    cost = [{"attention": name, "tokens": length, **forward_cost(name, length)}
            for name in ("dense", *names) for length in lengths]
    return {"blockwise against dense attention": exact,
            f"learning an echo, {steps} updates (nothing learnt: 2.48)": learning,
            "forward pass of 4 heads of width 16": cost}


def draw(figure: Any, tables: Tables) -> None:
    _, learning, cost = tables.values()
    axes = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["pattern"] for row in learning))
    for shift, distance in ((-0.2, 8), (0.2, 40)):
        losses = select(learning, "pattern", "loss", distance=distance)[1]
        axes[0].bar([i + shift for i in range(len(names))], losses, width=0.4, label=f"{distance} places before")
    axes[0].set_xticks(range(len(names)), names, rotation=20)
    axes[0].set(ylabel="loss at the end", title="learning an echo")
    for name in dict.fromkeys(row["attention"] for row in cost):
        for place, what in ((axes[1], "milliseconds"), (axes[2], "megabytes")):
            place.plot(*select(cost, "tokens", what, attention=name), marker="o", label=name)
            place.set(xscale="log", yscale="log", xlabel="tokens", title=what)
    for place in axes:
        place.legend()


CLAIM = Claim("approximation", __doc__ or "", measure, draw)

if __name__ == "__main__":
    run_claim(CLAIM)
