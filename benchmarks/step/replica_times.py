"""Times the replicas of a step on one device, one after another."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from benchmarks.kernels.programs import random_inputs
from benchmarks.step.compiled_step import CompiledStep
from benchmarks.step.drawn_batches import Assignment, Pack, Run, Times
from benchmarks.step.drawn_lists import BLOCK, SHARE_BITS
from benchmarks.timing import median_ms
from mtraining_jax.config import Config
from mtraining_jax.data.packs import block_table
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.training.build import build_attention, build_layout, build_pattern
from mtraining_jax.training.documents import attention_within, restarting_positions
from mtraining_jax.training.state import StateBuilder, TrainState


class ReplicaTimer:
    """Takes the training step of one replica for each replica; equal replicas are timed once.

    Args:
        run: of several replicas.
        config: of that run, whose attention counts pairs by document length.
        mesh: of one device.
        repeats: runs per median of attention alone.
    """

    def __init__(self, run: Run, config: Config, mesh: Mesh, repeats: int) -> None:
        self._run, self._repeats = run, repeats
        self._restart = restarting_positions(mesh, BLOCK)
        self._text = np.random.default_rng(0).integers(
            0, run.config.model.vocab_size, (run.packs, run.config.data.seq_len + 1), np.int32
        )
        model, seq_len = run.config.model, run.config.data.seq_len
        self._attention = _attention_alone(run.config, mesh)
        self._inputs = [
            x.astype(model.dtype)
            for x in random_inputs(
                jax.random.key(0), seq_len, model.num_heads, model.num_kv_heads, model.head_dim
            )
        ]
        self._times: dict[tuple, tuple[float, float]] = {}
        self._attention_ms: dict[tuple, float] = {}
        first = self._batch([Pack(np.array([2]), np.ones(1))] * run.packs, self._units(1.0))
        layout, pattern = build_layout(run.config), build_pattern(run.config)
        attention = build_attention(config, mesh, layout, pattern)
        self._step = CompiledStep(run.config, mesh, first, attention)
        self._state = StateBuilder(run.config, mesh).fresh()
        self._step.run(self._fresh_state(), [first])

    def measure(self, step: Assignment) -> Times:
        """Times of all replicas of a step."""
        attention, steps, densities = [], [], []
        for packs, shares in zip(step.packs, step.shares, strict=True):
            ms, density = self._step_ms(packs, shares)
            steps.append(ms)
            densities.append(density)
            attention.append(sum(self._alone_ms(pack, float(shares.mean())) for pack in packs))
        return Times(np.array(attention), np.array(steps), float(np.mean(densities)))

    def _step_ms(self, packs: Sequence[Pack], shares: np.ndarray) -> tuple[float, float]:
        """Time of a replica's step, and the density that it computed."""
        units = self._units(shares)
        # Tuning changes the densities of a pack and keeps its lengths.
        key = units.tobytes(), *(id(pack.lengths) for pack in packs)
        if key not in self._times:
            batch = jax.block_until_ready(self._batch(packs, units))
            found = self._step.run(self._fresh_state(), [batch])
            self._times[key] = 1e3 * found.seconds, found.density
        return self._times[key]

    def _fresh_state(self) -> TrainState:
        return jax.tree.map(lambda x: x.copy(), self._state)

    def _alone_ms(self, pack: Pack, share: float) -> float:
        """Attention of one pack in all layers: that of one layer, times their number."""
        units = self._units(share)[:, 0]
        key = id(pack.lengths), units.tobytes()
        if key not in self._attention_ms:
            table = jnp.asarray(self._table(pack)[None])
            run = functools.partial(self._attention, *self._inputs, table, jnp.asarray(units[:1]))
            layers = self._run.config.model.num_layers
            self._attention_ms[key] = layers * median_ms(run, self._repeats)
        return self._attention_ms[key]

    def _units(self, shares: np.ndarray | float) -> np.ndarray:
        """Mass fractions [L] as integers for each pack of a replica, int32 [packs, L]."""
        units = np.rint(np.asarray(shares) * 2**SHARE_BITS).astype(np.int32)
        return np.broadcast_to(units, (self._run.packs, self._run.config.model.num_layers))

    def _table(self, pack: Pack) -> np.ndarray:
        return block_table(pack.lengths, BLOCK, self._run.config.data.seq_len // BLOCK)

    def _batch(self, packs: Sequence[Pack], units: np.ndarray) -> dict[str, Array]:
        """The batch of a replica, as `DeviceBatches` would build it, of random tokens."""
        tables = np.stack([self._table(pack) for pack in packs])
        first, _, tokens = np.repeat(tables, BLOCK, axis=1).transpose(2, 0, 1)
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        followed = positions - first * BLOCK + 1 < tokens
        table = jnp.asarray(tables)
        return {
            "tokens": jnp.asarray(self._text[:, :-1]),
            "labels": jnp.asarray(np.where(followed, self._text[:, 1:], IGNORE_LABEL)),
            "positions": self._restart(jnp.asarray(positions), table),
            "documents": table,
            "shares": jnp.asarray(units),
        }


def _attention_alone(config: Config, mesh: Mesh) -> Callable[..., tuple[Array, ...]]:
    """(q, k, v, dout, table, shares) -> gradients: one layer's attention, compiled."""
    attention = build_attention(config, mesh, build_layout(config), build_pattern(config))

    @jax.jit
    def alone(
        q: Array, k: Array, v: Array, dout: Array, table: Array, shares: Array
    ) -> tuple[Array, ...]:
        attend = attention_within(attention, {"documents": table})
        _, vjp = jax.vjp(lambda *inputs: attend(*inputs, shares=shares)[0], q, k, v)
        return vjp(dout)

    return alone
