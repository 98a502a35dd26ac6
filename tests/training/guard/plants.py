"""Plants transient faults of devices into a run: bits that flip once."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mtraining_jax.parallel.ring.topology import RingAxis
from mtraining_jax.training import step as steps
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.loop import programs, trainer
from mtraining_jax.training.loop.programs import compile_programs
from mtraining_jax.training.loop.trainer import Trainer

GRADIENT, KV, PARAMETER, MOMENT = KINDS = ("gradient", "kv", "parameter", "moment")


@dataclasses.dataclass
class Fault:
    """Flips `bit` of a word, fp32, before or in the first of `passes` of a step."""

    step: int
    kind: str
    word: int
    bit: int
    array: int = 0  # of the gradients or parameters, by their sorted names
    device: int = 0
    passes: int = 1  # how many passes of the step it spoils
    moves: bool = False  # whether each pass has it in another word


class Plants:
    """What is planted now; programs read it when they run."""

    def __init__(self):
        self.faults, self.now, self.fired = [], None, []

    def of_kv(self):
        fault = self.now
        on = fault is not None and fault.kind == KV
        return np.array([on, on and fault.word, 1 << (fault.bit if on else 0)], np.uint32)

    def of_gradients(self):
        fault = self.now
        on = fault is not None and fault.kind == GRADIENT
        values = (1, fault.array, fault.word, 1 << fault.bit) if on else (0, 0, 0, 0)
        return np.array(values, np.uint32)


PLANTS = Plants()
_compiled = {}


def compiled_once(programs, arguments, *others):
    """Compiles the programs of the first run, for all."""
    if not _compiled:
        _compiled.update(compile_programs(programs, arguments, *others))
    return _compiled


def _flip(x, word, mask):
    words = lax.bitcast_convert_type(x, jnp.uint32).ravel()
    words = words.at[word % words.size].set(words[word % words.size] ^ mask)
    return lax.bitcast_convert_type(words, jnp.float32).reshape(x.shape)


def flipped(x, fault):
    """The array with a flipped bit in the memory of one device."""
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == fault.device:
            data.view(np.uint32).reshape(-1)[fault.word % data.size] ^= np.uint32(1 << fault.bit)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@contextlib.contextmanager
def planted(faults):
    """Plants faults into all runs of the block, which share their compiled programs."""
    plants = PLANTS
    plants.faults, plants.now, plants.fired = list(faults), None, []
    dispatch, make_gradients, read = Trainer._dispatch, steps.make_gradients, DeviceBatches.__next__
    shift = RingAxis.shift

    def of_gradients(*args, **kwargs):
        inner = make_gradients(*args, **kwargs)

        def gradients_of(trained, frozen, batch, rows):
            batch = dict(batch)
            on, array, word, mask = batch.pop("plant")
            loss, gradients, layers = inner(trained, frozen, batch, rows)
            changed = {
                name: jnp.where((on > 0) & (array == i), _flip(x, word, mask), x)
                for i, (name, x) in enumerate(sorted(gradients.items()))
            }
            return loss, changed, layers

        return gradients_of

    def next_batch(self):
        return read(self) | {"plant": plants.of_gradients()}

    def dispatched(self, step):
        plants.now, held = None, len(step.digests)
        for fault in plants.faults:
            if fault.step == step.number and held < fault.passes:
                if held == 0 and fault in plants.fired:
                    continue
                plants.now = dataclasses.replace(fault, word=fault.word + held * fault.moves)
                plants.fired.append(fault)
        if (now := plants.now) is not None and now.kind in (PARAMETER, MOMENT):
            state = self._state
            tree = state.parameters if now.kind == PARAMETER else state.opt_state[0].nu
            name = sorted(tree)[now.array % len(tree)]
            tree[name] = flipped(tree[name], now)
        step.batch = {**step.batch, "plant": plants.of_gradients()}
        dispatch(self, step)
        jax.block_until_ready(self._state)

    def spoiled(self, tree):
        moved = shift(self, tree)
        on, word, mask = jax.pure_callback(plants.of_kv, jax.ShapeDtypeStruct((3,), jnp.uint32))
        here = (lax.axis_index(self.names) == 0) & (on > 0)
        return jax.tree.map(lambda x: jnp.where(here, _flip(x, word, mask), x), moved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "make_gradients", of_gradients)
        patch.setattr(DeviceBatches, "__next__", next_batch)
        patch.setattr(Trainer, "_dispatch", dispatched)
        patch.setattr(RingAxis, "shift", spoiled)
        patch.setattr(trainer, "compile_programs", compiled_once)
        patch.setattr(programs, "make_train_step", steps.make_train_step)
        yield plants
