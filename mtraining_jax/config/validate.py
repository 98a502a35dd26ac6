"""Checks of combinations of fields."""

import dataclasses
import math
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, cast

from mtraining_jax.config.schema import Sections
from mtraining_jax.config.sections import GCS, AuditConfig
from mtraining_jax.models.families.family import family_of
from mtraining_jax.models.huggingface.config import FREE
from mtraining_jax.models.huggingface.peft import fused_parts, read_peft_config
from mtraining_jax.models.lora.adapters import target_problems
from mtraining_jax.models.spec import layer_windows, spec_problems
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened, toml_value
from mtraining_jax.utils.file_limits import is_url
from mtraining_jax.utils.hub import local_folder
from mtraining_jax.utils.limits import MAX_BLOCKS, MAX_POSITIONS
from mtraining_jax.utils.text import counted, nearest_multiples

# Fields that make some steps of a sparse run dense.
DENSE_STEPS = (
    "sparsity.dense_warmup_steps",
    "sparsity.dense_cooldown_steps",
    "sparsity.dense_interval",
)


def validate(config: Sections, device_count: int | None = None, platform: str = "") -> None:
    """Rejects a configuration with contradictory fields.

    Raises:
        UserError: one line per contradiction, with the fields, their values and valid values.
    """
    # Problems of values that eval.data has from data.
    common = {about_held_out(x) for check in (_sequence, _data) for x in check(config)}
    problems = [
        *_run(config),
        *spec_problems(config.model, prefix="model."),
        *_optimizer(config),
        *(offload_problems(config) if config.optimizer.offload == "all" else ()),
        *_sequence(config),
        *_sparsity(config),
        *_dense_steps(config),
        *_lora(config),
        *_audit(config),
        *_devices(config, device_count, platform),
        *_data(config),
        *(problem for problem in _held_out(config) if problem not in common),
        *_distributed(config),
    ]
    if problems:
        raise UserError("\n".join(problems))


def _optimizer(config: Sections) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.kind == "muon" and optimizer.offload:
        yield (
            f"optimizer.offload = {toml_value(optimizer.offload)} needs AdamW: set "
            'optimizer.kind = "adamw", or optimizer.offload = false'
        )


class _Named:
    """A section or field of a configuration, written with its value: `data.seq_len = 128`."""

    def __init__(self, value: Any, name: str = "") -> None:
        self._value, self._name = value, name

    def __getattr__(self, name: str) -> "_Named":
        return _Named(getattr(self._value, name), f"{self._name}.{name}".removeprefix("."))

    def __str__(self) -> str:
        return f"{self._name} = {shortened(toml_value(self._value))}"


def _product(config: Sections, *names: str) -> str:
    """Fields and their product: `data.seq_len * data.batch_size = 128 * 2 = 256`."""
    values = attrgetter(*names)(config)
    return f"{' * '.join(names)} = {' * '.join(map(str, values))} = {math.prod(values)}"


def _run(config: Sections) -> Iterator[str]:
    run, optimizer, profile, named = config.run, config.optimizer, config.profile, _Named(config)
    if is_url(run.output_dir) and not run.output_dir.startswith(GCS):
        reason = "because Orbax writes arrays to no other kind of URL"
        yield f"{named.run.output_dir}: use a mounted file system or gs://BUCKET/FOLDER, {reason}"
        return
    local_dir = config.checkpoint.local_dir
    if local_dir is not None and is_url(local_dir):
        yield f"{named.checkpoint.local_dir} is a URL; use a folder on a disk of each host"
    if run.bucket is not None:
        if {"", ".", ".."} & {*run.output_dir.removeprefix(GCS).removesuffix("/").split("/")}:
            yield f"{named.run.output_dir} is not allowed: it must be like gs://BUCKET/FOLDER"
        if config.checkpoint.skip_damaged:
            way = "set it to false, and move a damaged checkpoint with gcloud storage mv"
            yield f"checkpoint.skip_damaged = true needs a file system that renames folders; {way}"
    if optimizer.mu_dtype == "bfloat16" and optimizer.b1 > 1 - 2**-8:
        lost = (
            f"the first moment decays by less than bfloat16 rounds away with {named.optimizer.b1}"
        )
        way = 'set optimizer.b1 to at most 0.996, or optimizer.mu_dtype = "float32"'
        yield f"{named.optimizer.mu_dtype}: {lost}; {way}"
    parts, longest, way = run.name.split("/"), 200, ""
    if {"", ".", ".."} & set(parts) or not run.name.isprintable():
        way = 'such as "first" or "tests/first"'
    elif any(len(part.encode()) > longest for part in parts):
        way = f"of at most {longest} bytes"
    if way:
        allowed = f"it must be the name of a folder in run.output_dir, {way}"
        yield f"{named.run.name} is not allowed: {allowed}"
    if run.epochs is not None:  # the number of steps is not known yet
        return
    end = named.run.steps if optimizer.decay_steps is None else named.optimizer.decay_steps
    last = optimizer.decay_steps or run.steps
    if optimizer.schedule != "constant" and optimizer.warmup_steps > last:
        way = f"use at most that, e.g. --optimizer.warmup_steps={last // 10}"
        yield f"{named.optimizer.warmup_steps} is more than {end}, where the schedule ends; {way}"
    if profile.start is not None and (last := profile.start + profile.steps - 1) > run.steps:
        traced = f"{named.profile.start} and {named.profile.steps}"
        yield f"{traced} end at step {last}, after {named.run.steps}"


def offload_problems(config: Sections) -> Iterator[str]:
    """Yields what makes `optimizer.offload = "all"` impossible."""
    named, offload = _Named(config), 'optimizer.offload = "all"'
    if config.parallel.replicas > 1:
        way = "set parallel.replicas = 1, or optimizer.offload = true"
        why = f"needs all gradients on the device, unlike {offload}"
        yield f"{named.parallel.replicas} {why}; {way}"
    if len({*layer_windows(config.model)}) > 1:
        yield (
            f"{offload} is not possible if only some layers have a sliding window, as in this "
            "model; set optimizer.offload = true"
        )


def _sequence(config: Sections) -> Iterator[str]:
    """Checks the length and number of sequences."""
    model, data, named = config.model, config.data, _Named(config)
    for name in model.override:
        if name not in FREE:
            yield f'model.override: "{name}" cannot be overridden; choose from {", ".join(FREE)}'
    if data.seq_len > model.max_position_embeddings:
        way = ""
        if model.init_from is not None and "max_position_embeddings" not in model.override:
            way = f", given by {model.init_from}; to set another value, add it to model.override:"
            way += ' ["max_position_embeddings"] or ["max_position_embeddings", "rope_scaling"]'
        yield f"{named.data.seq_len} is more than {named.model.max_position_embeddings}{way}"
    block, unit, pattern = config.sparsity.block_size, config.sequence_unit, config.sparsity.pattern
    if data.seq_len % unit:
        factors = "parallel.nodes", "parallel.devices_per_node", "sparsity.block_size"
        words = _product(config, *factors)
        if config.parallel.layout == "zigzag":
            names, numbers, _ = words.split(" = ")
            words = f"2 * {names} = 2 * {numbers} = {unit}"
        yield _not_a_multiple(named.data.seq_len, data.seq_len, words, unit)
    most, why = MAX_POSITIONS, "up to which rotary position embeddings are exact"
    if pattern.sparse and pattern.selects and MAX_BLOCKS * block < most:
        most, why = MAX_BLOCKS * block, f"{MAX_BLOCKS} blocks of sparsity.block_size = {block}"
    if data.seq_len > most:
        yield f"{named.data.seq_len} is more than the supported {most} tokens, {why}"
    if data.batch_size % config.row_parts:
        words = _product(config, "parallel.replicas", "optimizer.accumulation_steps")
        yield _not_a_multiple(named.data.batch_size, data.batch_size, words, config.row_parts)


def _not_a_multiple(field: _Named, value: int, words: str, unit: int) -> str:
    return f"{field} is not a multiple of {words}; use {nearest_multiples(value, unit)}"


def _sparsity(config: Sections) -> Iterator[str]:
    sparsity, pattern, named = config.sparsity, config.sparsity.pattern, _Named(config)
    if config.audit.interval and not pattern.selects:
        yield _needs_selection(named, "audit.interval", "0")
    if sparsity.tune == "none":
        return
    if any(layer_windows(config.model)):
        yield (
            f"{named.sparsity.tune} cannot be combined with {named.model.sliding_window}: it tunes "
            'densities of all layers; set sparsity.tune = "none"'
        )
    option = next(iter(pattern.overridable()), None)
    if option is None:
        kind = str(named.sparsity.kind)
        if sparsity.kind == "vertical_slash":
            kind += f" with {named.sparsity.pattern.preset}".replace("pattern.", "")
        yield (
            f"{named.sparsity.tune} tunes the mass fraction of a pattern, and {kind} has none; set "
            'sparsity.kind = "sampled_rows", or "vertical_slash" with sparsity.preset = "safe"'
        )
        return
    value = getattr(pattern, option)
    if sparsity.tune_min > sparsity.tune_max:
        yield f"{named.sparsity.tune_min} is more than {named.sparsity.tune_max}"
    elif not sparsity.tune_min <= value <= sparsity.tune_max:
        limits = f"{named.sparsity.tune_min} and {named.sparsity.tune_max}"
        start = f"{named.sparsity.tune} starts from sparsity.{option} = {value}"
        yield f"{start}, which must lie between {limits}"


def _needs_selection(named: _Named, name: str, instead: str) -> str:
    return (
        f"{attrgetter(name)(named)} needs a pattern that selects pairs, and {named.sparsity.kind} "
        f"does not; set {name} = {instead}"
    )


def _dense_steps(config: Sections) -> Iterator[str]:
    """Rejects what cannot be combined with dense steps."""
    sparsity, named = config.sparsity, _Named(config)
    given = [name for name in DENSE_STEPS if attrgetter(name)(config)]
    names = ", ".join(str(attrgetter(name)(named)) for name in given)
    if not given or not sparsity.pattern.sparse:
        return
    ends_steps = sparsity.dense_warmup_steps + sparsity.dense_cooldown_steps
    if config.run.epochs is None and ends_steps > config.run.steps:
        ends = " + ".join(str(attrgetter(name)(named)) for name in given if name in DENSE_STEPS[:2])
        why = "dense warm-up and cooldown must fit into the run"
        yield f"{ends} is more than {named.run.steps}: {why}"
    if not sparsity.pattern.selects:
        yield (
            f"{names} cannot be combined with {named.sparsity.kind}, which measures speed and does "
            "not select pairs; set 0"
        )
    learns = "learns densities from every step: dense steps have none to learn from"
    if sparsity.tune != "none":
        way = 'set sparsity.tune = "none"'
        yield f"{names} cannot be combined with {named.sparsity.tune}, which {learns}; {way}"
    if config.data.balance == "density":
        way = 'set data.balance = "length"'
        yield f"{names} cannot be combined with {named.data.balance}, which {learns}; {way}"


def _lora(config: Sections) -> Iterator[str]:
    lora, model, named = config.lora, config.model, _Named(config)
    if lora.spec is None:
        if lora.init_from is not None:
            yield f"{named.lora.init_from} needs lora.rank, that of the adapters in this folder"
        return
    if config.optimizer.trainable:
        yield (
            f"{named.optimizer.trainable} cannot be combined with {named.lora.rank}, which trains "
            "adapters only; set lora.targets instead"
        )
    family = family_of(model.family)
    yield from target_problems(family.layer(cast(Any, model)), lora.targets)
    for module, parts in fused_parts(family).items():
        given = [part for part in parts if part in lora.targets]
        if given and len(given) < len(parts):
            yield (
                f"{named.lora.targets} has {', '.join(given)}, but checkpoints of "
                f"{family.model_type} have one matrix {module} of {', '.join(parts)}; set all of "
                "them or none"
            )
    if lora.init_from is not None:
        found, _ = read_peft_config(local_folder(lora.init_from), model.family)
        for name in ("rank", "alpha", "targets"):
            was, now = getattr(found, name), getattr(lora.spec, name)
            if was != now and (name != "targets" or set(was) != set(now)):
                was = toml_value(was)
                yield f"{named.lora.init_from} has {name} = {was}; set lora.{name} = {was}"


def _audit(config: Sections) -> Iterator[str]:
    audit, named = config.audit, _Named(config)
    layers, heads = config.model.num_layers, config.model.num_heads
    for text in audit.masks:
        mask = re.fullmatch("([0-9]{1,9})[.]([0-9]{1,9})", text)
        if mask is None or int(mask[1]) >= layers or int(mask[2]) >= heads:
            last = f"{layers - 1}.{heads - 1}"
            yield f'audit.masks has "{text}", which must be LAYER.HEAD, from 0.0 to {last}'
        elif layer_windows(config.model)[int(mask[1])] is not None:
            yield f'audit.masks has "{text}", but layer {mask[1]} has a sliding window'
    if audit.masks and not audit.interval:
        yield "audit.masks needs audits, and audit.interval = 0 disables them"
    if audit.interval and audit.num_queries > config.data.seq_len:
        yield f"{named.audit.num_queries} is more than {named.data.seq_len}"


def _devices(config: Sections, device_count: int | None, platform: str) -> Iterator[str]:
    parallel, distributed, named = config.parallel, config.distributed, _Named(config)
    factors = "parallel.replicas", "parallel.nodes", "parallel.devices_per_node"
    words, cpus = f"{_product(config, *factors)} devices", named.parallel.cpu_devices
    if parallel.cpu_devices is not None and parallel.backend in ("mosaic_gpu", "triton"):
        yield f"{named.parallel.backend} needs a GPU, and {cpus} runs on the CPU"
    # The number of processes is known here only if the configuration sets it.
    processes = 1 if distributed.initialize == "never" else distributed.num_processes
    available = device_count
    if device_count is None and processes is not None and parallel.cpu_devices is not None:
        available = parallel.cpu_devices * processes
    if available is None or config.devices <= available:
        return
    found = counted(available, f"{platform} device".lstrip())
    why = f"but JAX finds only {found}; reduce one of these fields or add processes"
    if parallel.cpu_devices is not None and parallel.cpu_devices <= available:
        processes = available // parallel.cpu_devices
        why = f"more than the {available} of {cpus} in {counted(processes, 'process')}; reduce one"
        why += f" of these fields or set parallel.cpu_devices = {-(-config.devices // processes)}"
    yield f"{words}, {why}"


def _data(config: Sections) -> Iterator[str]:
    data, named = config.data, _Named(config)
    yield from data.source_options.problems(data, config.model.vocab_size)
    if config.loss.weighting == "document" and not data.has_documents:
        yield (
            f'loss.weighting = "document" needs documents, and {named.data.mode} joins them; set '
            'data.mode = "pack" or data.mask_documents = true'
        )
    if not data.has_documents:
        return
    try:
        config.sparsity.pattern.check_documents()
    except UserError as error:
        field = named.data.mode if data.mode == "pack" else named.data.mask_documents
        yield f"{field} cannot be combined with {named.sparsity.kind}: {error}"


def _held_out(config: Sections) -> Iterator[str]:
    held_out, named = config.eval, _Named(config)
    if not held_out.interval:
        return
    ways = "eval.data.paths or eval.data.source"
    if held_out.data is None:
        yield f"{named.eval.interval} needs validation data; set {ways}"
    elif held_out.data.source_options == config.data.source_options:
        read = f'eval.data reads the training data (source = "{config.data.source}")'
        yield f"{read}; set {ways} to validation data"
    elif held_out.data.balance != "none":
        yield (
            f"{named.eval.data.balance} is not possible: evaluations read their batches in the "
            'order of the data; set eval.data.balance = "none"'
        )
    else:
        if held_out.attention != "dense" and not config.sparsity.pattern.selects:
            yield _needs_selection(named, "eval.attention", '"dense"')
        evaluation = evaluation_of(config)
        yield from map(about_held_out, (*_sequence(evaluation), *_data(evaluation)))


def _distributed(config: Sections) -> Iterator[str]:
    distributed, named = config.distributed, _Named(config).distributed
    names = [f"distributed.{x}" for x in ("coordinator", "num_processes", "process_id")]
    have = [name for name in names if attrgetter(name)(config) is not None]
    lack = [name for name in names if name not in have]
    if have and distributed.initialize == "never":
        yield f'distributed.initialize = "never" contradicts {", ".join(have)}'
    elif have and lack:
        yield f"{', '.join(have)} without {', '.join(lack)}: set all three or none"
    elif have and (distributed.process_id or 0) >= (distributed.num_processes or 0):
        yield f"{named.process_id} must be less than {named.num_processes}"
    if distributed.coordinator:
        host, _, port = distributed.coordinator.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            example = '"10.0.0.1:12345", with a port from 1 to 65535'
            yield f"{named.coordinator} must be HOST:PORT, for example {example}"


def evaluation_of[C: Sections](config: C) -> C:
    """The configuration with validation data in place of training data."""
    return dataclasses.replace(
        config,
        data=config.eval.data,
        optimizer=dataclasses.replace(config.optimizer, accumulation_steps=1),
        audit=AuditConfig(),
    )


def about_held_out(problem: str) -> str:
    """Renames `data.*` to `eval.data.*` in a message."""
    return re.sub(r"(?<![\w.])data\.(?=[a-z])", "eval.data.", problem)
