"""Steps of a plain Flax model: what a user of JAX writes without this library."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import Array

from benchmarks.report import versions
from benchmarks.step.peers.arms import (
    CHUNK,
    CLIP_NORM,
    INIT_STDDEV,
    LEARNING_RATE,
    RMS_NORM_EPS,
    ROPE_THETA,
    Sizes,
    on_cpu,
)
from mtraining_jax.tools.plan.compiled import peak_bytes

_INIT = nn.initializers.normal(INIT_STDDEV)
_norm = functools.partial(nn.RMSNorm, epsilon=RMS_NORM_EPS, dtype=jnp.bfloat16)


class Layer(nn.Module):
    """A decoder layer on activations bf16 [B, S, E]; parameters are fp32."""

    sizes: Sizes
    attention: str

    @nn.compact
    def __call__(self, x_BSE: Array, rotation: tuple[Array, Array]) -> tuple[Array, None]:
        sizes, (batch, count, width) = self.sizes, x_BSE.shape

        def dense(name: str, features: int, use_bias: bool = False) -> Callable[[Array], Array]:
            how = {"dtype": jnp.bfloat16, "kernel_init": _INIT, "use_bias": use_bias}
            return nn.Dense(features, name=name, **how)

        def heads(name: str, number: int) -> Array:
            projected = dense(name, number * sizes.head_dim, use_bias=True)(y_BSE)
            return projected.reshape(batch, count, number, sizes.head_dim)

        y_BSE = _norm(name="attention_norm")(x_BSE)
        q, k = heads("q", sizes.num_heads), heads("k", sizes.num_kv_heads)
        out = jax.nn.dot_product_attention(
            _rotated(q, *rotation),
            _rotated(k, *rotation),
            heads("v", sizes.num_kv_heads),
            is_causal=True,
            implementation=self.attention,
        )
        x_BSE += dense("o", width)(out.reshape(batch, count, -1))
        y_BSE = _norm(name="mlp_norm")(x_BSE)
        gate, up = (dense(name, sizes.intermediate_size)(y_BSE) for name in ("gate", "up"))
        return x_BSE + dense("down", width)(nn.silu(gate) * up), None


class Model(nn.Module):
    """int32 [B, S] -> hidden states bf16 [B, S, E] and the embedding, fp32 [V, E]."""

    sizes: Sizes
    attention: str

    @nn.compact
    def __call__(self, tokens_BS: Array) -> tuple[Array, Array]:
        sizes = self.sizes
        table_VE = self.param("embedding", _INIT, (sizes.vocab_size, sizes.hidden_size))
        layers = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=sizes.num_layers,
        )(sizes, self.attention, name="layers")
        x_BSE = table_VE.astype(jnp.bfloat16)[tokens_BS]
        x_BSE, _ = layers(x_BSE, _rotation(tokens_BS.shape[1], sizes.head_dim))
        return _norm(name="norm")(x_BSE), table_VE


def make_step(sizes: Sizes, attention: str, chunked: bool) -> tuple[Callable[..., Any], Any]:
    """The step (state, tokens) -> (state, loss), to be jitted with a donated state, and `init`."""
    model = Model(sizes, attention)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM), optax.adamw(LEARNING_RATE, weight_decay=0.0)
    )

    def loss_of(parameters: Any, tokens_BS: Array) -> Array:
        hidden_BSE, table_VE = model.apply(parameters, tokens_BS)
        hidden_TE, labels_T = hidden_BSE[0], jnp.roll(tokens_BS[0], -1)
        counted_T = jnp.arange(labels_T.size) < labels_T.size - 1
        rows = hidden_TE, labels_T, counted_T
        sums = functools.partial(_summed_loss, table_VE.astype(jnp.bfloat16))
        if chunked:
            parts = jax.tree.map(lambda x: x.reshape(-1, CHUNK, *x.shape[1:]), rows)
            total = jax.lax.map(lambda part: jax.checkpoint(sums)(*part), parts).sum()
        else:
            total = sums(*rows)
        return total / (labels_T.size - 1)

    def step(state: tuple[Any, Any], tokens_BS: Array) -> tuple[tuple[Any, Any], Array]:
        parameters, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens_BS)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    def init() -> tuple[Any, Any]:
        # Initial values depend neither on the length nor on the kernels of attention.
        parameters = Model(sizes, "xla").init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        return parameters, optimizer.init(parameters)

    return step, init


class Step:
    """The compiled step; `chunked` has the loss in chunks."""

    def __init__(self, sizes: Sizes, tokens: int, variant: str) -> None:
        if jax.default_backend() != "gpu" and not on_cpu():
            raise ImportError("JAX sees no GPU")
        self.tokens = jnp.asarray(sizes.tokens(tokens))
        attention = "xla" if on_cpu() else "cudnn"
        step, init = make_step(sizes, attention, variant == "chunked")
        self.init = jax.jit(init)
        lowered = jax.jit(step, donate_argnums=0).lower(jax.eval_shape(init), self.tokens)
        self.program = lowered.compile()

    def load(self) -> dict[str, Any]:
        self.state = jax.block_until_ready(self.init())
        packages = "jax", "jaxlib", "flax", "optax", "nvidia-cudnn-cu13"
        return {"device": jax.devices()[0].device_kind, "versions": versions(*packages)}

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Takes steps; returns their losses and seconds."""
        losses, seconds = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            self.state, loss = jax.block_until_ready(self.program(self.state, self.tokens))
            losses.append(float(loss))
            seconds.append(time.perf_counter() - begin)
        return losses, seconds

    def peak(self) -> int | None:
        """Bytes of a step, as the compiler reserves them."""
        return peak_bytes(self.program)

    def density(self) -> float:
        return 1.0


def _summed_loss(table_VE: Array, hidden_TE: Array, labels_T: Array, counted_T: Array) -> Array:
    logits_TV = (hidden_TE @ table_VE.T).astype(jnp.float32)
    losses_T = optax.softmax_cross_entropy_with_integer_labels(logits_TV, labels_T)
    return jnp.where(counted_T, losses_T, 0).sum()


def _rotation(count: int, head_dim: int) -> tuple[Array, Array]:
    """Cosine and sine of RoPE, fp32 [S, 1, D / 2] each."""
    frequencies = ROPE_THETA ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(count, dtype=jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotated(x_BSHD: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x_BSHD.astype(jnp.float32), 2, axis=-1)
    parts = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(parts, axis=-1).astype(x_BSHD.dtype)
