"""`--dry-run`: predicts whether a run fits its GPUs, and its step time."""

import dataclasses
import os
from collections.abc import Iterator

import jax

from mtraining_jax.config import Config, validate
from mtraining_jax.config.load import with_steps
from mtraining_jax.cost_model.flops import PEAK_BF16_FLOPS, mean_audit_flops
from mtraining_jax.patterns.options.base import DenseOptions
from mtraining_jax.planning.compiled import Compiled, compile_step, missing_plugin
from mtraining_jax.planning.cost import Flops, count_flops, rates_missing, seconds
from mtraining_jax.planning.documents import Pairs, planned_pairs
from mtraining_jax.planning.hardware import H200, Gpu
from mtraining_jax.planning.memory import Memory, estimate_memory, offloaded, planned_state
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value
from mtraining_jax.utils.jax_platform import MEMORY_FRACTION, host_memory

_GIB = 2**30
# Section, field, value and effect.
_Change = tuple[str, str, bool | int | str, str]
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # as JAX reads it
# Values of model.remat, from most memory to least.
_REMAT = {
    "none": "",
    "mlp": "recompute half of the MLP",
    "attention": "recompute layers except their attention",
    "attention_offload": "the same as attention, with layer inputs offloaded to host memory",
    "full": "recompute entire layers, including attention",
}


def dry_run(config: Config, mode: str = "auto", gpu: Gpu = H200) -> int:
    """Prints the predicted memory, FLOP and step time of a run; returns 0 if it fits, 1 if not.

    `mode` "compile" compiles the step for the GPU mesh, "estimate" uses formulas, "auto" compiles
    if possible.
    """
    jax.config.update("jax_platforms", "cpu")  # Avoids reserving memory of a GPU.
    opened, config = config.run.epochs is not None, with_steps(config)
    if (cpus := config.parallel.cpu_devices) is not None:  # in one process if no number is set
        validate(config, cpus * (config.distributed.num_processes or 1))
    if config.dense_steps.count() == config.run.steps:
        config = _dense(config)
    reason = missing_plugin()
    if gpu.target_config is None:
        reason = f"there is no target description of the {gpu.kind}"
    if config.parallel.cpu_devices is not None:
        reason = "the run uses virtual CPU devices"
    if mode == "compile" and reason:
        raise UserError(f"--dry-run=compile is not possible: {reason}")
    # Sparse and dense steps never run at the same time, so the larger one counts.
    programs = {_step(config): config}
    if _mixed(config):
        programs["dense step"] = _dense(config)
    memories = {what: estimate_memory(program) for what, program in programs.items()}
    compiled = {}
    how = "estimated by formulas" + (f": {reason}" if mode == "auto" else "")
    if mode != "estimate" and not reason:
        for what, program in programs.items():
            print(f"compiling the {what} for {config.devices} x {gpu.kind} ...", flush=True)
            compiled[what] = compile_step(program, gpu)
            memories[what] = memories[what].with_total(compiled[what].peak)
        took = sum(one.seconds for one in compiled.values())
        how = f"compiled by jax {jax.__version__} in {took:.0f} s"
    largest, memory = max(memories.items(), key=lambda item: item[1].total)
    if _mixed(config):
        how += f"; for a {largest}, which needs the most"
    pairs = planned_pairs(config, opened)
    print(*report(config, gpu, memory, how, pairs, compiled.get(largest)), sep="\n")
    return 0 if memory.total <= available(config, gpu) else 1


def _mixed(config: Config) -> bool:
    return 0 < config.dense_steps.count() < config.run.steps


def _step(config: Config) -> str:
    return "sparse step" if _mixed(config) else "step"


def _dense(config: Config) -> Config:
    dense = DenseOptions(block_size=config.sparsity.block_size)
    return dataclasses.replace(config, sparsity=dataclasses.replace(config.sparsity, pattern=dense))


def available(config: Config, gpu: Gpu) -> int:
    """Bytes that a run can use per device; virtual CPU devices share host memory."""
    if config.parallel.cpu_devices is not None:
        return host_memory() // config.parallel.cpu_devices
    text = os.environ.get(_FRACTION, str(MEMORY_FRACTION))
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UserError(
            f"{_FRACTION}={text} in the environment must be a number above 0 and up to 1"
        )
    return int(gpu.memory * fraction)


def report(
    config: Config,
    gpu: Gpu,
    memory: Memory,
    how: str,
    pairs: Pairs,
    compiled: Compiled | None = None,
) -> Iterator[str]:
    """Yields the lines that a dry run prints; `how` says how `memory` was obtained."""
    parallel, data, devices = config.parallel, config.data, config.devices
    shape = " x ".join(map(str, config.mesh_shape))
    kind = gpu.kind if parallel.cpu_devices is None else "virtual CPU device"
    total, trained = planned_state(config).count_parameters()
    read = "data is only counted" if pairs.counted else "no data is read"
    yield f"dry run of {config.run.name}: nothing is trained, {read}"
    yield f"  mesh        {shape} (data x node x device) of {devices} x {kind}"
    yield f"  batch       {data.batch_size} x {data.seq_len:,} tokens per step"
    if pairs.source:
        share = f"{pairs.causal:.1%} of all causal pairs"
        yield f"  documents   {share} are within documents ({pairs.source})"
    if _mixed(config):
        yield f"  dense       {config.dense_steps.describe()}"
    yield f"  parameters  {total:,}" + ("" if trained == total else f", {trained:,} trained")
    yield ""
    yield from _memory_lines(config, gpu, memory, how, compiled)
    yield ""
    flops = count_flops(config, pairs)
    yield from _flop_lines(config, flops, pairs)
    yield ""
    yield from _time_lines(config, gpu, memory, flops, pairs)
    if (excess := memory.total - available(config, gpu)) > 0:
        yield ""
        above = f"{excess / _GIB:.1f} GiB"
        yield f"the run exceeds the memory of a device by {above}; {way_to_fit(config, excess)}"
        yield from _advice(config)


def _memory_lines(
    config: Config, gpu: Gpu, memory: Memory, how: str, compiled: Compiled | None
) -> Iterator[str]:
    spread = "sharded over the mesh" if config.parallel.fsdp else "replicated on each device"
    rest = "rest of the compiler's peak" if compiled else "temporary buffers of a step"
    frozen = ("frozen base", memory.base, f"{config.model.dtype}, {spread}")
    rows = [
        *([frozen] if memory.base else []),
        ("adapters" if memory.base else "parameters", memory.parameters, f"fp32, {spread}"),
        ("gradients", memory.gradients, "fp32, of trainable parameters"),
        ("optimizer", memory.optimizer, "fp32, two moments"),
        ("activations", memory.kept, f"kept for backward, model.remat = {config.model.remat}"),
        ("index buffers", memory.index, "sparse indices, gathered columns, work lists"),
        ("workspace", memory.workspace, rest),
    ]
    unit, scale = ("GiB", _GIB) if memory.total >= _GIB else ("MiB", 2**20)
    yield f"memory per device, {unit} ({how})"
    for name, size, note in rows:
        yield f"  {name:<17} {size / scale:8.2f}  {note}"
    free, virtual = available(config, gpu), config.parallel.cpu_devices is not None
    of = f"JAX uses up to {free / _GIB:.1f} of {gpu.memory / _GIB:.1f} GiB ({_FRACTION})"
    if virtual:
        of = f"each virtual device has {free / _GIB:.1f} GiB of host memory"
    verdict = "fits" if memory.total <= free else "DOES NOT FIT"
    yield f"  {'total':<17} {memory.total / scale:8.2f}  {verdict}: {of}"
    host = offloaded(config) if compiled is None else compiled.host
    if host:
        yield f"  {'host memory':<17} {host / scale:8.2f}  per device, for offloaded activations"
    if not virtual:
        yield "  not included: CUDA context and NCCL buffers, which are outside of JAX's limit"


def _flop_lines(config: Config, flops: Flops, pairs: Pairs) -> Iterator[str]:
    every = "pairs within documents" if pairs.source else "causal pairs"
    rows = [
        ("model", flops.matrices, "matrix products, without attention"),
        ("attention", flops.attention_executed, f"at density {pairs.density:.1%} ({pairs.why})"),
        ("attention, dense", flops.attention_dense, f"all {every}, for comparison"),
        ("recomputed", flops.recomputed + flops.attention_recomputed, "in the backward pass"),
    ]
    unit, scale = ("PFLOP", 1e15) if flops.model >= 1e15 else ("TFLOP", 1e12)
    yield f"{unit} per {_step(config)}, forward and backward, all devices"
    for name, value, note in rows:
        yield f"  {name:<17} {value / scale:8.3f}  {note}"
    if config.sparsity.pattern.sparse and (audits := mean_audit_flops(config)):
        yield f"  audits add {audits / flops.executed:.3%} to this, averaged over steps"


def _time_lines(
    config: Config, gpu: Gpu, memory: Memory, flops: Flops, pairs: Pairs
) -> Iterator[str]:
    if missing := rates_missing(config, gpu):
        yield f"step time: not estimated ({missing})"
        return
    parts = seconds(config, gpu, memory, flops)
    total, tokens = sum(parts.values()), config.tokens_per_step
    mfu = flops.model / (total * config.devices * PEAK_BF16_FLOPS[gpu.kind])
    what = "an ESTIMATE from rates of its parts, not a measurement"
    if gpu.forecast is not None:
        what = f"a FORECAST from rates that were not measured:\n  {gpu.forecast}"
    yield f"{_step(config)} time in seconds: {what}"
    for name, value in parts.items():
        yield f"  {name:<20} {value:6.2f}"
    yield f"  {'total':<20} {total:6.2f}  {tokens / total:,.0f} tokens/s, MFU {mfu:.0%}"
    if _mixed(config):
        program = _dense(config)
        all_pairs = count_flops(program, dataclasses.replace(pairs, density=1.0))
        dense = sum(seconds(program, gpu, memory, all_pairs).values())
        share = config.dense_steps.count() / config.run.steps
        mean = share * dense + (1 - share) * total
        yield f"  {'dense step':<20} {dense:6.2f}  {share:.1%} of the steps"
        yield f"  {'mean of all steps':<20} {mean:6.2f}  {tokens / mean:,.0f} tokens/s"
    yield "  assumed: ring communication is hidden behind the attention kernels"
    if config.parallel.nodes * config.parallel.replicas > 1:
        yield "  assumed: the network between nodes is as fast as the links within a node"


def _advice(config: Config) -> Iterator[str]:
    """Describes the single options that save memory."""
    now = estimate_memory(config).total
    for change in _reductions(config):
        saved = (now - estimate_memory(_with(config, change)).total) / _GIB
        if round(saved, 1) > 0:
            yield f"  {_option(change)}: {saved:.1f} GiB less; {change[3]}"


def way_to_fit(config: Config, excess: int) -> str:
    """Names the first options that together save `excess` bytes of a device, by formulas."""
    most, changes = estimate_memory(config).total - excess, list(_reductions(config))
    for number in range(1, len(changes) + 1):
        needed = changes[:number]
        if estimate_memory(_with(config, *needed)).total > most:
            continue
        for change in changes[:number]:
            others = [x for x in needed if x is not change]
            if estimate_memory(_with(config, *others)).total <= most:
                needed = others
        return f"it fits with {' '.join(map(_option, needed))}, by formulas"
    more = "more devices or " if config.parallel.cpu_devices is None else ""
    return f"no option is enough: use {more}a shorter data.seq_len"


def _option(change: _Change) -> str:
    section, field, value, _ = change
    return f"--{section}.{field}={toml_value(value) if isinstance(value, bool) else value}"


def _with(config: Config, *changes: _Change) -> Config:
    for section, field, value, _ in changes:
        part = dataclasses.replace(getattr(config, section), **{field: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def _reductions(config: Config) -> Iterator[_Change]:
    """Yields changes that may reduce memory."""
    parallel, model = config.parallel, config.model
    if not parallel.fsdp and config.devices > 1:
        yield "parallel", "fsdp", True, "shard parameters and moments"
    if model.mlp_kept_chunks:
        yield "model", "mlp_kept_chunks", 0, "recompute the MLP for all tokens"
    else:
        for remat in list(_REMAT)[list(_REMAT).index(model.remat) + 1 :]:
            yield "model", "remat", remat, _REMAT[remat]
    if model.mlp_chunk_size > 4096:
        yield "model", "mlp_chunk_size", model.mlp_chunk_size // 4, "smaller MLP activations"
    if config.local_rows > 1:
        steps = config.data.batch_size // parallel.replicas
        yield "optimizer", "accumulation_steps", steps, "one sequence at a time"
    if config.loss.chunk_size > 256:
        yield "loss", "chunk_size", config.loss.chunk_size // 4, "fewer logits at a time"
    # Virtual devices share the memory of the host.
    if parallel.cpu_devices is None and config.data.seq_len % (2 * config.sequence_unit) == 0:
        twice = 2 * parallel.devices_per_node
        yield "parallel", "devices_per_node", twice, "twice as many devices per sequence"
