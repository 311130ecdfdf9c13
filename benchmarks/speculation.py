"""What speculative decoding gains on a run: acceptance rate and speed-up over greedy search, one sentence at a time.

    python benchmarks/speculation.py RUN --draft SMALL_RUN --draft-length 4
    python benchmarks/speculation.py RUN --lookup 4
    python benchmarks/speculation.py LM_RUN --lookup 4 --prompt-length 24 --max-length 100

The sentences are the first of the run's test split. Both ways take turns, one sentence each, after a first pass that
compiles. "same" says that the texts are equal, "accepted" is the share of drafted tokens that were taken over.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from tfm import load
from tfm.data import load_splits
from tfm.generation import make_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--draft", help="folder of a smaller model with the same tokenizer")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--lookup", type=int, default=0, help="tokens a round copied from the text so far")
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--prompt-length", type=int, help="first tokens of each text that are given to the model")
    arguments = parser.parse_args()
    if bool(arguments.draft) == bool(arguments.lookup):
        raise SystemExit("give --draft or --lookup")
    bundle = load(arguments.run)
    draft = None if arguments.draft is None else load(arguments.draft)
    splits = load_splits(bundle.config.data, bundle.config.train.seed)
    texts = [example if isinstance(example, str) else example[0] for example in splits.test][: arguments.sentences]
    rows = [bundle.source_ids(text, too_long="cut")[: arguments.prompt_length] for text in texts]
    guessed = {"lookup": arguments.lookup} if draft is None else {"draft_length": arguments.draft_length}
    plain = decoder(bundle, {}, None, arguments.max_length)
    speculative = decoder(bundle, guessed, draft, arguments.max_length)
    print(json.dumps(dict(bench="speculation", run=arguments.run, draft=arguments.draft, **guessed, sentences=len(rows),
                          **compare(rows, plain, speculative))))


def decoder(bundle: Any, options: dict[str, int], draft: Any, max_length: int) -> Callable[[Any], tuple]:
    """row -> new ids, drafted tokens, accepted tokens."""
    chosen = bundle.filled(make_options({"beam_size": 1, "batch_size": 1, "max_length": max_length, **options}))

    def decode(row: Any) -> tuple[list[int], int, int]:
        counts = [0, 0]

        def count(accepted: Any) -> None:
            counts[0] += int(accepted.drafted)
            counts[1] += int(accepted.accepted)

        ((found, *_),) = bundle.run([row], chosen, draft=draft, accepted=count)
        return found.ids, counts[0], counts[1]

    return decode


def compare(rows: list[list[int]], plain: Callable, speculative: Callable) -> dict[str, Any]:
    for row in rows:
        plain(row), speculative(row)
    seconds, tokens, drafted, accepted, same = [0.0, 0.0], 0, 0, 0, 0
    for row in rows:
        start = time.perf_counter()
        expected, *_ = plain(row)
        middle = time.perf_counter()
        found, guesses, taken = speculative(row)
        seconds = [seconds[0] + middle - start, seconds[1] + time.perf_counter() - middle]
        tokens, drafted, accepted = tokens + len(expected) + 1, drafted + guesses, accepted + taken
        same += found == expected
    return dict(accepted=round(accepted / max(drafted, 1), 4), same=same / len(rows),
                greedy_tokens_per_s=round(tokens / seconds[0], 1), tokens_per_s=round(tokens / seconds[1], 1),
                speed_up=round(seconds[0] / seconds[1], 3))


if __name__ == "__main__":
    main()
