"""Generates text: `python generate.py --model FOLDER --prompt TEXT`."""

import sys

from mtraining_jax.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
