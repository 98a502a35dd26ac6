"""The lines that a run prints at its end: results and commands to continue with."""

import shlex
from collections.abc import Sequence

import numpy as np

from mtraining_jax.callbacks import Record
from mtraining_jax.config import Config, available_configs
from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.tokenizer import BYTES
from mtraining_jax.reporting import PAGE
from mtraining_jax.reporting.goodput import processes_text, time_text
from mtraining_jax.reporting.history import History
from mtraining_jax.reporting.record import SPEEDS, note_on_density, rate, speed_text
from mtraining_jax.utils.invocation import command_of, command_with
from mtraining_jax.utils.text import counted

_EVALUATED = 1024  # tokens; tasks need some hundred


def summary(config: Config, history: History, wrote: Sequence[str]) -> list[str]:
    """Summarizes a run of at least one step in a few lines."""
    newest = history.last[-1]
    rows = {"speed": _speed(history)}
    if 0 < history.dense < history.count:
        rows["dense"] = _dense_speed(history)
    if history.losses:
        last = list(history.losses)[-max(1, history.finite_losses // 4) :]
        mean_note = f" (mean of the last {len(last)} steps)" if len(last) > 1 else ""
        rows["loss"] = f"{history.first_loss:.3f} -> {np.mean(last):.3f}{mean_note}"
    if history.validation:
        rows["validation"] = " -> ".join(history.validation)
    rows["attention"] = _density(history)
    if "wall_time" in newest:
        rows["time"] = time_text(newest)
        if (text := processes_text(newest)) is not None:
            rows["processes"] = text
    for suffix, how in (("_predicted", "predicted densities"), ("", "densities of each step")):
        attention = history.mean(f"attention_imbalance{suffix}")
        step = history.mean(f"step_imbalance{suffix}")
        if attention is not None and step is not None:
            rows["replicas"] = (
                f"slowest over mean: attention {attention:.2f}, step {step:.2f} (modeled, {how})"
            )
    if "tuned" in newest:
        low, high = history.fractions
        rows["tuned"] = (
            f"{newest['tuned']} {low:.3f} to {high:.3f}, mean {history.mean('tuned'):.3f};"
            f" infeasible for {history.mean('infeasible'):.1%} of replicas and steps"
        )
    if newest["skipped_steps"]:
        why = "non-finite values"
        if config.optimizer.skip_norm:
            why += f" or a gradient norm above {config.optimizer.skip_norm:g}"
        rows["skipped"] = f"{newest['skipped_steps']} steps with {why}"
    rows["wrote"] = f"\n{' ' * 13}".join(wrote) or "nothing"
    lines = [f"  {name:<10} {text}" for name, text in rows.items()]
    done = f"done: {counted(history.count, 'step')} in {history.seconds:.0f} s"
    return ["", done, *lines, "next:", *_next_steps(config, newest["step"])]


def already_complete(config: Config, step: int, changed: Sequence[str] = ()) -> list[str]:
    """Lines to print if the newest checkpoint, of `step`, is at or after `run.steps`.

    `changed` are fields with values that differ from those of the checkpoint.
    """
    note = "options that differ from those of the checkpoint, and change nothing:"
    place = config.run.bucket or config.run.folder
    return [
        f"{config.run.name} is complete: {place} has a checkpoint of step {step}, and"
        f" run.steps = {config.run.steps}",
        *([note, *(f"  {sentence}" for sentence in changed)] if changed else ()),
        "next:",
        *_next_steps(config, step),
    ]


def _next_steps(config: Config, done: int) -> list[str]:
    lines = _ways_to_use(config)
    commands = {}
    if config.checkpoint.last_step:
        steps = 2 * done if done >= config.run.steps else config.run.steps  # if stopped early
        commands[f"--run.steps={steps}"] = f"continue training from step {done}"
    commands["--checkpoint.resume=false"] = (
        "start from scratch; renames this run's folder to keep it"
    )
    if config.parallel.cpu_devices is not None:
        commands[
            f"{shlex.quote(f'--run.name={config.run.name}_gpu')} --parallel.cpu_devices=none"
            " --parallel.replicas=1 --parallel.nodes=1 --parallel.devices_per_node=1"
        ] = "on one GPU; needs the extra cuda (uv run --extra cuda, or pip install 'jax[cuda13]')"
    if config.model.init_from is None:  # otherwise the checkpoint sets the size
        larger = f"--model.num_layers={2 * config.model.num_layers}"
        commands[f"{shlex.quote(f'--run.name={config.run.name}_larger')} {larger}"] = (
            "a larger model; all fields can be set like this, see --help"
        )
    lines += [f"  {_command(options)}\n      {what}" for options, what in commands.items()]
    others = [name for name in available_configs() if name != config.run.name]
    if others:
        lines.append(f"  other configurations: {', '.join(others)}")
    return lines


def _ways_to_use(config: Config) -> list[str]:
    """How to look at a finished run, and use the model of its last checkpoint."""
    lines, folder, data = [], config.run.folder, config.data
    if (folder / PAGE).is_file():
        lines.append(f"  open {folder / PAGE} in a browser")
    has_tokenizer = isinstance(data.source_options, DocumentSource) or data.tokenizer != BYTES
    if not has_tokenizer or not config.checkpoint.last_step or config.run.bucket is not None:
        return lines
    model = f"--model {shlex.quote(str(folder))}"
    lines.append(
        f"  {command_of('generate')} {model} --prompt TEXT --temperature 0.8\n"
        "      continue a text with this model"
    )
    if data.seq_len >= _EVALUATED:
        lines.append(
            f"  {command_of('evaluate')} {model} --tasks needle --lengths {data.seq_len} "
            "--attention both\n      measure what it finds in long texts, dense and sparse"
        )
    return lines


def _command(options: str) -> str:
    # resume = false would start from scratch.
    without = ("--checkpoint.resume", "--run.epochs") if "--run.steps=" in options else ()
    return command_with(shlex.split(options), without)


def _after_warm_up(history: History) -> list[Record]:
    """Records for speed statistics: without two warm-up steps and traced steps."""
    first = max(0, 2 - (history.count - len(history.last)))
    return [record for record in list(history.last)[first:] if not record.get("profiled")]


def _speed(history: History) -> str:
    rest = _after_warm_up(history)
    steady = [x for x in rest if not x.get("dense_step")] or rest or [history.last[-1]]
    last = steady[-1]

    def median(name: str) -> float:
        return float(np.median([record[name] for record in steady]))

    kind = ""
    if history.dense:
        kind = "dense " if last.get("dense_step") else "sparse "
    which = "the last " if history.count > len(history.last) else ""
    steps = f"median of {which}{len(steady)} {kind}steps after warm-up"
    if history.count <= 2:
        steps = "last step"
    elif len(steady) == 1:
        steps = f"one {kind}step after warm-up"
    text = (
        f"{median('step_seconds'):.3f} s/step ({steps}), {speed_text(*map(median, SPEEDS))},"
        f" {rate(median('tflops_per_device_executed'))} TFLOP/s per device executed,"
        f" {rate(median('tflops_per_device_dense_equivalent'))} dense-equivalent"
    )
    if last["mfu"] is not None:
        text += f", MFU {median('mfu'):.1%}"
    if last["memory_bytes_peak"] is not None:
        peak = max(record["memory_bytes_peak"] for record in history.last)  # of dense steps, too
        text += f", peak memory {peak / 2**30:.1f} GiB"
    note = note_on_density(last)
    return text if note is None else f"{text}; {note}"


def _dense_speed(history: History) -> str:
    text = f"{history.dense} of the {counted(history.count, 'step')}"
    dense = [x["step_seconds"] for x in _after_warm_up(history) if x.get("dense_step")]
    of = f" (median of {len(dense)})" if len(dense) > 1 else ""
    return f"{text}: {np.median(dense):.3f} s/step{of}" if dense else text


def _density(history: History) -> str:
    if history.dense == history.count:
        return f"all of the causal pairs computed, in {counted(history.dense, 'dense step')}"
    density = history.mean("density")
    text = "an unknown fraction" if density is None else f"{density:.1%}"
    text += " of the causal pairs computed"
    if history.dense:
        text += f" in the {counted(history.count - history.dense, 'sparse step')}"
    if (note := note_on_density(history.last[-1])) is not None:
        text += f"; {note}"
    if (recall := history.mean("recall")) is not None:
        text += f", with {recall:.1%} of the attention mass (recall)"
    return text
