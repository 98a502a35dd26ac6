"""How well each token of a sequence is predicted: one forward pass, no gradients."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.network import Network
from mtraining_jax.models.label_scores import LabelScores, label_scores
from mtraining_jax.models.sharding import lm_head_spec
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.sparsity import Pattern


def make_score(
    network: Network, layout: Layout, pattern: Pattern, length: int, chunk_size: int
) -> Callable[..., tuple[LabelScores, Array]]:
    """A program that scores labels.

    Args:
        network: the model.
        layout: of the padded sequence.
        pattern: how pairs are chosen.
        length: stands for the tokens of the sequence (`Network.length_like`).
        chunk_size: tokens of one device whose logits exist at a time.

    Returns:
        A jitted function of the state, int32 [B, S] tokens, labels and positions in the order of
        the layout, the int32 scalar valid_len, behind which the choice reads nothing, and the
        pattern's `layer_inputs`. It gives scores [B, S] in the same order, whole on every device,
        and fp32, the share of the padded sequence's causal pairs that is computed, mean over
        layers.
    """
    mesh = network.mesh

    def score(
        state: nnx.State, tokens: Array, labels: Array, positions: Array, valid_len: Array,
        inputs: Any,
    ) -> tuple[LabelScores, Array]:
        model = nnx.merge(network.graphdef, state)
        hidden, statistics, _ = model.keeping(
            tokens,
            positions,
            network.attention(layout, pattern, valid_len),
            None,
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
