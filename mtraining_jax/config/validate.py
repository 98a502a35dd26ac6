"""Checks of combinations of fields."""

import re
from collections.abc import Iterator

from mtraining_jax.config.held_out import about_held_out, evaluation_of
from mtraining_jax.config.schema import Config
from mtraining_jax.data.sources import problems as data_problems
from mtraining_jax.models.huggingface.config import FREE
from mtraining_jax.models.spec import spec_problems
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value
from mtraining_jax.utils.file_limits import is_url
from mtraining_jax.utils.limits import MAX_BLOCKS, MAX_POSITIONS

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
    common = {*_positions(config), *_sequence(config), *_data(config)}
    common = set(map(about_held_out, common))
    problems = [
        *_run(config),
        *_model(config),
        *_sequence(config),
        *_sparsity(config),
        *_audit(config),
        *_devices(config, device_count),
        *_data(config),
        *(problem for problem in _held_out(config) if problem not in common),
        *_optimizer(config),
        *_profile(config),
        *_distributed(config),
    ]
    if problems:
        raise UserError("\n".join(problems))


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value` as text: `1536 or 2048`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _run(config: Config) -> Iterator[str]:
    if is_url(config.run.output_dir):
        yield (
            f"run.output_dir = {toml_value(config.run.output_dir)} is a URL, but runs are written "
            "to a local folder or a mounted file system"
        )
    name, longest = config.run.name, 200
    parts = name.split("/")
    if {"", ".", ".."} & set(parts) or not name.isprintable():
        way = 'such as "first" or "tests/first"'
    elif any(len(part.encode()) > longest for part in parts):
        way = f"of at most {longest} bytes"
    else:
        return
    yield (
        f"run.name = {_cut(toml_value(name))} is not allowed: it must be the name of a folder in "
        f"run.output_dir, {way}"
    )


def _cut(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _model(config: Config) -> Iterator[str]:
    model = config.model
    yield from spec_problems(model, prefix="model.")
    for name in model.override:
        if name not in FREE:
            yield f'model.override: "{name}" cannot be overridden; choose from {", ".join(FREE)}'
    yield from _positions(config)


def _positions(config: Config) -> Iterator[str]:
    model = config.model
    if config.data.seq_len > model.max_position_embeddings:
        way = ""
        if model.init_from is not None and "max_position_embeddings" not in model.override:
            way = f", given by {model.init_from}; to set another value, add it to model.override:"
            way += ' ["max_position_embeddings"] or ["max_position_embeddings", "rope_scaling"]'
        yield (
            f"data.seq_len = {config.data.seq_len} is more than model.max_position_embeddings = "
            f"{model.max_position_embeddings}{way}"
        )


def _sequence(config: Config) -> Iterator[str]:
    parallel, data = config.parallel, config.data
    block = config.sparsity.block_size
    unit = config.sequence_unit
    words = "parallel.nodes * parallel.devices_per_node * sparsity.block_size"
    numbers = f"{parallel.nodes} * {parallel.devices_per_node} * {block}"
    if parallel.layout == "zigzag":
        words, numbers = f"2 * {words}", f"2 * {numbers}"
    if data.seq_len % unit:
        yield (
            f"data.seq_len = {data.seq_len} is not a multiple of {words} = {numbers} = {unit}; "
            f"use {nearest_multiples(data.seq_len, unit)}"
        )
    most, why = MAX_POSITIONS, "up to which rotary position embeddings are exact"
    pattern = config.sparsity.pattern
    if pattern.sparse and pattern.selects and MAX_BLOCKS * block < most:
        most = MAX_BLOCKS * block
        why = f"{MAX_BLOCKS} blocks of sparsity.block_size = {block}"
    if data.seq_len > most:
        yield f"data.seq_len = {data.seq_len} is more than the supported {most} tokens, {why}"
    parts = config.row_parts
    if data.batch_size % parts:
        yield (
            f"data.batch_size = {data.batch_size} is not a multiple of parallel.replicas * "
            f"optimizer.accumulation_steps = {parallel.replicas} * "
            f"{config.optimizer.accumulation_steps} = {parts}; use "
            f"{nearest_multiples(data.batch_size, parts)}"
        )


def _sparsity(config: Config) -> Iterator[str]:
    settings = config.sparsity.pattern
    if config.data.has_documents:
        yield from _within_documents(config)
    yield from _tuning(config)
    if settings.sparse:
        yield from _dense_steps(config)
    for name in ("interval", "gradient_interval"):
        every = getattr(config.audit, name)
        if every and not settings.selects:
            yield (
                f"audit.{name} = {every} needs a pattern that selects pairs, and sparsity.kind = "
                f'"{config.sparsity.kind}" does not; set audit.{name} = 0'
            )


def _dense_steps(config: Config) -> Iterator[str]:
    """Rejects what cannot be combined with dense steps."""
    sparsity, steps = config.sparsity, config.run.steps
    first, last = sparsity.dense_warmup_steps, sparsity.dense_cooldown_steps
    values = {name: getattr(sparsity, name.rpartition(".")[2]) for name in DENSE_STEPS}
    given = ", ".join(f"{name} = {value}" for name, value in values.items() if value)
    if not given:
        return
    if first + last > steps:
        ends = [x for x in (DENSE_STEPS[0], DENSE_STEPS[1]) if values[x]]
        yield (
            " + ".join(f"{name} = {values[name]}" for name in ends)
            + f" is more than run.steps = {steps}: dense warm-up and cooldown must fit into the run"
        )
    if not sparsity.pattern.selects:
        yield (
            f'{given} cannot be combined with sparsity.kind = "{sparsity.kind}", which measures '
            "speed and does not select pairs; set 0"
        )
    learning = []
    if sparsity.tune != "none":
        learning.append((f'sparsity.tune = "{sparsity.tune}"', 'sparsity.tune = "none"'))
    if config.data.balance == "density":
        learning.append(('data.balance = "density"', 'data.balance = "length"'))
    for what, instead in learning:
        yield (
            f"{given} cannot be combined with {what}, which learns densities from every step: "
            f"dense steps have none to learn from; set {instead}"
        )


def _audit(config: Config) -> Iterator[str]:
    audit, model, seq_len = config.audit, config.model, config.data.seq_len
    if audit.interval and audit.num_queries > seq_len:
        yield f"audit.num_queries = {audit.num_queries} is more than data.seq_len = {seq_len}"
    for text in audit.masks:
        head = re.fullmatch("([0-9]{1,9})[.]([0-9]{1,9})", text)
        sizes = model.num_layers, model.num_heads
        if head is None or any(int(x) >= n for x, n in zip(head.groups(), sizes, strict=True)):
            yield (
                f'audit.masks has "{text}", which must be LAYER.HEAD, from 0.0 to '
                f"{sizes[0] - 1}.{sizes[1] - 1}"
            )
    if audit.masks and not audit.interval:
        yield "audit.masks needs audits, and audit.interval = 0 disables them"
    tokens, unit = audit.gradient_tokens, config.sequence_unit
    if tokens is None:
        return
    if tokens > seq_len:
        yield f"audit.gradient_tokens = {tokens} is more than data.seq_len = {seq_len}"
    if tokens % unit:
        yield (
            f"audit.gradient_tokens = {tokens} is not a multiple of {unit}, as data.seq_len must "
            f"be; use {nearest_multiples(tokens, unit)}"
        )


def _tuning(config: Config) -> Iterator[str]:
    sparsity = config.sparsity
    if sparsity.tune == "none":
        return
    tuned, kept = f'sparsity.tune = "{sparsity.tune}"', sparsity.pattern.mass_fraction()
    if kept is None:
        of = f'sparsity.kind = "{sparsity.kind}"'
        if sparsity.kind == "vertical_slash":
            of += f' with sparsity.preset = "{getattr(sparsity.pattern, "preset", None)}"'
        yield (
            f"{tuned} tunes the mass fraction of a pattern, and {of} has none; set sparsity.kind = "
            '"sampled_rows", or "vertical_slash" with sparsity.preset = "safe"'
        )
        return
    share, low, high = getattr(sparsity.pattern, kept.name), sparsity.tune_min, sparsity.tune_max
    if not low <= share <= high:
        yield (
            f"{tuned} starts from sparsity.{kept.name} = {share}, which must lie between "
            f"sparsity.tune_min = {low} and sparsity.tune_max = {high}"
        )


def _within_documents(config: Config) -> Iterator[str]:
    name = config.data.mode
    documents = f'data.mode = "{name}"' if name == "pack" else "data.mask_documents = true"
    kind = f'sparsity.kind = "{config.sparsity.kind}"'
    try:
        config.sparsity.pattern.check_documents()
    except UserError as error:
        yield f"{documents} cannot be combined with {kind}: {error}"


def _devices(config: Config, device_count: int | None) -> Iterator[str]:
    parallel, distributed = config.parallel, config.distributed
    asked = config.devices
    words = (
        "parallel.replicas * parallel.nodes * parallel.devices_per_node = "
        f"{parallel.replicas} * {parallel.nodes} * {parallel.devices_per_node} = {asked} devices"
    )
    if parallel.cpu_devices is not None and parallel.backend in ("mosaic_gpu", "triton"):
        yield (
            f'parallel.backend = "{parallel.backend}" needs a GPU, and parallel.cpu_devices = '
            f"{parallel.cpu_devices} runs on the CPU"
        )
    if device_count is not None:
        if asked > device_count:
            yield f"{words}, but only {device_count} are available"
        return
    # The number of processes is known here only if the configuration sets it.
    processes = 1 if distributed.initialize == "never" else distributed.num_processes
    if processes is not None and parallel.cpu_devices is not None:
        there = parallel.cpu_devices * processes
        if asked > there:
            yield (
                f"{words}, more than the {there} of parallel.cpu_devices = "
                f"{parallel.cpu_devices} in {processes} process{'es' if processes > 1 else ''}"
            )


def _data(config: Config) -> Iterator[str]:
    yield from data_problems(config.data, config.model.vocab_size)
    if config.loss.weighting == "document" and not config.data.has_documents:
        yield (
            f'loss.weighting = "document" needs documents, and data.mode = "{config.data.mode}" '
            'joins them; set data.mode = "pack" or data.mask_documents = true'
        )


def _held_out(config: Config) -> Iterator[str]:
    held_out = config.eval
    if not held_out.interval:
        return
    if held_out.data is None:
        yield (
            f"eval.interval = {held_out.interval} needs validation data; set "
            "eval.data.paths or eval.data.source"
        )
        return
    if held_out.data.source_options == config.data.source_options:
        yield (
            f'eval.data reads the training data (source = "{config.data.source}"); set '
            "eval.data.paths or eval.data.source to validation data"
        )
        return
    if held_out.data.balance != "none":
        yield (
            f'eval.data.balance = "{held_out.data.balance}" is not possible: evaluations read '
            'their batches in the order of the data; set eval.data.balance = "none"'
        )
        return
    if held_out.attention != "dense" and not config.sparsity.pattern.selects:
        yield (
            f'eval.attention = "{held_out.attention}" needs a pattern that selects pairs, and '
            f'sparsity.kind = "{config.sparsity.kind}" does not; set eval.attention = "dense"'
        )
    evaluation = evaluation_of(config)
    problems = [*_positions(evaluation), *_sequence(evaluation), *_data(evaluation)]
    if evaluation.data.has_documents:
        problems += _within_documents(evaluation)
    yield from map(about_held_out, problems)


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    name, end = "optimizer.decay_steps", optimizer.decay_steps
    if end is None:
        name, end = "run.steps", config.run.steps
    if optimizer.schedule != "constant" and optimizer.warmup_steps > end:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} is more than {name} = {end}, "
            "where the schedule ends"
        )


def _profile(config: Config) -> Iterator[str]:
    start, steps = config.profile.start, config.profile.steps
    if start is not None and start + steps - 1 > config.run.steps:
        yield (
            f"profile.start = {start} and profile.steps = {steps} end at step "
            f"{start + steps - 1}, after run.steps = {config.run.steps}"
        )


def _distributed(config: Config) -> Iterator[str]:
    distributed = config.distributed
    given = {
        "distributed.coordinator": distributed.coordinator,
        "distributed.num_processes": distributed.num_processes,
        "distributed.process_id": distributed.process_id,
    }
    process, processes = distributed.process_id, distributed.num_processes
    have = [name for name, value in given.items() if value is not None]
    lack = [name for name, value in given.items() if value is None]
    if have and distributed.initialize == "never":
        yield f'distributed.initialize = "never" contradicts {", ".join(have)}'
    elif have and lack:
        yield f"{', '.join(have)} without {', '.join(lack)}: set all three or none"
    elif process is not None and processes is not None and process >= processes:
        yield (
            f"distributed.process_id = {process} must be less than "
            f"distributed.num_processes = {processes}"
        )
    if distributed.coordinator:
        host, _, port = distributed.coordinator.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            yield (
                f'distributed.coordinator = "{distributed.coordinator}" must be HOST:PORT, for '
                'example "10.0.0.1:12345", with a port from 1 to 65535'
            )
