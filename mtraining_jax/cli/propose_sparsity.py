"""Command that proposes a sparse pattern: `python -m mtraining_jax.cli.propose_sparsity --help`."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mtraining_jax.cli.argument_parser import ArgumentParser
from mtraining_jax.cli.evaluate import forwarded_options, token_count
from mtraining_jax.config import Config, load_config
from mtraining_jax.config.fields import toml_value
from mtraining_jax.patterns import Settings
from mtraining_jax.patterns.setting_text import parse_settings, split_settings
from mtraining_jax.utils.errors import UserError, print_error
from mtraining_jax.utils.text import print_text

if TYPE_CHECKING:
    from mtraining_jax.evaluation.proposal import Measured

SETTINGS = (
    "sampled_rows,tau=0.95",
    "sampled_rows,tau=0.9",
    "sampled_rows,tau=0.85",
    "sampled_rows,tau=0.8",
    "xattention,tau=0.9",
    "vertical_slash,top_p=0.9",
)

_USAGE = f"""\
usage: python -m mtraining_jax.cli.propose_sparsity --model FOLDER --text FILES --length L [options]

Evaluates a model on text, with dense attention and with several sparse patterns, and proposes the
fastest pattern with a small increase of the loss. Reports for each pattern the density (computed
pairs over causal pairs), the increase of the loss over dense attention, and its increase on far
copies: last tokens of 4-token passages that occurred earlier, more than 256 tokens back. Nothing
is trained; a model trained with sparse attention adapts to it.

  --model FOLDER      run folder (uses its newest checkpoint) or Hugging Face checkpoint
  --text FILES        UTF-8 text that the model was not trained on: files, folders or globs
  --length L          sequence length in tokens, e.g. 32K; best the length of the planned run
  --sequences N       maximum number of sequences (default 8)
  --settings TEXTS    patterns with non-default options, e.g. sampled_rows,tau=0.9; default:
                      {" ".join(SETTINGS[:2])}
                      and {len(SETTINGS) - 2} more
  --most-rise X       maximum increase of the loss, in nats (default 0.01)
  --most-copies X     maximum increase of the loss on far copies, in nats (default 0.05)
  --config NAME       planned run, as in train.py: predicts its step time on H200s with each pattern
                      at its measured density; without it, the pattern of lowest density counts as
                      fastest
  --output FILE       write all results as JSON
  --tokenizer NAME    bytes or the path of a tokenizer.json, instead of the model's own
  --dtype TYPE        compute type: bfloat16 or float32
  --cpu-devices N     run on N virtual CPU devices
  --parallel.FIELD=VALUE
                      device mesh for this evaluation, as in train.py
  --help              print this help and exit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        Exit status: 0 on success; 1 if all settings exceed the limits; 2 after a user error.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if {"-h", "--help"} & set(arguments):
            return print_text(_USAGE)
        return _run(arguments)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 2
    except UserError as error:
        return print_error(error)


def _run(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog="python -m mtraining_jax.cli.propose_sparsity", allow_abbrev=False, add_help=False
    )
    for name in ("model", "length", "config", "output", "tokenizer"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--text", nargs="+", default=[])
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--cpu-devices", type=int)
    parser.add_argument("--most-rise", type=float, default=0.01)
    parser.add_argument("--most-copies", type=float, default=0.05)
    own, rest = parser.parse_known_args(arguments)
    overrides = forwarded_options(rest, ("parallel",))["parallel"]
    for name in ("model", "text", "length"):
        if not getattr(own, name):
            raise UserError(f"--{name} is missing; see --help")
    for name in ("sequences", "cpu_devices"):
        if (value := getattr(own, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}={value} must be at least 1")
    length = token_count("--length", own.length)
    settings = {text: _checked(text) for text in dict.fromkeys(own.settings)}
    configs = {text: config_with(own.config, text) for text in ("dense", *settings)}

    from mtraining_jax.utils.jax_platform import set_platform

    set_platform(own.cpu_devices)
    from mtraining_jax.evaluation.load import load
    from mtraining_jax.evaluation.proposal import (
        check_length,
        checked_paths,
        measure,
        proposed,
        read_sequences,
    )

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160  # for the table
    loaded = load(
        own.model,
        attention="dense",
        dtype=own.dtype,
        tokenizer=own.tokenizer,
        overrides=[(f"parallel.{name}", value) for name, value in overrides.items()],
    )
    check_length(loaded, list(settings.values()), length)
    sequences = read_sequences(loaded, checked_paths(own.text), length, own.sequences)
    console.print(f"{loaded.source}: {len(sequences)} sequences of {length:,} tokens", markup=False)
    found = list(
        measure(
            loaded,
            sequences,
            settings,
            lambda text: console.print(f"measuring {text} ...", markup=False),
        )
    )
    seconds = {one.text: forecast_seconds(configs[one.text], one.density) for one in found}

    def cost(one: "Measured") -> float:
        predicted = seconds[one.text]
        return one.density if predicted is None else predicted

    best = proposed(found[1:], cost, own.most_rise, own.most_copies)
    console.print(_table(found, seconds))
    if own.output is not None:
        _write(Path(own.output), own, length, sequences.shape[0], found, seconds, best)
    config = configs["dense"]
    if config is not None and config.data.seq_len != length:
        console.print(
            f"note: step times are for {config.data.seq_len:,} tokens, with densities measured at "
            f"{length:,}; shorter sequences have a higher density",
            markup=False,
        )
    limits = f"--most-rise {own.most_rise} and --most-copies {own.most_copies}"
    if best is None:
        console.print(f"all settings exceed {limits}: try denser ones", markup=False)
        return 1
    console.print(f"{_why(seconds[best.text])} within {limits}:", markup=False)
    name, options = split_settings(best.text)
    lines = ["[sparsity]", f"kind = {toml_value(name)}"]
    chosen = settings[best.text]
    lines += [f"{key} = {toml_value(getattr(chosen, key))}" for key in options]
    console.print("\n".join(lines), markup=False)
    return 0


def _checked(text: str) -> Settings:
    settings = parse_settings(text)
    if not settings.sparse or not settings.selects:
        raise UserError(
            f'--settings has "{text}", which does not select pairs; use a sparse pattern, e.g. '
            f"{SETTINGS[0]}"
        )
    return settings


def config_with(name: str | None, text: str) -> Config | None:
    """The planned run with a setting; None without a run."""
    if name is None:
        return None
    kind, options = split_settings(text)
    fields = [("sparsity.kind", kind), *((f"sparsity.{key}", x) for key, x in options.items())]
    return load_config(name, fields)


def forecast_seconds(config: Config | None, density: float) -> float | None:
    """Predicted step time on H200s at a density, as in the dry run; None if unknown."""
    if config is None:
        return None
    from mtraining_jax.planning.cost import count_flops, rates_missing, seconds
    from mtraining_jax.planning.documents import planned_pairs
    from mtraining_jax.planning.hardware import H200
    from mtraining_jax.planning.memory import estimate_memory

    if rates_missing(config, H200):
        return None
    pairs = dataclasses.replace(planned_pairs(config), density=density, why="measured")
    parts = seconds(config, H200, estimate_memory(config), count_flops(config, pairs))
    return sum(parts.values())


def _table(found: "Sequence[Measured]", seconds: dict[str, float | None]) -> Table:
    timed = any(value is not None for value in seconds.values())
    table = Table("setting")
    for name in ("density", "loss", "increase", "far copies", *(["s/step"] if timed else [])):
        table.add_column(name, justify="right")
    for one in found:
        error = "" if math.isnan(one.error) or one.text == "dense" else f" ± {one.error:.4f}"
        cells = [
            f"{one.density:.1%}",
            f"{one.loss:.4f}",
            f"{one.rise:+.4f}{error}",
            "none" if math.isnan(one.copies) else f"{one.copies:+.4f}",
        ]
        if timed:
            cells.append(f"{seconds[one.text]:.2f}")
        table.add_row(one.text, *cells)
    return table


def _why(seconds: float | None) -> str:
    return "lowest density" if seconds is None else f"fastest (predicted {seconds:.2f} s/step)"


def _write(
    path: Path,
    own: argparse.Namespace,
    length: int,
    sequences: int,
    found: "Sequence[Measured]",
    seconds: dict[str, float | None],
    best: "Measured | None",
) -> None:
    rows = [dataclasses.asdict(one) | {"step_seconds": seconds[one.text]} for one in found]
    for row in rows:
        row |= {key: None for key, x in row.items() if isinstance(x, float) and math.isnan(x)}
    result = {
        "model": own.model,
        "text": own.text,
        "length": length,
        "sequences": sequences,
        "most_rise": own.most_rise,
        "most_copies": own.most_copies,
        "settings": rows,
        "proposed": None if best is None else best.text,
    }
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
