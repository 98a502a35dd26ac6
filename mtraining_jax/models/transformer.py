"""A decoder in Flax NNX for all families, with attention as an argument.

The family's table has all parameters by name; parts that it does not list are omitted. Names are
those of Hugging Face checkpoints, but layers are stacked and run in one `lax.scan`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.models.embedding import embed
from mtraining_jax.models.experts.mixture import Balance, balance, padded_experts, route
from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.fsdp import fsdp_apply
from mtraining_jax.models.lora.adapters import FACTORS, LoraSpec
from mtraining_jax.models.lora.projection import Dropout, Projection, Projector
from mtraining_jax.models.parameters import LAYERS, Parameter, ParamTable
from mtraining_jax.models.products import dot32
from mtraining_jax.models.remat import POST_ATTENTION, QKV, RESIDUAL, remat, scan_kinds
from mtraining_jax.models.rope.rotary import apply_rope, rope_tables
from mtraining_jax.models.sharding import (
    layer_specs,
    parameter_names,
    parameter_spec,
    state_shardings,
)
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.swiglu import chunked_swiglu, gated
from mtraining_jax.parallel.host_memory import to_device

# (q_BSHD, k_BSHkD, v_BSHkD[, AttentionInputs of the layer])
# -> (out_BSHD, fp32 scalars or trees by name)
Attention = Callable[..., tuple[Array, dict[str, Any]]]
# (k_BSHkD, v_BSHkD) -> what to return of a layer's keys and values, a pytree
CaptureKV = Callable[[Array, Array], Any]


def _init_param(parameter: Parameter, rngs: nnx.Rngs) -> nnx.Param:
    shape, limit = parameter.shape, parameter.limit
    if limit is not None:  # a stream of its own, so that adapters do not change their base
        drawn = jax.random.uniform(rngs.adapters(), shape, jnp.float32, -limit, limit)
    elif parameter.stddev is not None:
        drawn = jax.random.normal(rngs.params(), shape, jnp.float32) * parameter.stddev
    else:
        drawn = jnp.full(shape, parameter.value, jnp.float32)
    return nnx.Param(drawn.astype(parameter.dtype))


class Matrix(nnx.Module):
    """A matrix, and an optional bias, without a product.

    An embedding table [V, E], a factor of an adapter, a router or a projection of all experts.
    """

    def __init__(self, table: ParamTable, name: str, rngs: nnx.Rngs) -> None:
        self.weight = _init_param(table[f"{name}.weight"], rngs)
        bias = table.get(f"{name}.bias")
        self.bias = _init_param(bias, rngs) if bias else None


class Linear(nnx.Module):
    """y = x W^T + b, in the dtype of x, optionally with a LoRA adapter.

    weight [out, in], bias fp32 [out] or absent.
    """

    def __init__(
        self, table: ParamTable, name: str, rngs: nnx.Rngs, lora: LoraSpec | None = None
    ) -> None:
        self.weight = _init_param(table[f"{name}.weight"], rngs)
        bias = table.get(f"{name}.bias")
        self.bias = _init_param(bias, rngs) if bias else None
        self.name, self.lora = name.rpartition(".")[2], lora
        a, b = (f"{name}.{factor}" for factor in FACTORS)
        adapted = f"{a}.weight" in table
        self.lora_A = Matrix(table, a, rngs) if adapted else None
        self.lora_B = Matrix(table, b, rngs) if adapted else None

    def projection(self, dtype: jnp.dtype) -> Projection:
        parts = (self, self.lora_A, self.lora_B)
        return Projection(*(part and part.weight[...].astype(dtype) for part in parts))

    def __call__(self, x: Array, seeds: Array | None = None) -> Array:
        project = Projector(self.lora, None if seeds is None else Dropout(seeds))
        y = project(x, self.projection(x.dtype), self.name)
        if self.bias is None:
            return y
        # Added in fp32, so that the bias gradient is summed over tokens in fp32.
        return (y.astype(jnp.float32) + self.bias[...]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32, returned in the dtype of x."""

    def __init__(self, spec: ModelSpec, table: ParamTable, name: str, rngs: nnx.Rngs) -> None:
        self.weight = _init_param(table[f"{name}.weight"], rngs)
        self.eps, self.offset = spec.rms_norm_eps, FAMILIES.get(spec.family).norm_offset

    @classmethod
    def if_listed(
        cls, spec: ModelSpec, table: ParamTable, name: str, rngs: nnx.Rngs
    ) -> "RMSNorm | None":
        return cls(spec, table, name, rngs) if f"{name}.weight" in table else None

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...] + self.offset if self.offset else self.weight[...]
        return (x32 * scale * weight).astype(x.dtype)


class SelfAttention(nnx.Module):
    """Projections and RoPE around an attention that the caller provides."""

    def __init__(self, spec: ModelSpec, table: ParamTable, name: str, rngs: nnx.Rngs) -> None:
        self.head_dim = spec.head_dim
        # Attention divides logits by the square root of head_dim.
        self.query_factor = (spec.head_dim / (spec.query_pre_attn_scalar or spec.head_dim)) ** 0.5
        self.q_proj = Linear(table, f"{name}.q_proj", rngs, spec.lora)
        self.k_proj = Linear(table, f"{name}.k_proj", rngs, spec.lora)
        self.v_proj = Linear(table, f"{name}.v_proj", rngs, spec.lora)
        self.o_proj = Linear(table, f"{name}.o_proj", rngs, spec.lora)
        self.q_norm = RMSNorm.if_listed(spec, table, f"{name}.q_norm", rngs)
        self.k_norm = RMSNorm.if_listed(spec, table, f"{name}.k_norm", rngs)
        sinks = table.get(f"{name}.sinks")
        self.sinks = _init_param(sinks, rngs) if sinks else None

    def project(
        self, x_BSE: Array, cos: Array, sin: Array, seeds_BS: Array | None
    ) -> tuple[Array, Array, Array]:
        """[B, S, E] -> rotated queries [B, S, Hq, D] and keys, and values [B, S, Hk, D]."""
        split = (*x_BSE.shape[:2], -1, self.head_dim)

        def rotated(projection: Linear, norm: RMSNorm | None, factor: float = 1.0) -> Array:
            heads = projection(x_BSE, seeds_BS).reshape(split)
            heads = heads if norm is None else norm(heads)
            return apply_rope(heads, *((cos, sin) if factor == 1 else (cos * factor, sin * factor)))

        q_BSHD = rotated(self.q_proj, self.q_norm, self.query_factor)
        k_BSHkD = rotated(self.k_proj, self.k_norm)
        return q_BSHD, k_BSHkD, self.v_proj(x_BSE, seeds_BS).reshape(split)

    def merge_heads(self, out_BSHD: Array, seeds_BS: Array | None) -> Array:
        """[B, S, Hq, D] -> [B, S, E], after the output projection."""
        return self.o_proj(out_BSHD.reshape(*out_BSHD.shape[:2], -1), seeds_BS)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, table: ParamTable, name: str, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(table, f"{name}.gate_proj", rngs, spec.lora)
        self.up_proj = Linear(table, f"{name}.up_proj", rngs, spec.lora)
        self.down_proj = Linear(table, f"{name}.down_proj", rngs, spec.lora)
        # Without rematerialization everything is saved, which needs no chunks but more memory.
        self.chunk_size = None if spec.remat == "none" else spec.mlp_chunk_size
        self.kept_chunks, self.lora = spec.mlp_kept_chunks, spec.lora
        self.activation = FAMILIES.get(spec.family).activation

    def __call__(self, x_BSE: Array, seeds_BS: Array | None) -> Array:
        if self.chunk_size is None:
            gate, up = self.gate_proj(x_BSE, seeds_BS), self.up_proj(x_BSE, seeds_BS)
            return self.down_proj(gated(self.activation, gate, up), seeds_BS)
        parts = (self.gate_proj, self.up_proj, self.down_proj)
        projections = (part.projection(x_BSE.dtype) for part in parts)
        x_TE = x_BSE.reshape(-1, x_BSE.shape[-1])
        seeds_T = None if seeds_BS is None else seeds_BS.reshape(-1)
        how = self.chunk_size, self.kept_chunks, self.lora, self.activation
        return cast(Array, chunked_swiglu(x_TE, *projections, seeds_T, *how)).reshape(x_BSE.shape)


class Experts(nnx.Module):
    """A mixture of gated experts; also returns how it distributes tokens over them."""

    def __init__(self, spec: ModelSpec, table: ParamTable, name: str, rngs: nnx.Rngs) -> None:
        self.gate = Matrix(table, f"{name}.gate", rngs)  # the router
        self.gate_proj = Matrix(table, f"{name}.gate_proj", rngs)
        self.up_proj = Matrix(table, f"{name}.up_proj", rngs)
        self.down_proj = Matrix(table, f"{name}.down_proj", rngs)
        self.spec = spec

    def __call__(self, x_BSE: Array, real_BS: Array | None = None) -> tuple[Array, Balance]:
        spec, matrices = self.spec, (self.gate, self.gate_proj, self.up_proj, self.down_proj)
        router, *experts = (matrix.weight[...].astype(x_BSE.dtype) for matrix in matrices)
        biases = [None if matrix.bias is None else matrix.bias[...] for matrix in matrices]
        x_TE = x_BSE.reshape(-1, x_BSE.shape[-1])
        how = spec.num_experts_per_tok, spec.norm_topk_prob
        routed = route(x_BSE, router, *how, biases[0])
        # Without rematerialization everything is saved, as one chunk.
        saved = spec.remat == "none"
        chunks = (len(x_TE), 1) if saved else (spec.mlp_chunk_size, spec.mlp_kept_chunks)
        pairs = tuple(x.reshape(len(x_TE), -1) for x in (routed.ids, routed.weights))
        how = *chunks, spec.lora is None, FAMILIES.get(spec.family).activation
        expert_biases = None if biases[1] is None else cast(Any, biases[1:])
        out = padded_experts(x_TE, cast(Any, pairs), experts, expert_biases, *how)
        return out.reshape(x_BSE.shape), balance(routed, real_BS)


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer, in halves around attention, which reads tokens of all devices."""

    def __init__(self, spec: ModelSpec, table: ParamTable, rngs: nnx.Rngs) -> None:
        self.input_layernorm = RMSNorm(spec, table, "input_layernorm", rngs)
        self.self_attn = SelfAttention(spec, table, "self_attn", rngs)
        self.post_attention_layernorm = RMSNorm(spec, table, "post_attention_layernorm", rngs)
        # With norms around the MLP, the one after attention is of its output.
        around = (f"{place}_feedforward_layernorm" for place in ("pre", "post"))
        norms = (RMSNorm.if_listed(spec, table, name, rngs) for name in around)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norms
        self.mlp = (Experts if spec.num_experts else MLP)(spec, table, "mlp", rngs)

    def before_attention(
        self, x_BSE: Array, cos: Array, sin: Array, seeds_BS: Array | None = None
    ) -> tuple[Array, Array, Array]:
        return self.self_attn.project(self.input_layernorm(x_BSE), cos, sin, seeds_BS)

    def after_attention(
        self,
        x_BSE: Array,
        out_BSHD: Array,
        seeds_BS: Array | None = None,
        real_BS: Array | None = None,
    ) -> tuple[Array, Balance | None]:
        """The output, and how experts are used, summed over the tokens of this device.

        `real_BS`, fp32, is 0 for padding, which the sums leave out; None: there is none.
        """
        before_mlp, after_mlp = self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        out_BSE, used = self.self_attn.merge_heads(out_BSHD, seeds_BS), None
        if before_mlp is not None:
            out_BSE = self.post_attention_layernorm(out_BSE)
        x_BSE = checkpoint_name(x_BSE + out_BSE, POST_ATTENTION)
        with jax.named_scope("mlp"):
            normed_BSE = (before_mlp or self.post_attention_layernorm)(x_BSE)
            if isinstance(self.mlp, MLP):
                out_BSE = self.mlp(normed_BSE, seeds_BS)
            else:
                out_BSE, used = self.mlp(normed_BSE, real_BS)
            return x_BSE + (out_BSE if after_mlp is None else after_mlp(out_BSE)), used


class Transformer(nnx.Module):
    """A causal language model, from a `ModelSpec` or any object or mapping with its fields."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        spec = ModelSpec.from_config(config)
        table, layer = spec.parameters, spec.layer
        self.spec = spec
        self.embed_tokens = Matrix(table, "embed_tokens", rngs)

        @nnx.split_rngs(splits=spec.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(layer_rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(spec, layer, layer_rngs)

        self.layers = stacked(rngs)
        self.norm = RMSNorm(spec, table, "norm", rngs)
        self.lm_head = None if spec.tie_word_embeddings else Linear(table, "lm_head", rngs)

    def __call__(
        self,
        tokens: Array,
        positions: Array,
        attention: Attention,
        *,
        attention_inputs: AttentionInputs | None = None,
        capture_kv: CaptureKV | None = None,
        mesh: Mesh | None = None,
        fsdp: bool = False,
        length: int | Array | None = None,
        dropout_seeds: Array | None = None,
    ) -> tuple[Array, dict[str, Any]]:
        """Runs all layers.

        Args:
            tokens: int32 [B, S], in any order along S.
            positions: int32 [S] or [B, S], global positions of these tokens, for RoPE only.
            attention: `(q_BSHD, k_BSHkD, v_BSHkD) -> (out_BSHD, stats)`, rotated and unscaled.
                `stats` are arrays without gradients. With `remat="attention"` the backward pass
                recomputes it, except for values named by `checkpoint_name` as in
                `pallas_kernels.names.SAVED_NAMES`.
            attention_inputs: optional; those of a layer are the fourth argument of `attention`.
            capture_kv: maps the rotated keys and the values of a layer, in the compute dtype and
                sharded over the mesh, to `stats["kv"]`.
            mesh: axes ('data', 'node', 'device') of type Auto. Each device computes its own tokens,
                [B over data, S over (node, device), E]. None: everything is on one device.
            fsdp: whether parameters are sharded as in `param_shardings(..., fsdp=True)`.
            length: sequence length if it is not S, because of padding or future tokens; or int32
                [B, S], the length of each token's document. Some RoPE scalings use it, and the
                sums of `experts` skip padding: positions that are not below an array of lengths.
            dropout_seeds: fp32 [B, S], from `projection.seeds_from`, to drop inputs of adapters.

        Returns:
            hidden [B, S, E] in the compute dtype, after the final norm, and the stats stacked
            over layers, [L, ...] each. A mixture of experts adds `experts`, its `Balance`
            [L, B, G], the only one with a gradient.
        """
        dtype, table = jnp.dtype(self.spec.dtype), self.spec.parameters
        positions = jnp.broadcast_to(positions, tokens.shape)
        rotations = {
            window: rope_tables(positions, self.spec.in_window(window), length)
            for window in dict.fromkeys(self.spec.windows)
        }
        with jax.named_scope("embedding"):
            table_VE = self.embed_tokens.weight[...]
            specs = mesh and parameter_spec(table["embed_tokens.weight"], mesh, fsdp)
            lookup = functools.partial(embed, dtype=dtype)
            x_BSE = fsdp_apply(lookup, table_VE, tokens, specs=specs, mesh=mesh)
            x_BSE = self.scale_embedding(x_BSE)
        real_BS = None
        if self.spec.num_experts and length is not None and not isinstance(length, int):
            real_BS = (positions < length).astype(jnp.float32)
        graphdef, layers = nnx.split(self.layers)
        specs = mesh and layer_specs(layers, table, mesh, fsdp)
        names = parameter_names(layers)

        def hold(name: str, x: Array) -> Array:
            return x if self.spec.trains(LAYERS + name) else jax.lax.stop_gradient(x)

        def run_half_layer(
            method: Callable[..., Any], parameters: nnx.State, *x: Array | None
        ) -> Any:
            def run(parameters: nnx.State, *x: Array | None) -> Any:
                # Here and not outside, so that neither products nor collectives compute gradients.
                return method(nnx.merge(graphdef, jax.tree.map(hold, names, parameters)), *x)

            return fsdp_apply(run, parameters, *x, specs=specs, mesh=mesh, dtype=dtype)

        def body(
            window: int | None, x_BSE: Array, inputs: tuple[Any, Any, Any]
        ) -> tuple[Array, dict[str, Any]]:
            parameters, layer_inputs, number = inputs
            parameters = jax.tree.map(to_device, parameters)
            x_BSE = checkpoint_name(x_BSE, RESIDUAL)
            seeds = (None,) if dropout_seeds is None else Dropout.of_layer(dropout_seeds, number)
            with jax.named_scope("attention_inputs"):
                before = DecoderLayer.before_attention
                qkv = run_half_layer(before, parameters, x_BSE, *rotations[window], *seeds)
            qkv = checkpoint_name(qkv, QKV)
            extra = () if attention_inputs is None else (attention_inputs.for_layer(layer_inputs),)
            sinks = parameters["self_attn"].get("sinks")
            if window is not None or sinks is not None:
                own: dict[str, Any] = {"window": window}
                own["sinks"] = None if sinks is None else hold("sinks", sinks[...])
                extra = (dataclasses.replace(extra[0] if extra else AttentionInputs(), **own),)
            with jax.named_scope("attention"):
                out_BSHD, stats = attention(*qkv, *extra)
            after = DecoderLayer.after_attention
            x_BSE, used = run_half_layer(after, parameters, x_BSE, out_BSHD, *seeds, real_BS)
            stats = jax.lax.stop_gradient(jax.tree.map(_as_statistic, stats))
            if used is not None:
                stats |= {"experts": jax.tree.map(lambda sums: jnp.sum(sums, axis=1), used)}
            return x_BSE, stats if capture_kv is None else stats | {"kv": capture_kv(*qkv[1:])}

        bodies = {
            window: remat(functools.partial(body, window), self.spec.remat) for window in rotations
        }
        per_layer = None if attention_inputs is None else attention_inputs.per_layer()
        numbers = None if dropout_seeds is None else jnp.arange(self.spec.num_layers)
        inputs = layers, per_layer, numbers
        x_BSE, stats = scan_kinds(bodies, self.spec.windows, x_BSE, inputs)
        return self.norm(x_BSE), stats

    def scale_embedding(self, x: Array) -> Array:
        """Embeddings [..., E] as the first layer reads them, in their dtype."""
        if not FAMILIES.get(self.spec.family).scales_embedding:
            return x
        return x * jnp.asarray(self.spec.hidden_size**0.5, x.dtype)

    def lm_head_weight(self) -> Array:
        """The output matrix, [V, E]: the embedding if tied."""
        table = self.embed_tokens if self.lm_head is None else self.lm_head
        return table.weight[...]

    def logits(self, hidden_BSE: Array) -> Array:
        """Full logits, fp32 [B, S, V]; for short sequences."""
        weight_VE = self.lm_head_weight().astype(hidden_BSE.dtype)
        return dot32("bse,ve->bsv", hidden_BSE, weight_VE)


def graph_definition(config: Any) -> nnx.GraphDef:
    """The static structure of a model, from a `ModelSpec` or its fields; for `nnx.merge`."""
    return _traced_model(ModelSpec.from_config(config))[0]


def abstract_state(config: Any) -> nnx.State:
    """The shapes of a model's state, in `jax.ShapeDtypeStruct`."""
    _, state = _traced_model(ModelSpec.from_config(config))
    return jax.tree.map(lambda x: x, state)  # a copy, because states are mutable


def param_shardings(config: Any, mesh: Mesh, fsdp: bool) -> nnx.State:
    """The `NamedSharding` of every parameter; with `fsdp`, matrices are sharded."""
    spec = ModelSpec.from_config(config)
    return state_shardings(abstract_state(spec), spec.parameters, mesh, fsdp)


def init_model(
    config: Any, *, seed: int | Array, mesh: Mesh | None = None, fsdp: bool = False
) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns the graph definition and an initial state; `seed` is an integer or a JAX key."""
    # Each device computes only its shards, and the values do not depend on the mesh.
    spec = ModelSpec.from_config(config)
    return graph_definition(spec), _init_state(seed, spec, mesh, fsdp)


@functools.partial(jax.jit, static_argnames=("spec", "mesh", "fsdp"))
def _init_state(seed: int | Array, spec: ModelSpec, mesh: Mesh | None, fsdp: bool) -> nnx.State:
    is_key = jnp.issubdtype(jnp.result_type(seed), jax.dtypes.prng_key)
    key = seed if is_key else jax.random.key(seed)
    rngs = nnx.Rngs(params=key, adapters=jax.random.fold_in(key, 1))
    state = nnx.state(Transformer(spec, rngs=rngs))
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, param_shardings(spec, mesh, fsdp))


@functools.lru_cache(maxsize=32)
def _traced_model(spec: ModelSpec) -> tuple[nnx.GraphDef, nnx.State]:
    """Cached, because several parts of a run need it."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(spec, rngs=nnx.Rngs(0))))


def _as_statistic(value: Any) -> Array:
    """Casts floating-point values to fp32, but not integers, such as the bits of a mask."""
    value = jnp.asarray(value)
    return value.astype(jnp.float32) if jnp.issubdtype(value.dtype, jnp.floating) else value
