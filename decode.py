"""Translate or continue lines: `python decode.py RUN < source.txt > out.txt` (see --help)."""

import sys

from tfm.cli.decode import main

if __name__ == "__main__":
    sys.exit(main())
