"""Checks that every Hopper kernel is deterministic over thousands of runs, whatever else runs.

    python benchmarks/sanitize/repeat.py  # one Hopper GPU, 16 cores, about two minutes
    python benchmarks/sanitize/repeat.py --times 200 --problems lists-64 dense-fused-128

The problems are those of `small_problems.py`, over 2048 tokens, on so few multiprocessors that each
thread block processes several items. Several processes run concurrently and preempt each other in
the middle of kernels, and one multiplies matrices at random intervals. Before each step all shared
memory is overwritten with NaN, and so is any memory that the allocator reuses in between; results
are allocated over NaN and another number, alternating. Prints a table; the exit status is 1 if a
bit differed or a repetition did not run.
"""

import argparse
import concurrent.futures
import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BLOCKS = 16  # of 128 tokens
MULTIPROCESSORS = 24
_MEMORY_ROWS = 440  # of 512 bytes: nearly all shared memory of a multiprocessor
_ROWS_AT_ONCE = 8
_THREAD_BLOCKS = 264  # more than the number of multiprocessors, each with room for one
_PROBLEM = "problem "  # prefix of a worker's result lines

Values = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--problems", nargs="+", help="names, as printed by sanitize.py --list")
    parser.add_argument("--jobs", type=int, default=10, help="number of concurrent processes")
    parser.add_argument("--timeout", type=float, default=240, help="seconds per process")
    parser.add_argument("--worker", nargs="+", metavar="PROBLEM", help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.load:
        return _multiply_matrices()
    if args.worker:
        return work(args.worker, args.times)
    from benchmarks.sanitize.sanitize import _names

    names = _names()
    chosen = args.problems or names
    if unknown := sorted(set(chosen) - set(names)):
        print(f"error: --problems: unknown problem {', '.join(unknown)}", file=sys.stderr)
        return 2
    load = subprocess.Popen(_command("--load"), env=_environment())
    try:
        shares = [chosen[i :: args.jobs] for i in range(min(args.jobs, len(chosen)))]
        with concurrent.futures.ThreadPoolExecutor(len(shares)) as pool:
            outputs = pool.map(lambda share: _run(share, args.times, args.timeout), shares)
        lines = [line for output in outputs for line in output.splitlines()]
    finally:
        disturbed = load.poll() is None
        load.kill()
        load.wait()
    rows, bad = table(lines, chosen, args.times)
    print("\n".join(rows))
    if not disturbed:
        print("the process that multiplies matrices exited early")
    return 1 if bad or not disturbed else 0


def table(lines: Sequence[str], names: Sequence[str], times: int) -> tuple[list[str], list[str]]:
    """Formats the output of workers as a table; also returns the names of failed problems.

    Args:
        lines: output of all workers.
        names: problems that were to run.
        times: number of repetitions.
    """
    found = {}
    for line in lines:
        if line.startswith(_PROBLEM):
            _, name, ran, different, seconds = line.split()
            found[name] = int(ran), int(different), float(seconds)
    rows = ["| problem | repetitions | different bits | seconds |", "|---|---|---|---|"]
    bad = []
    for name in names:
        ran, different, seconds = found.get(name, (0, 0, 0.0))
        rows.append(f"| {name} | {ran} | {different} | {seconds:.1f} |")
        if ran != times or different:
            bad.append(name)
    if bad:
        others = [line for line in lines if not line.startswith(_PROBLEM)]
        rows += ["", *others[-20:]]
    return rows, bad


def work(names: Sequence[str], times: int) -> int:
    """Repeats some problems and prints a line for each.

    Args:
        names: problems to run.
        times: number of repetitions of each.
    """
    import jax
    import numpy as np

    from benchmarks.sanitize import small_problems
    from pallas_kernels.mosaic_gpu import device

    device.multiprocessors = lambda interpret: MULTIPROCESSORS
    spoil = jax.jit(overwrite_shared_memory)
    for problem in small_problems.problems(BLOCKS):
        if problem.name not in names:
            continue
        with jax.default_device(jax.devices("cpu")[0]):
            inputs = jax.tree.map(np.asarray, problem.inputs())
        values = jax.device_put(inputs)
        calls = []
        for step in problem.steps:
            calls.append(_call(step, values, problem.backend))
            values |= calls[-1](values)
        begin = time.monotonic()
        different = count_differences(calls, jax.device_put(inputs), times, before=spoil)
        seconds = time.monotonic() - begin
        print(f"{_PROBLEM}{problem.name} {times} {different} {seconds:.2f}", flush=True)
    return 0


def count_differences(
    calls: Sequence[Callable[[Values], Values]],
    inputs: Values,
    times: int,
    before: Callable[[], Any] = lambda: None,
) -> int:
    """Returns how many repetitions differed in a bit from the first one.

    Args:
        calls: steps, run in order; each gets the inputs and the results so far.
        inputs: arrays by name.
        times: number of repetitions.
        before: called before each step.
    """
    import jax
    import jax.numpy as jnp

    def bits(x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    @jax.jit
    def add(count: jax.Array, a: Values, b: Values) -> jax.Array:
        same = jax.tree.map(lambda x, y: (bits(x) == bits(y)).all(), a, b)
        return count + ~jnp.stack(jax.tree.leaves(same)).all()

    def run() -> Values:
        results: Values = {}
        for call in calls:
            before()
            results |= call(inputs | results)
        return results

    first, count = run(), jnp.int32(0)
    for _ in range(times):
        count = add(count, first, run())
    return int(count)


def _call(step: Callable, values: Values, backend: str) -> Callable[[Values], Values]:
    """Compiles a step with results allocated over NaN, or every other time over 3.

    They alternate, so that a number that is never written differs between runs.
    """
    import jax
    import jax.numpy as jnp

    def spoilt(odd: bool, shape: Any) -> jax.Array:
        nothing = jnp.nan if jnp.issubdtype(shape.dtype, jnp.floating) else -1
        return jnp.full(shape.shape, nothing if odd else 3, shape.dtype)

    shapes = jax.eval_shape(lambda values: step(values, backend), values)
    spoil = jax.jit(
        lambda odd: jax.tree.map(functools.partial(spoilt, odd), shapes), static_argnums=0
    )
    odd = itertools.cycle((True, False))
    # Results use the memory of the first argument, which is donated.
    program = (
        jax.jit(lambda _, values: step(values, backend), donate_argnums=0, keep_unused=True)
        .lower(shapes, values)
        .compile()
    )
    between = program.memory_analysis().temp_size_in_bytes
    spoil_between = jax.jit(lambda: jnp.full(max(between // 4, 1), jnp.nan, jnp.float32))

    def call(values: Values) -> Values:
        spoil_between()  # freed immediately
        return program(spoil(next(odd)), values)

    return call


def overwrite_shared_memory() -> Any:
    """Fills the shared memory of every multiprocessor of a Hopper GPU with NaN."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def overwrite(out: Any, memory: Any) -> None:
        def fill(i: Any, _: None) -> None:
            rows = pl.ds(i * _ROWS_AT_ONCE, _ROWS_AT_ONCE)
            memory[rows] = jnp.full((_ROWS_AT_ONCE, 128), jnp.nan, jnp.float32)

        lax.fori_loop(0, _MEMORY_ROWS // _ROWS_AT_ONCE, fill, None)
        plgpu.commit_smem()
        block = lax.axis_index("block")
        out[block] = memory[lax.rem(block, _MEMORY_ROWS)]  # so that something is read

    return plgpu.kernel(
        overwrite,
        out_type=jax.ShapeDtypeStruct((_THREAD_BLOCKS, 128), jnp.float32),
        scratch_types=[plgpu.SMEM((_MEMORY_ROWS, 128), jnp.float32)],
        grid=(_THREAD_BLOCKS,),
        grid_names=("block",),
    )()


def _multiply_matrices() -> int:
    """Multiplies matrices of several sizes at random intervals until terminated."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng()
    sizes = [jnp.ones((n, n), jnp.bfloat16) for n in (256, 1024, 2048, 4096)]
    product = jax.jit(lambda x: x @ x)
    while os.getppid() != 1:  # the parent is alive
        for _ in range(rng.integers(1, 20)):
            product(sizes[rng.integers(len(sizes))]).block_until_ready()
        time.sleep(rng.uniform(0, 3e-3))
    return 0


def _run(names: Sequence[str], times: int, timeout: float) -> str:
    """Returns the output of a worker, even if it was terminated at the timeout."""
    command = _command(f"--times={times}", "--worker", *names)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment()
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\n{', '.join(names)}: terminated after {timeout:.0f} s"
    return output


def _command(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *arguments]


def _environment() -> dict[str, str]:
    # Freed memory must be reused: needs the default allocator, growing on demand.
    return os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


if __name__ == "__main__":
    sys.exit(main())
