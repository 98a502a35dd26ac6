"""AdamW over the trainable parameters, with its learning-rate schedule and gradient clipping.

Frozen parameters have no gradient and no optimizer state.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mtraining_jax.config.sections import OptimizerConfig
from mtraining_jax.utils.errors import UserError

Parameters = dict[str, Array]  # fp32 by dotted name: "layers.self_attn.q_proj.weight"
Schedule = Callable[[Array], Array]


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """Builds the learning-rate schedule, from the int32 step to the fp32 rate.

    Step t (from 0) of a warm-up of n steps has rate lr * (t + 1) / n. After it the rate is
    constant, or decays to final_lr_ratio * lr at `decay_steps` (None: `total_steps`), and stays.
    """
    end = config.decay_steps or total_steps

    def rate(step: Array) -> Array:
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
    """Builds AdamW without its learning rate: updates must be scaled by -lr.

    Biases and norms have no weight decay. The structure of the state does not depend on any field,
    so checkpoints stay valid when fields change.
    """

    def decay(updates: Any, parameters: Any) -> Parameters:
        return {
            name: update
            if name.endswith(("norm.weight", ".bias"))
            else update + config.weight_decay * parameters[name]
            for name, update in updates.items()
        }

    return optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.stateless(decay) if config.weight_decay else optax.identity(),
    )


def clip(gradients: Parameters, clip_norm: float) -> tuple[Parameters, Array]:
    """Clips gradients to a global norm, 0 disables that; returns them and their norm before."""
    norm = optax.tree.norm(gradients)
    if not clip_norm:
        return gradients, norm
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return jax.tree.map(lambda gradient: gradient * scale, gradients), norm
