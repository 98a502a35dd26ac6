r"""Takes training steps of a pretrained model with each pattern: loss, density and time.

    python -m examples.smollm2 MODEL
    python -m benchmarks.quality.texts --tokenizer MODEL/tokenizer.json --out TEXTS
    python -m benchmarks.step.patterns --config experiments/configs/c.toml --out RESULT.md \
        --model.init_from=MODEL --data.tokenizer=MODEL/tokenizer.json \
        --data.paths='["TEXTS/tokens.npy"]' --data.seq_len=131072 --data.batch_size=1 \
        --optimizer.accumulation_steps=1 --model.max_position_embeddings=131072 \
        --model.rope_scaling='{type="yarn", factor=16.0, original_max_position_embeddings=8192}'

Every pattern starts from the same checkpoint and takes the same batches, so losses are comparable.
Use a checkpoint: with random weights attention is flat, and patterns that keep a fraction of its
mass keep nearly all pairs. A pattern of your own is named as package.module:Name.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax.sharding import Mesh

from benchmarks.options import make_parser, overrides
from benchmarks.pattern_words import split_options
from benchmarks.report import Page, setting, table_head, table_line
from benchmarks.step.compiled_step import CompiledStep, Steps
from mtraining_jax.config import Config
from mtraining_jax.training.build import build_layout, build_mesh
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.jax_platform import set_platform

# "budgets" is replaced by a file with 1000 columns and 6096 diagonals for each head, as in most
# heads of published files.
PATTERNS = (
    "dense", "sampled_rows,probe_queries_per_block=16",
    "sampled_rows,probe_queries_per_block=16,columns=128",
    "xattention", "vertical_slash",
    "vertical_slash,preset=paper", "fixed,budget_file=budgets", "minference,budget_file=budgets",
    "flex_prefill", "moba", "block_topk", "benchmarks.replay:Replay",
)  # fmt: skip
_BUDGETS = ["vertical_and_slash", 1000, 6096, 1.0]
_COLUMNS = (
    "pattern", "density", "executed", "loss of each step", "grad norm", "step s", "of dense",
    "peak GiB (compiler)", "compiled in s",
)  # fmt: skip


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
            text: pool.submit(CompiledStep, each, mesh, first[0]) for text, each in configs.items()
        }
        # Wait for all: compiling tries kernels on the device, which would disturb the times.
        for future in compiling.values():
            future.exception()
    for text, future in compiling.items():
        try:
            # A new state each time: two states of a 3B model do not fit next to a step.
            yield text, future.result().run(builder.fresh(), first)
        except Exception as error:  # a failing pattern must not stop the others
            yield text, error


def main(argv: list[str] | None = None) -> None:
    """Prints the table; the exit status is 1 if a pattern failed."""
    parser = make_parser(__doc__, "out", "config")
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), metavar="NAME,OPTION=...")
    parser.add_argument("--steps", type=int, default=3, help="steps per pattern (default 3)")
    parser.add_argument("--compilers", type=int, default=8, help="programs compiled at once")
    args, fields = parser.parse_known_args(argv)
    try:
        failed = _run(args, overrides(fields))
    except UserError as error:
        parser.error(str(error))
    if failed:
        sys.exit(f"error: {len(failed)} patterns failed: {'; '.join(failed)}")


def _run(args: argparse.Namespace, values: dict[str, str]) -> list[str]:
    base = Config.load(args.config, values | {"sparsity.kind": "dense"})
    set_platform(base.parallel.cpu_devices)
    mesh, model = build_mesh(base), base.model
    with tempfile.TemporaryDirectory() as folder:
        budgets = Path(folder) / "budgets.json"
        budgets.write_text(json.dumps([[_BUDGETS] * model.num_heads] * model.num_layers))
        configs = {
            text: Config.load(args.config, values | _sparsity(text, budgets))
            for text in args.patterns
        }
        page = Page(args.out)
        page.add(*_head(base, mesh, args.steps))
        failed, dense = [], None
        for text, found in measure(base, configs, mesh, args.steps, args.compilers):
            if isinstance(found, Exception):
                failed.append(f"{text}: {type(found).__name__}: {found}")
                cells = [text, f"failed: {type(found).__name__}", *[""] * (len(_COLUMNS) - 2)]
            else:
                dense = found.seconds if text == "dense" else dense
                cells = _cells(text, found, dense)
            page.add(table_line(cells))
    return failed


def _sparsity(text: str, budgets: Path) -> dict[str, str]:
    name, options = split_options(text)
    options = {key: str(budgets) if x == "budgets" else x for key, x in options.items()}
    return {f"sparsity.{key}": x for key, x in ({"kind": name} | options).items()}


def _head(config: Config, mesh: Mesh, steps: int) -> list[str]:
    model, data = config.model, config.data
    return [
        f"# A training step with each pattern on {mesh.devices.flat[0].device_kind}",
        "",
        f"{setting()}. {model.init_from and Path(model.init_from).name or 'random weights'}, "
        f"{model.num_layers} layers, {model.num_heads}/{model.num_kv_heads} heads of "
        f"{model.head_dim}, {data.batch_size} x {data.seq_len} tokens on "
        f"{' x '.join(map(str, config.mesh_shape))} devices, {model.dtype}, remat {model.remat}; "
        f"{steps} steps from the same checkpoint on the same batches; time: median of all steps "
        "after the first.",
        "",
        *table_head(_COLUMNS),
    ]


def _cells(text: str, found: Steps, dense: float | None) -> list[str]:
    return [
        text.replace(",", " "), f"{found.density:.4f}", f"{found.executed:.4f}",
        " ".join(f"{loss:.4f}" for loss in found.losses), f"{found.norms[0]:.3f}",
        f"{found.seconds:.3f}", f"{found.seconds / dense:.2f}" if dense else "–",
        f"{found.peak_bytes / 2**30:.1f}" if found.peak_bytes else "–",
        f"{found.compile_seconds:.0f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
