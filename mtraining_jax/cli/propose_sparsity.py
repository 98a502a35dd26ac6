"""Command that proposes a sparse pattern: `python -m mtraining_jax.cli.propose_sparsity --help`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtraining_jax.cli.model_command import (
    at_least,
    check_required,
    expanded_path,
    forwarded_options,
    model_parser,
    results_console,
    run_command,
    token_count,
)
from mtraining_jax.config import Config
from mtraining_jax.patterns.registry import parse_options, split_options
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value
from mtraining_jax.utils.jax_platform import set_platform

SETTINGS = (
    "sampled_rows,tau=0.95",
    "sampled_rows,tau=0.9",
    "sampled_rows,tau=0.85",
    "sampled_rows,tau=0.8",
    "xattention,tau=0.9",
    "vertical_slash,top_p=0.9",
)

_USAGE = f"""\
--model FOLDER --text FILES --length L [options]

Evaluates a model on text, with dense attention and with several sparse patterns, and proposes the
fastest pattern with a small increase of the loss. Reports for each pattern the density (computed
pairs over causal pairs), the increase of the loss over dense attention, and its increase on far
copies: last tokens of 4-token passages that occurred earlier, more than 256 tokens back. Nothing
is trained; a model trained with sparse attention adapts to it.

  --model FOLDER      run folder (uses its newest checkpoint), Hugging Face checkpoint, or adapters
  --text FILES        UTF-8 text that the model was not trained on: files, folders or globs
  --length L          sequence length in tokens, e.g. 32K; best the length of the planned run
  --sequences N       maximum number of sequences (default 8)
  --settings TEXTS    patterns with non-default options, e.g. sampled_rows,tau=0.9; default:
                      {" ".join(SETTINGS[:2])}
                      and {len(SETTINGS) - 2} more
  --most-rise X       maximum increase of the loss, in nats (default 0.01)
  --most-copies X     maximum increase of the loss on far copies, in nats (default 0.05)
  --config NAME       planned run, as in training: predicts its step time on H200s with each pattern
                      at its measured density; without it, the pattern of lowest density counts as
                      fastest
  --output FILE       write all results as JSON
  --tokenizer NAME    bytes or the path of a tokenizer.json, instead of the model's own
  --dtype TYPE        compute type: bfloat16 or float32
  --cpu-devices N     run on N virtual CPU devices
  --parallel.FIELD=VALUE, --model.FIELD=VALUE
                      device mesh and model of this evaluation, as in training
  --help [SECTION]    print this help, or the fields of a section, and exit
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 if all settings exceed the limits, 2 after a user error."""
    return run_command("propose_sparsity", arguments, lambda: _USAGE, _run)


def _run(arguments: list[str]) -> int:
    own, overrides = _parse(arguments)
    settings = {text: parse_options(text) for text in dict.fromkeys(own.settings)}
    for text, one in settings.items():
        if not one.sparse or not one.selects:
            raise UserError(
                f'--settings has "{text}", which does not select pairs; use a sparse pattern, e.g. '
                f"{SETTINGS[0]}"
            )
    # The planned run with each setting.
    texts = ("dense", *settings) if own.config else ()
    configs = {text: config_with(own.config, text) for text in texts}
    set_platform(own.cpu_devices)
    # Imported here, because they import JAX, which reads the number of devices when it starts.
    from mtraining_jax.evaluation import proposal
    from mtraining_jax.evaluation.engine.engine import Engine

    console = results_console()
    engine = Engine.load(own.model, dtype=own.dtype, tokenizer=own.tokenizer, overrides=overrides)
    proposal.check_length(engine, settings.values(), own.length)
    sequences = proposal.read_sequences(engine, own.text, own.length, own.sequences)
    say = console.print
    say(f"{engine.loaded.source}: {len(sequences)} sequences of {own.length:,} tokens")
    found = []
    for measured in proposal.measure(engine, sequences, settings):
        say(f"measured {measured.text}")
        if configs:
            seconds = forecast_seconds(configs[measured.text], measured.density)
            measured = dataclasses.replace(measured, step_seconds=seconds)
        found.append(measured)
    best = proposal.proposed(found[1:], own.most_rise, own.most_copies)
    console.print(proposal.table(found))
    if own.output is not None:
        result = {
            "model": str(own.model),
            "text": own.text,
            "length": own.length,
            "sequences": len(sequences),
            "most_rise": own.most_rise,
            "most_copies": own.most_copies,
            "settings": [dataclasses.asdict(one) for one in found],
            "proposed": best and best.text,
        }
        _write(own.output, result)
    if configs and (planned := configs["dense"].data.seq_len) != own.length:
        say(
            f"note: step times are for {planned:,} tokens, with densities measured at "
            f"{own.length:,}; shorter sequences have a higher density"
        )
    limits = f"--most-rise {own.most_rise} and --most-copies {own.most_copies}"
    if best is None:
        say(f"all settings exceed {limits}: try denser ones")
        return 1
    why = "lowest density"
    if best.step_seconds is not None:
        why = f"fastest (predicted {best.step_seconds:.2f} s/step)"
    kind, options = split_options(best.text)
    say(f"{why} within {limits}:\n[sparsity]\nkind = {toml_value(kind)}")
    for key in options:
        say(f"{key} = {toml_value(getattr(settings[best.text], key))}")
    if best.density > 0.999:
        say("note: this computes all pairs; use a longer --length or a smaller block_size")
    return 0


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Returns the options, and fields of [parallel] and [model] by dotted name."""
    parser = model_parser()
    parser.add_argument("--text", nargs="+", default=[])
    parser.add_argument("--length", type=token_count)
    parser.add_argument("--sequences", type=at_least(1), default=8)
    parser.add_argument("--settings", nargs="+", default=SETTINGS)
    parser.add_argument("--most-rise", type=float, default=0.01)
    parser.add_argument("--most-copies", type=float, default=0.05)
    parser.add_argument("--config")
    parser.add_argument("--output", type=expanded_path)
    own, rest = parser.parse_known_args(arguments)
    overrides = forwarded_options(rest, ("parallel", "model"))
    check_required(own, "model", "text", "length")
    if own.output is not None and (own.output.is_dir() or not own.output.parent.is_dir()):
        raise UserError(f"--output {own.output} must be a file in an existing folder")
    return own, overrides


def config_with(name: str, text: str) -> Config:
    """Loads the configuration of a run with a setting."""
    kind, options = split_options(text)
    fields = {"kind": kind, **options}
    return Config.load(name, {f"sparsity.{key}": value for key, value in fields.items()})


def forecast_seconds(config: Config, density: float) -> float | None:
    """Predicts the step time on H200s at a density, as in the dry run; None if unknown."""
    from mtraining_jax.planning.cost import count_flops, rates_missing, seconds
    from mtraining_jax.planning.documents import planned_pairs
    from mtraining_jax.planning.hardware import H200
    from mtraining_jax.planning.memory import estimate_memory

    if rates_missing(config, H200):
        return None
    pairs = dataclasses.replace(planned_pairs(config), density=density, why="measured")
    parts = seconds(config, H200, estimate_memory(config), count_flops(config, pairs))
    return sum(parts.values())


def _write(path: Path, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
