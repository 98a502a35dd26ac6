"""Trains a model: `python train.py --config tiny`; `--help` lists all options."""

import sys

from mtraining_jax.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
