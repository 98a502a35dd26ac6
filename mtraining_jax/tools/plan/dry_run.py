"""`--dry-run`: predicts whether a run fits its GPUs, and its step time."""

import dataclasses
import os
from collections.abc import Iterator

import jax

from mtraining_jax.config import Config, validate
from mtraining_jax.config.load import with_steps
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.reporting.flops import PEAK_BF16_FLOPS, audit_flops, idle_parameters
from mtraining_jax.tools.plan.compiled import Compiled, compile_step, missing_plugin
from mtraining_jax.tools.plan.cost import Flops, count_flops, rates_missing, seconds
from mtraining_jax.tools.plan.documents import Pairs, planned_pairs
from mtraining_jax.tools.plan.fitting import Proposal, fastest, other_runs
from mtraining_jax.tools.plan.hardware import GPUS, H200, Gpu
from mtraining_jax.tools.plan.memory import Memory, estimate_memory, pinned_limit, planned_state
from mtraining_jax.utils.errors import DoesNotFit, UserError
from mtraining_jax.utils.invocation import command_with
from mtraining_jax.utils.jax_platform import MEMORY_FRACTION, free_host_memory, host_memory
from mtraining_jax.utils.printable import printable

_GIB = 2**30
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # as JAX reads it
# Part of the memory that proposals leave free if possible, as formulas are not exact.
SPARE = 0.03
_FASTER = 0.99  # of the predicted time, to be worth a line


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
            known = dataclasses.replace(memories[what], workspace=0)
            workspace = max(0, compiled[what].peak - known.total)
            memories[what] = dataclasses.replace(known, workspace=workspace)
        took = sum(one.seconds for one in compiled.values())
        how = f"compiled by jax {jax.__version__} in {took:.0f} s"
    largest, memory = max(memories.items(), key=lambda item: item[1].total)
    if _mixed(config):
        how += f"; for a {largest}, which needs the most"
    pairs = planned_pairs(config, opened)
    lines = report(config, gpu, memory, how, pairs, compiled.get(largest))
    print(printable("\n".join(lines)))
    free, program = available(config, gpu), programs[largest]
    most = free - memory.total + estimate_memory(program).total  # as formulas count
    if program is not config:
        pairs = dataclasses.replace(pairs, density=pairs.dense)
    if memory.total > free:
        above = f"{(memory.total - free) / _GIB:.1f} GiB"
        print(f"\nthe run exceeds the memory of a device by {above};")
        limit = free if compiled else None
        print(*ways_to_fit(program, gpu, most, pairs=pairs, compiled_for=limit), sep="\n")
        return 1
    best = propose(program, gpu, most, pairs=pairs)
    now = sum(seconds(program, gpu, memory, count_flops(program, pairs)).values())
    if best is not None and best.timed and best.cost < _FASTER * now:
        print(f"\nfaster, by formulas ({best.describe()}): {_command(best)}")
    return 0


def _mixed(config: Config) -> bool:
    return 0 < config.dense_steps.count() < config.run.steps


def _step(config: Config) -> str:
    return "sparse step" if _mixed(config) else "step"


def _dense(config: Config) -> Config:
    dense = Dense(block_size=config.sparsity.block_size)
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
    idle = idle_parameters(config)
    per_token = f", {total - idle:,} of them per token" if idle else ""
    trained_only = "" if trained == total else f", {trained:,} trained"
    yield f"  parameters  {total:,}{per_token}{trained_only}"
    yield ""
    yield from _memory_lines(config, gpu, memory, how, compiled)
    yield ""
    flops = count_flops(config, pairs)
    yield from _flop_lines(config, flops, pairs)
    yield ""
    yield from _time_lines(config, gpu, memory, flops, pairs)


def _memory_lines(
    config: Config, gpu: Gpu, memory: Memory, how: str, compiled: Compiled | None
) -> Iterator[str]:
    spread = "sharded over the mesh" if config.parallel.fsdp else "replicated on each device"
    rest = "rest of the compiler's peak" if compiled else "temporary buffers of a step"
    moments = "two moments in host memory"
    if not config.optimizer.offload:
        moments = f"two moments, {config.optimizer.mu_dtype} and float32"
    frozen = ("frozen", memory.frozen, f"{config.model.dtype}, {spread}")
    rows = [
        *([frozen] if memory.frozen else []),
        ("adapters" if config.lora.spec else "parameters", memory.parameters, f"fp32, {spread}"),
        ("gradients", memory.gradients, "fp32, of trainable parameters"),
        ("optimizer", memory.optimizer, moments),
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
    host = memory.host if compiled is None else compiled.host
    if host:
        what = ["moments"] * bool(config.optimizer.offload)
        what += ["parameters and gradients of layers"] * (config.optimizer.offload == "all")
        what += ["activations"] * config.model.remat.endswith("offload")
        note = f"per device, for offloaded {', '.join(what)}"
        if not virtual:
            note += f"; XLA pins {pinned_limit(config)} GiB at most"
        yield f"  {'host memory':<17} {host / scale:8.2f}  {note}"
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
    if config.sparsity.pattern.sparse and (interval := config.audit.interval):
        share = audit_flops(config) / interval / flops.executed
        yield f"  audits add {share:.3%} to this, averaged over steps"


def _time_lines(
    config: Config, gpu: Gpu, memory: Memory, flops: Flops, pairs: Pairs
) -> Iterator[str]:
    if missing := rates_missing(config, gpu):
        yield f"step time: not estimated ({missing})"
        return
    parts = seconds(config, gpu, memory, flops)
    total, tokens = sum(parts.values()), config.tokens_per_step
    mfu = flops.model / (total * config.devices * PEAK_BF16_FLOPS[gpu.kind])
    form = "6.2f" if total >= 0.1 else "6.4f"
    what = "an ESTIMATE from rates of its parts, not a measurement"
    if gpu.forecast is not None:
        what = f"a FORECAST from rates that were not all measured:\n  {gpu.forecast}"
    yield f"{_step(config)} time in seconds: {what}"
    for name, value in parts.items():
        each = ""
        if name == "attention" and config.sparsity.pattern.sparse:
            each = f"  {value / flops.density / 100:.3g} per % of the pairs"
        yield f"  {name:<20} {value:{form}}{each}"
    yield f"  {'total':<20} {total:{form}}  {tokens / total:,.0f} tokens/s, MFU {mfu:.0%}"
    if _mixed(config):
        program = _dense(config)
        all_pairs = count_flops(program, dataclasses.replace(pairs, density=pairs.dense))
        dense = sum(seconds(program, gpu, memory, all_pairs).values())
        share = config.dense_steps.count() / config.run.steps
        mean = share * dense + (1 - share) * total
        yield f"  {'dense step':<20} {dense:{form}}  {share:.1%} of the steps"
        yield f"  {'mean of all steps':<20} {mean:{form}}  {tokens / mean:,.0f} tokens/s"
    yield "  assumed: ring communication is hidden behind the attention kernels"
    if config.parallel.nodes * config.parallel.replicas > 1:
        yield "  assumed: the network between nodes is as fast as the links within a node"


def ways_to_fit(
    config: Config,
    gpu: Gpu,
    most: int,
    *,
    host: int | None = None,
    pairs: Pairs | None = None,
    compiled_for: int | None = None,
) -> Iterator[str]:
    """Yields the lines of one sentence: settings or runs that fit, with commands.

    Args:
        config: the run that does not fit.
        gpu: its GPUs.
        most: bytes of memory of a device, for the formulas.
        host: bytes of host memory for each device; None for no limit.
        pairs: computed pairs, if they are known.
        compiled_for: compile the settings for devices with so many bytes; None: only formulas.
    """
    best, how = propose(config, gpu, most, host, pairs), "by formulas"
    while best is not None and compiled_for is not None:
        print(f"compiling with {' '.join(best.options)} ...", flush=True)
        excess = (peak := compile_step(best.config, gpu).peak) - compiled_for
        if excess <= 0:
            best, how = dataclasses.replace(best, memory=peak), "as compiled"
            break
        best = propose(config, gpu, best.memory - excess - 1, host, pairs)
    unlimited = propose(config, gpu, most, None, pairs) if host is not None else best
    if unlimited is not None and unlimited != best and unlimited.host > (host or 0):
        needed, free = unlimited.host / _GIB, (host or 0) / _GIB
        yield f"{' '.join(unlimited.options)} needs {needed:.1f} GiB of host memory per device,"
        yield f"but {free:.1f} are free;"
    if best is not None:
        yield f"it fits, {how}, with"
        yield f"  {_command(best)}"
        yield f"  ({best.describe()})"
        return
    others = list(other_runs(config, gpu, int(most * (1 - SPARE)), host=host))
    if others:
        yield "no settings with the same results fit, by formulas, but other runs do:"
        for what, other in others:
            yield f"  {_command(other)}"
            yield f"  ({what}: {other.describe()})"
    else:
        yield "no settings fit: use more devices or a shorter data.seq_len"


def ways_after(error: DoesNotFit, config: Config) -> str:
    """What fits on the devices of this process, as the end of a sentence about a run."""
    if error.excess is None and error.free is None:
        return "use parallel.fsdp=true, more devices per sequence or a smaller model.mlp_chunk_size"
    most = error.free
    if error.excess is not None:
        most = estimate_memory(config).total - error.excess
    local, kinds = jax.local_devices(), {gpu.kind: gpu for gpu in GPUS.values()}
    host = free_host_memory() // max(len(local), config.parallel.devices_per_node)
    gpu = kinds.get(local[0].device_kind, H200)
    return " ".join(line.strip() for line in ways_to_fit(config, gpu, most or 0, host=host))


def propose(
    config: Config, gpu: Gpu, most: int, host: int | None = None, pairs: Pairs | None = None
) -> Proposal | None:
    """`fastest`, with some memory to spare if possible."""
    limits = (int(most * (1 - SPARE)), most)
    found = (fastest(config, gpu, limit, host=host, pairs=pairs) for limit in limits)
    return next((x for x in found if x is not None), None)


def _command(proposal: Proposal) -> str:
    return command_with(proposal.options, without=("--dry-run", "--dry-run-gpu"))
