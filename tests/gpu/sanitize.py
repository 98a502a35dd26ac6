"""Small calls of every Hopper attention kernel, for compute-sanitizer.

    compute-sanitizer --target-processes application-only --tool memcheck \\
        --kernel-name kns=mosaic_gpu --error-exitcode 1 python tests/gpu/sanitize.py

Other tools (racecheck, synccheck) are run in the same way. Without the first option the tool
follows JAX's child processes and crashes (version 2025.3.1). The tool watches the kernels. This
script also compares them with the XLA backend, so that a run in which they did nothing fails.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # so that bounds are seen
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import ListedTiles
from tests.pallas_kernels import cases
from tests.pallas_kernels.cases import Size
from tests.pallas_kernels.contract import backward, forward, resolve_index

BACKENDS = ("mosaic_gpu", "xla")


def main(backends: tuple[str, str] = BACKENDS) -> int:
    """Runs all problems; the exit status is 1 if a result is not that of XLA."""
    wrong = 0
    for dim, dtype in ((64, "float16"), (128, "bfloat16")):
        for name, problem in _problems(dim, dtype):
            results = [_run(backend, *problem) for backend in backends]
            same = jax.tree.all(jax.tree.map(_close, *results))
            wrong += not same
            print(f"D={dim} {name}: {'ok' if same else 'WRONG'}", flush=True)
    return min(wrong, 1)


def _problems(dim: int, dtype: str):
    """Name, then inputs, tiles, columns (with keys and values) and running result."""
    rng = np.random.default_rng(dim)
    size = Size(1, 4, 2, query_blocks=4, key_blocks=4, block_size=128, dim=dim)
    inputs = cases.qkv_dout(rng, size, dtype)
    index = cases.vertical_slash(rng, size, max_slashes=3, max_verticals=150, garbage=rng)
    tiles, columns, column_kv = resolve_index(index, *inputs[1:3])
    columns = columns, column_kv
    listed = cases.block_sparse(rng, size, causal=True, garbage=rng)
    listed = ListedTiles.from_index(listed)
    init = (
        jnp.asarray(rng.standard_normal(inputs[0].shape), jnp.float32),
        jnp.asarray(rng.standard_normal((1, size.heads, size.seq_len)), jnp.float32),
    )
    yield "diagonals and columns", (inputs, tiles, columns, None)
    yield "diagonals alone", (inputs, tiles, (), None)
    yield "columns alone", (inputs, None, columns, None)
    yield "listed blocks", (inputs, listed, (), None)
    yield "listed blocks and columns added to a running result", (inputs, listed, columns, init)


def _run(backend: str, inputs, tiles, columns, init):
    """Every output of forward and backward."""
    q, k, v, dout = inputs
    out, lse = forward(q, k, v, tiles, *columns, init=init, backend=backend)
    delta = pallas_kernels.delta_of(out, dout)
    return out, lse, backward(q, k, v, dout, lse, delta, tiles, *columns, backend=backend)


def _close(a, b) -> bool:
    """Up to some roundings of the operands' 8 or 11 bits."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    live = np.isfinite(b)
    if not np.array_equal(a[~live], b[~live]):  # lse of empty rows
        return False
    return bool(np.linalg.norm(a[live] - b[live]) <= 1e-2 * np.linalg.norm(b[live]))


if __name__ == "__main__":
    sys.exit(main())
