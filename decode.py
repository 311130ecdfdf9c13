"""Translate or continue lines: `python decode.py RUN < source.txt > out.txt` (see --help)."""

import sys

from tfm.cli.errors import start

if __name__ == "__main__":
    sys.exit(start("tfm.cli.decode"))
