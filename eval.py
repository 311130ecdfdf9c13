"""Measure a run on its test split: `python eval.py RUN` (see --help)."""

import sys

from tfm.cli.errors import start

if __name__ == "__main__":
    sys.exit(start("tfm.cli.eval"))
