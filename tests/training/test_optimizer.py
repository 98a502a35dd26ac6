import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

from mtraining_jax.config.sections import OptimizerConfig
from mtraining_jax.training.optimizer import (
    add,
    clip,
    make_optimizer,
    make_schedule,
    trainable_names,
    update,
    update_from_host,
    zeros_like,
)
from mtraining_jax.utils.errors import UserError

NAMES = (
    "embed_tokens.weight",
    "layers.self_attn.q_proj.weight",
    "layers.self_attn.q_proj.bias",
    "layers.self_attn.k_proj.weight",
    "layers.self_attn.o_proj.weight",
    "layers.mlp.up_proj.weight",
    "norm.weight",
)


def rates(total=20, **fields):
    schedule = make_schedule(OptimizerConfig(**fields), total)
    return np.array([float(schedule(step)) for step in range(total + 5)])


def test_defaults_are_those_of_the_paper():
    config = OptimizerConfig()
    assert (config.lr, config.b1, config.b2, config.weight_decay, config.clip_norm) == (
        2e-5,
        0.9,
        0.95,
        0.0,
        1.0,
    )
    np.testing.assert_allclose(rates(), 2e-5, rtol=1e-6)


def test_warm_up_rises_from_its_first_step():
    np.testing.assert_allclose(rates(lr=1.0, warmup_steps=4)[:6], [0.25, 0.5, 0.75, 1, 1, 1])


@pytest.mark.parametrize("kind, middle", [("linear", 0.2 + 0.8 * 0.5), ("cosine", 0.2 + 0.8 * 0.5)])
def test_decay_ends_at_its_ratio(kind, middle):
    r = rates(lr=2.0, warmup_steps=4, schedule=kind, final_lr_ratio=0.2)
    np.testing.assert_allclose(r[[3, 12, 20, 24]], 2 * np.array([1, middle, 0.2, 0.2]), rtol=1e-6)
    assert np.all(np.diff(r[4:]) <= 0)


def test_decay_steps_count_from_the_start():
    r = rates(lr=1.0, warmup_steps=2, schedule="linear", decay_steps=12)
    np.testing.assert_allclose(r[[2, 7, 12, 15]], [1, 0.5, 0, 0], atol=1e-6)


def test_trainable_names_by_pattern():
    assert trainable_names(NAMES, ()) == set(NAMES)
    assert trainable_names(NAMES, ("self_attn",)) == set(NAMES[1:5])
    assert trainable_names(NAMES, ("self_attn.q_proj", "self_attn.k_proj")) == set(NAMES[1:4])
    with pytest.raises(UserError, match="'self_attention' matches no parameter.*embed_tokens"):
        trainable_names(NAMES, ("self_attn", "self_attention"))


def test_adamw_equals_optax_adamw_and_spares_biases_and_norms():
    config = OptimizerConfig(lr=0.1, weight_decay=0.1, b1=0.8, b2=0.9, eps=1e-6)
    parameters = {name: jnp.full((3,), 2.0) for name in NAMES}
    decayed = {name: not name.endswith(("bias", "norm.weight")) for name in NAMES}
    theirs = optax.adamw(0.1, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.1, mask=decayed)
    ours = make_optimizer(config)
    mine, expected = dict(parameters), dict(parameters)
    my_state, their_state = ours.init(mine), theirs.init(expected)
    rng = np.random.default_rng(0)
    for _ in range(3):
        gradients = {name: jnp.asarray(rng.normal(size=3), jnp.float32) for name in NAMES}
        mine, my_state = update(ours, gradients, my_state, mine, config.lr, True, 1.0)
        updates, their_state = theirs.update(gradients, their_state, expected)
        expected = optax.apply_updates(expected, updates)
    for name in NAMES:
        np.testing.assert_allclose(mine[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize("mu_dtype", ["float32", "bfloat16"])
def test_arrays_on_the_host_change_no_bit(mu_dtype):
    shapes = {"layers.x.weight": (3, 40, 24), "layers.norm.weight": (3, 24), "x.weight": (61, 24)}
    rng = np.random.default_rng(0)

    def draw():
        drawn = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        return {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}

    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1, mu_dtype=mu_dtype))
    start, gradients, found = draw(), [draw() for _ in range(3)], []
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def layers_on_host(tree):
        return {
            name: jax.device_put(x, host) if name.startswith("layers.") else x
            for name, x in tree.items()
        }

    def kinds(tree):
        return {x.sharding.memory_kind for name, x in tree.items() if name.startswith("layers.")}

    for take, offload in ((update, False), (update_from_host, True), (update_from_host, "all")):

        @jax.jit
        def step(gradients, state, parameters, applied, take=take):
            sums = add(zeros_like(parameters), gradients)
            sums = add(sums, gradients)
            scale, norm, norms = clip(sums, 0.5)
            return *take(optimizer, sums, state, parameters, 0.1, applied, scale), norm, norms

        place = layers_on_host if offload == "all" else dict
        parameters, (adam, *others) = place(start), optimizer.init(start)
        if offload:
            moments = jax.device_put((adam.mu, adam.nu), host)
            adam = adam._replace(mu=moments[0], nu=moments[1])
        state = adam, *others
        for number, gradient in enumerate(gradients):
            parameters, state, *norms = step(place(gradient), state, parameters, number != 1)
        where = "pinned_host" if offload else "device"
        assert kinds(state[0].mu) == kinds(state[0].nu) == {where}
        assert kinds(parameters) == {"pinned_host" if offload == "all" else "device"}
        assert {x.dtype.name for x in state[0].mu.values()} == {mu_dtype}
        assert state[0].count == 2
        found.append(jax.device_get((parameters, state, norms)))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)


def test_muon_leaves_biases_of_experts_to_adamw():
    """They are stacked as [layers, experts, out], with as many axes as a matrix."""
    shapes = {
        "layers.mlp.gate_proj.weight": (2, 4, 24, 6),
        "layers.mlp.gate_proj.bias": (2, 4, 24),
        "layers.self_attn.q_proj.weight": (2, 8, 6),
        "layers.self_attn.sinks": (2, 8),
        "layers.self_attn.scale.weight": (2, 8),  # a vector, such as of a family of one's own
        "embed_tokens.weight": (9, 6),
    }
    rng = np.random.default_rng(0)
    gradients = {name: jnp.asarray(rng.normal(size=x), jnp.float32) for name, x in shapes.items()}
    optimizer = make_optimizer(OptimizerConfig(kind="muon", weight_decay=0.1))
    parameters = {name: jnp.ones(shape) for name, shape in shapes.items()}
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    for name, moved in updates.items():
        is_matrix = name.endswith("_proj.weight")
        decay = 0.1 if name.endswith(".weight") else 0.0
        # AdamW's first step has the sign of the gradient.
        is_sign = np.allclose(moved - decay, np.sign(gradients[name]), atol=1e-5)
        assert is_sign != is_matrix, name
        if is_matrix:  # of each layer and expert; bounds as in test_fit.py
            sizes = np.linalg.svd(moved - decay, compute_uv=False)
            sizes /= 0.2 * max(moved.shape[-2:]) ** 0.5
            assert sizes.max() < 1.25 and np.median(sizes, axis=-1).min() > 0.6, name


def test_clip_scales_to_the_norm_and_reports_the_norms_before():
    gradients = {"a": jnp.array([1.0, -2.0, 2.0]), "layers.b": jnp.array([[2.0] * 4, [6.0] * 4])}
    scale, norm, norms = clip(gradients, 1.0)
    assert float(norm) == 13.0
    assert jax.tree.map(np.ndarray.tolist, jax.device_get(norms)) == {
        "a": 3.0,
        "layers.b": [4.0, 12.0],
    }
    np.testing.assert_allclose(scale, 1 / 13, rtol=1e-6)
    for limit in (20.0, 0.0):
        assert float(clip(gradients, limit)[0]) == 1
