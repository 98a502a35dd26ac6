"""The built-in tasks, and how to make tasks from names."""

import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mtraining_jax.tools.evaluate.tasks.published.infinitebench import InfiniteBench
from mtraining_jax.tools.evaluate.tasks.published.longbench import LongBench
from mtraining_jax.tools.evaluate.tasks.ruler.needles import VARIANTS
from mtraining_jax.tools.evaluate.tasks.task import Task
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import Field, fields_of
from mtraining_jax.utils.plugins import Registry

_HERE = "mtraining_jax.tools.evaluate.tasks"
_NEEDLES = tuple(VARIANTS)
_INFINITEBENCH = tuple(f"infinitebench_{part}" for part in InfiniteBench.parts)
_LONGBENCH = tuple(f"longbench_{part}" for part in LongBench.parts)
# Groups of tasks. "ruler_generated" needs no files.
_GENERATED = (*_NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe")
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": (*_GENERATED, "ruler_qa_1", "ruler_qa_2"),
    "ruler_generated": _GENERATED,
    "infinitebench": _INFINITEBENCH,
    "longbench": _LONGBENCH,
}
TASKS = Registry(
    "task",
    base=f"{_HERE}.task:Task",
    built_in={
        "needle": f"{_HERE}.needle:Needle",
        "passkey": f"{_HERE}.needle:Passkey",
        "mqar": f"{_HERE}.recall:AssociativeRecall",
        **dict.fromkeys(_NEEDLES, f"{_HERE}.ruler.needles:RulerNeedles"),
        "ruler_vt": f"{_HERE}.ruler.tracking:VariableTracking",
        "ruler_cwe": f"{_HERE}.ruler.counting:CommonWords",
        "ruler_fwe": f"{_HERE}.ruler.counting:FrequentWords",
        "ruler_qa_1": f"{_HERE}.ruler.questions:QuestionAnswering",
        "ruler_qa_2": f"{_HERE}.ruler.questions:QuestionAnswering",
        **dict.fromkeys(_INFINITEBENCH, f"{_HERE}.published.infinitebench:InfiniteBench"),
        **dict.fromkeys(_LONGBENCH, f"{_HERE}.published.longbench:LongBench"),
        "longbench_v2": f"{_HERE}.published.longbench:LongBenchV2",
        "documents": f"{_HERE}.documents:LongDocuments",
    },
    groups=GROUPS,
)


def make_tasks(names: Sequence[str], options: Mapping[str, Any]) -> list[Task]:
    """Makes tasks from their names, and checks everything that can be checked before they run.

    Args:
        names: names in `TASKS` or `GROUPS`, or your own task as `package.module:Name`.
        options: values or texts by field. Each task takes the options that it has.

    Raises UserError for an unknown name or option, an invalid value, or a problem of a task.
    """
    single = dict.fromkeys(one for name in names for one in GROUPS.get(name, (name,)))
    classes = {name: TASKS.get(name) for name in single}
    known = {option.name for cls in classes.values() for option in _options(cls)}
    for name in sorted(options.keys() - known):
        has = f"use {', '.join(sorted(known))}" if known else "they have no options"
        raise UserError(f'unknown option "{name}" of the tasks {", ".join(names)}; {has}')
    tasks = [_make(name, cls, options) for name, cls in classes.items()]
    for task in tasks:
        task.check()
    return tasks


def option_docs(cls: type[Task]) -> dict[str, str]:
    """Returns the options of a task with their description and default."""
    return {
        name: doc if default is None else f"{doc} (default: {default})"
        for name, doc, default in ((x.name, x.doc, x.default) for x in _options(cls))
    }


def _options(cls: type[Task]) -> list[Field]:
    return [field for field in fields_of(cls).values() if field.name != "name"]


def _make(name: str, cls: type[Task], options: Mapping[str, Any]) -> Task:
    hints = typing.get_type_hints(cls)  # without limits, which the task itself checks
    values = {}
    for option in _options(cls):
        if option.name in options:
            value = options[option.name]
            try:
                values[option.name] = TypeAdapter(hints[option.name]).validate_python(value)
            except ValidationError as error:
                message = error.errors()[0]["msg"]
                raise UserError(
                    f'option {option.name} = "{value}" of task "{name}": {message}'
                ) from None
    try:
        return cls(name=name, **values)
    except ValueError as error:
        raise UserError(f'task "{name}": {error}') from None
