"""The section `eval.data`: what it takes over from `data`, and the run as an evaluation sees it."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from mtraining_jax.config.schema import AuditConfig, Config, DataConfig
from mtraining_jax.config.sections import assembled


def with_data_of_training(table: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the section `eval.data` of a table, where there is one, from `data`.

    Args:
        table: values by section and field, not yet checked.

    Returns:
        `table`, or a copy of it with another section `eval`.
    """
    held_out, data = table.get("eval"), table.get("data", {})
    if not isinstance(held_out, dict) or not isinstance(data, dict):
        return dict(table)
    given = held_out.get("data")
    if not isinstance(given, dict):
        return dict(table)
    of_sources = assembled(DataConfig).owners if "source" in given else ()
    # A batch is evaluated in the order of the data.
    left_out = {*of_sources, "balance"}
    taken = {name: value for name, value in data.items() if name not in left_out}
    return {**table, "eval": {**held_out, "data": taken | given}}


def evaluation_of(config: Config) -> Config:
    """The run with held-out data in place of its own: sizes, layout and batches follow from it.

    Args:
        config: of a run that evaluates.
    """
    return dataclasses.replace(
        config,
        data=config.eval.data,
        optimizer=dataclasses.replace(config.optimizer, accumulation_steps=1),
        audit=AuditConfig(),
    )


def about_held_out(problem: str) -> str:
    """A sentence about fields of `data` as one about those of `eval.data`."""
    return re.sub(r"(?<![\w.])data\.(?=[a-z])", "eval.data.", problem)
