"""What a run leaves to tools, which `mtraining_jax.trainer` provides."""

import abc
from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from mtraining_jax.callbacks import Callback
from mtraining_jax.data.balance import Balance
from mtraining_jax.data.loader import Loader
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.training.step import StepObserver


class Tools(abc.ABC):
    """What a run leaves to tools.

    Attributes:
        balance: how the loader distributes sequences over replicas; None keeps their order.
        by_length: whether steps count computed pairs by document length.
        observer: measures in the layers of every `audit.interval`-th step.
    """

    balance: Balance | None
    by_length: bool
    observer: StepObserver | None

    @abc.abstractmethod
    def before(self, loader: Loader | None, mesh: Mesh) -> Sequence[Callback]:
        """Callbacks before those of the user; `loader` is None for batches of `fit`."""

    @abc.abstractmethod
    def after(self) -> Sequence[Callback]:
        """Callbacks after metrics are written, in the process that writes them."""

    @abc.abstractmethod
    def verify(self, watchdog: HangWatchdog) -> None:
        """Raises a UserError in all processes if devices or links compute or move wrong bits."""

    @abc.abstractmethod
    def export(self, builder: StateBuilder, state: TrainState, eos: Sequence[int]) -> list[Path]:
        """Writes a state that ends texts with `eos` for other programs; returns the folders."""

    @abc.abstractmethod
    def export_checkpoint(self, step: int) -> list[Path]:
        """Writes a checkpoint of the run for other programs; returns the folders."""

    @abc.abstractmethod
    def page(self) -> str:
        """Writes the page of a finished run; returns its path, or why there is none."""
