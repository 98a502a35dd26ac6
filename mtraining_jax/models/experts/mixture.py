"""A mixture of experts: a router, and gated MLPs over tokens sorted by expert.

Each device computes all experts for its own tokens. Their weights are gathered like others (FSDP),
so only weights travel, and the sequence stays sharded.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtraining_jax.models.experts.grouped import Groups
from mtraining_jax.models.products import dot32
from mtraining_jax.models.swiglu import activation_gradients, gated, in_chunks, token_parts
from pallas_kernels import backends


class Routed(NamedTuple):
    """What the router decides for tokens: `ids` int32 and `weights` fp32 [..., K] of experts."""

    probabilities: Array  # fp32 [..., G], of all experts
    ids: Array
    weights: Array


class Balance(NamedTuple):
    """How tokens are distributed over experts: sums over tokens, fp32 [..., G]."""

    probabilities: Array  # differentiable
    counts: Array  # of selected tokens


def route(
    x: Array, router_GE: Array, per_token: int, normalize: bool, bias_G: Array | None = None
) -> Routed:
    """Selects the most probable experts of tokens [..., E]."""
    logits = dot32("...e,ge->...g", x, router_GE)
    probabilities = jax.nn.softmax(logits if bias_G is None else logits + bias_G)
    weights, ids = lax.top_k(probabilities, per_token)
    if normalize:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
    return Routed(probabilities, ids, weights)


def balance(routed: Routed, real_BS: Array | None = None) -> Balance:
    """Sums over local tokens, [B, 1, G]; without padding, where `real_BS` is 0."""
    selected = routed.ids[..., None] == jnp.arange(routed.probabilities.shape[-1])
    probabilities = routed.probabilities
    if real_BS is not None:
        selected = selected & (real_BS > 0)[..., None, None]
        probabilities = probabilities * real_BS[..., None]
    counts = jnp.sum(selected, axis=(1, 2), dtype=jnp.float32)[:, None]
    return Balance(jnp.sum(probabilities, axis=1, keepdims=True), counts)


def balance_loss(sums: Balance) -> tuple[Array, Array]:
    """The auxiliary loss (arXiv 2101.03961) as in transformers, and the load of experts.

    Transformers takes the fractions and means over all sequences of a device's micro-batch. Here
    they are those of each sequence, over the tokens of all its devices, so the loss does not depend
    on micro-batches and replicas.

    Args:
        sums: those of all layers and sequences, [L, B, G].

    Returns:
        The loss, mean over sequences: experts times the sum over experts of the fraction of tokens
        that select it times its mean probability, both means over all layers. It is `per_token` if
        experts are used evenly. And the load [L]: tokens of the busiest expert over the mean.
    """
    experts, tokens = sums.counts.shape[-1], jnp.sum(sums.probabilities, axis=(0, 2))
    tokens = jnp.where(tokens > 0, tokens, 1)  # a sequence may be all padding
    fractions, means = (jnp.sum(x, axis=0) / lax.stop_gradient(tokens)[:, None] for x in sums)
    loss = experts * jnp.mean(jnp.sum(fractions * means, axis=-1))
    mean = jnp.mean(sums.counts, axis=-1)
    load = jnp.max(sums.counts, axis=-1) / jnp.where(mean > 0, mean, 1)
    return loss, lax.stop_gradient(jnp.mean(load, axis=-1))


class _Dispatch(NamedTuple):
    """Places of (token, expert) pairs [C, K] in rows [R] sorted by expert.

    The rows of each expert are padded with zeros to a multiple of `row_tile`.
    """

    rows_CK: Array  # row of each pair
    pairs_R: Array  # pair of each row; C * K in padding
    sizes_G: Array

    @classmethod
    def of(cls, ids_CK: Array, experts: int, row_tile: int) -> "_Dispatch":
        pairs, ids = ids_CK.size, ids_CK.reshape(-1)
        counts_G = jnp.sum(ids[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
        sizes_G = -(-counts_G // row_tile) * row_tile
        padding_G = jnp.cumsum(sizes_G - counts_G) - (sizes_G - counts_G)  # before each expert
        order = jnp.argsort(ids, stable=True)
        rows = jnp.arange(pairs, dtype=jnp.int32) + padding_G[ids[order]]
        capacity = -(-pairs // row_tile) * row_tile + (experts * row_tile if row_tile > 1 else 0)
        pairs_R = jnp.full(capacity, pairs, jnp.int32).at[rows].set(order, unique_indices=True)
        rows_CK = jnp.zeros(pairs, jnp.int32).at[order].set(rows, unique_indices=True)
        return cls(rows_CK.reshape(ids_CK.shape), pairs_R, sizes_G)

    def spread(self, x_CE: Array) -> Array:
        """Rows [R, E] of their tokens; 0 in padding."""
        tokens = self.pairs_R // self.rows_CK.shape[1]
        return x_CE.at[tokens].get(mode="fill", fill_value=0)

    def row_values(self, x_CK: Array) -> Array:
        """Values [R] of pairs; 0 in padding."""
        return x_CK.reshape(-1).at[self.pairs_R].get(mode="fill", fill_value=0)

    def product(
        self, groups: Groups, x_RI: Array, weight_GOI: Array, bias_GO: Array | None
    ) -> Array:
        """Products with the matrix of each row's expert, plus its bias."""
        y_RO = groups.dot(x_RI, weight_GOI, self.sizes_G)
        if bias_GO is None:
            return y_RO
        sums = y_RO.astype(jnp.float32) + bias_GO[self.experts_R()]
        return sums.astype(y_RO.dtype)

    def by_expert(self, y_RO: Array) -> Array:
        """The sums over the rows of each expert without padding, fp32 [G, O]."""
        selected = self.experts_R()[:, None] == jnp.arange(len(self.sizes_G))
        real = self.pairs_R[:, None] < self.rows_CK.size
        # A product, because sums in the order of scattered rows are not deterministic on GPUs.
        y_RO = jnp.where(real, y_RO, 0)
        return dot32("rg,ro->go", selected.astype(y_RO.dtype), y_RO)

    def experts_R(self) -> Array:
        """The expert of each row; of rows after all experts, the last one."""
        experts = jnp.arange(len(self.sizes_G))
        return jnp.repeat(experts, self.sizes_G, total_repeat_length=len(self.pairs_R))

    def summed(self, x_RE: Array, weights_CK: Array | None = None) -> Array:
        """Weighted sums over the rows of each token, fp32 [C, E]."""
        x_CKE = x_RE[self.rows_CK].astype(jnp.float32)
        return jnp.sum(x_CKE if weights_CK is None else x_CKE * weights_CK[..., None], axis=1)


def padded_experts(
    x_TE: Array,
    pairs: tuple[Array, Array],
    matrices: Sequence[Array],
    biases: Sequence[Array] | None,
    *how: Any,
) -> Array:
    """`chunked_experts` with widths extended by zeros to those of the kernel.

    `pairs` are ids and weights, `matrices` and `biases` those of gate, up and down; `how` are the
    other arguments.
    """
    width, inner = matrices[2].shape[1:]
    padded_width, padded_inner = backends.grouped_widths(x_TE.dtype, (width, inner))
    none, e, f = (0, 0), (0, padded_width - width), (0, padded_inner - inner)
    outputs, inputs = (f, f, e), (e, e, f)
    sides = zip(matrices, outputs, inputs, strict=True)
    matrices = [jnp.pad(x, (none, output, given)) for x, output, given in sides]
    if biases is not None:
        biases = tuple(jnp.pad(x, (none, y)) for x, y in zip(biases, outputs, strict=True))
    x_TE = jnp.pad(x_TE, (none, e))
    out = cast(Array, chunked_experts(x_TE, *pairs, *matrices, *how, biases))
    return out[:, :width]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def chunked_experts(
    x_TE: Array,
    ids_TK: Array,
    weights_TK: Array,
    gate_GFE: Array,
    up_GFE: Array,
    down_GEF: Array,
    chunk_size: int,
    kept_chunks: int = 0,
    trained: bool = True,
    activation: str = "silu",
    biases: tuple[Array, Array, Array] | None = None,
) -> Array:
    """sum_k weights_k down_k(gated(gate_k(x), up_k(x))) over the experts of each token.

    `biases` [G, F or E] are those of gate, up and down.

    At most `chunk_size` tokens at a time, like `swiglu.chunked_swiglu`. Without `trained` experts
    are frozen and have no gradient.
    """
    experts = gate_GFE, up_GFE, down_GEF
    how = chunk_size, kept_chunks, trained, activation, biases
    return _forward(x_TE, ids_TK, weights_TK, *experts, *how)[0]


def _forward(
    x_TE, ids_TK, weights_TK, gate, up, down, chunk_size, kept_chunks, trained, activation, biases
):
    groups = Groups(x_TE.dtype, down.shape[1:])
    gate_bias, up_bias, down_bias = biases or [None] * 3

    def chunk(x_CE, ids_CK, weights_CK) -> tuple[Array, tuple[Array, Array]]:
        dispatch = _Dispatch.of(ids_CK, len(gate), groups.row_tile)
        x_RE = dispatch.spread(x_CE)
        product = functools.partial(dispatch.product, groups, x_RE)
        products = product(gate, gate_bias), product(up, up_bias)
        out_RE = dispatch.product(groups, gated(activation, *products), down, down_bias)
        return dispatch.summed(out_RE, weights_CK).astype(x_CE.dtype), products

    token_arrays = x_TE, ids_TK, weights_TK
    out_TE, products = in_chunks(chunk, token_arrays, chunk_size, kept_chunks)
    return out_TE, (*token_arrays, gate, up, down, biases, products)


def _backward(chunk_size, kept_chunks, trained, activation, residuals, d_out_TE):
    x_TE, ids_TK, weights_TK, gate, up, down, biases, kept_products = residuals
    dtype, groups = x_TE.dtype, Groups(x_TE.dtype, down.shape[1:])
    gate_bias, up_bias, down_bias = biases or [None] * 3

    def chunk(sums, inputs, products=None):
        x_CE, ids_CK, weights_CK, d_out_CE = inputs
        dispatch = _Dispatch.of(ids_CK, len(gate), groups.row_tile)
        sizes = dispatch.sizes_G
        x_RE, d_out_RE = dispatch.spread(x_CE), dispatch.spread(d_out_CE)
        weights_R1 = dispatch.row_values(weights_CK)[:, None]
        if products is None:
            product = functools.partial(dispatch.product, groups, x_RE)
            products = product(gate, gate_bias), product(up, up_bias)
        # The gradient of hidden_RF times its weights, without these.
        d_RF = groups.transposed(d_out_RE, down, sizes)
        hidden_RF, d_gate_RF, d_up_RF = activation_gradients(
            products, d_RF, weights_R1, activation=activation
        )
        d_weights_R = jnp.sum(hidden_RF * d_RF.astype(jnp.float32), axis=-1)
        if down_bias is not None:
            bias_RE = down_bias[dispatch.experts_R()].astype(jnp.float32)
            d_weights_R += jnp.sum(bias_RE * d_out_RE, axis=-1)
        hidden_RF = (hidden_RF * weights_R1).astype(dtype)
        d_x_RE = groups.transposed(d_gate_RF, gate, sizes).astype(jnp.float32)
        d_x_RE += groups.transposed(d_up_RF, up, sizes)
        if trained:
            gradients = (
                groups.outer(d_gate_RF, x_RE, sizes),
                groups.outer(d_up_RF, x_RE, sizes),
                groups.outer(d_out_RE, hidden_RF, sizes),
            )
            if biases:
                d_down_RE = (d_out_RE * weights_R1).astype(dtype)
                gradients += tuple(map(dispatch.by_expert, (d_gate_RF, d_up_RF, d_down_RE)))
            sums = jax.tree.map(jnp.add, sums, gradients)
        d_x_CE = dispatch.summed(d_x_RE.astype(dtype)).astype(dtype)
        return sums, (d_x_CE, d_weights_R[dispatch.rows_CK])

    experts = (gate, up, down, *(biases or ())) if trained else ()
    sums = tuple(jnp.zeros(w.shape, jnp.float32) for w in experts)
    token_arrays = x_TE, ids_TK, weights_TK, d_out_TE
    kept, rest = token_parts(token_arrays, chunk_size, kept_chunks)
    found = []
    if kept[0].shape[0]:
        sums, gradients = chunk(sums, kept, kept_products)
        found.append(gradients)
    if rest[0].shape[0]:
        sums, gradients = lax.scan(chunk, sums, rest)
        found.append(jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), gradients))
    d_x, d_weights = (jnp.concatenate(x)[: x_TE.shape[0]] for x in zip(*found, strict=True))
    expert_gradients: Any = [x.astype(w.dtype) for x, w in zip(sums, experts, strict=True)]
    expert_gradients = expert_gradients or [None] * 3
    return d_x, None, d_weights, *expert_gradients[:3], tuple(expert_gradients[3:]) or None


chunked_experts.defvjp(_forward, _backward)
