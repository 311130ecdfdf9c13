"""`python -m tfm COMMAND` is the `tfm` command."""

import sys

from tfm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
