"""Measure a run on its test split: `python eval.py RUN` (see --help)."""

import sys

from tfm.cli.eval import main

if __name__ == "__main__":
    sys.exit(main())
