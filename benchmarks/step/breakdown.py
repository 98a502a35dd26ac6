"""Splits the time of a training step into attention and everything else.

    python -m benchmarks.step.breakdown --config qwen3b_512k --sparsity.kind=replay

Takes optimizer steps of a configuration cut to a few layers, twice: as it is, and with attention
replaced by a sum of queries, keys and values, which costs next to nothing and keeps the same arrays
in memory. The second run times everything outside attention. Two depths give the time of one layer
and, extrapolated, of the full depth. Tokens are random.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding

from benchmarks.options import make_parser, overrides
from benchmarks.report import number, table_head, table_line
from benchmarks.step import trace_summary
from benchmarks.step.compiled_step import CompiledStep, Steps
from mtraining_jax.config import Config, load_config
from mtraining_jax.cost_model.flops import peak_flops, step_flops
from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.training.build import build_layout, build_mesh
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils.jax_platform import set_platform
from pallas_kernels.names import SAVED_NAMES

_COLUMNS = (
    "layers", "step s", "outside attention s", "TFLOP/s", "MFU", "attention s (difference)",
    "executed TFLOP/s", "density", "tokens/s", "MFU of the step", "peak GiB (compiler)",
)  # fmt: skip


def stand_in(q_BSHD: Array, k_BSHkD: Array, v_BSHkD: Array, *_: Any) -> tuple[Array, dict]:
    """A replacement for attention: the same shapes, with gradients to all of its inputs."""
    return _sum(q_BSHD, k_BSHkD, v_BSHkD), {}


@jax.custom_vjp
def _sum(q: Array, k: Array, v: Array) -> Array:
    out = jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2) + q
    return checkpoint_name(_row_major(out), SAVED_NAMES[0])


def _row_major(x: Array) -> Array:
    """Keeps the axis order that kernels would require, which XLA could otherwise change."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def _sum_forward(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, ...]]:
    return _sum(*map(_row_major, (q, k, v))), (k,)


def _sum_backward(residuals: tuple[Array, ...], d_out: Array) -> tuple[Array, Array, Array]:
    (k,) = residuals
    d_out = _row_major(d_out)
    d_k = _row_major(d_out.reshape(*k.shape[:3], -1, k.shape[3]).sum(axis=3))
    return _row_major(d_out), d_k, d_k


_sum.defvjp(_sum_forward, _sum_backward)


def time_step(
    config: Config, mesh: Mesh, with_attention: bool, steps: int, trace: Path | None = None
) -> Steps:
    """Compiles and times the training step with attention or `stand_in`, after one warm-up step.

    With a folder for a trace it profiles one more step and prints a summary.
    """
    batch = _batch(config, mesh, build_layout(config).permutation())
    step = CompiledStep(config, mesh, batch, None if with_attention else stand_in)
    builder = StateBuilder(config, mesh)
    found = step.run(builder.fresh(), [batch] * (steps + 1))
    if trace is not None:
        state = jax.block_until_ready(builder.fresh())
        with jax.profiler.trace(str(trace)):
            step.run(state, [batch])
        for file in trace_summary.find_traces(trace):
            gpus = trace_summary.read_trace(file).gpus
            lines = trace_summary.report(gpus, steps=1, top=30) if gpus else ["no GPU in the trace"]
            print(*lines, sep="\n", flush=True)
    return found


def _batch(config: Config, mesh: Mesh, permutation: np.ndarray) -> dict[str, Array]:
    """Random tokens in layout order; the label of a token is the next one."""
    shape, sharding = (config.data.batch_size, config.data.seq_len), NamedSharding(mesh, TOKENS)
    rng = np.random.default_rng(0)
    text = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    rows = {
        "tokens": text[:, permutation],
        "labels": text[:, permutation + 1],
        "positions": np.broadcast_to(permutation.astype(np.int32), shape),
    }
    return {
        name: jax.make_array_from_callback(shape, sharding, lambda index, x=x: x[index])
        for name, x in rows.items()
    }


def rows_of(
    config: Config, depths: list[int], timings: dict[tuple[int, bool], Steps], kind: str
) -> Iterator[list[str]]:
    """The cells of the table: a row for each depth, and one for the full depth from two.

    `timings` are by depth and whether there was attention.
    """
    peak = peak_flops(kind)
    seconds = {key: timing.seconds for key, timing in timings.items()}
    names = {depth: str(depth) for depth in depths}
    full_depth, first, last = config.model.num_layers, depths[0], depths[-1]
    if len(depths) > 1 and full_depth not in depths:
        for part in {part for _, part in seconds}:
            slope = (seconds[last, part] - seconds[first, part]) / (last - first)
            seconds[full_depth, part] = seconds[last, part] + (full_depth - last) * slope
        names[full_depth] = f"{full_depth} (from {first} and {last})"
    for depth, name in names.items():
        full, rest = seconds.get((depth, True)), seconds[depth, False]
        timing = timings.get((depth, True)) or timings.get((last, True))
        flops = step_flops(
            _with_layers(config, depth),
            density=timing.density if timing else 0.0,
            executed=timing.executed if timing else 0.0,
        )
        outside = flops.matrices / config.devices / rest
        of_attention = ["–"] * 5
        if full is not None:
            rate = flops.attention_executed / config.devices / (full - rest)
            of_attention = [
                number(full - rest, 3), f"{rate / 1e12:.0f}", f"{timing.density:.4f}",
                f"{config.tokens_per_step / full:,.0f}",
                f"{flops.model / config.devices / full / peak:.1%}" if peak else "–",
            ]  # fmt: skip
        measured = timings.get((depth, True)) or timings.get((depth, False))
        yield [
            name, number(full, 3), number(rest, 3), f"{outside / 1e12:.0f}",
            f"{outside / peak:.1%}" if peak else "–", *of_attention,
            f"{measured.peak_bytes / 2**30:.1f}" if measured else "–",
        ]  # fmt: skip


def _with_layers(config: Config, layers: int) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "config")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6], help="depths to time")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per program")
    parser.add_argument("--outside-only", action="store_true", help="without attention only")
    parser.add_argument("--trace", type=Path, help="folder for profiles of the deepest programs")
    args, fields = parser.parse_known_args()
    config = load_config(args.config, overrides(fields))
    set_platform(config.parallel.cpu_devices)
    mesh = build_mesh(config)
    kind = mesh.devices.flat[0].device_kind
    model = config.model
    print(
        f"{config.run.name}: {config.data.batch_size} x {config.data.seq_len} tokens on "
        f"{' x '.join(map(str, config.mesh_shape))} {kind}, jax "
        f"{jax.__version__}, sparsity {config.sparsity.kind}, remat {model.remat}, MLP chunks of "
        f"{model.mlp_chunk_size} and loss chunks of {config.loss.chunk_size} tokens; TFLOP/s per "
        "device; MFU does not count recomputation",
        flush=True,
    )
    depths = sorted(set(args.layers))
    timings: dict[tuple[int, bool], Steps] = {}
    for part in (False,) if args.outside_only else (False, True):
        for depth in depths:
            trace = None
            if args.trace and depth == depths[-1]:
                trace = args.trace / ("attention" if part else "outside")
            timing = time_step(_with_layers(config, depth), mesh, part, args.steps, trace)
            timings[depth, part] = timing
            print(
                f"{depth} layers {'with' if part else 'without'} attention: "
                f"{timing.seconds:.3f} s, compiled in {timing.compile_seconds:.0f} s",
                flush=True,
            )
    rows = rows_of(config, depths, timings, kind)
    print(*table_head(_COLUMNS), *map(table_line, rows), sep="\n")


if __name__ == "__main__":
    main()
