"""FlexAttention as a peer: the parent's side of the child process `flex_attention.py`."""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.cases import Row, Shape
from benchmarks.masks import Work


class FlexPeer:
    """A child process that compiles at once, and measures when the parent says it may."""

    def __init__(self, shape: Shape, mask: np.ndarray, seed: int, repeats: int):
        """`mask`: bool [heads, S/128, S/128], causal."""
        self.shape, self.work = shape, Work(int(mask.sum()))
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "problem.npz")
        np.savez(
            path, mask=np.packbits(mask), seq_len=shape.seq_len, heads=shape.heads,
            kv_heads=shape.kv_heads, dim=shape.dim, seed=seed, repeats=repeats,
        )
        script = Path(__file__).with_name("flex_attention.py")
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(script), str(path)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )

    @functools.cached_property
    def ready(self) -> tuple[bool, str]:
        """Waits until it is compiled; (True, versions) or (False, why there is no peer)."""
        answer = self._read()
        if "ready" in answer:
            return True, answer["ready"]
        return False, answer.get("missing", "the child process failed")

    def measure(self) -> Row:
        """Times FlexAttention; nothing else may use the device meanwhile."""
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        times = self._read()
        row = Row(self.shape, "F", "FlexAttention", self.work, **times)
        row.total = row.forward + row.backward
        return row

    def close(self) -> None:
        """Ends the child process."""
        self._child.kill()
        self._child.communicate()
        self._folder.cleanup()

    def _read(self) -> dict:
        line = self._child.stdout.readline()
        return json.loads(line) if line else {}
