"""The compiled programs of a run."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import Mesh

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.config import Config
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.reporting.progress import Display
from mtraining_jax.training.build import build_attention
from mtraining_jax.training.memory_check import check_memory, pinning_notice
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import LossTerms, StepObserver, make_train_step

_DESCRIPTIONS = {
    "train_step": "a training step",  # audited if every step is audited
    "audited_step": "a training step with an audit",  # if only some steps are audited
    "dense_step": "a training step with dense attention",  # of a sparse run
}
Programs = dict[str, Callable[..., Any]]  # those that some step needs, by name


def make_programs(
    config: Config,
    builder: StateBuilder,
    mesh: Mesh,
    layout: Layout,
    pattern: Pattern,
    done: int,
    loss_terms: LossTerms = (),
    observer: StepObserver | None = None,
    by_length: bool = False,
) -> Programs:
    """Builds the programs that the steps after `done` need, jitted but not compiled.

    `observer` measures in every `audit.interval`-th step.
    """
    given = {"mesh": mesh, "loss_terms": loss_terms}
    make_step = functools.partial(make_train_step, config, builder, **given)
    programs, num_dense = {}, config.dense_steps.count(done)
    has_sparse = num_dense < config.run.steps - done  # only these are audited
    if has_sparse:
        attention = build_attention(config, mesh, layout, pattern, by_length)
        inputs = AttentionInputs(pattern)
        how = {"attention": attention, "attention_inputs": inputs}
        always = config.audit.interval == 1
        programs["train_step"] = make_step(**how, observer=observer if always else None)
        if observer is not None and not always:
            programs["audited_step"] = make_step(**how, observer=observer)
    if num_dense:
        attention = build_attention(config, mesh, layout, Dense(pattern.block_size), by_length)
        programs["dense_step"] = make_step(attention=attention)
    return programs


def compile_programs(
    programs: Programs, arguments: tuple[Any, ...], devices: Iterable[Any], display: Display
) -> Programs:
    """Compiles the programs of a run for `arguments`; checks their memory.

    They are a state, a batch and optionally `GuardInputs`.
    """
    compiled = {}
    for name, program in programs.items():
        what = _DESCRIPTIONS[name]
        display.say(f"compiling {what.replace('a training', 'the training')} ...")
        begin = time.perf_counter()
        compiled[name] = program.lower(*arguments).compile()
        display.say(f"compiled in {time.perf_counter() - begin:.1f} s")
        check_memory(compiled[name], devices, what)
        if notice := pinning_notice(compiled[name], devices):
            display.say(notice)
    return compiled
