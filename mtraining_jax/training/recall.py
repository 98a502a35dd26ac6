"""How much of the attention's mass the sparse pattern keeps, measured on a few queries."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.config import Config
from mtraining_jax.models.transformer import Attention
from mtraining_jax.training.documents import attention_within
from mtraining_jax.training.shares import with_shares
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.training.step import Batch


def make_recall(
    config: Config,
    builder: StateBuilder,
    attention_with_recall: Callable[[Array], Attention],
    mesh: Mesh,
    attention_inputs: Any = None,
) -> Callable[[TrainState, Batch], dict[str, Array]]:
    """Compiles, at its first call, a forward pass that measures recall.

    Recall is the share of the softmax mass of exact attention that lies on the pairs the sparse
    pattern computes; 1 is dense attention. A mean hides a head that is emptied, so that of the
    worst head is measured as well.

    Args:
        config: of the run.
        builder: of its states.
        attention_with_recall: from int32 [R], positions of queries in the sequence, to an
            attention that reports `recall` on them, mean over batch and heads, and `recall_worst`,
            of the head that has least.
        mesh: axes ('data', 'node', 'device').
        attention_inputs: see `make_train_step`.

    Returns:
        A function of a state, which it leaves as it is, and a batch. It gives `recall` and
        `recall_worst`, fp32 [L], on `metrics.recall_rows` queries that are drawn anew each step.
    """
    rows, seq_len = config.metrics.recall_rows, config.data.seq_len

    def measure(state: TrainState, batch: Batch) -> dict[str, Array]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        positions = jax.random.choice(key, seq_len, (rows,), replace=False).astype(jnp.int32)
        model = nnx.merge(builder.graphdef, builder.unflatten(state.parameters))
        attend = attention_within(attention_with_recall(positions), batch)
        attend, inputs = with_shares(attend, attention_inputs, batch)
        _, layers = model(
            batch["tokens"],
            batch["positions"],
            attend,
            attention_inputs=inputs,
            mesh=mesh,
            fsdp=config.parallel.fsdp,
        )
        return {name: layers[name] for name in ("recall", "recall_worst")}

    return jax.jit(measure, out_shardings=NamedSharding(mesh, P()))
