"""The compiled programs of a run."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import Mesh

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.config import Config
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.reporting.progress import Display
from mtraining_jax.training.audit import audits_steps
from mtraining_jax.training.build import build_attention
from mtraining_jax.training.gradient_comparison import make_gradient_comparison
from mtraining_jax.training.memory_check import check_memory
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step

_DESCRIPTIONS = {
    "train_step": "a training step",
    "audited_step": "a training step with an audit",
    "dense_step": "a training step with dense attention",
    "compare_gradients": "the comparison of sparse and dense gradients",
}


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of a run; None for a program that no step needs."""

    train_step: Callable[..., Any] | None = None  # audited if every step is audited
    audited_step: Callable[..., Any] | None = None  # if only some steps are audited
    dense_step: Callable[..., Any] | None = None  # for the dense steps of a sparse run
    compare_gradients: Callable[..., Any] | None = None


def make_programs(
    config: Config, builder: StateBuilder, mesh: Mesh, layout: Layout, pattern: Pattern, done: int
) -> Programs:
    """Builds the programs that the steps after `done` need, jitted but not compiled."""
    num_dense = config.dense_steps.count(done)
    dense_step = None
    if num_dense:
        attention = build_attention(config, mesh, layout, Dense(pattern.block_size))
        dense_step = make_train_step(config, builder, attention, mesh)
    if num_dense == config.run.steps - done:  # only sparse steps are audited
        return Programs(dense_step=dense_step)
    attention = build_attention(config, mesh, layout, pattern)
    make_step = functools.partial(
        make_train_step, config, builder, attention, mesh, AttentionInputs(pattern)
    )
    audits, always = audits_steps(config), config.audit.interval == 1
    return Programs(
        train_step=make_step(audited=audits and always),
        audited_step=make_step(audited=True) if audits and not always else None,
        dense_step=dense_step,
        compare_gradients=make_gradient_comparison(config, builder, mesh, layout),
    )


def compile_programs(
    programs: Programs,
    arguments: tuple[Any, Any],
    devices: Iterable[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    display: Display,
) -> Programs:
    """Compiles the programs of a run for `arguments`, a state and a batch; checks their memory."""
    compiled = {}
    for name, what in _DESCRIPTIONS.items():
        function = getattr(programs, name)
        if function is None:
            continue
        display.say(f"compiling {what.replace('a training', 'the training')} ...")
        begin = time.perf_counter()
        compiled[name] = function.lower(*arguments).compile()
        display.say(f"compiled in {time.perf_counter() - begin:.1f} s")
        check_memory(compiled[name], devices, what)
    return Programs(**compiled)
