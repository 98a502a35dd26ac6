"""The section `eval.data`: its defaults from `data`, and the configuration of an evaluation."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mtraining_jax.config.schema import Sections
from mtraining_jax.config.sections import AuditConfig, DataConfig
from mtraining_jax.utils.fields import fields_of


def with_data_of_training(table: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Fills unset fields of `eval.data`, if present, from `data`; also returns their names."""
    match {"data": {}, **table}:
        case {"eval": {"data": dict() as given} as held_out, "data": dict() as data}:
            pass
        case _:
            return dict(table), set()
    inherited = {
        name: value
        for name, value in data.items()
        # Evaluations do not reorder sequences, and options of a source belong to that source.
        if name != "balance" and ("source" not in given or name in fields_of(DataConfig))
    }
    filled = {f"eval.data.{name}" for name in inherited.keys() - given.keys()}
    return {**table, "eval": {**held_out, "data": inherited | given}}, filled


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
