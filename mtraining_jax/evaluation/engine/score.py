"""Scores each token of a sequence in one forward pass."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.engine.network import Network
from mtraining_jax.models.label_scores import LabelScores, label_scores
from mtraining_jax.models.sharding import lm_head_spec
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.patterns import Pattern


def make_score(
    network: Network, layout: Layout, pattern: Pattern, length: int, chunk_size: int
) -> Callable[..., tuple[LabelScores, Array]]:
    """Builds a program that scores labels.

    `length` is the one that RoPE assumes for the sequence (`Network.length_like`).

    Returns:
        A jitted function of the state, int32 [B, S] tokens, labels and positions in layout order,
        the int32 scalar valid_len, beyond which the selection reads nothing, and the pattern's
        `layer_inputs`. It returns scores [B, S] in the same order, replicated, and the fp32 density
        over causal pairs of the padded sequence, mean over layers.
    """
    mesh = network.mesh

    def score(
        state: nnx.State,
        tokens: Array,
        labels: Array,
        positions: Array,
        valid_len: Array,
        inputs: Any,
    ) -> tuple[LabelScores, Array]:
        model = nnx.merge(network.graphdef, state)
        hidden, statistics = model(
            tokens,
            positions,
            network.attention(layout, pattern, valid_len),
            attention_inputs=inputs,
            mesh=mesh,
            fsdp=network.fsdp,
            length=length,
        )
        scores = label_scores(
            hidden,
            model.lm_head_weight(),
            labels,
            chunk_size=chunk_size,
            mesh=mesh,
            weight_spec=lm_head_spec(network.spec, mesh, network.fsdp),
        )
        return scores, statistics["density"].mean()

    return jax.jit(
        score,
        out_shardings=NamedSharding(mesh, P()),
        compiler_options=ring_compiler_options(mesh.devices.flat[0].platform),
    )
