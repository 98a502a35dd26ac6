"""Static description of a model on a mesh, shared by all programs of an evaluation."""

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
from mtraining_jax.patterns import ModelSizes, Pattern, Settings


@dataclasses.dataclass(frozen=True)
class Attending:
    """How layers attend; static. See `[sparsity]` and `[parallel]` of a configuration.

    Attributes:
        backend: kernel backend; None selects the fastest available one.
        sparse_answers: whether given answers use the pattern too, in one pass with the prompt as
            in training. Otherwise answer tokens attend to all earlier tokens, like generated ones.
    """

    settings: Settings
    layout: str = "striped"
    ring: str = "gather"
    backend: str | None = None
    sparse_answers: bool = False


@dataclasses.dataclass(frozen=True)
class Network:
    """A model without its parameters, on a mesh with one device along 'data'; static."""

    spec: ModelSpec
    mesh: Mesh
    attending: Attending
    fsdp: bool = False

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef:
        """Structure of the model for sequences, with a chunked MLP."""
        return graph_definition(dataclasses.replace(self.spec, remat="full", mlp_kept_chunks=0))

    @functools.cached_property
    def one_token_graphdef(self) -> nnx.GraphDef:
        return graph_definition(dataclasses.replace(self.spec, remat="none", mlp_kept_chunks=0))

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in SEQUENCE_AXES)

    @property
    def unit(self) -> int:
        chunks = 2 if self.attending.layout == "zigzag" else 1
        return chunks * self.ranks * self.attending.settings.block_size

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
        attending = self.attending
        return layout_for_ring(
            attending.layout, seq_len, sizes, attending.settings.block_size, attending.ring
        )

    def pattern(self, seq_len: int, settings: Settings) -> Pattern:
        """Builds the pattern for a padded sequence; its arrays have a leading layer axis."""
        return settings.pattern(ModelSizes(self.spec.num_layers, self.spec.num_heads, seq_len))

    def attention(self, layout: Layout, pattern: Pattern, valid_len: Array) -> Attention:
        """Builds the attention of the layers; `valid_len` may be traced."""
        attending = self.attending
        return make_attention(
            self.mesh,
            layout,
            pattern,
            ring=attending.ring,
            backend=attending.backend,
            valid_len=valid_len,
        )

    def length_like(self, tokens: int) -> int:
        """Returns a length equivalent to `tokens` for RoPE; see `RopeScaling.length_like`."""
        scaling = self.spec.rope_scaling
        return 1 if scaling is None else scaling.length_like(tokens)
