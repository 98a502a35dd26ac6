"""AdamW over the trainable parameters, by name; its schedule and its clipping.

Parameters are a flat dict from dotted name ("layers.self_attn.q_proj.weight") to fp32 array: the
master weights. Frozen parameters take no part: they have no gradient and no optimizer state.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax
from jax import Array

from mtraining_jax.config import OptimizerConfig
from mtraining_jax.errors import UserError

Parameters = dict[str, Array]
Schedule = Callable[[Array], Array]


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """The learning rate of a step.

    Step t (from 0) of a warm-up of n steps has rate lr * (t + 1) / n, so the first step does not
    have a rate of 0. After the warm-up the rate is constant, or falls from lr to
    final_lr_ratio * lr, which it has at step `decay_steps` and after: along a line, or half a
    cosine.

    Args:
        config: the `optimizer` section.
        total_steps: steps of the run, where the schedule ends if `decay_steps` is None.

    Returns:
        A function from the int32 step to the fp32 rate.
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
    """The names that contain one of the patterns; without patterns, all of them.

    Raises:
        UserError: naming a pattern that is in no name, and what names there are.
    """
    names = sorted(names)
    for pattern in patterns:
        if not any(pattern in name for name in names):
            raise UserError(
                f"optimizer.trainable has {pattern!r}, which is in the name of no parameter; "
                f"parameters are {', '.join(names)}"
            )
    if not patterns:
        return frozenset(names)
    return frozenset(name for name in names if any(pattern in name for pattern in patterns))


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW without its learning rate: gradients in, the step to take divided by -lr out.

    Moments are fp32. Weight decay leaves out biases and norms. The structure of the state depends
    on no field, so that checkpoints stay valid when fields change.
    """

    def decay(updates: Parameters, parameters: Parameters) -> Parameters:
        return {
            name: update if _is_vector(name) else update + config.weight_decay * parameters[name]
            for name, update in updates.items()
        }

    return optax.chain(
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
        optax.stateless(decay) if config.weight_decay else optax.identity(),
    )


def _is_vector(name: str) -> bool:
    return name.endswith(("norm.weight", ".bias"))


def clip(gradients: Parameters, clip_norm: float) -> tuple[Parameters, Array]:
    """Scales gradients so that their global norm is at most `clip_norm`; 0 leaves them.

    Returns:
        The gradients and their global norm before, fp32.
    """
    norm = optax.tree.norm(gradients)
    if not clip_norm:
        return gradients, norm
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return jax.tree.map(lambda gradient: gradient * scale, gradients), norm
