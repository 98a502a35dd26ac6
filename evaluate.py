"""Evaluates a model: `python evaluate.py --model FOLDER --tasks needle --lengths 4096`."""

import sys

from mtraining_jax.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
