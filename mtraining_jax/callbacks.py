"""Callbacks, which a run calls in addition to its steps: its own reports, and those of users.

See docs/training-from-python.md for recipes.
"""

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from jax import Array
from jax.sharding import Mesh

from mtraining_jax.config import Config

Record = dict[str, Any]  # the metrics of a step, JSON-serializable: docs/metrics.md


class State(Protocol):
    """The arrays of a run after a step, a pytree. The next step donates them."""

    @property
    def step(self) -> Array:
        """Steps taken so far, int32 []."""
        ...

    @property
    def parameters(self) -> dict[str, Array]:
        """Parameters of a checkpoint, fp32 by dotted name; with LoRA, the adapters.

        Those of all layers are stacked: `layers.self_attn.q_proj.weight` has a leading axis [L].
        """
        ...

    @property
    def model(self) -> dict[str, Array]:
        """All parameters of the model by dotted name, frozen ones too."""
        ...

    @property
    def base(self) -> dict[str, Array]:
        """Frozen parameters below LoRA adapters, which checkpoints do not have."""
        ...

    @property
    def opt_state(self) -> Any:
        """State of the optimizer."""
        ...


@dataclasses.dataclass
class Run:
    """What callbacks know about their run.

    Attributes:
        config: its configuration.
        mesh: its devices, with the axes ("data", "node", "device").
        is_first: whether this is the process that prints and writes.
        say: prints a line, in that process.
        alive: restarts the time limit `run.step_timeout_seconds` of a callback that takes long.
    """

    config: Config
    mesh: Mesh
    is_first: bool
    say: Callable[[str], None]
    alive: Callable[[], None] = lambda: None
    _reported: int = 0  # the step that callbacks are called for
    _stop: tuple[int, str] | None = None

    def stop(self, why: str) -> None:
        """Ends the run early, with a checkpoint if it writes any; the first call counts.

        The next step may have begun and is taken, too. With several processes, all of them must
        call this for the same step, which they do if they decide by its record, without times.
        """
        if self._stop is None:
            self._stop = self._reported, why

    def reports(self, step: int) -> None:
        """Called before the callbacks of each step."""
        self._reported = step

    def stops_after(self, step: int) -> str | None:
        """Why the run ends, if that was decided in a step up to `step`."""
        return None if self._stop is None or self._stop[0] > step else self._stop[1]


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves.

    Attributes:
        records: those of the last 1000 steps of this call; none if the run was complete before.
        state: arrays after the last step; None if the run was complete before.
        stopped: what a callback gave as the reason to stop early.
        places: files and folders that were written, as printed.
    """

    records: Sequence[Record]
    state: State | None
    stopped: str | None = None
    places: Sequence[str] = ()


class Callback:
    """Base class of callbacks. Every method does nothing, and all processes call all of them.

    For each finished step, in this order: `measured`, then for each callback `with_state`, if it
    wants the state, and `step`. This happens in a thread of its own, while the devices take the
    next step; an exception ends the run. The callbacks of users come after validation and before
    metrics are written. A class with `save` may set `key`, the name of its entry in checkpoints.
    """

    def loss(self, hidden: Array, lm_head: Array, batch: Mapping[str, Any]) -> Mapping[str, Array]:
        """Terms to add to the loss of a step, fp32 [] by name; traced, once per micro-batch.

        Each is a mean over the sequences it is given, and the record has the mean of all under its
        name (`loss` remains the cross-entropy). With `jax.lax.stop_gradient` it is only recorded.

        Args:
            hidden: [B, S, D] normalized hidden states of the last layer.
            lm_head: [V, D] weight of the output layer.
            batch: int32 [B, S] `tokens` and `labels` (-100: not trained), in the order of the run's
                layout, and what else the run needs.
        """
        del hidden, lm_head, batch
        return {}

    def restore(self, step: int, saved: Any) -> None:
        """Takes what `save` returned for the checkpoint of a step; None if it has nothing."""

    def start(self, run: Run, state: State) -> None:
        """Called once before the first step, while programs are compiled."""

    def batch(self, step: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the batch of a step, before it is taken; arrays are those of `loss`."""
        del step
        return batch

    def measured(self, metrics: MutableMapping[str, Any]) -> Record:
        """Returns entries of a step's record, from its metrics as NumPy arrays."""
        del metrics
        return {}

    def wants_state(self, step: int) -> bool:
        """Whether to call `with_state` after a step, which then delays the next one.

        Step 0 is the state before the first step of a new run.
        """
        del step
        return False

    def with_state(self, step: int, state: State) -> Record:
        """Returns entries of a step's record, from the state after it."""
        del step, state
        return {}

    def initial(self, record: Record) -> None:
        """Called with what `with_state` returned before the first step, if anything."""

    def step(self, record: Record) -> Record | None:
        """Takes the record of a step so far; may return more entries for it."""

    def save(self) -> Any:
        """Returns a JSON value to keep in a checkpoint, the same in all processes; None: none."""

    def saved(self, step: int) -> None:
        """Called when a checkpoint is being written, which may take longer than this call."""

    def end(self, result: Result) -> None:
        """Called once after the last step, unless the run fails."""

    def close(self) -> None:
        """Called at the end in any case, in reverse order; also if `start` was not called."""
