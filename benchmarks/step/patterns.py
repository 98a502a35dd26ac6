r"""A training step of a pretrained model with each pattern: does it train, what does it cost?

    python -m examples.smollm2 MODEL
    python -m benchmarks.quality.texts --tokenizer MODEL/tokenizer.json --out TEXTS
    python -m benchmarks.step.patterns --config experiments/configs/c.toml --out RESULT.md \
        --model.init_from=MODEL --data.tokenizer=MODEL/tokenizer.json \
        --data.paths='["TEXTS/tokens.npy"]' --data.seq_len=131072 --data.batch_size=1 \
        --optimizer.accumulation_steps=1 --model.max_position_embeddings=131072 \
        --model.rope_scaling='{type="yarn", factor=16.0, original_max_position_embeddings=8192}'

Every pattern starts from the same checkpoint and takes the same batches, so losses may be compared.
With random weights attention is flat, and patterns that keep a share of its mass keep nearly all
pairs: name a checkpoint. A pattern of your own is named as package.module:Name.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from benchmarks.report import setting
from mtraining_jax.config import Config, load_config
from mtraining_jax.errors import UserError
from mtraining_jax.jax_platform import set_platform
from mtraining_jax.sparsity.setting_text import split_settings
from mtraining_jax.training.build import (
    build_attention,
    build_layout,
    build_mesh,
    build_pattern,
    layer_inputs,
)
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step

# "budgets" stands for a file that is written here: of each head 1000 columns and 6096 diagonals,
# which is what published files give to most heads.
PATTERNS = (
    "dense", "sampled_rows,sampled_rows=16", "sampled_rows,sampled_rows=16,columns=128",
    "mixed_rows", "xattention", "prism", "exact_rows", "vertical_slash",
    "vertical_slash,preset=paper", "fixed,budget_file=budgets", "minference,budget_file=budgets",
    "flex_prefill", "moba", "block_topk", "replay",
)  # fmt: skip
_BUDGETS = ["vertical_and_slash", 1000, 6096, 1.0]
_COLUMNS = (
    "pattern", "density", "executed", "loss of each step", "grad norm", "step s", "of dense",
    "peak GiB (compiler)", "compiled in s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Steps:
    """What some steps with one pattern gave.

    Attributes:
        losses, norms: of each step; norms are those of the gradients.
        density, executed: means over layers, in the last step.
        seconds: median of the steps after the first.
        compile_seconds: of tracing and compiling.
        peak_bytes: memory of one device, as the compiler reserves it.
    """

    losses: list[float]
    norms: list[float]
    density: float
    executed: float
    seconds: float
    compile_seconds: float
    peak_bytes: int


class Step:
    """The compiled training step of a configuration.

    Args:
        config: of the run.
        mesh: of its devices.
        batch: int32 arrays by name, whose shapes all batches have.
        whole: the run of which `config` is one group: its attention is compiled, which counts what
            that run counts. None: `config` is the run.
    """

    def __init__(
        self, config: Config, mesh: Mesh, batch: dict[str, Array], whole: Config | None = None
    ) -> None:
        layout, pattern = build_layout(config), build_pattern(config)
        attention = build_attention(whole or config, mesh, layout, pattern)
        builder = StateBuilder(config, mesh)
        begin = time.perf_counter()
        step = make_train_step(config, builder, attention, mesh, layer_inputs(pattern))
        self._compiled = step.lower(builder.abstract(), batch).compile()
        self._compile_seconds = time.perf_counter() - begin

    def run(self, state: Any, batches: Sequence[dict[str, Array]]) -> Steps:
        """Takes a step a batch; `state` is used up."""
        jax.block_until_ready(state)
        times, found = [], []
        for batch in batches:
            begin = time.perf_counter()
            state, metrics = self._compiled(state, batch)
            found.append(jax.device_get(metrics))  # waits
            times.append(time.perf_counter() - begin)
        layers = {name: float(np.mean(x)) for name, x in found[-1]["layers"].items()}
        return Steps(
            losses=[float(metrics["loss"]) for metrics in found],
            norms=[float(metrics["grad_norm"]) for metrics in found],
            density=layers["density"],
            executed=layers["executed"],
            seconds=statistics.median(times[1:] or times),
            compile_seconds=self._compile_seconds,
            peak_bytes=self._compiled.memory_analysis().peak_memory_in_bytes,
        )


def measure(
    config: Config, configs: dict[str, Config], mesh: Mesh, steps: int, compilers: int
) -> Iterator[tuple[str, Steps | Exception]]:
    """Steps of each of `configs`, which differ from `config` in their pattern only."""
    batches = DeviceBatches(config, mesh, build_layout(config))
    first = [next(batches) for _ in range(steps)]
    batches.close()
    builder = StateBuilder(config, mesh)
    with ThreadPoolExecutor(compilers) as pool:
        compiling = {
            text: pool.submit(Step, each, mesh, first[0]) for text, each in configs.items()
        }
        # Compiling tries kernels out on the device, which times would show.
        for future in compiling.values():
            future.exception()
    for text, future in compiling.items():
        try:
            # Made anew each time: of a model of 3 billion parameters, two do not fit beside a step.
            yield text, future.result().run(builder.fresh(), first)
        except Exception as error:  # of one pattern: the others are not lost with it
            yield text, error


def main(argv: list[str] | None = None) -> None:
    """Prints the table; the exit status is 1 if a pattern failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), metavar="NAME,OPTION=...")
    parser.add_argument("--steps", type=int, default=3, help="of each pattern (default 3)")
    parser.add_argument("--compilers", type=int, default=8, help="programs compiled at once")
    parser.add_argument("--out", type=Path, help="file for the table")
    args, overrides = parser.parse_known_args(argv)
    try:
        failed = _run(args, [_pair(text) for text in overrides])
    except UserError as error:
        parser.error(str(error))
    if failed:
        sys.exit(f"error: {len(failed)} patterns failed: {'; '.join(failed)}")


def _run(args: argparse.Namespace, pairs: list[tuple[str, str]]) -> list[str]:
    base = load_config(args.config, [*pairs, ("sparsity.kind", "dense")])
    set_platform(base.parallel.cpu_devices)
    mesh = build_mesh(base)
    with tempfile.TemporaryDirectory() as folder:
        budgets = Path(folder) / "budgets.json"
        model = base.model
        budgets.write_text(json.dumps([[_BUDGETS] * model.num_heads] * model.num_layers))
        configs = {
            text: load_config(args.config, [*pairs, *_sparsity(text, budgets)])
            for text in args.patterns
        }
        lines = _head(base, mesh, args.steps)
        print("\n".join(lines), flush=True)
        failed, dense = [], None
        for text, found in measure(base, configs, mesh, args.steps, args.compilers):
            if isinstance(found, Exception):
                failed.append(f"{text}: {type(found).__name__}: {found}")
                cells = (text, f"failed: {type(found).__name__}", *[""] * (len(_COLUMNS) - 2))
            else:
                dense = found.seconds if text == "dense" else dense
                cells = _cells(text, found, dense)
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
            if args.out is not None:
                args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return failed


def _pair(text: str) -> tuple[str, str]:
    field, _, value = text.removeprefix("--").partition("=")
    return field, value


def _sparsity(text: str, budgets: Path) -> list[tuple[str, str]]:
    name, options = split_settings(text)
    options = {key: str(budgets) if x == "budgets" else x for key, x in options.items()}
    return [("sparsity.kind", name), *((f"sparsity.{key}", x) for key, x in options.items())]


def _head(config: Config, mesh: Mesh, steps: int) -> list[str]:
    model, data = config.model, config.data
    return [
        f"# A training step with each pattern on {mesh.devices.flat[0].device_kind}",
        "",
        f"{setting()}. {model.init_from and Path(model.init_from).name or 'random weights'}, "
        f"{model.num_layers} layers, {model.num_heads}/{model.num_kv_heads} heads of "
        f"{model.head_dim}, {data.batch_size} x {data.seq_len} tokens on "
        f"{' x '.join(map(str, config.mesh_shape))} devices, {model.dtype}, remat {model.remat}; "
        f"{steps} steps from the same checkpoint on the same batches, the time a median of all "
        "but the first.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + " --- |" * len(_COLUMNS),
    ]


def _cells(text: str, found: Steps, dense: float | None) -> tuple[str, ...]:
    return (
        text.replace(",", " "), f"{found.density:.4f}", f"{found.executed:.4f}",
        " ".join(f"{loss:.4f}" for loss in found.losses), f"{found.norms[0]:.3f}",
        f"{found.seconds:.3f}", f"{found.seconds / dense:.2f}" if dense else "–",
        f"{found.peak_bytes / 2**30:.1f}", f"{found.compile_seconds:.0f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
