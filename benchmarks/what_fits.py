"""Writes the tables of docs/what-fits.md.

python -m benchmarks.what_fits --out docs/what-fits.md
"""

import argparse
import bisect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from mtraining_jax.config import Config
from mtraining_jax.tools.plan.dry_run import SPARE, available
from mtraining_jax.tools.plan.fitting import Proposal, fastest
from mtraining_jax.tools.plan.hardware import H100, H200, Gpu
from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.text import short_power

# The names of models, and configurations of their sizes.
MODELS = {
    "Qwen2.5-0.5B": "qwen0_5b_512k",
    "Qwen2.5-3B": "qwen3b_512k",
    "Qwen2.5-7B": "qwen7b_512k",
    "Qwen3-8B": "qwen3_8b_1m",
    "Llama-3.1-8B": "llama3_8b_512k",
}
_GPUS = 1, 2, 4, 8
_LENGTHS = [2**power for power in range(15, 24)]
_BEGIN, _END = "<!-- begin tables -->\n", "<!-- end tables -->\n"


def longest(config_name: str, gpus: int, gpu: Gpu) -> Proposal | None:
    """The fastest settings of the longest sequence that fits; None if none fits."""
    found: dict[int, Proposal] = {}

    def too_long(seq_len: int) -> bool:
        overrides = {
            "data.seq_len": seq_len,
            "model.max_position_embeddings": max(_LENGTHS),
            "parallel.devices_per_node": gpus,
            "parallel.fsdp": str(gpus > 1).lower(),
        }
        config = Config.load(config_name, overrides)
        best = fastest(config, gpu, int(available(config, gpu) * (1 - SPARE)))
        if best is not None:
            found[seq_len] = best
        return best is None

    bisect.bisect_left(_LENGTHS, True, key=too_long)  # memory grows with the length
    return found[max(found)] if found else None


def row(model: str, gpu: Gpu) -> str:
    """The line of a table for a model."""
    return f"| {model} | {' | '.join(_cell(longest(MODELS[model], n, gpu)) for n in _GPUS)} |"


def _cell(best: Proposal | None) -> str:
    if best is None:
        return "-"
    length = short_power(best.config.data.seq_len)
    seconds = f"{best.cost:.3g}" if best.cost < 1000 else f"{best.cost:.0f}"
    host = f" (+{best.host / 2**30:.0f})" if best.host else ""
    offload = best.config.optimizer.offload
    moments = ", all" if offload == "all" else ", moments" if offload else ""
    return f"**{length}** {seconds} s {best.config.model.remat}{moments}{host}"


def _table(title: str, gpu: Gpu) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| | 1 GPU | 2 | 4 | 8 |\n|---|---|---|---|---|"
    yield from (row(model, gpu) for model in MODELS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; `arguments` without the program name, None for `sys.argv`."""
    parser = argparse.ArgumentParser(description="Writes tables of what fits into a page.")
    parser.add_argument("--out", type=Path, required=True, help="page with the tables to replace")
    out = parser.parse_args(arguments).out
    try:
        before, begin, rest = out.read_text(encoding="utf-8").partition(_BEGIN)
        _, end, after = rest.partition(_END)
        if not (begin and end):
            raise UserError(f'--out {out} needs the lines "{_BEGIN.strip()}" and "{_END.strip()}"')
        jax.config.update("jax_platforms", "cpu")
        titles = {"80 GB: H100": H100, "141 GB: H200": H200}
        tables = "\n\n".join("\n".join(_table(*item)) for item in titles.items())
        out.write_text(f"{before}{begin}{tables}\n{end}{after}", encoding="utf-8")
    except OSError as error:
        return print_error(UserError(f"--out {out}: {error.strerror}"))
    except UserError as error:
        return print_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
