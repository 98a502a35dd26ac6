"""`fit`: trains according to a configuration, with all tools that it asks for."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optax
from jax.sharding import Mesh

from mtraining_jax.callbacks import Callback, Result, State
from mtraining_jax.config import Config
from mtraining_jax.data.loader import Loader
from mtraining_jax.tools.audit.alarms import Alarms
from mtraining_jax.tools.audit.auditing import build_audit
from mtraining_jax.tools.audit.masks import Masks
from mtraining_jax.tools.balance.replica_load import (
    ReplicaLoad,
    balance_of,
    measures_by_length,
    replicas_differ,
)
from mtraining_jax.tools.balance.tuner import Tuner
from mtraining_jax.tools.cluster.verify import verify
from mtraining_jax.tools.export.state import export_checkpoint, export_state
from mtraining_jax.tools.report.page import page_of_finished_run
from mtraining_jax.training import run as core
from mtraining_jax.training.loop.trainer import Given
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.training.tools import Tools
from mtraining_jax.utils.signals import StopSignals

_NOTHING = Given()


class AllTools(Tools):
    """The tools of this package, as a configuration asks for them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.balance, self.by_length = balance_of(config), measures_by_length(config)
        self.observer = build_audit(config)

    def before(self, loader: Loader | None, mesh: Mesh) -> Sequence[Callback]:
        config, found = self.config, list[Callback]()
        if loader is not None and replicas_differ(config):
            tunes = config.sparsity.tune != "none"
            found.append(Tuner(config, loader, mesh) if tunes else ReplicaLoad(config, loader))
        return [*found, Alarms(config)]

    def after(self) -> Sequence[Callback]:
        return [Masks(self.config)] if self.config.audit.masks else []

    def verify(self, watchdog: HangWatchdog) -> None:
        verify(self.config, watchdog.watch, self.config.run.step_timeout_seconds)

    def export(self, builder: StateBuilder, state: TrainState, eos: Sequence[int]) -> list[Path]:
        return export_state(self.config, builder, state, eos)

    def export_checkpoint(self, step: int) -> list[Path]:
        return export_checkpoint(self.config, step)

    def page(self) -> str:
        return page_of_finished_run(self.config.run.folder)


def fit(
    config: Config,
    *,
    data: Iterator[Mapping[str, Any]] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    callbacks: Sequence[Callback] = (),
    state: State | None = None,
) -> Result:
    """Trains according to a configuration, from the newest checkpoint if there is one.

    Everything that can be checked is checked before the first step. In a notebook, Ctrl-C raises an
    error at once, and the same call resumes from the newest checkpoint. On several hosts, every
    process calls this with the same arguments, after nothing that starts JAX's devices.

    Args:
        config: the configuration of the run.
        data: batches in place of `[data]`: dicts of NumPy arrays of this process's sequences, int32
            [b, data.seq_len] each, with all tokens in their order. `tokens` are ids; `labels` are
            the next tokens, -100 where none is trained, and by default follow from the tokens;
            `documents`, a `Documents` table with `data.mask_documents`, are those of each sequence.
            b is data.batch_size divided by the processes that share it. With `get_state` and
            `set_state` (JSON values, as Grain's iterators have them), a resumed run continues with
            the right batch; without, it reads the data again from its start, and says so.
        optimizer: any optax transformation in place of `[optimizer]`'s, with its learning rate. It
            gets fp32 gradients, clipped by `optimizer.clip_norm`, as a flat dict by dotted name;
            those of all layers are stacked.
        callbacks: see `Callback`.
        state: arrays to start from in place of model.init_from, such as the `state` of an earlier
            result; they are donated. The optimizer's state continues, but steps, and with them the
            schedule of `[optimizer]`, begin at 1. Only for a run without a checkpoint to resume
            from.

    Returns:
        Records, the last state, and what was written.

    Raises:
        UserError: for any error that the user can correct, before or during the run.
    """
    return run(config, Given(data, optimizer, tuple(callbacks), state))


def run(config: Config, given: Given = _NOTHING, signals: StopSignals | None = None) -> Result:
    """Runs `fit`, and ends after a step at a stop signal of the command.

    Without `signals` only SIGTERM does that, with several processes.

    Raises:
        UserError: as for `fit`.
        Stopped: after a stop signal, when everything is written.
    """
    return core.run(config, AllTools, given, signals)
