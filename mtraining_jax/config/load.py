"""Loads a validated `Config` from a TOML file and overrides."""

import dataclasses
import logging
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtraining_jax.config.build import Builder, Fields, Layer, Layers, merged
from mtraining_jax.config.files import find_config, read_chain
from mtraining_jax.config.held_out import about_held_out, with_data_of_training
from mtraining_jax.config.help import all_fields
from mtraining_jax.config.schema import Config
from mtraining_jax.config.sections import DataConfig
from mtraining_jax.config.tables import values_of
from mtraining_jax.config.validate import validate
from mtraining_jax.data.corpus import packs_of, starts_of
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of, toml_value
from mtraining_jax.utils.text import counted

# Dotted field name and value as text; None if an option of the command line has no value.
Overrides = Sequence[tuple[str, str | None]]
_COMMAND_LINE = "command line"
_LOG = logging.getLogger(__name__)


def load_config(name_or_path: str | Path, overrides: Overrides = ()) -> Config:
    """Loads and validates the configuration of a run.

    Args:
        name_or_path: a name from `available_configs()`, or the path of a TOML file.
        overrides: pairs of dotted field name and value as text, parsed as TOML or else as a plain
            string. Later overrides win. None is the value of a boolean field that is true.

    Raises:
        UserError: one line per problem.
    """
    layers = _file_layers(name_or_path)
    default_name = {"run": {"name": Path(layers[0][0]).stem}}
    config = _load([*layers, ("default", default_name)], overrides)
    names = {name for name, _ in overrides}
    if "run.steps" in names:
        config = _with_warm_ups_that_fit(config, names)
    validate(config)
    return config


def _with_warm_ups_that_fit(config: Config, names: Collection[str]) -> Config:
    """Shortens warm-ups of a file for a test run of few steps; `names` are set by the user."""
    steps, optimizer, sparsity = config.run.steps, config.optimizer, config.sparsity
    too_long = []
    ends = optimizer.schedule != "constant" and optimizer.decay_steps is None
    if ends and optimizer.warmup_steps > steps:
        too_long.append("optimizer.warmup_steps")
    if sparsity.dense_warmup_steps + sparsity.dense_cooldown_steps > steps:
        too_long += ["sparsity.dense_warmup_steps", "sparsity.dense_cooldown_steps"]
    for name in too_long:
        section, field = name.split(".")
        before, now = getattr(getattr(config, section), field), steps // 10
        if name not in names and before > now:
            part = dataclasses.replace(getattr(config, section), **{field: now})
            config = dataclasses.replace(config, **{section: part})
            note = "note: %s = %d, instead of %d in the file, to fit run.steps = %d"
            _LOG.warning(note, name, now, before, steps)
    return config


def config_from_dict(table: Mapping[str, Any], source: str) -> Config:
    """Builds and validates a `Config` from a nested dict, the inverse of `config_to_dict`.

    Raises:
        UserError: one line per problem.
    """
    config = _load([(source, table)])
    validate(config)
    return config


def config_of_model(table: Mapping[str, Any], source: str, overrides: Overrides = ()) -> Config:
    """Builds a `Config` for inference: validates single fields only, and needs no training data.

    Options of plug-ins that are not selected are ignored.

    Args:
        table: values by section and field; lists or tuples for lists.
        source: origin of the values, for error messages.
        overrides: as in `load_config`.

    Raises:
        UserError: one line per problem.
    """
    return _load([(source, table)], overrides, stored=True)


def with_steps(config: Config) -> Config:
    """Sets `run.steps` to `run.epochs`, if any, rounded up; opens the data to count sequences.

    Raises:
        UserError: the data is endless or unreadable, or other fields contradict the steps.
    """
    epochs, data = config.run.epochs, config.data
    if epochs is None:
        return config
    corpus = data.source_options.open(data, config.model.vocab_size)
    if corpus.endless:
        raise UserError(
            f'run.epochs = {epochs:g} is not possible with data.source = "{data.source}", which '
            "has no end; set run.steps instead"
        )
    if data.has_documents:
        sequences = len(packs_of(corpus, data, config.sparsity.block_size))
    else:
        sequences = len(starts_of(corpus, data))
    steps = math.ceil(round(epochs * sequences / data.batch_size, 6)) or 1
    run = dataclasses.replace(config.run, steps=steps, epochs=None)
    config = dataclasses.replace(config, run=run)
    try:
        validate(config)
    except UserError as error:
        what = f"run.epochs = {epochs:g} is {counted(steps, 'step')}"
        raise UserError(f"{what} of {counted(sequences, 'sequence')}: {error}") from None
    return config


def with_bos(config: Config, saved: Mapping[str, Any] | None = None) -> Config:
    """Sets an unset `data.bos` to that of a checkpoint's run, or of pre-tokenized data.

    Args:
        saved: the configuration in the checkpoint. Runs before this field existed trained text
            without such a token.

    Raises:
        UserError: the data is missing, or its parts differ.
    """

    def resolved(data: DataConfig | None, saved: Mapping[str, Any] | None) -> DataConfig | None:
        if data is None or data.bos is not None:
            return data
        bos, source = None, data.source_options
        if saved is not None and ("bos" in saved or not (source.holds_ids or source.is_chat)):
            bos = saved.get("bos", False)
        elif (recorded := source.recorded_bos()) is not None and len(recorded) < 2:
            bos = recorded[0] if recorded else False
        return dataclasses.replace(data, bos=bos)

    of_data = of_eval = None
    if saved is not None:
        of_data, of_eval = saved.get("data", {}), saved.get("eval", {}).get("data") or {}
    data = resolved(config.data, of_data)
    try:
        held_out = dataclasses.replace(config.eval, data=resolved(config.eval.data, of_eval))
    except UserError as error:
        raise UserError(about_held_out(str(error))) from error
    return dataclasses.replace(config, data=data, eval=held_out)


def fields_with(name_or_path: str | None, overrides: Overrides) -> dict[str, Field]:
    """All fields by dotted name, with those of the plug-ins that a file and overrides select."""
    try:
        layers = [] if name_or_path is None else _file_layers(name_or_path)
    except UserError:
        layers = []
    return _selected_fields(layers, overrides)


def _file_layers(name_or_path: str | Path) -> list[Layer]:
    chain = read_chain(find_config(str(name_or_path)))
    return [(str(path), table) for path, table in chain]


def check_overrides(overrides: Overrides) -> None:
    """Raises a UserError unless overrides are pairs of a field and its value."""
    for pair in [overrides] if isinstance(overrides, str | Mapping) else overrides:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(
                f"overrides={overrides!r} must be pairs of a field and its value, such as "
                '[("run.steps", "10")]'
            )


def _load(layers: Layers, overrides: Overrides = (), stored: bool = False) -> Config:
    check_overrides(overrides)
    overrides = [(name, None if value is None else str(value)) for name, value in overrides]
    for _, values in layers:
        all_fields(values)  # loads their plug-ins, so that options of those are known
    fields = _selected_fields(layers, overrides)
    table, problems = _command_line(overrides, fields)
    return Builder([table, *layers], fields, problems, stored).config()


def _selected_fields(layers: Layers, overrides: Overrides) -> dict[str, Field]:
    untyped, _ = _command_line(overrides, {})
    return all_fields(with_data_of_training(merged([untyped, *layers])[0])[0])


def _command_line(overrides: Overrides, fields: Fields) -> tuple[Layer, list[str]]:
    """The table of the command line, and the problems of values that cannot be parsed."""
    table: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in overrides:
        try:
            _put(table, name, parse_value(name, text, fields.get(name)))
        except UserError as error:
            problems.append(f"{_COMMAND_LINE}: {error}")
    return (_COMMAND_LINE, table), problems


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    """Sets a dotted field of a nested dict; creates missing tables."""
    *folders, leaf = name.split(".")
    for folder in folders:
        if not isinstance(table.get(folder), dict):
            table[folder] = {}
        table = table[folder]
    table[leaf] = value


def parse_value(name: str, text: str | None, field: Field | None) -> Any:
    """Parses the command line value of a field; a `field` of None has an unknown type.

    Accepts `none`, booleans in any case, strings without quotes and single items of lists.
    """
    kinds = frozenset() if field is None else field.kinds
    if text is None:
        if field is None or bool in kinds:
            return True
        raise UserError(f"{name} needs a value: --{name}=VALUE")
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        table = tomllib.loads(f"value = {text}")
        value = table["value"] if len(table) == 1 else text
    except (ValueError, RecursionError):
        if list in kinds and text.startswith("["):
            way = 'write it like ["one", "two"]'
            raise UserError(f"{name}={text} is not a TOML list; {way}") from None
        value = text
    if not isinstance(value, str) and type(value) not in kinds and kinds & {str, list}:
        value = text
    return [value] if list in kinds and isinstance(value, str) else value


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested dicts of JSON values; `config_from_dict` is the inverse.

    As in files, the options of a plug-in are fields of its section.
    """
    sections = fields_of(Config).items()
    return {name: values_of(field.annotation, getattr(config, name)) for name, field in sections}


def config_to_toml(config: Config) -> str:
    """TOML text that loads to an equal configuration.

    TOML has no null: fields that are None become comments. None is always their default.
    """
    lines: list[str] = []

    def table(title: str, values: Mapping[str, Any]) -> None:
        lines.extend(["", f"[{title}]"] if lines else [f"[{title}]"])
        for name, value in values.items():
            if not isinstance(value, dict):
                lines.append(f"{'# ' if value is None else ''}{name} = {toml_value(value)}")
        for name, value in values.items():
            if isinstance(value, dict):
                table(f"{title}.{name}", value)

    for name, section in config_to_dict(config).items():
        table(name, section)
    return "\n".join(lines) + "\n"
