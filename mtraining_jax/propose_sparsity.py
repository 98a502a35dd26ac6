"""The command that proposes a sparse pattern: `python -m mtraining_jax.propose_sparsity --help`."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mtraining_jax.argument_parser import ArgumentParser
from mtraining_jax.config import Config, load_config
from mtraining_jax.config.fields import toml_value
from mtraining_jax.errors import UserError, print_error
from mtraining_jax.evaluation.cli import forwarded_options, token_count
from mtraining_jax.sparsity import Settings
from mtraining_jax.sparsity.setting_text import parse_settings, split_settings

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
usage: python -m mtraining_jax.propose_sparsity --model FOLDER --text FILES --length L [options]

Runs a model over a text, dense and then with each of some sparse patterns in every layer, and
proposes the fastest of those that lose little. It measures the share of computed pairs, the rise of
the loss over dense attention, and its rise on far copies: tokens that end a passage of 4 tokens
which stood earlier, more than 256 tokens back. Nothing is trained; a model that is trained sparse
adapts.

  --model FOLDER      folder of a run (its newest checkpoint) or a Hugging Face checkpoint
  --text FILES        UTF-8 text that it was not trained on: files, folders, patterns
  --length L          tokens of a sequence, as 32K; best that of the run to come
  --sequences N       at most so many (default 8)
  --settings TEXTS    patterns with the options that differ, as sampled_rows,tau=0.9; default
                      {" ".join(SETTINGS[:2])}
                      and {len(SETTINGS) - 2} more
  --most-rise X       of the loss, in nats, that a proposal may have (default 0.01)
  --most-copies X     of the loss on far copies (default 0.05)
  --config NAME       run to come, as of train.py, whose step is forecast on H200s with each setting
                      at its measured density; without it the least density counts as fastest
  --output FILE       write all figures there as JSON
  --tokenizer NAME    bytes, or a tokenizer.json, instead of the model's own
  --dtype TYPE        bfloat16 or float32, what layers compute in
  --cpu-devices N     run on N virtual devices of the CPU
  --parallel.FIELD=VALUE
                      as of train.py: the mesh that the model runs on here
  --help              print this text and stop
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: without the program's name; None takes those of this process.

    Returns:
        The exit status: 0; 1 if no setting loses little enough; 2 after a mistake that the user can
        correct, reported on stderr.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if {"-h", "--help"} & set(arguments):
            print(_USAGE, end="")
            return 0
        return _run(arguments)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 2
    except UserError as error:
        return print_error(error)


def _run(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog="python -m mtraining_jax.propose_sparsity", allow_abbrev=False, add_help=False
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
            raise UserError(f"--{name} is missing; --help tells more")
    for name in ("sequences", "cpu_devices"):
        if (value := getattr(own, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}={value} must be at least 1")
    length = token_count("--length", own.length)
    settings = {text: _checked(text) for text in dict.fromkeys(own.settings)}
    configs = {text: config_with(own.config, text) for text in ("dense", *settings)}

    from mtraining_jax.platform import set_platform

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
        console.width = 160  # of the table in a file
    loaded = load(
        own.model, attention="dense", dtype=own.dtype, tokenizer=own.tokenizer,
        overrides=[(f"parallel.{name}", value) for name, value in overrides.items()],
    )  # fmt: skip
    check_length(loaded, list(settings.values()), length)
    sequences = read_sequences(loaded, checked_paths(own.text), length, own.sequences)
    console.print(
        f"{loaded.source}: {len(sequences)} sequences of {length:,} tokens", markup=False
    )
    found = list(
        measure(
            loaded, sequences, settings,
            lambda text: console.print(f"measuring {text} ...", markup=False),
        )
    )
    seconds = {one.text: forecast_seconds(configs[one.text], one.density) for one in found}
    best = proposed(
        found[1:],
        lambda one: one.density if seconds[one.text] is None else seconds[one.text],
        own.most_rise, own.most_copies,
    )  # fmt: skip
    console.print(_table(found, seconds))
    if own.output is not None:
        _write(Path(own.output), own, length, sequences.shape[0], found, seconds, best)
    config = configs["dense"]
    if config is not None and config.data.seq_len != length:
        console.print(
            f"note: the forecast is of a step of {config.data.seq_len:,} tokens, with densities "
            f"measured at {length:,}; shorter sequences keep a larger share", markup=False,
        )  # fmt: skip
    limits = f"--most-rise {own.most_rise} and --most-copies {own.most_copies}"
    if best is None:
        console.print(f"none of the settings keeps {limits}: ask for denser ones", markup=False)
        return 1
    console.print(f"within {limits} this is the {_why(seconds[best.text])}:", markup=False)
    name, options = split_settings(best.text)
    lines = ["[sparsity]", f"kind = {toml_value(name)}"]
    chosen = settings[best.text]
    lines += [f"{key} = {toml_value(getattr(chosen, key))}" for key in options]
    console.print("\n".join(lines), markup=False)
    return 0


def _checked(text: str) -> Settings:
    settings = parse_settings(text)
    if not settings.sparse or not settings.chooses:
        raise UserError(
            f'--settings has "{text}": a pattern that chooses what to leave out is needed'
        )
    return settings


def config_with(name: str | None, text: str) -> Config | None:
    """The run to come with a setting; None without a run.

    Raises:
        UserError: as `load_config`.
    """
    if name is None:
        return None
    kind, options = split_settings(text)
    fields = [("sparsity.kind", kind), *((f"sparsity.{key}", x) for key, x in options.items())]
    return load_config(name, fields)


def forecast_seconds(config: Config | None, density: float) -> float | None:
    """A step of a run on H200s at a density, as the dry run forecasts it; None if it cannot."""
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
    for name in ("density", "loss", "rise", "of far copies", *(["s a step"] if timed else [])):
        table.add_column(name, justify="right")
    for one in found:
        error = "" if math.isnan(one.error) or one.text == "dense" else f" ± {one.error:.4f}"
        cells = [
            f"{one.density:.1%}", f"{one.loss:.4f}", f"{one.rise:+.4f}{error}",
            "none" if math.isnan(one.copies) else f"{one.copies:+.4f}",
        ]  # fmt: skip
        if timed:
            cells.append(f"{seconds[one.text]:.2f}")
        table.add_row(one.text, *cells)
    return table


def _why(seconds: float | None) -> str:
    return "least dense" if seconds is None else f"fastest, a step of {seconds:.2f} s by forecast"


def _write(
    path: Path, own: object, length: int, sequences: int, found: "Sequence[Measured]",
    seconds: dict[str, float | None], best: "Measured | None",
) -> None:
    rows = [dataclasses.asdict(one) | {"step_seconds": seconds[one.text]} for one in found]
    for row in rows:
        row |= {key: None for key, x in row.items() if isinstance(x, float) and math.isnan(x)}
    result = {
        "model": own.model, "text": own.text, "length": length, "sequences": sequences,
        "most_rise": own.most_rise, "most_copies": own.most_copies, "settings": rows,
        "proposed": None if best is None else best.text,
    }  # fmt: skip
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
