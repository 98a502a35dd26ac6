"""Checks of combinations of fields."""

import functools
import operator
import re
from collections.abc import Iterator
from typing import Any

from mtraining_jax.config.held_out import about_held_out, evaluation_of
from mtraining_jax.config.schema import Config
from mtraining_jax.data.sources import problems as data_problems
from mtraining_jax.models.huggingface.config import FREE
from mtraining_jax.models.spec import spec_problems
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened, toml_value
from mtraining_jax.utils.file_limits import is_url
from mtraining_jax.utils.limits import MAX_BLOCKS, MAX_POSITIONS
from mtraining_jax.utils.text import counted, nearest_multiples

# Fields that make some steps of a sparse run dense.
DENSE_STEPS = (
    "sparsity.dense_warmup_steps",
    "sparsity.dense_cooldown_steps",
    "sparsity.dense_interval",
)


def validate(config: Config, device_count: int | None = None) -> None:
    """Rejects a configuration with contradictory fields.

    Raises:
        UserError: one line per contradiction, with the fields, their values and valid values.
    """
    # Problems of values that eval.data has from data.
    common = {about_held_out(x) for check in (_sequence, _data) for x in check(config)}
    problems = [
        *_run(config),
        *spec_problems(config.model, prefix="model."),
        *_sequence(config),
        *_sparsity(config),
        *_dense_steps(config),
        *_audit(config),
        *_devices(config, device_count),
        *_data(config),
        *(problem for problem in _held_out(config) if problem not in common),
        *_distributed(config),
    ]
    if problems:
        raise UserError("\n".join(problems))


def _get(config: Config, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), config)


def _value(config: Config, name: str) -> str:
    """A field and its value: `data.seq_len = 128`."""
    return f"{name} = {shortened(toml_value(_get(config, name)))}"


def _product(config: Config, *names: str) -> str:
    """Fields and their product: `data.seq_len * data.batch_size = 128 * 2 = 256`."""
    values = [_get(config, name) for name in names]
    numbers = " * ".join(map(str, values))
    return f"{' * '.join(names)} = {numbers} = {functools.reduce(operator.mul, values)}"


def _run(config: Config) -> Iterator[str]:
    run, optimizer, profile = config.run, config.optimizer, config.profile
    if is_url(run.output_dir):
        output = _value(config, "run.output_dir")
        yield f"{output} is a URL, but runs are written to a local folder or a mounted file system"
    parts, longest = run.name.split("/"), 200
    way = ""
    if {"", ".", ".."} & set(parts) or not run.name.isprintable():
        way = 'such as "first" or "tests/first"'
    elif any(len(part.encode()) > longest for part in parts):
        way = f"of at most {longest} bytes"
    if way:
        yield (
            f"{_value(config, 'run.name')} is not allowed: it must be the name of a folder in "
            f"run.output_dir, {way}"
        )
    end = "run.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
    if optimizer.schedule != "constant":
        if optimizer.warmup_steps > (optimizer.decay_steps or run.steps):
            warmup = _value(config, "optimizer.warmup_steps")
            yield f"{warmup} is more than {_value(config, end)}, where the schedule ends"
    if profile.start is not None and (last := profile.start + profile.steps - 1) > run.steps:
        yield (
            f"{_value(config, 'profile.start')} and {_value(config, 'profile.steps')} end at step "
            f"{last}, after {_value(config, 'run.steps')}"
        )


def _sequence(config: Config) -> Iterator[str]:
    """Checks the length and number of sequences."""
    model, parallel, data = config.model, config.parallel, config.data
    seq_len = _value(config, "data.seq_len")
    for name in model.override:
        if name not in FREE:
            yield f'model.override: "{name}" cannot be overridden; choose from {", ".join(FREE)}'
    if data.seq_len > model.max_position_embeddings:
        way = ""
        if model.init_from is not None and "max_position_embeddings" not in model.override:
            way = f", given by {model.init_from}; to set another value, add it to model.override:"
            way += ' ["max_position_embeddings"] or ["max_position_embeddings", "rope_scaling"]'
        yield f"{seq_len} is more than {_value(config, 'model.max_position_embeddings')}{way}"
    block, unit, pattern = config.sparsity.block_size, config.sequence_unit, config.sparsity.pattern
    if data.seq_len % unit:
        factors = "parallel.nodes", "parallel.devices_per_node", "sparsity.block_size"
        words = _product(config, *factors)
        if parallel.layout == "zigzag":
            names, numbers, _ = words.split(" = ")
            words = f"2 * {names} = 2 * {numbers} = {unit}"
        yield f"{seq_len} is not a multiple of {words}; use {nearest_multiples(data.seq_len, unit)}"
    most, why = MAX_POSITIONS, "up to which rotary position embeddings are exact"
    if pattern.sparse and pattern.selects and MAX_BLOCKS * block < most:
        most, why = MAX_BLOCKS * block, f"{MAX_BLOCKS} blocks of sparsity.block_size = {block}"
    if data.seq_len > most:
        yield f"{seq_len} is more than the supported {most} tokens, {why}"
    if data.batch_size % config.row_parts:
        yield (
            f"{_value(config, 'data.batch_size')} is not a multiple of "
            f"{_product(config, 'parallel.replicas', 'optimizer.accumulation_steps')}; use "
            f"{nearest_multiples(data.batch_size, config.row_parts)}"
        )


def _sparsity(config: Config) -> Iterator[str]:
    sparsity, pattern = config.sparsity, config.sparsity.pattern
    kind = _value(config, "sparsity.kind")
    for name in ("audit.interval", "audit.gradient_interval"):
        if _get(config, name) and not pattern.selects:
            yield (
                f"{_value(config, name)} needs a pattern that selects pairs, and {kind} does not; "
                f"set {name} = 0"
            )
    if sparsity.tune == "none":
        return
    tuned, fraction = _value(config, "sparsity.tune"), pattern.mass_fraction()
    if fraction is None:
        if sparsity.kind == "vertical_slash":
            kind += f" with {_value(config, 'sparsity.pattern.preset').replace('pattern.', '')}"
        yield (
            f"{tuned} tunes the mass fraction of a pattern, and {kind} has none; set sparsity.kind "
            '= "sampled_rows", or "vertical_slash" with sparsity.preset = "safe"'
        )
        return
    value = getattr(pattern, fraction.name)
    if not sparsity.tune_min <= value <= sparsity.tune_max:
        low, high = _value(config, "sparsity.tune_min"), _value(config, "sparsity.tune_max")
        yield (
            f"{tuned} starts from sparsity.{fraction.name} = {value}, which must lie between {low} "
            f"and {high}"
        )


def _dense_steps(config: Config) -> Iterator[str]:
    """Rejects what cannot be combined with dense steps."""
    sparsity = config.sparsity
    given = [_value(config, name) for name in DENSE_STEPS if _get(config, name)]
    names = ", ".join(given)
    if not given or not sparsity.pattern.sparse:
        return
    if sparsity.dense_warmup_steps + sparsity.dense_cooldown_steps > config.run.steps:
        ends = " + ".join(text for text in given if not text.startswith(DENSE_STEPS[2]))
        yield (
            f"{ends} is more than {_value(config, 'run.steps')}: dense warm-up and cooldown must "
            "fit into the run"
        )
    if not sparsity.pattern.selects:
        yield (
            f"{names} cannot be combined with {_value(config, 'sparsity.kind')}, which measures "
            "speed and does not select pairs; set 0"
        )
    learning = {
        "sparsity.tune": (sparsity.tune != "none", "none"),
        "data.balance": (config.data.balance == "density", "length"),
    }
    for name, (learns, instead) in learning.items():
        if learns:
            yield (
                f"{names} cannot be combined with {_value(config, name)}, which learns densities "
                "from every step: dense steps have none to learn from; set "
                f'{name} = "{instead}"'
            )


def _audit(config: Config) -> Iterator[str]:
    audit, data, unit = config.audit, config.data, config.sequence_unit
    sizes = config.model.num_layers, config.model.num_heads
    for text in audit.masks:
        head = re.fullmatch("([0-9]{1,9})[.]([0-9]{1,9})", text)
        if head is None or any(int(x) >= n for x, n in zip(head.groups(), sizes, strict=True)):
            last = f"{sizes[0] - 1}.{sizes[1] - 1}"
            yield f'audit.masks has "{text}", which must be LAYER.HEAD, from 0.0 to {last}'
    if audit.masks and not audit.interval:
        yield "audit.masks needs audits, and audit.interval = 0 disables them"
    needed = {
        "audit.num_queries": audit.num_queries if audit.interval else 0,
        "audit.gradient_tokens": audit.gradient_tokens or 0,
    }
    for name, number in needed.items():
        if number > data.seq_len:
            yield f"{_value(config, name)} is more than {_value(config, 'data.seq_len')}"
    if (tokens := audit.gradient_tokens or 0) % unit:
        yield (
            f"{_value(config, 'audit.gradient_tokens')} is not a multiple of {unit}, as "
            f"data.seq_len must be; use {nearest_multiples(tokens, unit)}"
        )


def _devices(config: Config, device_count: int | None) -> Iterator[str]:
    parallel, distributed = config.parallel, config.distributed
    factors = "parallel.replicas", "parallel.nodes", "parallel.devices_per_node"
    words, cpus = f"{_product(config, *factors)} devices", _value(config, "parallel.cpu_devices")
    if parallel.cpu_devices is not None and parallel.backend in ("mosaic_gpu", "triton"):
        yield f"{_value(config, 'parallel.backend')} needs a GPU, and {cpus} runs on the CPU"
    # The number of processes is known here only if the configuration sets it.
    processes = 1 if distributed.initialize == "never" else distributed.num_processes
    if device_count is not None:
        if config.devices > device_count:
            yield f"{words}, but only {device_count} are available"
    elif processes is not None and parallel.cpu_devices is not None:
        available = parallel.cpu_devices * processes
        if config.devices > available:
            where = f"{cpus} in {counted(processes, 'process')}"
            yield f"{words}, more than the {available} of {where}"


def _data(config: Config) -> Iterator[str]:
    data, pattern = config.data, config.sparsity.pattern
    yield from data_problems(data, config.model.vocab_size)
    if config.loss.weighting == "document" and not data.has_documents:
        yield (
            f'loss.weighting = "document" needs documents, and {_value(config, "data.mode")} '
            'joins them; set data.mode = "pack" or data.mask_documents = true'
        )
    if not data.has_documents:
        return
    try:
        pattern.check_documents()
    except UserError as error:
        name = "data.mode" if data.mode == "pack" else "data.mask_documents"
        kind = _value(config, "sparsity.kind")
        yield f"{_value(config, name)} cannot be combined with {kind}: {error}"


def _held_out(config: Config) -> Iterator[str]:
    held_out = config.eval
    if not held_out.interval:
        return
    if held_out.data is None:
        yield (
            f"{_value(config, 'eval.interval')} needs validation data; set eval.data.paths or "
            "eval.data.source"
        )
    elif held_out.data.source_options == config.data.source_options:
        yield (
            f'eval.data reads the training data (source = "{config.data.source}"); set '
            "eval.data.paths or eval.data.source to validation data"
        )
    elif held_out.data.balance != "none":
        yield (
            f"{_value(config, 'eval.data.balance')} is not possible: evaluations read their "
            'batches in the order of the data; set eval.data.balance = "none"'
        )
    else:
        if held_out.attention != "dense" and not config.sparsity.pattern.selects:
            yield (
                f"{_value(config, 'eval.attention')} needs a pattern that selects pairs, and "
                f'{_value(config, "sparsity.kind")} does not; set eval.attention = "dense"'
            )
        evaluation = evaluation_of(config)
        yield from map(about_held_out, (*_sequence(evaluation), *_data(evaluation)))


def _distributed(config: Config) -> Iterator[str]:
    distributed = config.distributed
    names = [f"distributed.{x}" for x in ("coordinator", "num_processes", "process_id")]
    have = [name for name in names if _get(config, name) is not None]
    lack = [name for name in names if _get(config, name) is None]
    if have and distributed.initialize == "never":
        yield f'distributed.initialize = "never" contradicts {", ".join(have)}'
    elif have and lack:
        yield f"{', '.join(have)} without {', '.join(lack)}: set all three or none"
    elif have and (distributed.process_id or 0) >= (distributed.num_processes or 0):
        yield f"{_value(config, names[2])} must be less than {_value(config, names[1])}"
    if distributed.coordinator:
        host, _, port = distributed.coordinator.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            yield (
                f"{_value(config, names[0])} must be HOST:PORT, for example "
                '"10.0.0.1:12345", with a port from 1 to 65535'
            )
