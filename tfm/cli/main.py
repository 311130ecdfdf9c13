"""The `tfm` command: `tfm train ...`, `tfm decode ...`, each in its own module."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tfm.cli.errors import start
from tfm.config_json import nearest

COMMANDS = {
    "train": ("tfm.cli.train", "train a model from a config file"),
    "eval": ("tfm.cli.eval", "measure a run on its test split"),
    "decode": ("tfm.cli.decode", "translate or continue the lines of standard input"),
    "cost": ("tfm.cli.cost", "parameters, FLOPs and memory of a config at a length"),
    "plan": ("tfm.cli.plan", "memory, time and cost of training on a mesh, without it"),
    "convert": ("tfm.cli.convert", "turn a run into a Hugging Face checkpoint, or one into a run"),
    "show": ("tfm.cli.show", "draw a model's attention weights"),
}
"""command -> (module with main(argv), what it does)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; give its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: tfm COMMAND ...\n")
        print("\n".join(f"  {name:10} {what}" for name, (_, what) in COMMANDS.items()))
        print("\ntfm COMMAND --help shows its options")
        return 0
    if arguments[0] not in COMMANDS:
        near = nearest(arguments[0], list(COMMANDS))
        print(f"error: unknown command {arguments[0]}" + (f": did you mean {near}?" if near else ""), file=sys.stderr)
        return 2
    return start(COMMANDS[arguments[0]][0], arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
