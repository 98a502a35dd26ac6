"""What a run leaves to tools."""

from collections.abc import Sequence
from pathlib import Path

from jax.sharding import Mesh

from mtraining_jax.callbacks import Callback
from mtraining_jax.config import Config
from mtraining_jax.data.balance import Balance
from mtraining_jax.data.loader import Loader
from mtraining_jax.training.loop.watchdog import HangWatchdog
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.training.step import StepObserver


class Tools:
    """What a run leaves to tools: here none of it; `mtraining_jax.trainer` has all of them.

    Attributes:
        balance: how the loader distributes sequences over replicas; None keeps their order.
        by_length: whether steps count computed pairs by document length.
        observer: measures in the layers of every `audit.interval`-th step.
    """

    balance: Balance | None = None
    by_length: bool = False
    observer: StepObserver | None = None

    def __init__(self, config: Config) -> None:
        self.config = config

    def before(self, loader: Loader | None, mesh: Mesh) -> Sequence[Callback]:
        """Callbacks before those of the user; `loader` is None for batches of `fit`."""
        del loader, mesh
        return ()

    def after(self) -> Sequence[Callback]:
        """Callbacks after metrics are written, in the process that writes them."""
        return ()

    def verify(self, watchdog: HangWatchdog) -> None:
        """Raises a UserError in all processes if devices or links compute or move wrong bits."""

    def export(self, builder: StateBuilder, state: TrainState, eos: Sequence[int]) -> list[Path]:
        """Writes a state that ends texts with `eos` for other programs; returns the folders."""
        raise NotImplementedError

    def export_checkpoint(self, step: int) -> list[Path]:
        """Writes a checkpoint of the run for other programs; returns the folders."""
        raise NotImplementedError

    def page(self) -> str | None:
        """Writes the page of a finished run; returns its path, or why there is none."""
