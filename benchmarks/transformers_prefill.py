"""Times prefill in transformers, sparse and dense, and compares losses with mtraining-jax.

    python -m benchmarks.transformers_prefill FOLDER --tokens IDS.npy --losses OURS.npz --engine
    python -m benchmarks.transformers_prefill FOLDER --tokens IDS.npy --losses OURS.npz

The first command writes the losses of mtraining-jax; the second one needs torch and transformers.
FOLDER is an export, or any checkpoint with `--pattern`. With `--density`, for random weights, all
layers attend to random blocks after the selection.
"""

import functools
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import make_parser
from benchmarks.pattern_words import parse_pattern
from benchmarks.report import Page, number, setting, table_head, table_line, versions
from mtraining_jax.models.huggingface.config import SPARSE_ENTRY, read_json, sparse_entry

COLUMNS = "tokens,attention,density,prefill s,selection s,attention s,peak GiB,loss,over JAX"


def write_losses(options: Namespace, entry: dict[str, Any], ids: np.ndarray) -> None:
    """Writes the loss of each token, by attention and length."""
    from mtraining_jax import Engine

    values = {f"sparsity.{name}": value for name, value in entry.items()}
    sparse = Engine.load(options.folder, attention="sparse", overrides=values)
    found = {f"sparse {n}": sparse.token_losses(ids[: n + 1]) for n in options.lengths}
    found |= {f"dense {n}": sparse.dense().token_losses(ids[: n + 1]) for n in options.lengths}
    np.savez(options.losses, **found)


def measure(options: Namespace, entry: dict[str, Any], ids: np.ndarray) -> None:
    """Prints a table of times and losses in transformers."""
    sys.path.append(str(Path(__file__).parents[1] / "mtraining_jax/models/huggingface"))
    import sparse_attention as module
    import torch
    import torch.nn.functional as F
    import transformers

    on_gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    seconds, densities = {}, []

    def timed(function: Any, name: str, *arguments: Any) -> Any:
        wait()
        start, result = time.perf_counter(), function(*arguments)
        wait()
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
        if name == "selection" and options.density is not None:
            drawn = torch.rand_like(result[0], dtype=torch.float32) < options.density
            result = (drawn | torch.eye(drawn.shape[2]).bool().to(drawn.device)).tril(), None
        if name == "selection":
            size = result[0].shape[2]
            densities.append(float(result[0].float().mean()) * 2 * size / (size + 1))
        return result

    parts = {"_select": "selection", "_attend": "attention", "_attend_on_gpu": "attention"}
    for name, part in parts.items():
        setattr(module, name, functools.partial(timed, getattr(module, name), part))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=dtype)
    model = model.to("cuda" if on_gpu else "cpu").eval()
    setattr(model.config, SPARSE_ENTRY, entry)
    ours, page = np.load(options.losses) if options.losses else {}, Page(options.out)
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    page.add(f"{where}, {setting([versions('torch', 'transformers')])}", "", f"`{entry}`", "")
    page.add(*table_head(COLUMNS.split(",")))
    for length in options.lengths:
        tokens = torch.tensor(ids[None, : length + 1], device=model.device).long()
        for name, kind in (("sparse", module.NAME), ("dense", "sdpa")):
            model.set_attn_implementation(kind)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            runs = []
            with torch.no_grad():
                for _ in range(1 + options.repeats):  # the first one compiles
                    seconds, densities = {}, []
                    hidden = timed(model.model, "all", tokens[:, :-1]).last_hidden_state[0]
                    runs.append(seconds)
                parts = zip(hidden.split(2048), tokens[0, 1:].split(2048), strict=True)
                parts = ((model.lm_head(x).float(), y) for x, y in parts)
                loss = float(sum(F.cross_entropy(*x, reduction="sum") for x in parts)) / length
            best = min(runs[1:], key=lambda x: x["all"])
            peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
            times = map(best.get, ("all", "selection", "attention"))
            figures = [np.mean(densities or 1), *times, peak, loss]
            difference = loss - ours[f"{name} {length}"].mean() if options.losses else None
            cells = [*(number(x, 3) for x in figures), number(difference, 5)]
            page.add(table_line([f"{length:,}", name, *cells]))


def main() -> None:
    """Runs the command."""
    parser = make_parser(__doc__, "repeats", "out")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--pattern", help="as sampled_rows,tau=0.9; default: that in config.json")
    parser.add_argument("--tokens", type=Path, help="ids [n], .npy; default: random ones")
    parser.add_argument("--losses", type=Path, help="losses of mtraining-jax, .npz")
    parser.add_argument("--engine", action="store_true", help="write --losses, with JAX")
    parser.add_argument("--density", type=float, help="density of random blocks")
    options = parser.parse_args()
    config = read_json(options.folder / "config.json")
    entry = config.get(SPARSE_ENTRY)
    if text := options.pattern:
        entry = sparse_entry(text.partition(",")[0], parse_pattern(text), config["model_type"])
    count = max(options.lengths) + 1
    drawn = np.random.default_rng(0).integers(0, config["vocab_size"], count)
    ids = np.load(options.tokens)[:count] if options.tokens else drawn
    if entry is None or len(ids) < count:
        parser.error(f"a pattern (--pattern) and {count} ids (--tokens) are needed")
    (write_losses if options.engine else measure)(options, entry, ids)


if __name__ == "__main__":
    main()
