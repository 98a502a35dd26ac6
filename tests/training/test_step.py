import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.parallel.replicas import per_replica
from mtraining_jax.tools.audit.auditing import build_audit
from mtraining_jax.tools.audit.figures import GRADIENT_FIGURES
from mtraining_jax.training.build import build_attention, build_layout, build_mesh, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step, mean_over_parts, micro_batches
from tests.parallel.hlo_meetings import meetings
from tests.training.common import VERTICAL_SLASH, changed, tiny_config

pytestmark = pytest.mark.usefixtures("drawn_alone")


def untied(folder, model=None, **sections):
    """A run with an untied output layer; the other tests tie it."""
    return tiny_config(folder, model={"tie_word_embeddings": False} | (model or {}), **sections)


class Parts:
    """The parts of a run without the training loop.

    Attributes:
        first_moments: Adam moments after the first step: gradients, clipped and scaled.
    """

    def __init__(self, config):
        self.mesh = build_mesh(config)
        layout = build_layout(config)
        self.batches = DeviceBatches(config, self.mesh, layout)
        self.builder = StateBuilder(config, self.mesh)
        pattern = build_pattern(config)
        attention = build_attention(config, self.mesh, layout, pattern)
        audit = build_audit(config)
        self.step = make_train_step(config, self.builder, attention, self.mesh, observer=audit)

    def train(self, steps):
        """Returns the metrics of each step, and the last state."""
        state, found = self.builder.fresh(), []
        for _ in range(steps):
            state, metrics = self.step(state, next(self.batches))
            found.append(jax.device_get(metrics))
            if len(found) == 1:
                self.first_moments = jax.device_get(state.opt_state[0].mu)
        return found, state


def loss_and_norm(metrics):
    return np.array([(m["loss"], m["grad_norm"]) for m in metrics])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("step")


@pytest.fixture(scope="module")
def dense(folder):
    """Batches of 4 without accumulation on 1 x 2 x 2 devices, dense."""
    config = untied(folder, data={"batch_size": 4}, sparsity={"kind": "dense"})
    parts = Parts(config)
    metrics, state = parts.train(3)
    return parts, metrics, state


def test_the_parts_of_a_step_have_names_in_traces(tmp_path):
    config = tiny_config(tmp_path)
    parts = Parts(config)
    state = parts.builder.abstract()
    text = parts.step.lower(state, next(parts.batches)).as_text(debug_info=True)
    parts.batches.close()
    scopes = set(re.findall(r"\w+", " ".join(re.findall(r'loc\("([^"]*)"', text))))
    names = {"embedding", "attention_inputs", "attention", "selection", "mlp", "loss", "optimizer"}
    assert names | {"ring_plans", "ring_forward", "ring_backward"} <= scopes


def test_a_part_without_a_value_does_not_count():
    """As when all audited queries of a micro-batch are padding; and masks are not averaged."""
    recall = jnp.array([[0.5, np.nan], [np.nan, np.nan], [0.75, np.nan]])
    np.testing.assert_array_equal(mean_over_parts(recall), [0.625, np.nan])
    np.testing.assert_array_equal(mean_over_parts(jnp.array([[3, 4], [1, 1]])), [3, 4])


def test_loss_falls_and_metrics_are_complete(dense):
    _, metrics, state = dense
    assert [int(m["step"]) for m in metrics] == [1, 2, 3]
    assert metrics[2]["loss"] < metrics[0]["loss"]
    assert all(m["labels"] == 4 * 127 for m in metrics)  # the last token has no label
    assert metrics[0]["layers"]["density"].shape == (2,)
    assert int(state.skipped) == 0


def test_dense_equals_sparse_with_everything_selected(folder, dense):
    everything = VERTICAL_SLASH | {
        "top_p": 1.0,
        "max_verticals": 128,
        "max_slashes": 128,
        "min_slashes": 128,
        "min_verticals": 128,
    }
    config = untied(
        folder,
        data={"batch_size": 4},
        sparsity=everything,
        parallel={"nodes": 2, "devices_per_node": 1},
        audit={"interval": 1, "num_queries": 16},
    )
    sparse, _ = Parts(config).train(3)
    np.testing.assert_array_equal(sparse[0]["layers"]["density"], [1, 1])
    np.testing.assert_array_equal(dense[1][0]["layers"]["density"], [1, 1])
    for metrics in sparse:  # an audit measures full recall
        np.testing.assert_allclose(metrics["audit"]["recall"], np.ones((2, 6)), rtol=1e-5)
        np.testing.assert_allclose(metrics["audit"]["output_error"], np.zeros((2, 6)), atol=1e-5)
        for name in GRADIENT_FIGURES:
            np.testing.assert_allclose(metrics["audit"][name], np.ones((2, 6)), rtol=1e-4)
    np.testing.assert_allclose(loss_and_norm(sparse), loss_and_norm(dense[1]), rtol=2e-5)


@pytest.fixture(scope="module")
def groups(folder):
    """The same batches in two micro-batches on two replicas of 1 x 2 devices."""
    config = untied(
        folder,
        data={"batch_size": 4},
        sparsity={"kind": "dense"},
        parallel={"replicas": 2, "nodes": 1, "devices_per_node": 2, "fsdp": True},
        optimizer={"accumulation_steps": 2, "lr": 1e-2},
    )
    parts = Parts(config)
    return parts, *parts.train(3)


def test_accumulation_over_data_groups_equals_one_big_batch(dense, groups):
    parts, metrics, _ = groups
    np.testing.assert_allclose(loss_and_norm(metrics), loss_and_norm(dense[1]), rtol=2e-5)
    for name in metrics[0]["layers"]:
        for mine, expected in zip(metrics, dense[1], strict=True):
            np.testing.assert_allclose(mine["layers"][name], expected["layers"][name], rtol=1e-5)
    for name, found in parts.first_moments.items():
        expected = dense[0].first_moments[name]
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 1e-6 or "k_proj.bias" in name, name  # its gradient is 0 except for rounding


def test_parameters_in_host_memory_change_no_bit(folder):
    config = untied(
        folder,
        sparsity={"kind": "dense"},
        parallel={"nodes": 1, "devices_per_node": 2, "fsdp": True},
        optimizer={"accumulation_steps": 2},
    )
    expected, before = Parts(config).train(2)
    found, after = Parts(changed(config, optimizer={"offload": "all"})).train(2)
    assert {name for name, x in after.model.items() if x.sharding.memory_kind == "pinned_host"} == {
        name for name in after.model if name.startswith("layers.")
    }
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_replicas_synchronize_once_a_step(groups):
    parts, _, state = groups
    program = parts.step.lower(state, next(parts.batches)).compile()
    found = meetings(program.as_text())
    assert sum(meeting.in_loop for meeting in found) > 5
    joining = [meeting for meeting in found if meeting.joins(2, 4)]
    assert not any(meeting.in_loop for meeting in joining)
    # Labels are counted before; gradients and statistics are summed after.
    assert [meeting.kind for meeting in joining].count("all-reduce") == 2
    # Each replica updates a part of every matrix.
    matrices = [n for n, x in state.parameters.items() if not x.sharding.is_fully_replicated]
    others = [meeting.kind for meeting in joining if meeting.kind != "all-reduce"]
    assert others == ["all-gather"] * len(matrices)
    for moments in (state.opt_state[0].mu, state.opt_state[0].nu):
        for name in matrices:
            assert moments[name].addressable_shards[0].data.size == moments[name].size // 4


def test_micro_batches_hold_every_row_once_and_move_none(dense):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), dense[0].mesh.axis_names)
    sharding = jax.NamedSharding(mesh, TOKENS)
    rows = jax.device_put(jnp.arange(8 * 16).reshape(8, 16), sharding)

    def own(x):
        return micro_batches({"tokens": x}, 2, mesh)["tokens"]

    cut = jax.jit(per_replica(own, mesh, jax.P("data"), jax.P(None, "data")))
    np.testing.assert_array_equal(cut(rows)[:, :, 0] // 16, [[0, 1, 4, 5], [2, 3, 6, 7]])
    text = cut.lower(rows).compile().as_text()
    assert "all-to-all" not in text and "all-gather" not in text and "permute" not in text


@pytest.mark.timeout(120)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(dense):
    parts, _, state = dense
    name = "layers.mlp.up_proj.weight"
    # The step donates its argument.
    state = jax.tree.map(jnp.copy, state)
    good = np.asarray(state.parameters[name])
    spoilt = dataclasses.replace(
        state, parameters=state.parameters | {name: state.parameters[name].at[0, 0, 0].set(np.nan)}
    )
    spoilt = jax.device_put(spoilt, parts.builder.shardings())
    before = jax.device_get(spoilt)
    after, metrics = parts.step(spoilt, next(parts.batches))
    assert not np.isfinite(metrics["loss"])
    assert (int(metrics["skipped"]), int(metrics["skipped_in_row"])) == (1, 1)
    assert int(after.step) == int(before.step) + 1
    for old, new in zip(
        jax.tree.leaves((before.parameters, before.opt_state)),
        jax.tree.leaves((after.parameters, after.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(old, new)
    fixed = {**after.parameters, name: jax.device_put(good, parts.builder.shardings().step)}
    after, metrics = parts.step(dataclasses.replace(after, parameters=fixed), next(parts.batches))
    assert np.isfinite(metrics["loss"])
    assert (int(metrics["skipped"]), int(metrics["skipped_in_row"])) == (1, 0)


@pytest.mark.parametrize(
    ("family", "trained"), [("qwen2", ["norm"]), ("qwen3_moe", ["layers.self_attn", "mlp.gate."])]
)
def test_gradients_of_frozen_matrices_are_not_computed(tmp_path, family, trained):
    """FLOP of a step, in metrics and dry runs, count none."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2} if "moe" in family else {}
    found = []
    for trainable in ([], trained):
        config = untied(
            tmp_path,
            model={"family": family, **experts},
            sparsity={"kind": "dense"},
            parallel={"nodes": 1, "devices_per_node": 1},
            optimizer={"trainable": trainable},
        )
        parts = Parts(config)
        text = parts.step.lower(parts.builder.abstract(), next(parts.batches)).as_text()
        parts.batches.close()
        products = re.findall(r"dot(?:_general)?\W.*-> tensor<(.*)xf32>", text)
        matrices = {name: x.shape for name, x in parts.builder.abstract().model.items()}
        shapes = {
            name: "x".join(map(str, shape[1:] if name.startswith("layers.") else shape))
            for name, shape in matrices.items()
            if name.endswith("_proj.weight") or name == "lm_head.weight"
        }
        found.append({name for name, shape in shapes.items() if shape in products})
    assert len(found[0]) == 8
    assert found[1] == {name for name in found[0] if any(part in name for part in trained)}


def test_frozen_matrices_are_bf16_and_stay_with_the_same_bits_as_from_fp32(folder, dense):
    config = untied(
        folder,
        data={"batch_size": 4},
        sparsity={"kind": "dense"},
        parallel={"nodes": 1, "devices_per_node": 1},
        model={"dtype": "bfloat16"},
        optimizer={"trainable": ["layers.self_attn.q_proj", "self_attn.k_proj"], "lr": 1e-2},
    )
    parts = Parts(config)
    before = jax.device_get(parts.builder.fresh().parameters)
    metrics, state = parts.train(1)
    trained = {f"layers.self_attn.{p}_proj.{w}" for p in "qk" for w in ("weight", "bias")}
    moved = {n for n, x in state.parameters.items() if not np.array_equal(x, before[n])}
    # A bias of the keys shifts all scores of a query equally, so rounding may leave it unchanged.
    assert trained - {"layers.self_attn.k_proj.bias"} <= moved <= trained
    assert set(state.opt_state[0].mu) == set(state.opt_state[0].nu) == trained
    in_bf16 = {name for name, x in state.parameters.items() if x.dtype == jnp.bfloat16}
    vectors = {name for name in state.parameters if name.endswith(("norm.weight", ".bias"))}
    assert in_bf16 == state.parameters.keys() - trained - vectors
    assert {x.dtype.name for x in jax.tree.leaves(state.opt_state)} == {"float32", "int32"}
    found, expected = metrics[0]["loss"], dense[1][0]["loss"]
    np.testing.assert_allclose(found, expected, rtol=0.01)  # bf16 keeps 8 bits
    assert found != expected

    everything = StateBuilder(changed(config, optimizer={"trainable": []}), parts.mesh).fresh()
    start = dataclasses.replace(parts.builder.fresh(), parameters=everything.parameters)
    assert {x.dtype.name for x in start.parameters.values()} == {"float32"}
    batches = DeviceBatches(config, parts.mesh, build_layout(config))
    after, of_fp32 = parts.step(start, next(batches))
    np.testing.assert_array_equal(loss_and_norm([of_fp32]), loss_and_norm(metrics))
    for name in trained:
        np.testing.assert_array_equal(after.parameters[name], state.parameters[name])
