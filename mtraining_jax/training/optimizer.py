"""AdamW or Muon over the trainable parameters, with learning-rate schedule and gradient clipping.

Frozen parameters have no gradient and no optimizer state.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from mtraining_jax.config.sections import OptimizerConfig
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.parallel.host_memory import (
    by_memory,
    map_layers,
    move_to,
    over_layers,
    to_device,
)
from mtraining_jax.utils.errors import UserError

_VECTORS = "norm.weight", ".bias", ".sinks"  # ends of names
_RMS = 0.2  # of updates of matrices, about that of AdamW (arXiv 2502.16982)
Parameters = dict[str, Array]  # fp32 by dotted name: "layers.self_attn.q_proj.weight"
Schedule = Callable[[Array | int], Array]


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Builds the learning-rate schedule, from the int32 step to the fp32 rate.

    Step t (from 0) of a warm-up of n steps has rate lr * (t + 1) / n. After it the rate is
    constant, or decays to final_lr_ratio * lr at `decay_steps` (None: `total_steps`), and stays.
    """
    end = config.decay_steps or total_steps

    def rate(step: Array | int) -> Array:
        step = jnp.asarray(step, jnp.float32)
        scale = jnp.minimum(1.0, (step + 1) / max(config.warmup_steps, 1))
        if config.schedule != "constant":
            done = (step - config.warmup_steps) / max(end - config.warmup_steps, 1)
            done = jnp.clip(done, 0.0, 1.0)
            left = 1 - done if config.schedule == "linear" else 0.5 * (1 + jnp.cos(jnp.pi * done))
            scale = scale * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)
        return config.lr * scale

    return rate


def trainable_names(names: Iterable[str], patterns: tuple[str, ...]) -> frozenset[str]:
    """Returns the names that contain one of the patterns; without patterns, all names."""
    names = sorted(names)
    matches = {pattern: {name for name in names if pattern in name} for pattern in patterns}
    for pattern, matching in matches.items():
        if not matching:
            raise UserError(
                f"optimizer.trainable: pattern {pattern!r} matches no parameter; "
                f"the parameters are {', '.join(names)}"
            )
    return frozenset().union(*matches.values()) if patterns else frozenset(names)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Builds the optimizer without its learning rate: updates must be scaled by -lr.

    Biases, norms and sinks have no weight decay. The structure of the state depends on `kind` only,
    so checkpoints stay valid when other fields change.
    """
    return _muon(config) if config.kind == "muon" else _adamw(config)


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:

    def adam(updates: Any, state: Any, params: Any = None) -> tuple[Parameters, Any]:
        # Each sum has one product, as compilers fuse one of two with the sum, not always the same:
        # results must not depend on where moments are.
        mu = jax.tree.map(lambda m, g: m + (1 - config.b1) * (g - m), state.mu, updates)
        nu = jax.tree.map(lambda v, g: v + (1 - config.b2) * (g * g - v), state.nu, updates)
        count = optax.safe_increment(state.count)
        mu_scale, nu_scale = (1 / (1 - b**count) for b in (config.b1, config.b2))
        updates = jax.tree.map(
            lambda m, v: m * mu_scale / (jnp.sqrt(v * nu_scale) + config.eps), mu, nu
        )
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.chain(
        optax.GradientTransformation(optax.scale_by_adam(mu_dtype=config.mu_dtype).init, adam),
        _decay(config) if config.weight_decay else optax.identity(),
    )


def _decay(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adds decayed parameters to updates, except biases, norms and sinks."""

    def decay(path: Any, update: Array, parameter: Array) -> Array:
        if path[-1].key.endswith(_VECTORS):
            return update
        return update + config.weight_decay * parameter

    return optax.stateless(functools.partial(jax.tree_util.tree_map_with_path, decay))


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Muon for matrices of layers, stacked as [L, out, in] or [L, experts, out, in]; else AdamW."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-1, output_axis=-2)

    def labels(parameters: Parameters) -> dict[str, str]:
        # Biases of experts are stacked as [L, experts, out].
        matrices = {
            name
            for name, x in parameters.items()
            if name.startswith(LAYERS) and x.ndim > 2 and not name.endswith(_VECTORS)
        }
        return {name: "muon" if name in matrices else "adamw" for name in parameters}

    def with_rms(x: Array) -> Array:
        return x * (_RMS * max(x.shape[-2:]) ** 0.5)

    return optax.partition(
        {
            "muon": optax.chain(
                optax.contrib.scale_by_muon(
                    eps=config.eps,
                    mu_dtype=config.mu_dtype,
                    weight_dimension_numbers=lambda matrices: jax.tree.map(
                        lambda _: axes, matrices
                    ),
                ),
                optax.stateless(lambda updates, _: jax.tree.map(with_rms, updates)),
                _decay(config),
            ),
            "adamw": _adamw(config),
        },
        labels,
    )


def update(
    optimizer: optax.GradientTransformation,
    gradients: Parameters,
    state: Any,
    parameters: Parameters,
    rate: Array,
    applied: Array,
    scale: Array | float,
) -> tuple[Parameters, Any]:
    """Returns new parameters and optimizer state; the old ones where `applied` is false."""
    # Products with a bf16 moment would be rounded.
    exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state)
    # Without a product that compilers could fuse with sums of the optimizer.
    gradients = lax.optimization_barrier(jax.tree.map(lambda x: x * scale, gradients))
    updates, after = optimizer.update(gradients, exact, parameters)
    updated = jax.tree.map(lambda parameter, u: parameter - rate * u, parameters, updates)
    return jax.tree.map(
        lambda new, old: jnp.where(applied, new.astype(old.dtype), old),
        (updated, after),
        (parameters, state),
    )


def update_from_host(
    optimizer: optax.GradientTransformation,
    gradients: Parameters,
    state: Any,
    parameters: Parameters,
    rate: Array,
    applied: Array,
    scale: Array | float,
) -> tuple[Parameters, Any]:
    """Computes `update` with arrays in host memory, for one layer at a time on the device."""
    adam, *others = state

    def part(old: tuple[Parameters, ...], gradients: Parameters) -> tuple[Parameters, ...]:
        parameters, mu, nu = old
        on_device = adam._replace(mu=mu, nu=nu), *others
        how = rate, applied, scale
        after, (new, *_) = update(optimizer, gradients, on_device, parameters, *how)
        return after, new.mu, new.nu

    def named(tree: Parameters, names: Iterable[str]) -> Parameters:
        return {name: tree[name] for name in names}

    arrays = parameters, adam.mu, adam.nu
    stacked = sorted(name for name in parameters if name.startswith(LAYERS))
    done = tuple(named(tree, stacked) for tree in arrays)
    done = over_layers(part, done, named(gradients, stacked))
    for name in sorted(parameters.keys() - set(stacked)):
        own = tuple(named(tree, [name]) for tree in arrays)
        # XLA would copy them to the device earlier, all at the same time.
        own, done, applied = lax.optimization_barrier((own, done, applied))
        new = part(jax.tree.map(to_device, own), named(gradients, [name]))
        done = tuple(x | y for x, y in zip(done, jax.tree.map(move_to, new, own), strict=True))
    updated, mu, nu = done
    count = jnp.where(applied, optax.safe_increment(adam.count), adam.count)
    return updated, (adam._replace(count=count, mu=mu, nu=nu), *others)


def clip(gradients: Parameters, clip_norm: float) -> tuple[Array | float, Array, dict[str, Array]]:
    """Returns the factor that clips gradients to a global norm, 0 disables that.

    Also their norm before, and that of each parameter, fp32 [] or [L] of layers.
    """

    def squares(x: Array, first: int = 0) -> Array:
        square = jnp.square(to_device(x).astype(jnp.float32))
        return jnp.sum(square, axis=tuple(range(first, x.ndim)))

    here, there = by_memory(gradients)
    sums = {name: squares(x, int(name.startswith(LAYERS))) for name, x in here.items()}
    sums |= map_layers(functools.partial(jax.tree.map, squares), there)
    # Summed in the same order, wherever gradients are.
    sums = lax.optimization_barrier({name: sums[name] for name in gradients})
    norm = jnp.sqrt(sum(jnp.sum(x) for x in sums.values()))
    scale = clip_norm / jnp.maximum(norm, clip_norm) if clip_norm else 1.0
    return scale, norm, jax.tree.map(jnp.sqrt, sums)


def zeros_like(parameters: Parameters) -> Parameters:
    """Zeros in the same memory as parameters."""
    here, there = by_memory(parameters)

    def layer_zeros(arrays: Parameters) -> Parameters:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)
        # XLA would copy equal ones in host memory.
        return jax.tree.map(move_to, lax.optimization_barrier(zeros), arrays)

    zeros = map_layers(layer_zeros, there)
    return jax.tree.map(jnp.zeros_like, here) | zeros


def add(sums: Parameters, gradients: Parameters) -> Parameters:
    """Adds gradients to sums, those in host memory for one layer at a time."""
    (here, there), (new, new_there) = by_memory(sums), by_memory(gradients)
    add_trees = functools.partial(jax.tree.map, jnp.add)
    return add_trees(here, new) | over_layers(add_trees, there, new_there)
