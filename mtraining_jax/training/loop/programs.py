"""The compiled programs of a run."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from mtraining_jax.config import Config
from mtraining_jax.reporting.progress import Display
from mtraining_jax.training.memory_check import check_memory


@dataclasses.dataclass(frozen=True)
class Programs:
    """What the devices run.

    Attributes:
        train_step: of `make_train_step`.
        measure_recall: of `make_recall`; None where recall is not measured.
    """

    train_step: Callable[..., Any]
    measure_recall: Callable[..., Any] | None


def compile_programs(
    config: Config,
    train_step: Any,
    measure_recall: Any,
    arguments: tuple[Any, Any],
    devices: Iterable[jax.Device],
    display: Display,
) -> Programs:
    """Compiles the training step, and what measures recall if the configuration asks for it.

    Args:
        config: of the run.
        train_step: jitted, of `make_train_step`.
        measure_recall: jitted, of `make_recall`.
        arguments: a state and a batch.
        devices: those of this process that the step runs on.
        display: where to print.

    Returns:
        The programs.

    Raises:
        UserError: if the step takes more memory than a device has.
    """
    display.say("compiling the training step ...")
    begin = time.perf_counter()
    step = train_step.lower(*arguments).compile()
    recall = None
    # Dense attention keeps all of the mass.
    if config.metrics.recall_every and config.sparsity.settings.sparse:
        recall = measure_recall.lower(*arguments).compile()
    display.say(f"compiled in {time.perf_counter() - begin:.1f} s")
    check_memory(step, devices)
    return Programs(step, recall)
