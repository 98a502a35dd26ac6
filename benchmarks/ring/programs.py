"""Programs that the ring benchmark compiles and times."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.kernels.masks import BLOCK
from benchmarks.kernels.programs import PATTERN
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DATA_AXIS, HEADS, SEQUENCE_AXES, make_mesh
from mtraining_jax.parallel.ring import RingTopology, ring_attention, ring_plans
from mtraining_jax.parallel.ring.columns import fetch_columns
from mtraining_jax.patterns import Dense, select_index
from pallas_kernels.index import DenseIndex, Index, VerticalSlashIndex


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of the benchmark: batch 1, bf16.

    Attributes:
        seq_len: S.
        layout: kind of the layout.
        ring: one of `RINGS`.
        gpus: W, ranks of the ring.
        nodes: N of the mesh, `gpus` / N devices each.
        sparse: whether there is an index (masks A and B), else dense causal.
        heads, kv_heads, dim: of the attention.
        backend: of the kernels; None for the best one here.
    """

    seq_len: int
    layout: str
    ring: str
    gpus: int
    nodes: int
    sparse: bool
    heads: int = 16
    kv_heads: int = 2
    dim: int = 128
    backend: str | None = None

    @property
    def name(self) -> str:
        """For progress lines."""
        kind = "sparse" if self.sparse else "dense"
        mesh = f"{self.nodes}x{self.gpus // self.nodes}"
        return f"{kind} S={self.seq_len} {self.layout} {self.ring} {mesh}"

    def ring_layout(self) -> Layout:
        """The layout for this ring."""
        nodes = 1 if self.ring == "flat" else self.nodes
        return Layout(self.layout, self.seq_len, self.gpus, BLOCK, nodes)

    def topology(self) -> RingTopology:
        """The order in which shards meet."""
        sizes = (self.nodes, self.gpus // self.nodes)
        return RingTopology(
            self.ring_layout(), SEQUENCE_AXES, sizes, self.ring, backend=self.backend
        )


class RingPrograms:
    """Functions of one problem, and abstract arguments to trace them with.

    Args:
        problem: what to compute.
        devices: the first `problem.gpus` of them are used.
    """

    def __init__(self, problem: Problem, devices: list[jax.Device]):
        self.problem = problem
        self.mesh = make_mesh(
            1, problem.nodes, problem.gpus // problem.nodes, devices[: problem.gpus]
        )
        self.layout = problem.ring_layout()
        self._attention = make_attention(
            self.mesh, self.layout, Dense(BLOCK), ring=problem.ring, backend=problem.backend
        )
        one = SingleDeviceSharding(self.mesh.devices.flat[0])
        self.sharded = self._heads(problem.seq_len, NamedSharding(self.mesh, HEADS))
        self.shard = self._heads(problem.seq_len // problem.gpus, one)  # of one rank
        self.rank = jax.ShapeDtypeStruct((), jnp.int32, sharding=one)
        self.index: Index = DenseIndex(BLOCK)  # on all devices, and on the first one
        self.index_on_one: Index = DenseIndex(BLOCK)
        if problem.sparse:
            index = jax.eval_shape(self.select, *self.sharded[:2])
            self.index, self.index_on_one = (
                jax.tree.map(
                    lambda x, to=to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), index
                )
                for to in (NamedSharding(self.mesh, P()), one)
            )

    def _heads(self, tokens: int, sharding: Sharding) -> list[jax.ShapeDtypeStruct]:
        """q, k, v and dout."""
        problem = self.problem
        heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
        return [
            jax.ShapeDtypeStruct((1, tokens, n, problem.dim), jnp.bfloat16, sharding=sharding)
            for n in heads
        ]

    def random_inputs(self, seed: int) -> list[Array]:
        """Normal q, k, v and dout, drawn on their devices."""
        draw = jax.jit(
            lambda key: [
                jax.random.normal(k, x.shape, x.dtype)
                for k, x in zip(jax.random.split(key, 4), self.sharded, strict=True)
            ],
            out_shardings=[x.sharding for x in self.sharded],
        )
        return draw(jax.random.key(seed))

    def forward(self, q: Array, k: Array, v: Array, index: Any) -> Array:
        """The output, on all ranks."""
        return self._attention(q, k, v, index)[0]

    def both(self, q: Array, k: Array, v: Array, dout: Array, index: Any) -> tuple[Array, ...]:
        """Output and gradients, on all ranks."""
        out, vjp = jax.vjp(lambda q, k, v: self.forward(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    def silent(self, q: Array, k: Array, v: Array, dout: Array, index: Any) -> tuple[Array, ...]:
        """`both` on all ranks at once, without communication; see `without_collectives`."""
        with without_collectives(dict(self.mesh.shape)):
            return self.both(q, k, v, dout, index)

    def local(
        self, q: Array, k: Array, v: Array, dout: Array, index: Any, rank: Array
    ) -> tuple[Array, ...]:
        """`both` of one rank on one device, from arrays of one shard, without communication."""
        topology = self.problem.topology()

        def attend(q, k, v):
            return ring_attention(
                q,
                k,
                v,
                index,
                layout=self.layout,
                axis_names=topology.axis_names,
                axis_sizes=topology.axis_sizes,
                ring=topology.ring,
                backend=topology.backend,
            )

        with without_collectives(dict(self.mesh.shape), rank):
            out, vjp = jax.vjp(attend, q, k, v)
            return out, *vjp(dout)

    def select(self, q: Array, k: Array) -> VerticalSlashIndex:
        """Selects an index over all ranks, as a training step does."""

        def on_rank(q: Array, k: Array) -> VerticalSlashIndex:
            return select_index(
                q,
                k,
                PATTERN,
                block_ids=self.layout.block_ids(lax.axis_index(SEQUENCE_AXES)),
                num_blocks=self.layout.num_blocks,
                axis_names=SEQUENCE_AXES,
                backend=self.problem.backend,
            )

        return jax.shard_map(
            on_rank,
            mesh=self.mesh,
            in_specs=(HEADS, HEADS),
            out_specs=P(DATA_AXIS),
            check_vma=False,
        )(q, k)

    def build(self, q: Array, k: Array, v: Array, index: Index, rank: Array) -> Any:
        """Everything that the kernels of one rank read, except shards, at all steps.

        That is, plans of both passes, and columns among the rank's own keys, without communication.
        """
        topology = self.problem.topology()
        with without_collectives(dict(self.mesh.shape), rank):
            plans = ring_plans(topology, index, q, k)
            tokens = index.column_tokens(topology.every_row)
        if tokens is None:
            return plans, None
        return plans, fetch_columns((k, v), self.layout.local_positions(tokens, rank), ())


@contextlib.contextmanager
def without_collectives(axis_sizes: dict[str, int], rank: Array | None = None) -> Iterator[None]:
    """Programs traced within it replace every collective by local data of the same shape.

    A permute returns what was sent, a sum its own term, a gather copies of its own part, a
    scattered sum this rank's part of its own term. Shapes, kernels and work lists (which depend on
    the index only) are those of the real program; results are not. Keys of columns on other ranks
    are zeros.

    Args:
        axis_sizes: of the mesh. Collectives over other axes are unchanged.
        rank: this rank, outside a `shard_map`; None inside one.
    """

    def names_of(axis_name: Any) -> tuple[Any, ...]:
        return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)

    def in_mesh(axis_name: Any) -> bool:
        return all(name in axis_sizes for name in names_of(axis_name))

    def size(axis_name: Any) -> int:
        return int(np.prod([axis_sizes[name] for name in names_of(axis_name)]))

    def patched(name: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(lax, name)

        @functools.wraps(original)
        def call(x: Any, axis_name: Any, *args: Any, **options: Any) -> Any:
            if not in_mesh(axis_name):
                return original(x, axis_name, *args, **options)
            # The barrier hides from the compiler that nothing changes.
            x = lax.optimization_barrier(x)
            return jax.tree.map(lambda x: stand_in(x, axis_name, *args, **options), x)

        return call

    def same(x: Array, axis_name: Any, *_: Any, **__: Any) -> Array:
        return x

    def gather(x: Array, axis_name: Any, *, axis: int = 0, tiled: bool = False, **_: Any) -> Array:
        parts = [x] * size(axis_name)
        return jnp.concatenate(parts, axis) if tiled else jnp.stack(parts, axis)

    def scatter(
        x: Array, axis_name: Any, *, scatter_dimension: int = 0, tiled: bool = False, **_: Any
    ) -> Array:
        count = size(axis_name)
        part = lax.slice_in_dim(x, 0, x.shape[scatter_dimension] // count, axis=scatter_dimension)
        return part if tiled else lax.squeeze(part, (scatter_dimension,))

    stand_ins = {
        "ppermute": same,
        "psum": same,
        "pmax": same,
        "pmin": same,
        "pmean": same,
        "all_gather": gather,
        "psum_scatter": scatter,
    }
    patches = {name: patched(name, stand_in) for name, stand_in in stand_ins.items()}
    if rank is not None:
        real_index = lax.axis_index

        def axis_index(axis_name: Any) -> Array:
            if not in_mesh(axis_name):
                return real_index(axis_name)
            below, result = 1, jnp.int32(0)
            names = list(axis_sizes)
            for name in reversed(names_of(axis_name)):
                inner = int(np.prod([axis_sizes[n] for n in names[names.index(name) + 1 :]]))
                result = result + rank // inner % axis_sizes[name] * below
                below *= axis_sizes[name]
            return result

        patches["axis_index"] = axis_index
    with mock.patch.multiple(lax, **patches):
        yield
