"""Measures groups of a step on one device: each by itself, as the training step of one group."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from benchmarks.step import balance
from benchmarks.step.balance import Pack, Setting
from benchmarks.step.drawn_lists import DrawnLists
from benchmarks.step.group_steps import Dealt, Times
from benchmarks.step.patterns import Step
from benchmarks.timing import median_ms
from mtraining_jax.config import Config
from mtraining_jax.data.loader import IGNORE_LABEL
from mtraining_jax.data.packs import block_table
from mtraining_jax.training.build import build_attention, build_layout, build_pattern
from mtraining_jax.training.documents import attention_within, restarting_positions
from mtraining_jax.training.state import StateBuilder, TrainState


class Groups:
    """Runs groups one after the other on one device; no group runs twice that is the same.

    Args:
        run: of several groups.
        config: of that run, whose attention counts pairs by length; `run.config` is one group's.
        mesh: of one device.
        repeats: of attention alone.
    """

    def __init__(self, run: Setting, config: Config, mesh: Mesh, repeats: int) -> None:
        self._run, self._repeats, self._mesh = run, repeats, mesh
        self._restart = restarting_positions(mesh, balance.BLOCK)
        self._text = np.random.default_rng(0).integers(
            0, run.config.model.vocab_size, (run.parts, run.config.data.seq_len + 1), np.int32
        )
        self._attention = _attention_alone(run.config, mesh)
        self._inputs = _random_inputs(run.config)
        self._times: dict[tuple, tuple[float, float]] = {}
        self._attention_ms: dict[tuple, float] = {}
        first = self._batch([Pack(np.array([2]), np.ones(1))] * run.parts, self._units(1.0))
        ways = {True: config, False: None}
        with ThreadPoolExecutor(len(ways)) as pool:
            compiling = {
                way: pool.submit(Step, run.config, mesh, first, whole)
                for way, whole in ways.items()
            }
        self._steps = {way: step.result() for way, step in compiling.items()}
        self._state = StateBuilder(run.config, mesh).fresh()
        for step in self._steps.values():
            step.run(self._fresh_state(), [first])

    def measure(self, dealt: Dealt, counting: bool) -> Times:
        """Times of all groups of a step.

        Args:
            dealt: it.
            counting: whether pairs are counted by the length of documents.
        """
        attention, steps, densities = [], [], []
        for packs, shares in zip(dealt.groups, dealt.shares, strict=True):
            ms, density = self.step_ms(packs, shares, counting)
            steps.append(ms)
            densities.append(density)
            attention.append(sum(self._alone_ms(pack, float(shares.mean())) for pack in packs))
        return Times(np.array(attention), np.array(steps), float(np.mean(densities)))

    def step_ms(
        self, packs: Sequence[Pack], shares: np.ndarray, counting: bool
    ) -> tuple[float, float]:
        """Time of one group's step, and the density that it computed."""
        units = self._units(shares)
        # Tuning changes the densities of a pack, and not which it is.
        key = counting, units.tobytes(), *(id(pack.lengths) for pack in packs)
        if key not in self._times:
            batch = jax.block_until_ready(self._batch(packs, units))
            found = self._steps[counting].run(self._fresh_state(), [batch])
            self._times[key] = 1e3 * found.seconds, found.density
        return self._times[key]

    def _fresh_state(self) -> TrainState:
        return jax.tree.map(lambda x: x.copy(), self._state)

    def _alone_ms(self, pack: Pack, share: float) -> float:
        """Attention of one pack in all layers, which are alike: one of them, many times."""
        units = self._units(share)[:, 0]
        key = id(pack.lengths), units.tobytes()
        if key not in self._attention_ms:
            table = jnp.asarray(self._table(pack)[None])
            run = functools.partial(self._attention, *self._inputs, table, jnp.asarray(units[:1]))
            layers = self._run.config.model.num_layers
            self._attention_ms[key] = layers * median_ms(run, self._repeats)
        return self._attention_ms[key]

    def _units(self, shares: np.ndarray | float) -> np.ndarray:
        """Shares [L] as `Shards` has them, for each pack of a group: int32 [parts, L]."""
        scale = 1 << DrawnLists().kept_share().bits
        units = np.rint(np.asarray(shares) * scale).astype(np.int32)
        return np.broadcast_to(units, (self._run.parts, self._run.config.model.num_layers))

    def _table(self, pack: Pack) -> np.ndarray:
        num_blocks = self._run.config.data.seq_len // balance.BLOCK
        return block_table(pack.lengths, balance.BLOCK, num_blocks)

    def _batch(self, packs: Sequence[Pack], units: np.ndarray) -> dict[str, Array]:
        """A group's batch as `Batches` would give it, of random tokens."""
        tables = np.stack([self._table(pack) for pack in packs])
        first, _, tokens = np.repeat(tables, balance.BLOCK, axis=1).transpose(2, 0, 1)
        places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        followed = places - first * balance.BLOCK + 1 < tokens
        table = jnp.asarray(tables)
        return {
            "tokens": jnp.asarray(self._text[:, :-1]),
            "labels": jnp.asarray(np.where(followed, self._text[:, 1:], IGNORE_LABEL)),
            "positions": self._restart(jnp.asarray(places), table),
            "documents": table,
            "shares": jnp.asarray(units),
        }


def _attention_alone(config: Config, mesh: Mesh) -> Callable[..., tuple[Array, ...]]:
    """(q, k, v, dout, table, shares) -> gradients: one layer's attention, compiled."""
    layout, pattern = build_layout(config), build_pattern(config)
    attention = build_attention(config, mesh, layout, pattern)

    @jax.jit
    def alone(
        q: Array, k: Array, v: Array, dout: Array, table: Array, shares: Array
    ) -> tuple[Array, ...]:
        attend = attention_within(attention, {"documents": table})
        _, back = jax.vjp(lambda *inputs: attend(*inputs, shares=shares)[0], q, k, v)
        return back(dout)

    return alone


def _random_inputs(config: Config) -> list[Array]:
    """q, k, v and dout of one sequence."""
    model, seq_len = config.model, config.data.seq_len
    heads = model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads
    keys = jax.random.split(jax.random.key(0), len(heads))
    return [
        jax.random.normal(key, (1, seq_len, count, model.head_dim), model.dtype)
        for key, count in zip(keys, heads, strict=True)
    ]
