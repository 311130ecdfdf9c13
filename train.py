"""Train a model: `python train.py configs/quickstart.py --workdir RUN` (see --help)."""

import sys

from tfm.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
