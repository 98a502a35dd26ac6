"""The configuration of a run: `Config.load`, and what follows from the data of a run."""

import dataclasses
import logging
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from mtraining_jax.config.build import Builder, Layer, Layers, merged, with_data_of_training
from mtraining_jax.config.files import read_chain
from mtraining_jax.config.help import all_fields
from mtraining_jax.config.schema import Sections
from mtraining_jax.config.sections import DataConfig
from mtraining_jax.config.tables import values_of
from mtraining_jax.config.validate import about_held_out, validate
from mtraining_jax.data.corpus import packs_of, starts_of
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of, options, toml_value
from mtraining_jax.utils.text import counted

# Values by dotted field: Python values, or text as on the command line, which is parsed as TOML or
# else as a plain string; `...` for an option without a value, true for a boolean field.
Overrides = Mapping[str, Any]
NO_OVERRIDES: Overrides = MappingProxyType({})
_LOG = logging.getLogger(__name__)


@options(kw_only=True)
class Config(Sections):
    """The configuration of a run; see `Config.load`."""

    @classmethod
    def load(cls, name_or_path: str | Path, overrides: Overrides = NO_OVERRIDES) -> Self:
        """Loads and validates the configuration of a run.

        Args:
            name_or_path: a name from `available_configs()`, or the path of a TOML file.
            overrides: values by dotted field: `{"data.seq_len": 131072}`; text is parsed as on the
                command line.

        Raises:
            UserError: one line per problem.
        """
        layers = read_chain(str(name_or_path))
        default_name = {"run": {"name": Path(layers[0][0]).stem}}
        config = _load(cls, [*layers, ("default", default_name)], overrides)
        if "run.steps" in overrides:
            config = config._with_warm_ups_that_fit(overrides)
        validate(config)
        return config

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], source: str = "the table") -> Self:
        """Builds and validates a configuration from nested dicts, the inverse of `to_dict`.

        Args:
            table: values by section and field; lists or tuples for lists.
            source: origin of the values, for error messages.

        Raises:
            UserError: one line per problem.
        """
        config = _load(cls, [(source, table)])
        validate(config)
        return config

    @classmethod
    def from_record(
        cls, table: Mapping[str, Any], source: str, overrides: Overrides = NO_OVERRIDES
    ) -> Self:
        """Builds the configuration that a run stored; arguments as in `from_dict` and `load`.

        Single fields are validated, but not their combinations, so training data is not needed.
        Options of plug-ins that are not selected are ignored.

        Raises:
            UserError: one line per problem.
        """
        return _load(cls, [(source, table)], overrides, stored=True)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts of JSON values; as in files, options of plug-ins are fields of a section."""
        sections = fields_of(Sections).items()
        return {name: values_of(field.annotation, getattr(self, name)) for name, field in sections}

    def to_toml(self) -> str:
        """TOML text that loads to an equal configuration.

        TOML has no null: fields that are None become comments. None is always their default.
        """
        lines: list[str] = []

        def add(title: str, values: Mapping[str, Any]) -> None:
            lines.extend(["", f"[{title}]"] if lines else [f"[{title}]"])
            for name, value in values.items():
                if not isinstance(value, dict):
                    lines.append(f"{'# ' if value is None else ''}{name} = {toml_value(value)}")
            for name, value in values.items():
                if isinstance(value, dict):
                    add(f"{title}.{name}", value)

        for name, section in self.to_dict().items():
            add(name, section)
        return "\n".join(lines) + "\n"

    def _with_warm_ups_that_fit(self, overrides: Overrides) -> Self:
        """Shortens warm-ups of a file for a test run of few steps."""
        config, steps, schedule = self, self.run.steps, self.optimizer
        too_long = []
        ends = schedule.schedule != "constant" and schedule.decay_steps is None
        if ends and schedule.warmup_steps > steps:
            too_long.append("optimizer.warmup_steps")
        if self.sparsity.dense_warmup_steps + self.sparsity.dense_cooldown_steps > steps:
            too_long += ["sparsity.dense_warmup_steps", "sparsity.dense_cooldown_steps"]
        for name in too_long:
            section, field = name.split(".")
            before, now = getattr(getattr(config, section), field), steps // 10
            if name not in overrides and before > now:
                part = dataclasses.replace(getattr(config, section), **{field: now})
                config = dataclasses.replace(config, **{section: part})
                note = "note: %s = %d, instead of %d in the file, to fit run.steps = %d"
                _LOG.warning(note, name, now, before, steps)
        return config


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

    saved_data = saved_eval = None
    if saved is not None:
        saved_data, saved_eval = saved.get("data", {}), saved.get("eval", {}).get("data") or {}
    data = resolved(config.data, saved_data)
    try:
        held_out = dataclasses.replace(config.eval, data=resolved(config.eval.data, saved_eval))
    except UserError as error:
        raise UserError(about_held_out(str(error))) from error
    return dataclasses.replace(config, data=data, eval=held_out)


def fields_with(
    name_or_path: str | None = None, overrides: Overrides = NO_OVERRIDES
) -> dict[str, Field]:
    """All fields by dotted name, with those of the plug-ins that a file and overrides select."""
    try:
        layers = [] if name_or_path is None else read_chain(name_or_path)
    except UserError:
        layers = []
    return _selected_fields(layers, overrides)


def check_overrides(overrides: Any) -> None:
    """Raises a UserError unless overrides are values by field."""
    if not isinstance(overrides, Mapping):
        way = 'values by field, such as {"run.steps": 10}'
        raise UserError(f"overrides={overrides!r} must be a dict of {way}")


def _load[C: Sections](
    cls: type[C], layers: Layers, overrides: Overrides = NO_OVERRIDES, stored: bool = False
) -> C:
    check_overrides(overrides)
    for _, values in layers:
        all_fields(values)  # loads their plug-ins, so that options of those are known
    fields = _selected_fields(layers, overrides)
    layer, problems = _override_layer(overrides, fields)
    return cls(**Builder([layer, *layers], fields, problems, stored).sections())


def _selected_fields(layers: Layers, overrides: Overrides) -> dict[str, Field]:
    untyped, _ = _override_layer(overrides, {})
    return all_fields(with_data_of_training(merged([untyped, *layers])[0])[0])


def _override_layer(overrides: Overrides, fields: Mapping[str, Field]) -> tuple[Layer, list[str]]:
    """The table of the overrides, and the problems of texts that cannot be parsed."""
    is_text = all(isinstance(value, str) or value is ... for value in overrides.values())
    label, table, problems = "command line" if is_text else "overrides", {}, []
    for name, value in overrides.items():
        *folders, leaf = name.split(".")
        inner: dict[str, Any] = table
        for folder in folders:
            if not isinstance(inner.get(folder), dict):
                inner[folder] = {}
            inner = inner[folder]
        try:
            inner[leaf] = _parsed(name, value, fields.get(name))
        except UserError as error:
            problems.append(f"{label}: {error}")
    return (label, table), problems


def _parsed(name: str, given: Any, field: Field | None) -> Any:
    """The value of an override; a `field` of None has an unknown type.

    Accepts `none`, booleans in any case, strings without quotes and single items of lists.
    """
    kinds = frozenset() if field is None else field.kinds
    if given is ...:
        if field is None or bool in kinds:
            return True
        raise UserError(f"{name} needs a value: --{name}=VALUE")
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        return text
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
