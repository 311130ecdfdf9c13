"""`load(path)`: the config, parameters and tokenizer of a run or of a foreign checkpoint, ready to use on text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tfm.batching import Rows
from tfm.config import Config, ModelConfig, require
from tfm.data.tokenizer import Tokenizer, load_tokenizer
from tfm.decoding import Accepted, minimum_bayes_risk
from tfm.decoding.logits import BelowSize
from tfm.decoding.state import eos_ids
from tfm.decoding.text import before_possible_stop, cut_at_stop, settled
from tfm.generation import GenerationOptions, make_options
from tfm.inference import classify, embed, generate, score_pairs, stream
from tfm.models.narrow import Weights, narrow_weights
from tfm.models.stepper import prepare
from tfm.search import Result, Search

TooLong = Literal["error", "cut"]


@dataclass(frozen=True)
class Special:
    """The ids that begin and end texts, as a run or a checkpoint uses them."""

    start_id: int
    """First input of an encoder-decoder's decoder."""
    eos_ids: tuple[int, ...]
    """Ids that end a generated text."""
    pad_id: int = 0
    before: tuple[int, ...] = ()
    """Put before a source or prompt."""
    after: tuple[int, ...] = ()
    """Put after a source."""
    reweight: tuple[Any, ...] = ()
    """Rules of the checkpoint's own generation settings."""
    allow: tuple[Any, ...] = ()
    defaults: tuple[tuple[str, Any], ...] = ()
    """Fields of `GenerationOptions` as the checkpoint has them, where the caller says nothing."""
    max_total: int | None = None
    """Most tokens of prompt and output together, where the caller says nothing."""
    pooling: Literal["mean", "first"] = "mean"
    """What `embed` makes a vector of: the mean of the hidden vectors, or the first."""


@dataclass(frozen=True)
class Bundle:
    """A model with all that is needed to use it.

    Attributes:
        config: the whole config; `config.model` is the architecture.
        params: nested dict of arrays.
        tokenizer: None where the checkpoint has none: then only the methods on ids work.
        special: ids around texts.
    """

    config: Config
    params: Any
    tokenizer: Tokenizer | None
    special: Special = field(default_factory=lambda: Special(0, ()))

    @property
    def model(self) -> ModelConfig:
        """The architecture."""
        return self.config.model

    @cached_property
    def module(self) -> Any:
        """The Flax module, for `bundle.module.apply({"params": bundle.params}, ...)`."""
        from tfm.models import build

        return build(self.model)

    @cached_property
    def prepared(self) -> Any:
        """The parameters laid out for decoding, once for all calls (`tfm.models.stepper.prepare`)."""
        return prepare(self.model, self.params)

    def translate(self, texts: Sequence[str], **options: Any) -> list[Any]:
        """Translate texts by beam search, with the config's settings; options as for `generate`.

        Returns:
            A text for each input, or a list of texts where n_best is above 1. A blank text gives a blank text.

        Raises:
            ValueError: the model is no encoder-decoder, or a text is too long.
        """
        require(self.model.is_encoder_decoder, "model.encoder_layers", self.model.encoder_layers,
                "translation needs an encoder-decoder: use generate")
        return self.generate(texts, **{"beam_size": self.config.decode.beam_size, **options})

    def generate(self, texts: Sequence[str], *, too_long: TooLong = "error", draft: Bundle | None = None,
                 **options: Any) -> list[Any]:
        """Continue texts (decoder), or write the output for them (encoder-decoder).

        Args:
            texts: prompts or sources.
            too_long: what to do with texts that the model cannot take: "error" or "cut" their end.
            draft: a smaller model with the same tokenizer, whose guesses are checked `draft_length` at a time.
            **options: fields of `tfm.generation.GenerationOptions`, such as beam_size=4 or temperature=0.8.

        Returns:
            A text for each input, or a list of texts where n_best is above 1.

        Raises:
            ValueError: an option out of range, or a text too long for the model.
        """
        texts, chosen = self._texts(texts), self.filled(make_options(options))
        filled = [i for i, text in enumerate(texts) if text.strip() or self.model.is_decoder_only]
        found = self.write([self.source_ids(texts[i], too_long=too_long) for i in filled], chosen, draft=draft,
                           scored=False)
        outputs: list[Any] = ["" if chosen.n_best == 1 else [""] * chosen.n_best for _ in texts]
        for i, hypotheses in zip(filled, found, strict=True):
            written = [text for text, _ in hypotheses]
            outputs[i] = written[0] if chosen.n_best == 1 else written
        return outputs

    def write(self, rows: Rows, options: GenerationOptions, **how: Any) -> list[list[tuple[str, Result]]]:
        """The texts that are generated for rows of ids, each with its result, best first; arguments as for `run`."""
        times = options.mbr or 1
        found = self.run([row for row in rows for _ in range(times)], options, **how)
        texts = [[(cut_at_stop(self.decode(h.ids), options.stop)[0], h) for h in row] for row in found]
        if not options.mbr:
            return texts
        samples = [[row[0] for row in texts[i : i + times]] for i in range(0, len(texts), times)]
        return [[drawn[minimum_bayes_risk([text for text, _ in drawn])[0]]] for drawn in samples]

    def generate_ids(self, rows: Rows, *, beam_size: int = 1, max_length: int | None = None, n_best: int = 1,
                     eos_id: int | Sequence[int] | None = None, **options: Any) -> list[Any]:
        """New ids for rows of ids, EOS left off.

        Args:
            rows: sources or prompts exactly as the model reads them, special ids included.
            beam_size: 1 is greedy.
            max_length: most new ids; None: source length + 50, or 128 for a decoder.
            n_best: hypotheses for each row.
            eos_id: the id or ids that end a row; None: the checkpoint's own.
            **options: those of `results`.

        Returns:
            For each row a list of ids, or n_best lists where n_best is above 1.
        """
        found = self.results(rows, beam_size=beam_size, max_length=max_length, n_best=n_best, eos_id=eos_id,
                             scored=False, **options)
        return [[h.ids for h in row] if n_best > 1 else row[0].ids for row in found]

    def results(self, rows: Rows, *, eos_id: int | Sequence[int] | None = None,
                progress: Callable[[int], None] | None = None, scored: bool = True,
                **options: Any) -> list[list[Result]]:
        """The n best results of each row of ids, with scores.

        Args:
            rows: ids as the model reads them.
            eos_id: the id or ids that end a row; None: the checkpoint's own.
            progress: called with the number of rows done.
            scored: False where scores and log-probabilities do not matter: greedy search and sampling then leave them
                out (NaN), and are faster.
            **options: fields of `tfm.generation.GenerationOptions`.

        Raises:
            ValueError: options that do not exist or cannot work together, or rows that the model cannot take.
        """
        chosen = make_options(options)
        for name in ("stop", "mbr"):
            require(not getattr(chosen, name), name, getattr(chosen, name), "it acts on texts, not ids: use generate")
        return self.run(rows, self.filled(chosen), eos_id=eos_id, progress=progress, scored=scored)

    def run(self, rows: Rows, options: GenerationOptions, *, eos_id: int | Sequence[int] | None = None,
            draft: Bundle | None = None, progress: Callable[[int], None] | None = None,
            accepted: Callable[[Accepted], None] | None = None, scored: bool = True) -> list[list[Result]]:
        """`results` with options that are already made and `filled`.

        Args:
            rows: ids as the model reads them.
            options: how to generate; its `mbr` belongs to `write`.
            eos_id: as for `results`.
            draft: a smaller model with the same tokenizer, where `options.draft_length` is above 0.
            progress: as for `results`.
            accepted: called with the counts of drafted and accepted tokens of each batch, where tokens are drafted.
            scored: as for `results`.
        """
        assert options.batch_size is not None
        if draft is not None:
            require(draft.same_tokens(self), "draft", draft.model.vocab_size,
                    "a model that drafts needs the tokenizer of the model that checks")
        return generate(self.model, self.prepared, rows, self._search(options, eos_id, scored),
                        limits=[self._limit(options, row) for row in rows], start_id=self.special.start_id,
                        batch_size=options.batch_size, seed=options.seed, progress=progress, accepted=accepted,
                        draft=None if draft is None else (draft.model, draft.prepared))

    def same_tokens(self, other: Bundle) -> bool:
        """Whether the other model reads and writes the same ids as this one."""
        if self.model.vocab_size != other.model.vocab_size or (self.tokenizer is None) != (other.tokenizer is None):
            return False
        mine, theirs = self.tokenizer, other.tokenizer
        return mine is None or theirs is None or mine.to_bytes() == theirs.to_bytes()

    def filled(self, options: GenerationOptions, *, beam_size: int = 1) -> GenerationOptions:
        """Options with the checkpoint's own, or else the config's, where they say None; `beam_size` where none does."""
        return options.filled(self.config.decode, beam_size=beam_size, own=dict(self.special.defaults))

    def _search(self, options: GenerationOptions, eos_id: int | Sequence[int] | None, scored: bool) -> Search:
        special = self.special
        for name in ("prefix", "phrases", "bad_words"):
            require(not getattr(options, name) or self.tokenizer is not None, name, getattr(options, name),
                    "it is a text, and this checkpoint has no tokenizer")
        require(all(0 <= i < self.model.vocab_size for i in options.suppress), "suppress", options.suppress,
                f"ids must lie in [0, {self.model.vocab_size})")
        encode = None if self.tokenizer is None else self.tokenizer.encode_target
        ends = special.eos_ids if eos_id is None else eos_ids(eos_id)
        search = options.search(eos_ids=ends, pad_id=special.pad_id, reweight=special.reweight,
                                allow=(*special.allow, *self._padded_rows()), encode=encode)
        return replace(search, scored=scored or not search.token_by_token)

    def _padded_rows(self) -> list[Any]:
        """Rows of the vocabulary behind the tokenizer's last id are never written."""
        if self.tokenizer is None or self.tokenizer.vocab_size >= self.model.vocab_size:
            return []
        return [BelowSize(self.tokenizer.vocab_size)]

    def _limit(self, options: GenerationOptions, row: Sequence[int]) -> int:
        if options.max_length is not None:
            return options.max_length
        if self.model.is_encoder_decoder or self.special.max_total is None:
            return len(row) + 50 if self.model.is_encoder_decoder else 128
        room = self.special.max_total - len(row)
        require(room > 0, "the length of a prompt", len(row), "the checkpoint's own max_length, "
                f"{self.special.max_total}, leaves none for a new token: give max_length")
        return room

    def stream(self, text: str, *, too_long: TooLong = "error", steps: int = 4, **options: Any) -> Iterator[str]:
        """Generate for one text and yield what is written piece by piece, whole characters only.

        Args:
            text: prompt or source.
            too_long: as for `generate`.
            steps: tokens between two pieces.
            **options: fields of `tfm.generation.GenerationOptions`.

        Raises:
            ValueError: as for `generate`, or beam_size above 1.
        """
        chosen = self.filled(make_options({"beam_size": 1, **options}))
        require(chosen.mbr == 0, "mbr", chosen.mbr, "a stream is one sample: use generate")
        row, shown = self.source_ids(text, too_long=too_long), ""
        whole = ""
        for result in stream(self.model, self.prepared, row, self._search(chosen, None, scored=False),
                             limit=self._limit(chosen, row), start_id=self.special.start_id, seed=chosen.seed,
                             steps=steps):
            whole, stopped = cut_at_stop(self.decode(result.ids), chosen.stop)
            if stopped:
                break
            ready = before_possible_stop(settled(whole), chosen.stop)
            if ready.startswith(shown) and ready != shown:
                yield ready[len(shown) :]
                shown = ready
        if len(whole) > len(shown):
            yield whole[len(shown) :]

    def score(self, sources: Sequence[str], targets: Sequence[str], *, batch_size: int | None = None) -> list[float]:
        """Summed log-probability of each target text given its source (or prompt), EOS included.

        Raises:
            ValueError: unequal numbers of texts, or a text too long for the model.
        """
        return [sum(row) for row in self.token_scores(sources, targets, batch_size=batch_size)]

    def token_scores(self, sources: Sequence[str], targets: Sequence[str], *,
                     batch_size: int | None = None) -> list[list[float]]:
        """The log-probability of each target token, EOS last."""
        sources, targets = self._texts(sources), self._texts(targets)
        require(len(sources) == len(targets), "targets", len(targets), f"there are {len(sources)} sources")
        eos = list(self.special.eos_ids[:1])
        rows = [self.source_ids(text) for text in sources]
        labels = [self._tokenizer.encode_target(text) + eos for text in targets]
        return score_pairs(self.model, self.params, rows, labels, start_id=self.special.start_id,
                           batch_size=batch_size or self.config.decode.batch_size)

    def embed(self, texts: Sequence[str], *, too_long: TooLong = "error", batch_size: int | None = None) -> np.ndarray:
        """A vector of length 1 for each text: the mean of the encoder's hidden vectors, or as the checkpoint says.

        Returns:
            [N, M] float32.
        """
        rows = [self.source_ids(text, too_long=too_long) for text in self._texts(texts)]
        return embed(self.model, self.params, rows, batch_size=batch_size or self.config.decode.batch_size,
                     pooling=self.special.pooling)

    def classify(self, texts: Sequence[str], *, too_long: TooLong = "error",
                 batch_size: int | None = None) -> list[str]:
        """The name of the most probable class of each text; of a blank text a blank name.

        Raises:
            ValueError: the model has no classification head, or a text is too long.
        """
        texts, labels = self._texts(texts), self.config.data.labels
        filled = [i for i, text in enumerate(texts) if text.strip()]
        found = self.class_probabilities([texts[i] for i in filled], too_long=too_long, batch_size=batch_size)
        names = [""] * len(texts)
        for i, row in zip(filled, found, strict=True):
            names[i] = labels[int(np.argmax(row))]
        return names

    def class_probabilities(self, texts: Sequence[str], *, too_long: TooLong = "error",
                            batch_size: int | None = None) -> np.ndarray:
        """The probability of each class, in the order of `config.data.labels`: [N, num_classes] float32."""
        rows = [self.source_ids(text, too_long=too_long) for text in self._texts(texts)]
        return classify(self.model, self.params, rows, batch_size=batch_size or self.config.decode.batch_size)

    def align(self, sources: Sequence[str], outputs: Sequence[str]) -> list[tuple[list[tuple[int, int]], float]]:
        """For each source and output the pairs (source word, output word) that cross-attention links, from 0, and how
        sure it is of them, from 0 to 1; see `tfm.alignment`.

        Raises:
            ValueError: the model is no encoder-decoder, or a text is too long.
        """
        from tfm.alignment import align, cross_weights

        sources, outputs = self._texts(sources), self._texts(outputs)
        rows = [self.source_ids(text, too_long="cut") for text in sources]
        targets = [self._tokenizer.encode_target(text) for text in outputs]
        weights = cross_weights(self.model, self.params, rows, targets, start_id=self.special.start_id,
                                batch_size=self.config.decode.batch_size)
        before, after, piece = len(self.special.before), len(self.special.after), self._tokenizer.piece
        found = []
        for row, target, weight in zip(rows, targets, weights, strict=True):
            text = [piece(i) for i in row[before : len(row) - after]]
            found.append(align(weight[:, before:], text, [piece(i) for i in target]))
        return found

    def attention_maps(self, source: str, target: str | None = None, *, part: Any = None,
                       layer: int | None = None) -> Any:
        """Attention weights of every layer and head for one text (pair), or of the part and layer that are named;
        see `tfm.analysis.attention_maps`.
        """
        from tfm.analysis.attention_maps import attention_maps

        target_ids = None
        if self.model.is_encoder_decoder:
            written = self.translate([source])[0] if target is None else target
            target_ids = [self.special.start_id, *self._tokenizer.encode_target(written)]
        source_ids = self.source_ids(source)
        maps = attention_maps(self.model, self.params, source_ids, target_ids, part=part, layer=layer)
        pieces = self._tokenizer.piece
        return maps.with_tokens([pieces(i) for i in source_ids], [pieces(i) for i in target_ids or ()])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self._tokenizer.decode(ids)

    def source_ids(self, text: str, *, too_long: TooLong = "error") -> list[int]:
        """The ids of a source or prompt as the model reads them.

        Raises:
            ValueError: more ids than learned positions, where too_long is "error".
        """
        require(too_long in ("error", "cut"), "too_long", too_long, "it must be 'error' or 'cut'")
        before, after, ids = self.special.before, self.special.after, self._tokenizer.encode(text)
        room = self.model.max_positions if self.model.position == "learned" else None
        if room is not None and len(ids) + len(before) + len(after) > room:
            require(too_long == "cut", "the length of a text", len(ids) + len(before) + len(after),
                    f"the model has {room} positions: shorten {text[:40]!r}... or set too_long='cut'")
            ids = ids[: room - len(before) - len(after)]
        return [*before, *ids, *after]

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer: use the methods on ids, such as generate_ids")
        return self.tokenizer

    def _texts(self, texts: Sequence[str]) -> Sequence[str]:
        require(not isinstance(texts, str), "texts", texts, "it must be a list of texts: put [ ] around it")
        return texts


def load(path: str | Path, *, checkpoint: int | str = "newest", average: int = 1, weights: Weights | None = None,
         say: Callable[[str], None] = print) -> Bundle:
    """Open a run folder, or a Hugging Face checkpoint folder or GGUF file.

    Args:
        path: `RUN`, or a folder with config.json and safetensors, or a .gguf file.
        checkpoint: of a run: a step, "newest" or "best".
        average: of a run: take the mean of this many newest checkpoints.
        weights: "bfloat16" or "int8": narrow the matrices; see `tfm.models.narrow`. None: as they are.
        say: told about damaged checkpoints that were passed over, and about settings that are left to the caller.

    Raises:
        FileNotFoundError: no such folder, or no such checkpoint in it.
        ValueError: it is none of the three, or it is damaged.
    """
    bundle = _load(Path(path), checkpoint, average, say)
    if weights is None:
        return bundle
    model, params = narrow_weights(bundle.model, bundle.params, weights)
    return replace(bundle, config=bundle.config.replace(model=model), params=params)


def _load(path: Path, checkpoint: int | str, average: int, say: Callable[[str], None]) -> Bundle:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if (path / "checkpoints").is_dir():
        return _load_run(path, checkpoint, average, say)
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        from tfm.foreign import load_foreign

        for name, value, plain in (("checkpoint", checkpoint, "newest"), ("average", average, 1)):
            require(value == plain, name, value, f"{path} is no run folder, which may have several checkpoints")
        return load_foreign(path, say=say)
    raise ValueError(f"{path} is neither a run folder (no checkpoints/), nor a Hugging Face checkpoint (no "
                     "config.json), nor a .gguf file")


def run_special(config: Config, tokenizer: Tokenizer) -> Special:
    """The ids around texts in our own runs, as `tfm.data` puts them."""
    model = config.model
    ids = Special(tokenizer.bos_id, (tokenizer.eos_id,), tokenizer.pad_id)
    if model.is_encoder_decoder:
        return Special(ids.start_id, ids.eos_ids, ids.pad_id, after=(tokenizer.eos_id,))
    after = (tokenizer.eos_id,) if model.is_encoder_only else ()
    return Special(ids.start_id, ids.eos_ids, ids.pad_id, before=(tokenizer.bos_id,), after=after)


def special_of_run(path: Path, config: Config, tokenizer: Tokenizer) -> Special:
    """The ids around texts in a run folder: our own, or those of the foreign checkpoint that it comes from."""
    if (path / "generation_config.json").is_file():
        from tfm.foreign import converted_special

        special = converted_special(path, config.model, tokenizer)
        trained_here = config.train.init_from is not None  # the run's own settings of decoding hold then
        return replace(special, defaults=(), max_total=None) if trained_here else special
    return run_special(config, tokenizer)


def _load_run(path: Path, checkpoint: int | str, average: int, say: Callable[[str], None]) -> Bundle:
    from tfm.models.adapters import merge_adapters
    from tfm.training.checkpoint import (
        average_checkpoints,
        checkpoint_steps,
        find_checkpoint,
        load_checkpoint_config,
        load_checkpoint_params,
    )

    require(average >= 1, "average", average, "it must be at least 1")
    chosen = find_checkpoint(path, checkpoint, say=say)
    config = load_checkpoint_config(chosen)
    if average > 1:
        steps = [step for step in checkpoint_steps(path) if step <= int(chosen.name)]
        require(len(steps) >= average, "average", average, f"{path} has only {len(steps)} checkpoints up to that step")
        params = average_checkpoints([chosen.parent / str(step) for step in steps[-average:]])
        model = replace(config.model, lora_rank=0)
    else:
        model, params = merge_adapters(config.model, load_checkpoint_params(chosen))
    tokenizer = load_tokenizer(path / "tokenizer.model")
    return Bundle(config.replace(model=model), params, tokenizer, special_of_run(path, config, tokenizer))
