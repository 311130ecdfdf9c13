"""Minimum Bayes risk: of several samples take the one that is most like the others."""

from collections.abc import Callable, Sequence

Utility = Callable[[str, str], float]  # (hypothesis, reference) -> higher is better


def minimum_bayes_risk(
    samples: Sequence[str], *, weights: Sequence[float] | None = None, utility: Utility | None = None
) -> tuple[int, list[float]]:
    """The sample h with the largest expected utility sum_r w(r) u(h, r) over all samples r, its own included.

    Args:
        samples: hypotheses for one source, as a sampler drew them; one drawn twice counts twice.
        weights: of each sample, as a reference; equal by default.
        utility: (hypothesis, reference) -> float; by default sentence chrF (0 to 100) by sacrebleu.

    Returns:
        The number of the best sample, the first of equals, and the expected utility of each.

    Raises:
        ValueError: no samples, or weights that do not fit them.

    Example:
        >>> minimum_bayes_risk(["no idea", "the cat sat", "the cat sits", "a cat sits"])[0]
        2

    Reference: Kumar and Byrne, 2004, "Minimum Bayes-Risk Decoding for Statistical Machine Translation"; with samples
        and chrF: Eikema and Aziz, 2022, "Sampling-Based Approximations to Minimum Bayes Risk Decoding for NMT".
    """
    if not samples:
        raise ValueError("samples is empty: expected at least one text")
    weights = [1.0] * len(samples) if weights is None else list(weights)
    if len(weights) != len(samples) or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"weights is {weights}: expected {len(samples)} numbers of at least 0, not all 0")
    utility = utility or chrf_utility()
    references: dict[str, float] = {}
    for text, weight in zip(samples, weights, strict=True):
        references[text] = references.get(text, 0.0) + weight
    total = sum(weights)
    expected = {
        text: sum(weight * utility(text, other) for other, weight in references.items()) / total for text in references
    }
    values = [expected[text] for text in samples]
    return max(range(len(values)), key=values.__getitem__), values


def chrf_utility() -> Utility:
    """Sentence-level chrF between 0 and 100 (Popović, 2015)."""
    from sacrebleu.metrics import CHRF

    metric = CHRF()
    return lambda hypothesis, reference: metric.sentence_score(hypothesis, [reference]).score
