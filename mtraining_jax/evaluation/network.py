"""What every program of an evaluation shares: a model on a mesh, and how its layers attend."""

import dataclasses
import functools
import math

from flax import nnx
from jax import Array
from jax.sharding import Mesh

from mtraining_jax.attention.order import layout_for_ring
from mtraining_jax.attention.sharded import make_attention
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import Attention, graph_definition
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import SEQUENCE_AXES
from mtraining_jax.sparsity import ModelSizes, Pattern, Settings


@dataclasses.dataclass(frozen=True)
class Attending:
    """How layers attend; static.

    Attributes:
        settings: of the pattern.
        layout: "striped" or "zigzag", how blocks are dealt to ranks.
        ring: how keys travel (`mtraining_jax.parallel.ring`).
        backend: of the kernels; None is the best that runs here.
        sparse_answers: whether tokens of a given answer attend by the pattern too, in one pass with
            the prompt, as in training. Otherwise they attend to all, as generated ones do.
    """

    settings: Settings
    layout: str = "striped"
    ring: str = "gather"
    backend: str | None = None
    sparse_answers: bool = False


@dataclasses.dataclass(frozen=True)
class Network:
    """A model without its parameters, on a mesh; static.

    Attributes:
        spec: its numbers.
        mesh: axes ('data', 'node', 'device'), with one device along 'data'.
        attending: how its layers attend, where whole sequences are read.
        fsdp: whether matrices are spread over the devices, instead of a copy on each.
    """

    spec: ModelSpec
    mesh: Mesh
    attending: Attending
    fsdp: bool = False

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef:
        """The structure of the model that reads a sequence, its MLP some tokens at a time."""
        return graph_definition(dataclasses.replace(self.spec, remat="full", mlp_kept_chunks=0))

    @functools.cached_property
    def one_token_graphdef(self) -> nnx.GraphDef:
        """The structure of the model that reads one token."""
        return graph_definition(dataclasses.replace(self.spec, remat="none", mlp_kept_chunks=0))

    @property
    def ranks(self) -> int:
        """W, devices that share a sequence."""
        return math.prod(self.mesh.shape[axis] for axis in SEQUENCE_AXES)

    @property
    def unit(self) -> int:
        """What the length of a sequence must be a multiple of."""
        chunks = 2 if self.attending.layout == "zigzag" else 1
        return chunks * self.ranks * self.attending.settings.block_size

    def padded_length(self, tokens: int) -> int:
        """The length that a sequence is padded to, so that few programs serve many lengths.

        Up to two units each multiple of the unit is one, from there on two in an octave: 2^i and
        3 * 2^(i-1) units.
        """
        units = max(1, -(-tokens // self.unit))
        power = 1 << (units - 1).bit_length()
        between = power * 3 // 4
        return self.unit * (between if power > 2 and units <= between else power)

    def sequence_layout(self, seq_len: int) -> Layout:
        """How the tokens of a padded sequence lie on the ranks."""
        sizes = tuple(self.mesh.shape[axis] for axis in SEQUENCE_AXES)
        attending = self.attending
        return layout_for_ring(
            attending.layout, seq_len, sizes, attending.settings.block_size, attending.ring
        )

    def pattern(self, seq_len: int, settings: Settings) -> Pattern:
        """How pairs are chosen in a padded sequence by such settings; arrays lead with the layers.

        Raises:
            UserError: if the pattern cannot be made for this model.
        """
        return settings.pattern(ModelSizes(self.spec.num_layers, self.spec.num_heads, seq_len))

    def attention(self, layout: Layout, pattern: Pattern, valid_len: Array) -> Attention:
        """What the layers attend with; `valid_len` may be traced."""
        attending = self.attending
        return make_attention(
            self.mesh, layout, pattern, ring=attending.ring, backend=attending.backend,
            valid_len=valid_len,
        )  # fmt: skip

    def length_like(self, tokens: int) -> int:
        """A length that rotary positions treat as `tokens`; see `RopeScaling.length_like`."""
        scaling = self.spec.rope_scaling
        return 1 if scaling is None else scaling.length_like(tokens)
