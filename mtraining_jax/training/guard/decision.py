"""What a guarded step decides on the devices: whether its update is applied."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import ArrayLike


class GuardInputs(NamedTuple):
    """Arguments of a guarded step: arrays, or their shapes."""

    control: Any  # uint32 [6], from `control`
    state_sums: Any  # uint32 [D, N], of the state as the step before left it
    held: Any  # bool, whether the step before was held


class Findings(NamedTuple):
    """Results of a guarded step. A step that is held leaves the state as it was."""

    held: Array  # bool
    damaged: Array  # bool: the state was not as the step before had left it
    split: Array  # bool: devices have different copies of the state after the step
    state_sums: Array  # uint32 [D, N], after the step
    gradient_sums: dict[str, Array]
    digest: Array  # uint32 [], of the gradients and the loss


def control(hold: bool, repeats: bool, limits: ArrayLike, accepted: Sequence[int]) -> np.ndarray:
    """Packs what the host decides: uint32 [6].

    Args:
        hold: whether to hold the step in any case.
        repeats: whether it is another pass of a step that was held, applied only if its digest is
            one of the `accepted` ones, at most two.
        limits: loss and gradient norm above which a first pass is held.
    """
    digests = np.array([*accepted[:1], *accepted[-1:]] or [0, 0], np.uint32)
    words = np.array([hold, repeats], np.uint32), np.asarray(limits, np.float32).view(np.uint32)
    return np.concatenate([*words, digests])


def is_held(inputs: GuardInputs, damaged: Array, digest: Array, loss: Array, norm: Array) -> Array:
    """Whether a step is held: the state is damaged, the step before was held, or it looks wrong."""
    hold, repeats = (inputs.control[i] > 0 for i in (0, 1))
    of_loss, of_norm = lax.bitcast_convert_type(inputs.control[2:4], jnp.float32)
    accepted = jnp.any(inputs.control[4:] == digest)
    suspect = hold | ~(loss <= of_loss) | ~(norm <= of_norm)
    return damaged | jnp.where(repeats, ~accepted, inputs.held | suspect)
