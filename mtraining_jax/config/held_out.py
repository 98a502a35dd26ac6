"""The section `eval.data`: its defaults from `data`, and the configuration of an evaluation."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mtraining_jax.config.schema import AuditConfig, Config, DataConfig
from mtraining_jax.config.sections import assembled


def with_data_of_training(table: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Fills unset fields of `eval.data`, if present, from `data`; does not modify `table`.

    Returns:
        The completed table, and the dotted names of the filled fields.
    """
    held_out, data = table.get("eval"), table.get("data", {})
    if not isinstance(held_out, dict) or not isinstance(data, dict):
        return dict(table), set()
    given = held_out.get("data")
    if not isinstance(given, dict):
        return dict(table), set()
    of_sources = assembled(DataConfig).owners if "source" in given else ()
    excluded = {*of_sources, "balance"}  # evaluations do not reorder sequences
    inherited = {name: value for name, value in data.items() if name not in excluded}
    filled = {f"eval.data.{name}" for name in inherited.keys() - given.keys()}
    return {**table, "eval": {**held_out, "data": inherited | given}}, filled


def evaluation_of(config: Config) -> Config:
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
