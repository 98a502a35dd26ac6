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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.kernels.masks import BLOCK
from benchmarks.kernels.programs import PATTERN
from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.attention.sharded import make_attention, select_index
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import DATA_AXIS, HEADS, SEQUENCE_AXES, make_mesh
from mtraining_jax.patterns.dense import Dense
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


class RingPrograms:
    """Functions of one problem, and abstract arguments to trace them with.

    Args:
        problem: what to compute.
        devices: the first `problem.gpus` of them are used.
    """

    def __init__(self, problem: Problem, devices: list[jax.Device]) -> None:
        self._backend = problem.backend
        self.mesh = make_mesh(
            1, problem.nodes, problem.gpus // problem.nodes, devices[: problem.gpus]
        )
        nodes = 1 if problem.ring == "flat" else problem.nodes
        self._layout = Layout(problem.layout, problem.seq_len, problem.gpus, BLOCK, nodes)
        self._attention = make_attention(
            self.mesh, self._layout, Dense(BLOCK), ring=problem.ring, backend=problem.backend
        )
        sharding = NamedSharding(self.mesh, HEADS)
        self.inputs = [  # q, k, v and dout
            jax.ShapeDtypeStruct(
                (1, problem.seq_len, heads, problem.dim), jnp.bfloat16, sharding=sharding
            )
            for heads in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
        ]
        self.index: Index = DenseIndex(BLOCK)
        if problem.sparse:
            self.index = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.everywhere),
                jax.eval_shape(self.select, *self.inputs[:2]),
            )

    @property
    def everywhere(self) -> NamedSharding:
        """Copies on all devices."""
        return NamedSharding(self.mesh, P())

    def random_inputs(self, seed: int) -> list[Array]:
        """Normal q, k, v and dout, drawn on their devices."""
        draw = jax.jit(
            lambda key: [
                jax.random.normal(k, x.shape, x.dtype)
                for k, x in zip(jax.random.split(key, 4), self.inputs, strict=True)
            ],
            out_shardings=[x.sharding for x in self.inputs],
        )
        return draw(jax.random.key(seed))

    def forward(self, q: Array, k: Array, v: Array, index: Any) -> Array:
        """The output, on all ranks."""
        return self._attention(q, k, v, AttentionInputs(index))[0]

    def both(self, q: Array, k: Array, v: Array, dout: Array, index: Any) -> tuple[Array, ...]:
        """Output and gradients, on all ranks."""
        out, vjp = jax.vjp(lambda q, k, v: self.forward(q, k, v, index), q, k, v)
        return out, *vjp(dout)

    def silent(self, q: Array, k: Array, v: Array, dout: Array, index: Any) -> tuple[Array, ...]:
        """`both` on all ranks at once, without communication; see `without_collectives`."""
        with without_collectives(dict(self.mesh.shape)):
            return self.both(q, k, v, dout, index)

    def select(self, q: Array, k: Array) -> VerticalSlashIndex:
        """Selects an index over all ranks, as a training step does."""

        def on_rank(q: Array, k: Array) -> VerticalSlashIndex:
            return select_index(
                q, k, PATTERN, block_ids=self._layout.block_ids(lax.axis_index(SEQUENCE_AXES)),
                num_blocks=self._layout.num_blocks, axis_names=SEQUENCE_AXES,
                backend=self._backend,
            )  # fmt: skip

        return jax.shard_map(
            on_rank, mesh=self.mesh, in_specs=(HEADS, HEADS), out_specs=P(DATA_AXIS),
            check_vma=False,
        )(q, k)  # fmt: skip


@contextlib.contextmanager
def without_collectives(axis_sizes: dict[str, int]) -> Iterator[None]:
    """Programs traced within it replace every collective by local data of the same shape.

    A permute returns what was sent, a sum its own term, a gather copies of its own part, a
    scattered sum this rank's part of its own term. Shapes, kernels and work lists (which depend on
    the index only) are those of the real program; results are not.

    Args:
        axis_sizes: of the mesh. Collectives over other axes are unchanged.
    """

    def patched(name: str, stand_in: Callable[..., Array]) -> Callable[..., Any]:
        original = getattr(lax, name)

        @functools.wraps(original)
        def call(x: Any, axis_name: Any, *args: Any, **options: Any) -> Any:
            names = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
            if not axis_sizes.keys() >= set(names):
                return original(x, axis_name, *args, **options)
            size = int(np.prod([axis_sizes[name] for name in names]))
            # The barrier hides from the compiler that nothing changes.
            x = lax.optimization_barrier(x)
            return jax.tree.map(lambda x: stand_in(x, size, **options), x)

        return call

    def same(x: Array, size: int, **_: Any) -> Array:
        return x

    def gather(x: Array, size: int, *, axis: int = 0, tiled: bool = False) -> Array:
        return (jnp.concatenate if tiled else jnp.stack)([x] * size, axis)

    def scatter(x: Array, size: int, *, scatter_dimension: int = 0, tiled: bool = False) -> Array:
        part = lax.slice_in_dim(x, 0, x.shape[scatter_dimension] // size, axis=scatter_dimension)
        return part if tiled else lax.squeeze(part, (scatter_dimension,))

    stand_ins = {"all_gather": gather, "psum_scatter": scatter}
    stand_ins |= dict.fromkeys(("ppermute", "psum", "pmax", "pmin", "pmean"), same)
    patches = {name: patched(name, stand_in) for name, stand_in in stand_ins.items()}
    with mock.patch.multiple(lax, **patches):
        yield
