"""The kernels of this project on one problem: `python -m benchmarks.peers.own JOB`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.masks import BLOCK
from benchmarks.kernels.programs import Attention, index_of
from benchmarks.peers.measure import serve
from benchmarks.peers.problems import INPUTS, Problem, draw_bits, read_input
from benchmarks.report import versions
from pallas_kernels import BlockMaskIndex


class Own:
    """Every pass compiled as one program."""

    masked = True

    def __init__(self, problem: Problem, job: dict[str, Any]) -> None:
        self.problem, self.folder = problem, Path(job["folder"])
        kernels, size = Attention(job["backend"]), problem.num_blocks
        shapes = [jax.ShapeDtypeStruct(problem.shape(name), jnp.bfloat16) for name in INPUTS]
        self._index: Any = None
        if problem.kind == "columns":
            self._index = index_of(problem.slashes(job["seed"]), min(size, 4096), 4096)
        elif problem.kind == "lists":
            bits = jnp.asarray(draw_bits(problem, job["seed"]))
            self._index = BlockMaskIndex(bits, size, BLOCK)

        def both_passes(q: Any, k: Any, v: Any, dout: Any, index: Any) -> Any:
            out, vjp = jax.vjp(lambda *x: kernels.attention(*x, index), q, k, v)
            return out, *vjp(dout)

        with ThreadPoolExecutor() as pool:

            def compiled(f: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
                lowered = jax.jit(f).lower(*args)
                return pool.submit(lowered.compile), lowered.out_info

            build, plan = compiled(kernels.build, *shapes[:3], self._index)
            forward, saved = compiled(kernels.forward, *shapes[:3], plan)
            backward, _ = compiled(kernels.backward, *shapes, *saved, plan)
            total, _ = compiled(both_passes, *shapes, self._index)
        self._programs = [x.result() for x in (build, forward, backward, total)]

    def load(self) -> None:
        arrays = [jnp.asarray(read_input(self.folder, name)) for name in INPUTS]
        self._inputs = [x.view(jnp.bfloat16) for x in arrays]
        device = jax.local_devices()[0]
        self.about = {"device": device.device_kind, "versions": versions("jax", "jaxlib")}
        self.wait = jax.block_until_ready
        self.same = lambda *xs: bool(jnp.array_equal(*(x.view(jnp.int16) for x in xs)))
        self.block = lambda x, batch, head, rows: np.asarray(x[batch, rows, head], np.float32)
        self.memory = lambda: (_bytes(device, "bytes_in_use"), _bytes(device, "peak_bytes_in_use"))

    def build(self) -> Any:
        return self._programs[0](*self._inputs[:3], self._index)

    def forward(self, index: Any) -> Any:
        return *self._programs[1](*self._inputs[:3], index), index

    def backward(self, saved: Any) -> Any:
        return self._programs[2](*self._inputs, *saved)

    def total(self) -> Any:
        return self._programs[3](*self._inputs, self._index)


def _bytes(device: jax.Device, which: str) -> int:
    return (device.memory_stats() or {}).get(which, 0)


if __name__ == "__main__":
    serve(lambda name: Own)
