"""Steps of runs that differ in nothing that a step is made of, made and traced once a process.

Most of the time of a run as small as those of tests goes to tracing and lowering a step that an
earlier run of the process has had. What a step is made of is compared, not what it becomes; in
test_processes.py processes that trace their own go on where others have stopped.
"""

import dataclasses
import inspect
from collections import OrderedDict
from typing import Any

import numpy as np

from mtraining_jax.config import Config
from mtraining_jax.training.step import make_train_step

_KEPT = 12
_made: OrderedDict[str, Any] = OrderedDict()


def made_once(config, builder, attention, mesh, inputs=None, audit=None):
    """`make_train_step`, or what it gave for an equal step: its arguments are equal too."""
    devices, each_layer = mesh.device_ids.tolist(), inputs is not None
    of_step = _of_step(config, audit is not None)
    key = repr((of_step, _of_attention(attention), devices, each_layer))
    step = _made.pop(key, None) or make_train_step(config, builder, attention, mesh, inputs, audit)
    _made[key] = step
    if len(_made) > _KEPT:
        _made.popitem(last=False)
    return step


def _of_step(config: Config, audited: bool) -> tuple:
    """What a step may read of a configuration."""
    optimizer = dataclasses.replace(config.optimizer, max_skipped_steps=0)
    sparsity = dataclasses.replace(config.sparsity, dense_first=0, dense_last=0, dense_every=0)
    return (
        config.run.seed, optimizer.schedule != "constant" and config.run.steps,
        dataclasses.replace(config.model, init_from=None), config.parallel, config.data,
        optimizer, config.loss, sparsity, audited and config.audit,
    )  # fmt: skip


def _of_attention(attention: Any) -> tuple:
    """What `make_attention` has made it of."""
    within = inspect.getclosurevars(attention).nonlocals
    pattern, (way,) = within["pattern"], within["run"].args
    arrays = [np.asarray(getattr(pattern, name)).tobytes() for name in pattern.arrays]
    return pattern, arrays, way, within["audit_rows"], within["mask_heads"]
