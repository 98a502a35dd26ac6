"""What a run says at its start and at its end."""

import math
import os
import shlex
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from mtraining_jax.config import Config, available_configs
from mtraining_jax.errors import UserError
from mtraining_jax.reporting.metrics import REPLAYED, Record, density_of, is_replayed
from mtraining_jax.training.state import StateBuilder
from pallas_kernels import xla
from pallas_kernels.backends import mosaic_gpu, no_hopper_gpu, resolve


def banner(config: Config, builder: StateBuilder, mesh: Mesh, data: str) -> list[str]:
    """One screen about what is going to run; lines."""
    model, parallel, sparsity = config.model, config.parallel, config.sparsity
    sizes = {name: math.prod(x.shape) for name, x in builder.abstract().parameters.items()}
    total = sum(sizes.values())
    trained = sum(sizes[name] for name in builder.trainable)
    share = "" if trained == total else f", {trained / total:.1%} of them trained"
    start = f", from {model.init_from}" if model.init_from else ""
    device = mesh.devices.flat[0]
    processes = jax.process_count()
    shape = " x ".join(map(str, config.mesh_shape))
    ring = f"{parallel.ring} ring"
    batch = f"{config.data.batch_size} x {config.data.seq_len:,} tokens a step"
    parts = config.optimizer.accumulation_steps
    rows = [
        (
            "model",
            f"Qwen2 with {_count(total)} parameters{share}{start}: {model.num_layers} layers, width"
            f" {model.hidden_size}, {model.num_heads}/{model.num_kv_heads} heads of"
            f" {model.head_dim}, vocabulary {model.vocab_size:,}, {model.dtype}",
        ),
        ("data", data),
        ("batch", batch + (f" in {parts} parts" if parts > 1 else "")),
        (
            "mesh",
            f"{shape} (data x node x device) of {mesh.size} {device.device_kind} devices in"
            f" {processes} process{'es' if processes > 1 else ''}"
            + (", parameters sharded" if parallel.fsdp else ""),
        ),
        (
            "attention",
            f"{_sparsity(config)}, blocks of {sparsity.block_size} tokens, {parallel.layout},"
            f" {ring}",
        ),
        ("output", str(config.run.folder)),
    ]
    return [
        f"mtraining-jax: {config.run.name}, {config.run.steps} steps",
        *(f"  {name:<10} {text}" for name, text in rows),
        f"attention backend: {backend_line(config)}",
    ]


def backend_line(config: Config) -> str:
    """The name of the attention kernels in use, and why these.

    Raises:
        UserError: if the kernels that the configuration asks for cannot run here.
    """
    model, block_size = config.model, config.sparsity.block_size
    q = jax.ShapeDtypeStruct((1, block_size, model.num_heads, model.head_dim), model.dtype)
    asked = config.parallel.backend
    try:
        module = resolve(asked, q, block_size)
    except ValueError as error:
        raise UserError(f"parallel.backend = {asked} is not possible: {error}") from error
    if module is not xla:
        return f"mosaic_gpu ({jax.devices()[0].device_kind})"
    if asked == "xla":
        return "xla (parallel.backend)"
    if jax.default_backend() == "cpu":
        return "xla (no Hopper GPU here)"
    return f"xla ({no_hopper_gpu() or mosaic_gpu.unsupported(q, block_size)})"


def summary(config: Config, records: Sequence[Record], wrote: Sequence[str]) -> list[str]:
    """What came out, what was written, and how to go on; lines.

    Args:
        config: of the run.
        records: of the steps just taken, at least one.
        wrote: files and folders.
    """
    losses = [record["loss"] for record in records if record["loss"] is not None]
    last = losses[-min(10, max(1, len(losses) // 4)) :]
    seconds = sum(record["step_seconds"] for record in records)
    lines = [
        "",
        f"done: {len(records)} steps in {seconds:.0f} s",
        f"  speed      {_speed(records)}",
    ]
    if losses:
        of_last = f" (mean of the last {len(last)} steps)" if len(last) > 1 else ""
        lines.append(f"  loss       {losses[0]:.3f} -> {np.mean(last):.3f}{of_last}")
    lines.append(f"  attention  {_density(records)}")
    if records[-1]["skipped_steps"]:
        lines.append(f"  skipped    {records[-1]['skipped_steps']} steps that were not finite")
    lines.append(f"  wrote      {wrote[0] if wrote else 'nothing'}")
    lines += [f"             {where}" for where in wrote[1:]]
    return [*lines, "to go on:", *_next_steps(config)]


def already_complete(config: Config, step: int) -> list[str]:
    """What to say where there is nothing left to do; lines."""
    return [
        f"{config.run.name} is complete: {config.run.folder} has a checkpoint of step {step}, and"
        f" run.steps = {config.run.steps}",
        "to go on:",
        *_next_steps(config),
    ]


def _next_steps(config: Config) -> list[str]:
    more = 2 * config.run.steps
    rows = [
        ("--checkpoint.resume=false", "start anew; this run's folder is kept under another name"),
    ]
    if config.checkpoint.last_step:
        rows.insert(0, (f"--run.steps={more}", f"train on from step {config.run.steps}"))
    if config.parallel.cpu_devices is not None:
        rows.append(
            (
                f"--run.name={config.run.name}_gpu --parallel.cpu_devices=none"
                " --parallel.nodes=1 --parallel.devices_per_node=1",
                "on one GPU; needs the extra cuda (uv run --extra cuda, or mtraining-jax[cuda])",
            )
        )
    rows.append(
        (
            f"--run.name=larger --model.num_layers={2 * config.model.num_layers}",
            "a larger model; every field can be set so, and --help lists them",
        )
    )
    others = [name for name in available_configs() if name != config.run.name]
    lines = [f"  {_command(options)}\n      {what}" for options, what in rows]
    if others:
        lines.append(f"  other configurations: {', '.join(others)}")
    return lines


def _command(options: str) -> str:
    """The command that was given, with other options in place of those of the same name."""
    names = {option.partition("=")[0] for option in options.split()}
    kept, rest = [], list(sys.argv)
    while rest:
        argument = rest.pop(0)
        if argument.partition("=")[0] not in names:
            kept.append(argument)
        elif "=" not in argument and rest and not rest[0].startswith("--"):
            rest.pop(0)  # its value
    prefix = "uv run" if "UV" in os.environ else "python"
    return f"{prefix} {shlex.join(kept)} {options}"


def steady_steps(records: Sequence[Record]) -> list[Record]:
    """Records that tell the speed: without the first two, which warm up, and traced ones."""
    rest = [record for record in records[2:] if not record.get("profiled")]
    return rest or list(records[-1:])


def _speed(records: Sequence[Record]) -> str:
    steady = steady_steps(records)

    def median(name: str) -> float:
        return float(np.median([record[name] for record in steady]))

    steps = f"median of {len(steady)} steps after warm-up" if len(records) > 2 else "last step"
    text = (
        f"{median('step_seconds'):.3f} s/step ({steps}), {median('tokens_per_second'):,.0f}"
        f" tokens/s, {median('tflops_per_device_executed'):.3g} TFLOP/s a device executed,"
        f" {median('tflops_per_device_dense_equivalent'):.3g} dense-equivalent"
    )
    if steady[-1]["mfu"] is not None:
        text += f", MFU {median('mfu'):.1%}"
    if steady[-1]["memory_bytes_peak"] is not None:
        text += f", peak memory {steady[-1]['memory_bytes_peak'] / 2**30:.1f} GiB"
    return text + (f"; {REPLAYED}" if is_replayed(steady[-1]) else "")


def _density(records: Sequence[Record]) -> str:
    densities = [density_of(record) for record in records if density_of(record) is not None]
    recalls = [record["recall"] for record in records if record.get("recall") is not None]
    text = f"{np.mean(densities):.1%} of the causal pairs computed"
    if is_replayed(records[-1]):
        text += f"; {REPLAYED}"
    if recalls:
        text += f", which hold {np.mean(recalls):.1%} of the attention's mass (recall)"
    return text


def _sparsity(config: Config) -> str:
    sparsity = config.sparsity
    if sparsity.kind == "dense":
        return "dense"
    if sparsity.kind == "replay":
        also = ", with the time of choosing an index" if sparsity.replay_estimate else ""
        return (
            f"{REPLAYED}: {sparsity.replay_density:.1%} of the causal pairs, random block"
            f" diagonals and columns{also}"
        )
    if sparsity.kind == "fixed":
        return f"vertical-slash with the budgets of {sparsity.budget_file}"
    return f"dynamic vertical-slash, top-p {sparsity.top_p:g} ({sparsity.preset})"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)
