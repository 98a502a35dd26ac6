"""Static description of a model on a mesh, shared by all programs of an evaluation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.attention.order import layout_for_ring
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.models.sharding import lm_head_spec
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import CaptureKV, Transformer, graph_definition
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES
from mtraining_jax.patterns.base import NewTokens, Pattern
from mtraining_jax.tools.evaluate.engine.options import AnswerKind


@dataclasses.dataclass(frozen=True)
class Network:
    """A model without its parameters, on a mesh with one device along 'data'; static."""

    spec: ModelSpec
    mesh: Mesh
    settings: Pattern
    # See sections parallel and loss.
    layout: str = "striped"
    ring: str = "gather"
    backend: str | None = None
    fsdp: bool = False
    answers: AnswerKind = "dense"
    loss_chunk_size: int = 1024

    @property
    def new_tokens(self) -> NewTokens | None:
        """How new tokens select what they attend to; None if they attend to all earlier ones."""
        return self.settings.for_new_tokens() if self.answers == "sparse" else None

    def selects(self, window: int | None) -> bool:
        """Whether new tokens select in the layers with a window."""
        return window is None and self.new_tokens is not None

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in SEQUENCE_AXES)

    @property
    def unit(self) -> int:
        """The smallest number of tokens that all ranks can share."""
        chunks = 2 if self.layout == "zigzag" else 1
        return chunks * self.ranks * self.settings.block_size

    @property
    def lm_head_spec(self) -> PartitionSpec:
        return lm_head_spec(self.spec, self.mesh, self.fsdp)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def padded_length(self, tokens: int) -> int:
        """Returns the padded length of a sequence, one of few so that programs can be reused.

        Every multiple up to two units, then two lengths per octave, 2^i and 3 * 2^(i-1) units.
        """
        units = max(1, -(-tokens // self.unit))
        power = 1 << (units - 1).bit_length()
        between = power * 3 // 4
        return self.unit * (between if power > 2 and units <= between else power)

    def sequence_layout(self, seq_len: int) -> Layout:
        sizes = tuple(self.mesh.shape[axis] for axis in SEQUENCE_AXES)
        return layout_for_ring(self.layout, seq_len, sizes, self.settings.block_size, self.ring)

    def rope_length(self, tokens: int) -> int:
        """See `RopeScaling.length_like`."""
        scaling = self.spec.rope_scaling
        return 1 if scaling is None else scaling.length_like(tokens)

    def forward(
        self,
        layout: Layout,
        length: int | None,
        state: nnx.State,
        tokens: Array,
        positions: Array,
        inputs: AttentionInputs,
        capture_kv: CaptureKV | None = None,
    ) -> tuple[Transformer, Array, dict[str, Any]]:
        """Runs all layers over padded tokens, int32 [B, S] in layout order.

        `length` is that of `rope_length`. Returns the model, the input of its output layer
        [B, S, E], and statistics of the layers.
        """
        assert isinstance(inputs.pattern, Pattern)  # not an index
        attention = make_attention(
            self.mesh, layout, inputs.pattern, ring=self.ring, backend=self.backend
        )
        chunked_mlp = dataclasses.replace(self.spec, remat="full", mlp_kept_chunks=0)
        model: Transformer = nnx.merge(graph_definition(chunked_mlp), state)
        hidden, statistics = model(
            tokens,
            positions,
            attention,
            attention_inputs=inputs,
            capture_kv=capture_kv,
            mesh=self.mesh,
            fsdp=self.fsdp,
            length=length,
        )
        return model, hidden, statistics

    def jit(self, program: Callable[..., Any], out_shardings: Any) -> Any:
        options = ring_compiler_options(self.mesh.devices.flat[0].platform)
        return jax.jit(program, out_shardings=out_shardings, compiler_options=options)
