"""Time of a training step: attention, and everything else.

    python -m benchmarks.step.breakdown --config qwen3b_512k --sparsity.kind=replay

Takes real optimizer steps of a configuration cut to a few layers, twice: as it is, and with
attention replaced by a sum of queries, keys and values, which costs next to nothing and has the
same arrays in memory. The second run gives the time of everything outside attention. Two depths
give the time of one layer, and from it that of the full depth. Tokens are random.
"""

import argparse
import dataclasses
import statistics
import time
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

from benchmarks.step import trace_summary
from mtraining_jax.config import Config, load_config
from mtraining_jax.jax_platform import set_platform
from mtraining_jax.models.transformer import Attention
from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.reporting.flops import peak_flops, step_flops
from mtraining_jax.training.build import (
    build_attention,
    build_layout,
    build_mesh,
    build_pattern,
    layer_inputs,
)
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step
from pallas_kernels.names import SAVED_NAMES


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of one program.

    Attributes:
        seconds: median of its steps.
        compile_seconds: of tracing and compiling.
        peak_bytes: memory of one device, as the compiler reserves it.
        density, executed: means over layers, as attention reports them; None without attention.
    """

    seconds: float
    compile_seconds: float
    peak_bytes: int
    density: float | None
    executed: float | None


def stand_in(q_BSHD: Array, k_BSHkD: Array, v_BSHkD: Array, *_: Any) -> tuple[Array, dict]:
    """A stand-in for attention: the same shapes, with gradients to all of its inputs."""
    return _sum(q_BSHD, k_BSHkD, v_BSHkD), {}


@jax.custom_vjp
def _sum(q: Array, k: Array, v: Array) -> Array:
    out = _spread_heads(q, k + v) + q
    return checkpoint_name(_row_major(out), SAVED_NAMES[0])


def _spread_heads(q: Array, k: Array) -> Array:
    """Repeats each key/value head for every query head that shares it."""
    return jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)


def _row_major(x: Array) -> Array:
    """Keeps the order of axes that kernels would require, which XLA could otherwise change."""
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
) -> Timing:
    """Compiles the training step and runs it `steps` times, after two to warm up.

    Args:
        config: of the run.
        mesh: of its devices.
        with_attention: or with `stand_in`.
        steps: number of timed steps.
        trace: folder for a profile of one more step, whose longest kernels are printed; None for
            no profile.
    """
    layout, pattern = build_layout(config), build_pattern(config)
    attention: Attention = stand_in
    if with_attention:
        attention = build_attention(config, mesh, layout, pattern)
    builder = StateBuilder(config, mesh)
    inputs = layer_inputs(pattern)
    batch = _batch(config, mesh, layout.permutation())
    begin = time.perf_counter()
    step = make_train_step(config, builder, attention, mesh, inputs)
    compiled = step.lower(builder.abstract(), batch).compile()
    compile_seconds = time.perf_counter() - begin
    state = builder.fresh()
    times = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - begin)
    if trace is not None:
        with jax.profiler.trace(str(trace)):
            state, metrics = compiled(state, batch)
            jax.block_until_ready((state, metrics))
        for file in trace_summary.find_traces(trace):
            gpus = trace_summary.read_trace(file).gpus
            lines = trace_summary.report(gpus, steps=1, top=30) if gpus else ["no GPU in the trace"]
            print("\n".join(lines), flush=True)
    layers = {name: float(np.mean(x)) for name, x in metrics["layers"].items()}
    return Timing(
        seconds=statistics.median(times[2:]),
        compile_seconds=compile_seconds,
        peak_bytes=compiled.memory_analysis().peak_memory_in_bytes,
        density=layers.get("density"),
        executed=layers.get("executed"),
    )


def _batch(config: Config, mesh: Mesh, permutation: np.ndarray) -> dict[str, Array]:
    """Random tokens in layout order; the label of a token is the one after it."""
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
    config: Config, depths: list[int], timings: dict[tuple[int, bool], Timing], kind: str
) -> Iterator[list[str]]:
    """The cells of the table: a row for each depth, and one for the whole depth from two.

    Args:
        config: of the whole model.
        depths: layers, ascending.
        timings: by depth and whether attention was there.
        kind: of the devices.
    """
    peak = peak_flops(kind)
    devices = config.devices
    seconds = {
        (depth, part): timings[depth, part].seconds
        for depth in depths
        for part in (True, False)
        if (depth, part) in timings
    }
    whole = config.model.num_layers
    shown = [(depth, str(depth)) for depth in depths]
    if len(depths) > 1 and whole not in depths:
        first, last = depths[0], depths[-1]
        for part in (True, False):
            if (first, part) in seconds:
                slope = (seconds[last, part] - seconds[first, part]) / (last - first)
                seconds[whole, part] = seconds[last, part] + (whole - last) * slope
        shown.append((whole, f"{whole} (from {first} and {last})"))
    for depth, name in shown:
        cut = _with_layers(config, depth)
        full, rest = seconds.get((depth, True)), seconds[depth, False]
        timing = timings.get((depth, True)) or timings.get((depths[-1], True))
        flops = step_flops(
            cut,
            density=timing.density if timing else 0.0,
            executed=timing.executed if timing else 0.0,
        )
        outside = flops.matrices / devices / rest
        cells = [name, _seconds(full), _seconds(rest), f"{outside / 1e12:.0f}"]
        cells.append(f"{outside / peak:.1%}" if peak else "–")
        if full is None:
            cells += ["–"] * 5
        else:
            attention = full - rest
            rate = flops.attention_executed / devices / attention
            cells += [
                _seconds(attention),
                f"{rate / 1e12:.0f}",
                f"{timing.density:.4f}",
                f"{config.tokens_per_step / full:,.0f}",
                f"{flops.model / devices / full / peak:.1%}" if peak else "–",
            ]
        measured = timings.get((depth, True)) or timings.get((depth, False))
        cells.append(f"{measured.peak_bytes / 2**30:.1f}" if measured else "–")
        yield cells


def _with_layers(config: Config, layers: int) -> Config:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=layers))


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


_COLUMNS = (
    "layers",
    "step s",
    "outside attention s",
    "TFLOP/s",
    "MFU",
    "attention s (difference)",
    "executed TFLOP/s",
    "density",
    "tokens/s",
    "MFU of the step",
    "peak GiB (compiler)",
)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6])
    parser.add_argument("--steps", type=int, default=5, help="timed steps a program")
    parser.add_argument("--outside-only", action="store_true", help="leave attention out")
    parser.add_argument("--trace", type=Path, help="folder for profiles of the deepest programs")
    arguments, overrides = parser.parse_known_args()
    pairs = [tuple(text.removeprefix("--").split("=", 1)) for text in overrides]
    config = load_config(arguments.config, pairs)
    set_platform(config.parallel.cpu_devices)
    mesh = build_mesh(config)
    kind = mesh.devices.flat[0].device_kind
    model = config.model
    print(
        f"{config.run.name}: {config.data.batch_size} x {config.data.seq_len} tokens on "
        f"{' x '.join(map(str, config.mesh_shape))} {kind}, jax "
        f"{jax.__version__}, sparsity {config.sparsity.kind}, remat {model.remat}, MLP chunks of "
        f"{model.mlp_chunk_size} and loss chunks of {config.loss.chunk_size} tokens; TFLOP/s per "
        "device; what is computed again is not counted in MFU",
        flush=True,
    )
    depths = sorted(set(arguments.layers))
    timings: dict[tuple[int, bool], Timing] = {}
    for part in (False,) if arguments.outside_only else (False, True):
        for depth in depths:
            trace = None
            if arguments.trace and depth == depths[-1]:
                trace = arguments.trace / ("attention" if part else "outside")
            timing = time_step(_with_layers(config, depth), mesh, part, arguments.steps, trace)
            timings[depth, part] = timing
            print(
                f"{depth} layers {'with' if part else 'without'} attention: "
                f"{timing.seconds:.3f} s, compiled in {timing.compile_seconds:.0f} s",
                flush=True,
            )
    print("| " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * len(_COLUMNS))
    for cells in rows_of(config, depths, timings, kind):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
