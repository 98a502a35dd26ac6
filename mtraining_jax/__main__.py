"""Entry point of the installed package: `python -m mtraining_jax --config tiny`."""

import sys

from mtraining_jax.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
