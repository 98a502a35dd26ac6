"""The compiled programs of a run."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from mtraining_jax.reporting.progress import Display
from mtraining_jax.training.memory_check import check_memory


@dataclasses.dataclass(frozen=True)
class Programs:
    """What the devices run.

    Attributes:
        train_step: of `make_train_step`.
        audited_step: the same with an audit; None where the run has none.
        compare_gradients: of `make_gradient_comparison`; None where the run does not ask for it.
    """

    train_step: Callable[..., Any]
    audited_step: Callable[..., Any] | None
    compare_gradients: Callable[..., Any] | None


def compile_programs(
    train_step: Any,
    audited_step: Any | None,
    compare_gradients: Any | None,
    arguments: tuple[Any, Any],
    devices: Iterable[jax.Device],
    display: Display,
) -> Programs:
    """Compiles the training step, and what measures it if the configuration asks for that.

    Args:
        train_step: jitted, of `make_train_step`.
        audited_step: the same with an audit, or None.
        compare_gradients: jitted, of `make_gradient_comparison`, or None.
        arguments: a state and a batch.
        devices: those of this process that the step runs on.
        display: where to print.

    Returns:
        The programs.

    Raises:
        UserError: if one of them takes more memory than a device has.
    """
    programs = []
    for function, what in (
        (train_step, "a training step"),
        (audited_step, "a training step with an audit"),
        (compare_gradients, "the comparison of gradients with dense ones"),
    ):
        if function is None:
            programs.append(None)
            continue
        display.say(f"compiling {what.replace('a training', 'the training')} ...")
        begin = time.perf_counter()
        programs.append(function.lower(*arguments).compile())
        display.say(f"compiled in {time.perf_counter() - begin:.1f} s")
        check_memory(programs[-1], devices, what)
    return Programs(*programs)
