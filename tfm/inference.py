"""Ids in, ids out: batches of ragged rows through compiled decoding, scoring and embedding.

Rows are grouped by length into a few buckets and batches are filled up to a few sizes, so that any stream of inputs
compiles a small fixed number of programs, and a row is always computed at the shape of its own bucket: its result does
not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tfm.batching import (
    Batch,
    Rows,
    Stopped,
    batches,
    batches_at_once,
    bucket,
    by_row,
    check_rows,
    data_mesh,
    everywhere,
    side_by_side,
)
from tfm.config import ModelConfig, require
from tfm.decoding import (
    Accepted,
    Beam,
    DiverseBeam,
    Greedy,
    Hypotheses,
    ModelDraft,
    PromptLookup,
    Sample,
    Session,
    lexical_beam_search,
    speculate,
    token_log_probs,
)
from tfm.decoding.power_beam import PowerBeam
from tfm.decoding.program import Program
from tfm.models import build
from tfm.models.stepper import (
    attends_fully,
    branch,
    branches,
    follow,
    make_step,
    own_part,
    prepared,
    start_generation,
    start_translation,
)
from tfm.nn.cache import alone, rewind, widen
from tfm.search import Result, Search

STEPS = 16
"""Tokens after which finished rows may leave a batch."""
SIZES = (8, 16, 32, 64)
"""What a batch may shrink to."""
ROOM = 32
"""New tokens that the cache of a larger batch has room for at first."""


def generate(config: ModelConfig, params: Any, rows: Rows, search: Search, *, limits: Sequence[int], start_id: int,
             batch_size: int = 32, seed: int = 0, draft: tuple[ModelConfig, Any] | None = None,
             progress: Callable[[int], None] | None = None,
             accepted: Callable[[Accepted], None] | None = None) -> list[list[Result]]:
    """The n best continuations (decoder) or outputs (encoder-decoder) of each row, in order.

    Args:
        config: of a model with a decoder.
        params: its parameters, plain or `tfm.models.stepper.Prepared`.
        rows: ids of prompts, or of sources.
        search: how to choose.
        limits: most new tokens of each row.
        start_id: first input of an encoder-decoder's decoder (BOS).
        batch_size: most rows at a time. Halves of a small model's batch are decoded in two threads on a CPU, where
            settings of this thread alone, such as `jax.enable_x64` as a context, do not hold.
        seed: of sampling; a row's draw depends on the seed and its number alone.
        draft: config and parameters of the smaller model of the same vocabulary that drafts `search.draft` tokens.
        progress: called with the number of rows done.
        accepted: called with the counts of drafted and accepted tokens of each batch, where tokens are drafted.

    Returns:
        For each row its `n_best` results, best first.

    Raises:
        ValueError: an encoder, an empty row, an id outside the vocabulary, or a row too long for the model.
    """
    require(not config.is_encoder_only, "model.decoder_layers", 0, "generation needs a decoder")
    check_rows(config, rows, config.source_vocab_size or config.vocab_size)
    require(search.coverage == 0.0 or config.is_encoder_decoder, "coverage", search.coverage,
            "it counts the attention to a source, which a decoder does not have")
    require((draft is not None) == (search.draft > 0), "draft", search.draft, "it goes with a model that drafts")
    config, params = prepared(config, params)
    mesh = data_mesh(params)
    params, draft = everywhere(params, mesh), draft and (draft[0], everywhere(draft[1], mesh))
    results: list[list[Result]] = [[] for _ in rows]

    def decode(batch: Batch, stopped: Stopped) -> tuple[list[int], Hypotheses, Accepted | None]:
        numbers, ids, mask = batch
        padded = numbers + [numbers[0]] * (len(ids) - len(numbers))
        limit = np.array([_limit(config, limits[n], len(rows[n])) for n in padded], np.int32)
        buffer = bucket(int(limit.max()))
        keys = _keys(jax.random.key(seed), np.array(padded, np.uint32)) if search.temperature > 0.0 else None
        ids, mask, limit = by_row((ids, mask, limit), mesh)
        sizes = [size for size in SIZES if size < len(ids)]
        if search.lookup or search.draft or search.phrases or not sizes:
            return numbers, *jax.device_get(_search(config, search, buffer, start_id, params, ids, mask, limit, keys,
                                                    *(draft or (None, None))))
        session = _session(config, search, buffer, start_id, params, ids, mask, limit, keys)
        return numbers, session.run(STEPS, sizes, stopped), None

    done, at_once = 0, batches_at_once((params, draft), batch_size)
    for numbers, found, counts in side_by_side(decode, batches(rows, batch_size // at_once), at_once):
        if counts is not None and accepted is not None:
            accepted(counts)
        for place, number in enumerate(numbers):
            results[number] = _results(found, place, search)
        done += len(numbers)
        if progress is not None:
            progress(done)
    return results


@jax.jit
def _keys(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """A key for each row number."""
    return jax.vmap(partial(jax.random.fold_in, key))(numbers)


def _limit(config: ModelConfig, wanted: int, prompt: int) -> int:
    """Most new tokens of a row: as wanted, or what a learned position table still has room for."""
    if config.position != "learned":
        return wanted
    used = 1 if config.is_encoder_decoder else prompt
    require(used < config.max_positions, "the length of a prompt", used,
            f"the model has {config.max_positions} positions, which leaves none for a new token")
    return min(wanted, config.max_positions - used)


@partial(Program, static_argnames=("config", "search", "buffer", "start_id", "draft_config"))
def _search(config: ModelConfig, search: Search, buffer: int, start_id: int, params: Any, ids: jax.Array,
            mask: jax.Array, limit: jax.Array, keys: jax.Array | None, draft_config: ModelConfig | None = None,
            draft_params: Any = None) -> tuple[Hypotheses, Accepted | None]:
    """A whole batch in one program; for speculative decoding also the counts of drafted and accepted tokens."""
    size = search.lookup or search.draft
    loop = None if size or search.phrases else _loop(config, search)
    slots = buffer + 1 + size if loop is None else _slots(loop, buffer)
    shared, cache, prompt = _start(config, slots, start_id, search.cache_dtype, params, ids, mask)
    cache = alone(cache) if search.beam_size == 1 else cache
    step = make_step(config, params, shared, attention=search.coverage > 0.0)
    limits: dict[str, Any] = {"max_length": limit, "buffer_length": buffer,
                              "seen": None if config.is_encoder_decoder else jnp.where(mask, ids, -1)}
    if loop is not None:
        limits |= {"keys": keys} if isinstance(loop, Sample) else {"source_mask": mask} if search.coverage else {}
        return loop.run(step, cache, prompt, **limits), None
    common = {"eos_id": search.eos_ids, "pad_id": search.pad_id, "alpha": search.alpha, "reweight": search.reweight,
              "allow": search.allow, **limits}
    if search.phrases:
        return lexical_beam_search(step, cache, prompt, beam_size=search.beam_size, n_best=search.n_best,
                                   phrases=_phrases(search, ids.shape[0]), **common), None
    draft: PromptLookup | ModelDraft = PromptLookup()
    if search.draft:
        assert draft_config is not None
        own, drafting, _ = _start(draft_config, slots, start_id, search.cache_dtype, draft_params, ids, mask)
        draft = ModelDraft(make_step(draft_config, draft_params, own), alone(drafting), rewind)
    return speculate(step, cache, prompt, draft=draft, rewind=rewind, draft_length=size, key=keys,
                     temperature=search.temperature, top_k=search.top_k, top_p=search.top_p, min_p=search.min_p,
                     typical_p=search.typical_p, **common)


def _slots(loop: Any, buffer: int) -> int:
    """Slots of a cache for `buffer` new tokens of a row, or of each of the beams that share it."""
    return 1 + buffer * _writers(loop)


def _writers(loop: Any) -> int:
    """How many hypotheses of a row write into one cache."""
    return loop.beam_size if isinstance(loop, Beam) and loop.spread is branch else 1


def _session(config: ModelConfig, search: Search, buffer: int, start_id: int, params: Any, ids: np.ndarray,
             mask: np.ndarray, limit: np.ndarray, keys: jax.Array | None) -> Session:
    """A batch that has its first tokens, for all searches whose rows may leave it."""
    loop = _loop(config, search)
    room = min(ROOM, buffer) if attends_fully(config) else buffer
    shared, cache, prompt = _start(config, _slots(loop, room), start_id, search.cache_dtype, params, ids, mask)
    return Session(loop, _session_step(config, search.coverage > 0.0), params, shared, cache, prompt, max_length=limit,
                   buffer_length=buffer, seen=None if config.is_encoder_decoder else np.where(mask, ids, -1), keys=keys,
                   source_mask=mask if search.coverage else None, room=room, widen=_widen(_writers(loop)))


def _loop(config: ModelConfig, search: Search) -> Any:
    """The settings of the loop that a search asks for."""
    rules: dict[str, Any] = {"eos_ids": search.eos_ids, "pad_id": search.pad_id, "alpha": search.alpha,
                             "reweight": search.reweight, "allow": search.allow}
    if search.beam_size == 1:
        rules["log_probs"] = search.scored
    if search.temperature > 0.0:
        return Sample(temperature=search.temperature, top_k=search.top_k, typical_p=search.typical_p,
                      top_p=search.top_p, min_p=search.min_p, **rules)
    if search.beam_size == 1:
        return Greedy(**rules)
    size = search.beam_size // search.groups
    if branches(config, size):
        rules |= {"spread": branch, "reorder": follow}
    if search.groups > 1:
        return DiverseBeam(beam_size=size, n_best=size, groups=search.groups, diversity=search.diversity,
                           each=search.n_best // search.groups, **rules)
    if search.length_penalty is not None:
        return PowerBeam(beam_size=size, n_best=search.n_best, power=search.length_penalty,
                         early_stopping=search.early_stopping, renormalize=search.renormalize, **rules)
    return Beam(beam_size=size, n_best=search.n_best, coverage=search.coverage, **rules)


def _phrases(search: Search, batch: int) -> jax.Array:
    """[B, C, W] int32, -1 behind the end of shorter ones."""
    width = max(map(len, search.phrases))
    padded = [[*phrase, *[-1] * (width - len(phrase))] for phrase in search.phrases]
    return jnp.broadcast_to(jnp.array(padded, jnp.int32), (batch, len(padded), width))


def _results(found: Hypotheses, place: int, search: Search) -> list[Result]:
    hypotheses = []
    for n in range(search.n_best):
        at: Any = (place, n) if search.beam_size > 1 else place
        length = int(found.lengths[at])
        if n > 0 and not np.isfinite(found.scores[at]):  # the first is empty where no token was possible at all
            continue
        ids = found.ids[at][:length].tolist()
        hypotheses.append(Result(ids[:-1] if ids and ids[-1] in search.eos_ids else ids, float(found.scores[at]),
                                 bool(found.finished[at]), found.log_probs[at][:length].tolist()))
    return hypotheses


def stream(config: ModelConfig, params: Any, row: Sequence[int], search: Search, *, limit: int, start_id: int,
           seed: int = 0, steps: int = 4) -> Iterator[Result]:
    """What was generated so far for one row, every `steps` tokens; greedy search or sampling.

    Args: as for `generate`, for one row.

    Yields:
        Ever longer results; the last one is whole.
    """
    require(search.beam_size == 1, "beam_size", search.beam_size, "a stream needs beam_size=1: beams change their past")
    for name in ("lookup", "draft"):
        require(getattr(search, name) == 0, name, getattr(search, name), "a stream goes token by token")
    check_rows(config, [row], config.source_vocab_size or config.vocab_size)
    ((_, ids, mask),) = batches([row], 1)
    limit = _limit(config, limit, len(row))
    buffer = bucket(limit)
    keys = jax.random.split(jax.random.key(seed), 1) if search.temperature > 0.0 else None
    config, params = prepared(config, params)
    session = _session(config, search, buffer, start_id, params, ids, mask, np.array([limit]), keys)
    for found in session.stream(steps):
        yield _results(found, 0, search)[0]


@partial(jax.jit, static_argnames=("config", "slots", "start_id", "dtype"))
def _start(config: ModelConfig, slots: int, start_id: int, dtype: str | None, params: Any, ids: jax.Array,
           mask: jax.Array) -> tuple[Any, Any, jax.Array]:
    """What all hypotheses of a row share, the loop's own cache for `slots` new tokens, and its first input."""
    if config.is_encoder_decoder:
        shared = start_translation(config, params, ids, mask, slots, dtype=dtype)
        return shared.replace(layers=(), slots=()), own_part(shared), jnp.full((ids.shape[0], 1), start_id, jnp.int32)
    prompt, cache = start_generation(config, params, ids, mask, slots, dtype=dtype)
    return None, cache, prompt


@lru_cache
def _widen(writers: int) -> Callable[[Any, int], Any]:
    return lambda cache, tokens: widen(cache, tokens * writers)


@lru_cache
def _session_step(config: ModelConfig, attention: bool) -> Callable[[Any, Any], Any]:
    return lambda params, shared: make_step(config, params, shared, attention=attention)


def score_pairs(config: ModelConfig, params: Any, sources: Rows, targets: Rows, *, start_id: int,
                batch_size: int = 32) -> list[list[float]]:
    """log p(y_t | y_<t, x) of each target token given its source (encoder-decoder) or prompt (decoder).

    Args:
        config: of a model with a decoder.
        params: its parameters.
        sources: ids of sources or prompts.
        targets: ids to score, EOS included where it counts.
        start_id: first input of an encoder-decoder's decoder.
        batch_size: most rows at a time.

    Returns:
        For each row a list of log-probabilities, one for each target id.
    """
    require(not config.is_encoder_only, "model.decoder_layers", 0, "scoring needs a decoder")
    require(len(sources) == len(targets), "the number of targets", len(targets), f"there are {len(sources)} sources")
    check_rows(config, sources, config.source_vocab_size or config.vocab_size)
    check_rows(config, targets, config.vocab_size)
    scores: list[list[float]] = [[] for _ in sources]
    joint = [list(s) + list(t) for s, t in zip(sources, targets, strict=True)]
    if config.is_decoder_only:
        check_rows(config, joint, config.vocab_size)
    inputs = sources if config.is_encoder_decoder else joint
    for numbers, ids, mask in batches(inputs, batch_size):
        padded = numbers + [numbers[0]] * (len(ids) - len(numbers))
        if config.is_encoder_decoder:
            longest = bucket(max(len(targets[n]) for n in padded))
            shifted, labels = _shift(config, targets, padded, start_id, longest)
            found = np.asarray(_score_target(config, params, ids, mask, shifted, labels))
            starts = [0] * len(padded)
        else:
            found = np.asarray(_score_tokens(config, params, ids, mask))
            starts = [len(sources[n]) - 1 for n in padded]
        for place, number in enumerate(numbers):
            scores[number] = found[place, starts[place] : starts[place] + len(targets[number])].tolist()
    return scores


def _shift(config: ModelConfig, targets: Rows, numbers: Sequence[int], start_id: int,
           length: int) -> tuple[np.ndarray, np.ndarray]:
    shifted, labels = np.zeros((2, len(numbers), length), np.int32)
    for place, number in enumerate(numbers):
        row = list(targets[number])
        labels[place, : len(row)] = row
        shifted[place, : len(row)] = [start_id, *row[:-1]]
    return shifted, labels


@partial(jax.jit, static_argnames=("config",))
def _score_target(config: ModelConfig, params: Any, source: jax.Array, source_mask: jax.Array, shifted: jax.Array,
                  labels: jax.Array) -> jax.Array:
    module: Any = build(config)
    logits = module.apply({"params": params}, source, shifted, source_mask=source_mask)
    return token_log_probs(logits, labels)


@partial(jax.jit, static_argnames=("config",))
def _score_tokens(config: ModelConfig, params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    module: Any = build(config)
    logits = module.apply({"params": params}, ids, mask=mask)
    return token_log_probs(logits[:, :-1], ids[:, 1:])


def embed(config: ModelConfig, params: Any, rows: Rows, *, batch_size: int = 32, pooling: str = "mean") -> np.ndarray:
    """One vector for each row: the mean of its last hidden vectors over real tokens, or the first, of length 1.

    Args:
        config: of a model with an encoder.
        params: its parameters.
        rows: ids.
        batch_size: most rows at a time.
        pooling: "mean" or "first".

    Returns:
        [N, M] float32.

    Reference: Reimers and Gurevych (2019), "Sentence-BERT", section 3.
    """
    require(config.encoder_layers > 0, "model.encoder_layers", 0, "embeddings need an encoder")
    check_rows(config, rows, config.source_vocab_size or config.vocab_size)
    vectors = np.zeros((len(rows), config.d_model), np.float32)
    for numbers, ids, mask in batches(rows, batch_size):
        vectors[numbers] = np.asarray(_embed(config, pooling, params, ids, mask))[: len(numbers)]
    return vectors


@partial(jax.jit, static_argnames=("config", "pooling"))
def _embed(config: ModelConfig, pooling: str, params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    module: Any = build(config)
    variables = {"params": params}
    if config.is_encoder_only:
        hidden = module.apply(variables, ids, mask=mask)
    else:
        hidden = module.apply(variables, ids, source_mask=mask, method="encode")
    hidden = hidden.astype(jnp.float32)
    total = hidden[:, 0] if pooling == "first" else jnp.sum(jnp.where(mask[..., None], hidden, 0.0), axis=1)
    return total / jnp.maximum(jnp.linalg.norm(total, axis=-1, keepdims=True), 1e-12)


def classify(config: ModelConfig, params: Any, rows: Rows, *, batch_size: int = 32) -> np.ndarray:
    """The probability of each class for each row.

    Args:
        config: of an encoder with a classification head.
        params: its parameters.
        rows: ids.
        batch_size: most rows at a time.

    Returns:
        [N, num_classes] float32.

    Raises:
        ValueError: there is no such head, or a row that the model cannot take.
    """
    require(config.num_classes > 0, "model.num_classes", 0,
            "classifying needs an encoder with a classification head: train one with data.task='classify'")
    check_rows(config, rows, config.vocab_size)
    found = np.zeros((len(rows), config.num_classes), np.float32)
    for numbers, ids, mask in batches(rows, batch_size):
        found[numbers] = np.asarray(_classify(config, params, ids, mask))[: len(numbers)]
    return found


@partial(jax.jit, static_argnames=("config",))
def _classify(config: ModelConfig, params: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
    module: Any = build(config)
    return jax.nn.softmax(module.apply({"params": params}, ids, mask=mask, method="class_logits"), axis=-1)
