"""Train a model: `python train.py configs/quickstart.py --workdir RUN` (see --help)."""

import sys

from tfm.cli.errors import start

if __name__ == "__main__":
    sys.exit(start("tfm.cli.train"))
