"""A child that answers as `peers/child.py` does: with the lines in its arrays."""

import sys

import numpy as np

if __name__ == "__main__":
    lines = np.load(sys.argv[1])["lines"]
    print(lines[0], flush=True)
    sys.stdin.readline()
    print(*lines[1:], sep="\n", end="\n" * (len(lines) > 1), flush=True)
