"""Generates text: `python generate.py --model FOLDER --prompt TEXT`."""

import sys

from mtraining_jax.evaluation.generate_cli import main

if __name__ == "__main__":
    sys.exit(main())
