"""Claim: label smoothing makes the perplexity worse and translations not; beams, averages and Table 3 at small size.

    python examples/claims/smoothing_and_search.py [--quick] [--output FOLDER]

Vaswani et al. (2017), section 5.4: label smoothing "hurts perplexity, as the model learns to be more unsure, but
improves accuracy and BLEU score"; section 6.1: beam 4 and alpha 0.6, the last checkpoints averaged; Table 3: one head,
small d_k, fewer layers and a smaller width are worse, learned positions as good as sinusoids. Expected on a toy pair of
languages (the order is reversed; 6 of 10 translations are in a dialect that has two words for each, the others in a
plain one): perplexity and confidence as said; the gradient of the smoothed loss is p - q'; averaging does not hurt;
beams find the plain translation, which is likelier as a whole and begins with an unlikelier word. That smoothing also
raises BLEU is not expected here, where data never repeat and nothing can be learnt by heart.
"""

from dataclasses import replace
from typing import Any

from tfm.analysis.claim import Claim, Tables, run_claim, select
from tfm.analysis.translation import (
    BASE,
    BOS,
    EOS,
    smoothing_gradient_error,
    token_figures,
    train_pairs,
    unseen_rows,
)
from tfm.inference import Search, generate

VARIANTS = {"base": {}, "A: 1 head": {"num_heads": 1}, "A: 16 heads": {"num_heads": 16}, "B: d_k 2": {"head_dim": 2},
            "C: 1 layer": {"encoder_layers": 1, "decoder_layers": 1}, "C: width 16": {"d_model": 16},
            "C: d_ff 32": {"d_ff": 32}, "D: dropout 0.2": {"dropout_rate": 0.2},
            "E: learned positions": {"position": "learned", "max_positions": 16}}


def bleu(params: Any, *, beam_size: int, alpha: float) -> float:
    """BLEU of the toy pair's test sentences; each id is a word."""
    import sacrebleu

    sources, references = unseen_rows()
    search = Search(beam_size=beam_size, alpha=alpha, eos_ids=(EOS,))
    found = generate(BASE, params, sources, search, limits=[12] * len(sources), start_id=BOS, batch_size=64)
    texts = [" ".join(f"w{i}" for i in row[0].ids) for row in found]
    wanted = [" ".join(f"w{i}" for i in row) for row in references]
    return sacrebleu.corpus_bleu(texts, [wanted], tokenize="none", force=True).score


def measure(quick: bool) -> Tables:
    steps = 250 if quick else 1500
    smoothing, trained = [], {}
    for epsilon in (0.0, 0.1) if quick else (0.0, 0.1, 0.3):
        trained[epsilon] = train_pairs(BASE, smoothing=epsilon, steps=steps)
        smoothing.append({"smoothing": epsilon, "gradient - (p - q')": smoothing_gradient_error(epsilon),
                          **token_figures(BASE, trained[epsilon][0]),
                          "BLEU": bleu(trained[epsilon][0], beam_size=4, alpha=0.6)})
    last, mean = trained[0.1]
    search = [{"beam": beam, "alpha": alpha, "BLEU": bleu(last, beam_size=beam, alpha=alpha)}
              for beam, alpha in (((1, 0.6), (4, 0.6)) if quick else
                                  ((1, 0.6), (2, 0.6), (4, 0.0), (4, 0.6), (4, 1.0), (8, 0.6)))]
    average = [{"parameters": name, **token_figures(BASE, params)} for name, params in
               (("last", last), (f"mean of the last {steps // 10}", mean))]
    tables = {f"label smoothing, {steps} updates": smoothing, "search, smoothing 0.1": search,
              "averaging, smoothing 0.1": average}
    if not quick:
        tables["rows of Table 3, smoothing 0.1"] = [_variant(name, steps) for name in VARIANTS]
    return tables


def _variant(name: str, steps: int) -> dict[str, Any]:
    config = replace(BASE, **VARIANTS[name])
    return {"model": name, **token_figures(config, train_pairs(config, smoothing=0.1, steps=steps)[0])}


def draw(figure: Any, tables: Tables) -> None:
    smoothing, search, average, *variants = tables.values()
    axes = figure.subplots(1, 3 + bool(variants))
    axes[0].plot(*select(smoothing, "smoothing", "perplexity"), marker="o")
    axes[0].set(xlabel="label smoothing", ylabel="perplexity", title="label smoothing")
    twin = axes[0].twinx()
    twin.plot(*select(smoothing, "smoothing", "BLEU"), marker="s", color="tab:orange")
    twin.set(ylabel="BLEU (squares)", ylim=(0, 1.1 * max(row["BLEU"] for row in smoothing)))
    dots = [(axes[1], [f"beam {row['beam']}\nalpha {row['alpha']}" for row in search], search, "BLEU", "search"),
            (axes[2], [row["parameters"] for row in average], average, "perplexity", "averaging")]
    if variants:
        dots.append((axes[3], [row["model"] for row in variants[0]], variants[0], "perplexity", "Table 3"))
    for place, names, rows, what, title in dots:
        place.plot(range(len(rows)), [row[what] for row in rows], "o")
        place.margins(x=0.4 / len(rows) + 0.05, y=0.2)
        place.set_xticks(range(len(rows)), names, rotation=70 if len(rows) > 3 else 0, fontsize=8)
        place.set(ylabel=what, title=title)


CLAIM = Claim("smoothing_and_search", __doc__ or "", measure, draw, size=(15.0, 4.8))

if __name__ == "__main__":
    run_claim(CLAIM)
