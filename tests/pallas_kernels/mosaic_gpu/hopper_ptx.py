"""Compiles the Hopper kernels for an H200 on a machine without a GPU, and checks their fences.

    python tests/pallas_kernels/mosaic_gpu/hopper_ptx.py  # all problems: 3 minutes on one core
    python tests/pallas_kernels/mosaic_gpu/hopper_ptx.py lists-64 ring-128

Needs the CUDA plugin of JAX. Problems: `benchmarks/sanitize/small_problems.py`. Prints the
table of `proxy_fences.py`. The exit status is 1 if a fence is missing.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tests.pallas_kernels.mosaic_gpu import proxy_fences  # noqa: E402

_MARK = "// compiled: "


def main(names: Sequence[str]) -> int:
    """Prints the fences in the kernels of the given problems, or of all."""
    if names[:1] == ["--compile"]:
        _compile(names[1:])
        return 0
    rows = [(name, x) for name, ptx in compiled(names).items() for x in proxy_fences.read(ptx)]
    print("\n".join(proxy_fences.table(rows)))
    return 1 if any(x.wrong for _, x in rows) else 0


def compiled(names: Sequence[str] = ()) -> dict[str, str]:
    """Returns the PTX of the kernels of each problem, compiled in a separate process."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTX": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # otherwise nothing is compiled
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--compile", *names],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        env=environment,
    )
    parts = re.split(rf"^{_MARK}(.*)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[:-1:2], strict=True))


def _compile(names: Sequence[str]) -> None:
    """Compiles problems; Mosaic GPU prints their PTX, followed by the problem's name."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from benchmarks.sanitize import small_problems
    from tests.pallas_kernels.mosaic_gpu.hopper import described_h200s

    mesh = Mesh(np.array(described_h200s(1)), ("x",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def described(values: small_problems.Values) -> small_problems.Values:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), values
        )

    for problem in small_problems.problems():
        if names and problem.name not in names:
            continue
        values = described(jax.tree.map(np.asarray, problem.inputs()))
        for step in problem.steps:
            # The device of the abstract mesh determines the backend.
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                program = small_problems.jitted(step, problem.backend)
                results = jax.eval_shape(program, values)
                program.trace(values).lower(lowering_platforms=("cuda",)).compile()
            values = values | described(results)
        print(f"\n{_MARK}{problem.name}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
