"""Proposes a sparse pattern for training from measurements. Imports no JAX."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of one setting; losses are means in nats."""

    text: str  # the setting as the user wrote it
    density: float
    loss: float
    rise: float  # loss minus the loss with dense attention
    error: float | None  # standard error of the rise over sequences; None with a single one
    copies: float | None  # the rise over far copies only; None if the text has none
    step_seconds: float | None = None  # predicted for training; None if unknown


def proposed(measured: Sequence[Measured], most_rise: float, most_copies: float) -> Measured | None:
    """Returns the fastest setting within both limits, or that of lowest density; None without."""
    within = [
        one
        for one in measured
        if one.rise <= most_rise and (one.copies is None or one.copies <= most_copies)
    ]

    def cost(one: Measured) -> float:
        return one.density if one.step_seconds is None else one.step_seconds

    return min(within, key=cost, default=None)
