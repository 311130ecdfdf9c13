"""Decoding over any step function: greedy search, sampling, beam search, scoring."""

from tfm.decoding.beam import Beam, beam_search
from tfm.decoding.diverse import DiverseBeam, diverse_beam_search
from tfm.decoding.greedy import Greedy, greedy
from tfm.decoding.lexical import lexical_beam_search
from tfm.decoding.mbr import minimum_bayes_risk
from tfm.decoding.sample import Sample, sample
from tfm.decoding.score import score, token_log_probs, token_mask
from tfm.decoding.session import Session
from tfm.decoding.speculative import Accepted, ModelDraft, PromptLookup, speculate
from tfm.decoding.state import History, Hypotheses, Step, gather_beams, length_penalty, take_rows, tile

__all__ = [
    "Accepted",
    "Beam",
    "DiverseBeam",
    "Greedy",
    "History",
    "Hypotheses",
    "ModelDraft",
    "PromptLookup",
    "Sample",
    "Session",
    "Step",
    "beam_search",
    "diverse_beam_search",
    "gather_beams",
    "greedy",
    "length_penalty",
    "lexical_beam_search",
    "minimum_bayes_risk",
    "sample",
    "score",
    "speculate",
    "take_rows",
    "tile",
    "token_log_probs",
    "token_mask",
]
