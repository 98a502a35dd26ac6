"""Checksums of the bits of gradients and of the state, of each layer and on each device.

Also what a guarded step decides on the devices: whether its update is applied.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from numpy.typing import ArrayLike

from mtraining_jax.models.huggingface.checksums import checksum
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.parallel.host_memory import by_memory, map_layers, to_device
from mtraining_jax.training.optimizer import Parameters
from mtraining_jax.training.state import PINNED_HOST, StateBuilder, TrainState


def gradient_sums(gradients: Parameters) -> dict[str, Array]:
    """The checksum of each gradient, uint32 [], or [L] of layers."""
    here, there = by_memory(gradients)
    sums = {name: _sums(name, x) for name, x in here.items()}
    sums |= map_layers(lambda x: {name: checksum(to_device(x[name])) for name in x}, there)
    return {name: sums[name] for name in gradients}


def digest(sums: Iterable[Array]) -> Array:
    """The checksum of checksums, uint32 []."""
    return checksum(jnp.concatenate([jnp.ravel(x) for x in sums]))


def _sums(name: str, x: Array) -> Array:
    return jax.vmap(checksum)(x) if name.startswith(LAYERS) else checksum(x)


class StateSums:
    """Sums of parameters and moments in device memory, on each device of the mesh.

    `names` are of the N sums of a device: an array of layers has one for each layer.
    """

    def __init__(self, builder: StateBuilder) -> None:
        self._mesh = mesh = builder.mesh
        self._paths, self._specs, self.names, firsts = [], [], [], []
        for path, x in jax.tree_util.tree_leaves_with_path(builder.abstract()):
            name = getattr(path[-1], "key", "")
            if not name or x.sharding.memory_kind == PINNED_HOST:
                continue
            moment = next((p.name for p in path if getattr(p, "name", "") in ("mu", "nu")), None)
            label = name if moment is None else f"{moment} of {name}"
            stacked = name.startswith(LAYERS)
            layers = [f" in layer {i}" for i in range(x.shape[0])] if stacked else [""]
            self._paths.append(path)
            self._specs.append(x.sharding.spec)
            self.names += [label + layer for layer in layers]
            firsts += [_first_with_the_same(mesh, x.sharding.spec)] * len(layers)
        self._firsts = np.stack(firsts, axis=1)

    def __call__(self, state: TrainState) -> Array:
        """The sums, uint32 [D, N], of devices in the order of the mesh."""
        leaves = dict(jax.tree_util.tree_leaves_with_path(state))
        # Of what is in memory, not of values on their way there.
        held = lax.optimization_barrier([leaves[path] for path in self._paths])

        def on_device(*arrays: Array) -> Array:
            sums = [_sums(path[-1].key, x) for path, x in zip(self._paths, arrays, strict=True)]
            return jnp.concatenate([jnp.ravel(x) for x in sums])[None]

        everywhere = P(self._mesh.axis_names)
        return jax.shard_map(
            on_device,
            mesh=self._mesh,
            in_specs=tuple(self._specs),
            out_specs=everywhere,
            check_vma=False,
        )(*held)

    def differ(self, sums: Any) -> Any:
        """Where a device has other bits than the first one with the same shard, bool [D, N]."""
        return sums != sums[self._firsts, np.arange(len(self.names))]

    def places(self, wrong: np.ndarray) -> str:
        """Names the devices and arrays of a bool [D, N], the first ones of many."""
        devices, arrays = (np.flatnonzero(wrong.any(axis)) for axis in (1, 0))
        names = [self.names[i] for i in arrays]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        found = [self._mesh.devices.flat[i] for i in devices]
        where = ", ".join(f"device {x.id} (process {x.process_index})" for x in found[:3])
        where += f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"{', '.join(names[:3])}{more} on {where}"


def _first_with_the_same(mesh: Any, spec: P) -> np.ndarray:
    """For each device, the first one that holds the same shard of an array, int [D]."""
    parts = ((axes,) if isinstance(axes, str) else axes or () for axes in spec)
    sharded = {axis for axes in parts for axis in axes}
    numbers = np.arange(mesh.size).reshape(mesh.devices.shape)
    for axis, name in enumerate(mesh.axis_names):
        if name not in sharded:
            numbers = np.broadcast_to(numbers.take([0], axis), numbers.shape)
    return numbers.ravel()


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
    loss_limit, norm_limit = lax.bitcast_convert_type(inputs.control[2:4], jnp.float32)
    accepted = jnp.any(inputs.control[4:] == digest)
    suspect = hold | ~(loss <= loss_limit) | ~(norm <= norm_limit)
    return damaged | jnp.where(repeats, ~accepted, inputs.held | suspect)
