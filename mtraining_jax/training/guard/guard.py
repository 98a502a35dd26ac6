"""Decides on the host which steps are repeated, and what the bits of their passes say."""

import dataclasses
import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.callbacks import Record
from mtraining_jax.config import Config
from mtraining_jax.training.guard.gpus import gpus_of_host
from mtraining_jax.training.guard.sums import Findings, GuardInputs, StateSums, control
from mtraining_jax.training.processes.agreement import collect
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.invocation import command_of

FAULTS = "faults.jsonl"


@dataclasses.dataclass
class TakenStep:
    """A step that was dispatched, and may be held."""

    number: int
    program: str
    batch: Mapping[str, Array]
    wants_state: bool  # whether a callback does
    # Of the newest pass: what it was given and what it returned.
    state_sums: Array | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    digests: list[int] = dataclasses.field(default_factory=list)  # of held passes
    sums: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)  # theirs
    notes: Record = dataclasses.field(default_factory=dict)  # for the record of the step


def abstract_inputs(builder: StateBuilder) -> GuardInputs:
    """Shapes and shardings of the arguments of a guarded step."""
    sums, everywhere = StateSums(builder), NamedSharding(builder.mesh, P())
    shapes = (6,), (builder.mesh.size, len(sums.names)), ()
    dtypes = jnp.uint32, jnp.uint32, jnp.bool_
    return GuardInputs(
        *(
            jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    )


class Guard:
    """Repeats steps with an unusual loss or norm, and every `guard.interval`-th step.

    A first pass that is suspicious is held. The second one is applied if its bits are the same;
    else there is a fault, and a third pass decides. All processes call all methods together.
    """

    def __init__(self, config: Config, builder: StateBuilder) -> None:
        self._config, self._guard = config, config.guard
        self._outliers, self.faults = Outliers(), 0
        self._state_sums = StateSums(builder)
        self._everywhere = NamedSharding(builder.mesh, P())

    def start(self, state: TrainState) -> GuardInputs:
        """Sums the bits of the first state; returns arguments of its step, to compile it."""
        sums = jax.jit(self._state_sums, out_shardings=self._everywhere)(state)
        held = jax.jit(lambda: jnp.asarray(False), out_shardings=self._everywhere)()
        self._newest = sums, held
        return GuardInputs(self._place(control(False, False, (0, 0), [])), sums, held)

    def state(self) -> dict[str, Any]:
        """JSON-serializable."""
        return {"outliers": self._outliers.state(), "faults": self.faults}

    def go_to(self, state: Mapping[str, Any] | None) -> None:
        """Restores `state`."""
        if state is not None:
            self._outliers.go_to(state["outliers"])
            self.faults = state["faults"]

    def checks(self, step: int) -> bool:
        """Whether a step is repeated without a suspicion."""
        return bool(self._guard.interval) and step % self._guard.interval == 0

    def inputs(self, step: TakenStep) -> GuardInputs:
        """Arguments of the next pass of a step."""
        again, limits = bool(step.digests), self._outliers.limits()
        how = self.checks(step.number), again, limits, step.digests
        step.state_sums = self._newest[0]
        return GuardInputs(self._place(control(*how)), *self._newest)

    def dispatched(self, step: TakenStep, metrics: Mapping[str, Any]) -> None:
        """Takes the results of a pass."""
        found: Findings = metrics["guard"]
        step.metrics, self._newest = metrics, (found.state_sums, found.held)

    def holds(self, step: TakenStep) -> bool:
        """Waits for the newest pass of a step; returns whether it was held, to be repeated.

        Raises:
            UserError: the state is not what it was, three passes had three results, or there were
                more than `guard.max_faults` faults.
        """
        found: Findings = step.metrics["guard"]
        held, damaged, split, digest = jax.device_get(found[:3] + (found.digest,))
        if damaged or split:
            raise self._damaged(step, found, bool(damaged))
        loss, norm = (float(step.metrics[name]) for name in ("loss", "grad_norm"))
        if not held:
            self._outliers.add(loss, norm)
            if len(step.digests) > 1:
                self._record(step, "step", int(digest))
            return False
        step.digests.append(int(digest))
        step.sums.append(jax.device_get(found.gradient_sums))
        if len(step.digests) == 1:
            self._suspect(step, loss, norm)
        else:
            self._fault(step)
        return True

    def _place(self, x: np.ndarray) -> Array:
        return jax.make_array_from_callback(x.shape, self._everywhere, lambda index: x[index])

    def _suspect(self, step: TakenStep, loss: float, norm: float) -> None:
        step.notes["passes"] = 2
        (loss_limit, norm_limit), same = self._outliers.limits(), "a second pass had the same bits"
        if not loss <= loss_limit:
            what = f"the loss, {loss:.4g}, is above its usual limit, {loss_limit:.4g}"
        elif not norm <= norm_limit:
            found = {x: np.asarray(v) for x, v in step.metrics["parameter_norms"].items()}
            step.notes["parameter_norms"] = {name: _finite(x.tolist()) for name, x in found.items()}
            norms = {x: np.where(np.isnan(v), np.inf, v) for x, v in found.items()}
            name = max(norms, key=lambda x: norms[x].max())
            layer = f" in layer {norms[name].argmax()}" if norms[name].ndim else ""
            what = (
                f"the gradient norm, {norm:.4g}, is above its usual limit, {norm_limit:.4g}, and "
                f"largest, {norms[name].max():.4g}, for {name}{layer}"
            )
        else:
            return
        step.notes["alarms"] = [f"{what}; {same}, so it follows from the data and the parameters"]

    def _fault(self, step: TakenStep) -> None:
        self.faults += 1
        step.notes.pop("parameter_norms", None)
        step.notes["passes"] = 3
        where = _where(*step.sums[-2:])
        step.notes["alarms"] = [
            f"two passes of the step had different bits, in the gradients of {where}: a device is "
            f"faulty; a third pass decided, and {FAULTS} has the details"
        ]
        if len(step.digests) > 2:
            self._record(step, "step", None)
            raise UserError(
                f"three passes of step {step.number} had three results, the last two different in "
                f"the gradients of {where}; {self._way_out}"
            )
        if self.faults > self._guard.max_faults:
            self._record(step, "step", None)
            raise UserError(
                f"step {step.number} had other bits when it was repeated, in the gradients of "
                f"{where}: {self.faults} faults, more than guard.max_faults = "
                f"{self._guard.max_faults}; {self._way_out}"
            )

    @property
    def _way_out(self) -> str:
        command = command_of("check_cluster")
        return f"find the device with {command}, and exclude its host; {FAULTS} has the details"

    def _damaged(self, step: TakenStep, found: Findings, damaged: bool) -> UserError:
        if damaged:
            what = f"the state was not in step {step.number} as the step before had left it"
            wrong = np.asarray(step.state_sums) != np.asarray(found.state_sums)
        else:
            what = f"devices have different copies of the state after step {step.number}"
            wrong = self._state_sums.differ(np.asarray(found.state_sums))
        where = self._state_sums.places(wrong)
        self.faults += 1
        self._record(step, what, None, where)
        return UserError(f"{what}: {where}: a device is faulty; {self._way_out}")

    def _record(
        self, step: TakenStep, what: str, right: int | None, where: str | None = None
    ) -> None:
        hosts = collect(gpus_of_host(), self._config.distributed.timeout_seconds)
        if jax.process_index() == 0:
            record = {
                "step": step.number,
                "what": what,
                "where": where or _where(*step.sums[:2]),
                "digests": step.digests,
                "applied": right,
                "hosts": hosts,
            }
            with (self._config.run.folder / FAULTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


def _finite(x: Any) -> Any:
    if isinstance(x, list):
        return [_finite(y) for y in x]
    return x if math.isfinite(x) else None


def _where(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> str:
    """Names the gradients that differ, the last layer first, where the backward pass begins."""
    found: list[tuple[float, str]] = []
    for name in one:
        layers = np.flatnonzero(np.atleast_1d(one[name] != other[name]))
        if not np.ndim(one[name]):
            found += [(np.inf, name)] * len(layers)
        elif len(layers):
            low, high = layers[0], layers[-1]
            where = f"layer {low}" if low == high else f"layers {low} to {high}"
            found.append((high, f"{name} in {where}"))
    names = [name for _, name in sorted(found, key=lambda x: -x[0])]
    if not names:
        return "no parameter, but in the loss"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_STEPS, _LEAST_STEPS = 50, 10
# Robust deviations from the median, 1.4826 times the median distance, of the loss and of the norm's
# logarithm; and the least distances.
_LOSS, _LEAST_PART = 12, 0.05
_NORM, _LEAST_FACTOR = 6, 5


class Outliers:
    """Losses and gradient norms of the newest steps that were applied.

    Limits are the median loss plus 12 robust standard deviations, but at least 5 % more; and of
    the norms' logarithms the same with 6, but at least 5 times the median norm.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_STEPS)
        self._norms: deque[float] = deque(maxlen=_STEPS)

    def add(self, loss: float, norm: float) -> None:
        """Adds a step, unless its values are not finite, or 0 as without labels."""
        if math.isfinite(loss + norm) and norm > 0:
            self._losses.append(loss)
            self._norms.append(norm)

    def limits(self) -> tuple[float, float]:
        """Largest usual loss and norm; infinite after too few steps."""
        if len(self._norms) < _LEAST_STEPS:
            return math.inf, math.inf
        loss, loss_deviation = _center(self._losses)
        norm, norm_deviation = _center([math.log(x) for x in self._norms])
        above = max(_LOSS * loss_deviation, _LEAST_PART * abs(loss))
        return loss + above, math.exp(norm + max(_NORM * norm_deviation, math.log(_LEAST_FACTOR)))

    def state(self) -> list[list[float]]:
        """JSON-serializable."""
        return [list(self._losses), list(self._norms)]

    def go_to(self, state: Iterable[Iterable[float]]) -> None:
        """Restores `state`."""
        for values, saved in zip((self._losses, self._norms), state, strict=True):
            values.clear()
            values.extend(saved)


def _center(values: Sequence[float]) -> tuple[float, float]:
    """The median, and a robust standard deviation."""
    median = statistics.median(values)
    return median, 1.4826 * statistics.median(abs(x - median) for x in values)
