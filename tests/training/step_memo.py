"""Training steps shared by runs with equal step inputs, built and traced once per process.

Most of the time of such a small run is tracing and lowering a step that an earlier run of the
process already had. The memo compares the inputs of a step, not the result; in test_processes.py,
processes that trace their own steps resume where others have stopped.
"""

import dataclasses
import inspect
from collections import OrderedDict
from typing import Any

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.training.step import make_train_step

_KEPT = 24
_made: OrderedDict[str, Any] = OrderedDict()


def made_once(
    config, builder, attention, mesh, attention_inputs=None, observer=None, loss_terms=()
):
    """`make_train_step`, or its earlier result for equal arguments."""
    how = attention, mesh, attention_inputs, observer, loss_terms
    devices, each_layer = mesh.device_ids.tolist(), attention_inputs is not None
    own = (builder.optimizer if builder.own_rate else None), loss_terms  # compared by identity
    key = repr((_of_step(config), observer, _of_attention(attention), devices, each_layer, own))
    step, _ = _made.pop(key, None) or (make_train_step(config, builder, *how), own)
    _made[key] = step, own  # kept, so that no other object gets its address
    if len(_made) > _KEPT:
        _made.popitem(last=False)
    return step


def _of_step(config: Config) -> tuple:
    """Returns what a step may read from a configuration."""
    optimizer = dataclasses.replace(config.optimizer, max_skipped_steps=0)
    sparsity = dataclasses.replace(
        config.sparsity, dense_warmup_steps=0, dense_cooldown_steps=0, dense_interval=0
    )
    return (
        config.run.seed,
        optimizer.schedule != "constant" and config.run.steps,
        dataclasses.replace(config.model, init_from=None),
        config.parallel,
        optimizer,
        config.loss,
        config.guard.enabled,
        sparsity,
    )


def _of_attention(attention: Any) -> tuple:
    """Returns the arguments of `make_attention`."""
    within = inspect.getclosurevars(attention).nonlocals
    pattern, spec = within["pattern"], within["spec"]
    arrays = [np.asarray(getattr(pattern, name)).tobytes() for name in pattern.arrays]
    return pattern, arrays, spec
