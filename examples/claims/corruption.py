"""Claim: a tenth of kept and a tenth of random tokens make BERT read what it sees; T5's short targets cost less.

    python examples/claims/corruption.py [--quick] [--output FOLDER]

Devlin et al. (2019), section 3.1: MASK never comes in real text, so not all chosen tokens become MASK; appendix C.2:
mask-only training is fine after fine-tuning and worse when vectors are used as they are. Expected: with MASK only the
model finds fewer of the wrong tokens that it sees than with 80/10/10; random tokens alone make masked ones harder.
Raffel et al. (2020), section 3.3.4: targets of spans alone are about as good as whole texts and cheaper, as they are
shorter. Expected: at equal compute T5's objective makes 1.9 times as many updates and fills spans at least as well as
BART's. In the first few hundred updates BART is ahead: each of them learns from six times as many tokens.
"""

from typing import Any

from tfm.analysis.claim import Claim, Tables, run_claim, select
from tfm.analysis.corruption import RECIPES, learn_masked, learn_spans, steps_of_equal_compute


def measure(quick: bool) -> Tables:
    steps = 200 if quick else 1500
    recipes = ("80/10/10", "mask only") if quick else tuple(RECIPES)
    masked = [{"recipe": recipe, **learn_masked(recipe, steps=steps)} for recipe in recipes]
    spans = []
    for updates in (600,) if quick else (200, 500, 1500):
        for objective, count in steps_of_equal_compute(updates).items():
            spans.append({"objective": objective, "BART's updates": updates, "updates": count,
                          "loss of the span": learn_spans(objective, steps=count)})
    return {f"masked language models after {steps} updates": masked, "filling spans at equal compute": spans}


def draw(figure: Any, tables: Tables) -> None:
    masked, spans = tables.values()
    left, middle, right = figure.subplots(1, 3)
    names = [row["recipe"] for row in masked]
    left.bar(names, [row["masked"] for row in masked])
    left.set(ylabel="loss", title="masked tokens")
    middle.bar(names, [row["visible"] for row in masked])
    middle.set(ylabel="share named", title="visible tokens")
    for objective in ("T5", "BART"):
        line = select(spans, "BART's updates", "loss of the span", objective=objective)
        right.plot(*line, marker="o", label=objective)
    right.set(xlabel="compute, in BART's updates", ylabel="loss", title="a span of 4 tokens")
    right.legend()


CLAIM = Claim("corruption", __doc__ or "", measure, draw)

if __name__ == "__main__":
    run_claim(CLAIM)
