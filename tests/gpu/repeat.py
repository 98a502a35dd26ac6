"""Thousands of repetitions of every Hopper kernel must give the same bits, whatever else runs.

    python tests/gpu/repeat.py                    # one Hopper GPU, 16 cores, about two minutes
    python tests/gpu/repeat.py --times 200 --problems lists-64 dense-fused-128

The problems are those of `small_problems.py`, over 2048 tokens, on so few multiprocessors that each
thread block goes through several items. Several processes run at the same time and take the GPU
from each other in the middle of kernels, and one multiplies matrices at random intervals. Before
each step all shared memory is overwritten by NaN, and so is, where the allocator gives the same
memory again, what lies between; results are by NaN and another number in turn. Prints a table; the
exit status is 1 if a bit differed or not all repetitions ran.
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
_THREAD_BLOCKS = 264  # more than there are multiprocessors, each with room for one of them
_PROBLEM = "problem "  # begins a line of a worker

Values = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--problems", nargs="+", help="only these, as `sanitize.py --list` prints")
    parser.add_argument("--jobs", type=int, default=10, help="processes at the same time")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each process")
    parser.add_argument("--worker", nargs="+", metavar="PROBLEM", help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.load:
        return _multiply_matrices()
    if args.worker:
        return work(args.worker, args.times)
    from tests.gpu.sanitize import _names

    names = _names()
    chosen = args.problems or names
    if unknown := sorted(set(chosen) - set(names)):
        print(f"error: --problems: no problem is called {', '.join(unknown)}", file=sys.stderr)
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
        print("the process that multiplies matrices had ended")
    return 1 if bad or not disturbed else 0


def table(lines: Sequence[str], names: Sequence[str], times: int) -> tuple[list[str], list[str]]:
    """The table of what workers printed, and the names of problems that are not as they should be.

    Args:
        lines: of all workers.
        names: of the problems that were to run.
        times: how often.
    """
    found = {}
    for line in lines:
        if line.startswith(_PROBLEM):
            _, name, ran, different, seconds = line.split()
            found[name] = int(ran), int(different), float(seconds)
    rows = ["| problem | repetitions | with other bits | seconds |", "|---|---|---|---|"]
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
    """Repeats some problems; prints a line for each.

    Args:
        names: of the problems.
        times: how often each one runs.
    """
    import jax
    import numpy as np

    from pallas_kernels.mosaic_gpu import device
    from tests.gpu import small_problems

    device.multiprocessors = lambda: MULTIPROCESSORS
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
    calls: Sequence[Callable[[Values], Values]], inputs: Values, times: int,
    before: Callable[[], Any] = lambda: None,
) -> int:
    """How many repetitions gave a bit that the first one did not.

    Args:
        calls: steps, one after another; each gets the inputs and the results so far.
        inputs: arrays by name.
        times: repetitions.
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
    """A step whose results lie where NaN lay before, or every other time 3.

    By turns, so that a number that is never written has other bits the next time.
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
    # Results take the memory of the first argument, which is given away.
    program = jax.jit(
        lambda _, values: step(values, backend), donate_argnums=0, keep_unused=True
    ).lower(shapes, values).compile()  # fmt: skip
    between = program.memory_analysis().temp_size_in_bytes
    spoil_between = jax.jit(lambda: jnp.full(max(between // 4, 1), jnp.nan, jnp.float32))

    def call(values: Values) -> Values:
        spoil_between()  # and freed at once
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
    """Multiplies matrices of several sizes at random intervals until it is ended."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng()
    sizes = [jnp.ones((n, n), jnp.bfloat16) for n in (256, 1024, 2048, 4096)]
    product = jax.jit(lambda x: x @ x)
    while os.getppid() != 1:  # the parent is there
        for _ in range(rng.integers(1, 20)):
            product(sizes[rng.integers(len(sizes))]).block_until_ready()
        time.sleep(rng.uniform(0, 3e-3))
    return 0


def _run(names: Sequence[str], times: int, timeout: float) -> str:
    """What a worker printed, also one that was ended for want of time."""
    command = _command(f"--times={times}", "--worker", *names)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment()
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\n{', '.join(names)}: ended after {timeout:.0f} s"
    return output


def _command(*arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), *arguments]


def _environment() -> dict[str, str]:
    # Memory that is freed must be given again: by the usual allocator, which grows as needed.
    return os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


if __name__ == "__main__":
    sys.exit(main())
