"""Searches for settings with which a run fits its GPUs, among those that change no result."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, get_args

from mtraining_jax.config import Config
from mtraining_jax.config.validate import offload_problems
from mtraining_jax.models.products import num_chunks
from mtraining_jax.models.spec import RematPolicy
from mtraining_jax.tools.plan.cost import count_flops, rates_missing, seconds
from mtraining_jax.tools.plan.documents import Pairs, planned_pairs
from mtraining_jax.tools.plan.hardware import Gpu
from mtraining_jax.tools.plan.memory import estimate_memory, state_bytes
from mtraining_jax.utils.fields import toml_value
from mtraining_jax.utils.text import counted

_GIB = 2**30
_REMAT = get_args(RematPolicy)
_SAME = 1.005  # predicted times that differ by less are the same
_MOST_GPUS = 8  # of a host
_SHORTEST = 1024  # tokens


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Settings of a run with their memory and time, by formulas."""

    config: Config
    options: tuple[str, ...]  # what to add to the command line
    memory: int  # bytes of a device
    host: int  # bytes of host memory per device
    cost: float  # seconds per step; if `timed` is False, executed FLOP
    timed: bool

    def describe(self) -> str:
        """Memory and time as text: `70.9 GiB per device, 6.9 s per step`."""
        parts = [f"{self.memory / _GIB:.1f} GiB per device"]
        if self.host:
            parts.append(f"{self.host / _GIB:.1f} GiB of host memory per device")
        if self.timed:
            parts.append(f"{self.cost:.{2 if self.cost >= 0.1 else 4}f} s per step")
        return ", ".join(parts)


def fastest(
    config: Config, gpu: Gpu, most: int, *, host: int | None = None, pairs: Pairs | None = None
) -> Proposal | None:
    """Finds the settings with the least predicted step time that fit.

    Args:
        config: the run.
        gpu: its GPUs.
        most: bytes of memory that a device has for the run.
        host: bytes of host memory for each device; None for no limit.
        pairs: computed pairs, if they are known.

    Returns:
        Of equally fast settings those with the fewest changes, then those with the least memory;
        None if no settings fit.
    """
    pairs = planned_pairs(config) if pairs is None else pairs
    timed = rates_missing(config, gpu) is None
    states, found = {}, []
    for changed in _settings(config, timed):
        optimizer = changed.optimizer
        kind = changed.parallel.fsdp, optimizer.offload, optimizer.accumulation_steps > 1
        if kind not in states:
            states[kind] = state_bytes(changed)
        memory = estimate_memory(changed, states[kind])
        offload = memory.host
        # Virtual devices share the memory of the host.
        shared = offload if config.parallel.cpu_devices is not None else 0
        if memory.total + shared > most or (host is not None and offload > host):
            continue
        flops = count_flops(changed, pairs)
        cost = sum(seconds(changed, gpu, memory, flops).values()) if timed else flops.executed
        options = tuple(_differences(config, changed))
        found.append(Proposal(changed, options, memory.total, offload, cost, timed))
    least = _SAME * min((x.cost for x in found), default=0.0)
    same = [x for x in found if x.cost <= least]
    return min(same, key=lambda x: (len(x.options), x.memory), default=None)


def other_runs(
    config: Config, gpu: Gpu, most: int, *, host: int | None = None
) -> Iterator[tuple[str, Proposal]]:
    """Yields runs that fit on more GPUs and with a shorter sequence, with what they change."""
    parallel, seq_len = config.parallel, config.data.seq_len
    shorter = [seq_len]
    while shorter[-1] > _SHORTEST and shorter[-1] % (2 * config.sequence_unit) == 0:
        shorter.append(shorter[-1] // 2)
    more = [parallel.devices_per_node]
    while parallel.cpu_devices is None and 2 * more[-1] <= _MOST_GPUS:
        more.append(2 * more[-1])
    for section, name, unit, values in (
        ("parallel", "devices_per_node", "GPU", more[1:]),
        ("data", "seq_len", "token", shorter[1:]),
    ):
        for value in values:
            changed = _with(config, section, **{name: value})
            if section == "parallel" and seq_len % changed.sequence_unit:
                break
            if (best := fastest(changed, gpu, most, host=host)) is not None:
                options = tuple(_differences(config, best.config))
                count = changed.devices if section == "parallel" else value
                yield counted(count, unit), dataclasses.replace(best, options=options)
                break


def _settings(config: Config, timed: bool) -> Iterator[Config]:
    """Yields the run with all settings that change its memory and time, but no result."""
    model, rows = config.model, config.data.batch_size // config.parallel.replicas
    mlp_chunks = {model.mlp_chunk_size, max(4096, model.mlp_chunk_size // 4)}
    loss_chunks = {config.loss.chunk_size, max(256, config.loss.chunk_size // 4)}
    steps = config.optimizer.accumulation_steps
    splits = [steps << n for n in range(rows.bit_length()) if rows % (steps << n) == 0]
    fsdp, offload = {config.parallel.fsdp, config.devices > 1}, {config.optimizer.offload, True}
    if timed and not any(offload_problems(config)):  # else its copies would seem to take no time
        offload |= {"all"}
    for split, sharded, moments in itertools.product(splits, fsdp, offload):
        outer = _with(config, "optimizer", accumulation_steps=split, offload=moments)
        outer = _with(outer, "parallel", fsdp=sharded)
        for loss_chunk, mlp_chunk in itertools.product(loss_chunks, mlp_chunks):
            chunked = _with(outer, "loss", chunk_size=min(loss_chunk, config.loss.chunk_size))
            size = min(mlp_chunk, model.mlp_chunk_size)
            count = num_chunks(chunked.local_tokens, size)
            quarters = {count * n // 4 for n in range(5)}
            for remat in _REMAT:
                for kept in sorted(quarters) if remat == "mlp" else [0]:
                    fields = {"remat": remat, "mlp_chunk_size": size, "mlp_kept_chunks": kept}
                    yield _with(chunked, "model", **fields)


def _with(config: Config, section: str, **fields: Any) -> Config:
    changed = dataclasses.replace(getattr(config, section), **fields)
    return dataclasses.replace(config, **{section: changed})


def _differences(before: Config, after: Config) -> Iterator[str]:
    """Yields the options of a command line that change one configuration into another."""
    for section in ("parallel", "optimizer", "data", "model", "loss"):
        old, new = getattr(before, section), getattr(after, section)
        if old is not new:
            for field in dataclasses.fields(old):
                value = getattr(new, field.name)
                if value != getattr(old, field.name):
                    text = value if isinstance(value, str) else toml_value(value)
                    yield f"--{section}.{field.name}={text}"
