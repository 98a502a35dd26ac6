"""A run notices planted faults, repairs gradients, and ends where its state is damaged."""

import dataclasses
import json

import numpy as np
import pytest

from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.guard import guard
from mtraining_jax.training.guard.guard import FAULTS, Guard, Outliers, TakenStep
from mtraining_jax.training.guard.sums import Findings, StateSums
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils.errors import UserError
from tests.training.common import changed, losses, run, written
from tests.training.guard.plants import GRADIENT, KV, MOMENT, PARAMETER, Fault, planted

EXPONENT = 30  # flipping this bit multiplies a small number by 2**128
DIFFERED = "two passes of the step had different bits, in the gradients of "


@pytest.fixture
def guarded(config):
    """A run of 16 steps on 4 devices; step 15 is repeated."""
    return changed(
        config,
        run={"steps": 16},
        sparsity={"kind": "dense"},
        parallel={"replicas": 2, "nodes": 1, "fsdp": True, "ring": "flat"},
        guard={"enabled": True, "interval": 15},
        checkpoint={"interval": 5},
    )


def named(config, name):
    return changed(config, run={"name": name})


def faults_of(config):
    path = config.run.folder / FAULTS
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def test_wrong_gradients_are_repaired(guarded, monkeypatch):
    # Checkpoints take time; the one of step 10 waits for the limits that step 11 needs.
    guarded = changed(guarded, checkpoint={"interval": 10})
    config = named(guarded, "clean")
    with planted([]):
        clean = run(config)
    assert [x.get("passes") for x in clean] == [None] * 14 + [2, None]
    assert not faults_of(config) and not any("alarms" in x for x in clean)

    transient = [
        Fault(11, GRADIENT, 5, EXPONENT, array=2),
        Fault(13, GRADIENT, 9, EXPONENT, array=4),
        Fault(15, KV, 7, 20),  # in a repeated step any bit that matters is noticed
    ]
    config = named(guarded, "repaired")
    with planted(transient) as plants:
        repaired = run(config)
    assert plants.fired == transient
    np.testing.assert_array_equal(losses(repaired), losses(clean))
    assert [x["grad_norm"] for x in repaired] == [x["grad_norm"] for x in clean]
    assert [x.get("passes") for x in repaired] == [None] * 10 + [3, None] * 3
    alarms = [x["alarms"][0] for x in repaired[10::2]]
    assert all(alarm.startswith(DIFFERED) for alarm in alarms)
    assert alarms[1].startswith(f"{DIFFERED}layers.mlp.up_proj.weight in layer 0: ")
    # In the order of the backward pass: the last layer after what is in no layer.
    assert alarms[2].startswith(f"{DIFFERED}embed_tokens.weight, norm.weight, layers.")
    assert [x["step"] for x in faults_of(config)] == [11, 13, 15]
    for fault in faults_of(config):
        assert fault["applied"] == fault["digests"][1] != fault["digests"][0]
        assert fault["hosts"][0]["devices"] == list(range(8))

    # Values that are unusual in every pass are used, or skipped if they are not finite.
    config = named(guarded, "real")
    # The second one is in the upper half of its array, layer 1.
    real = [Fault(12, GRADIENT, 5, EXPONENT), Fault(14, GRADIENT, 2000, EXPONENT, array=4)]
    with planted([dataclasses.replace(x, passes=9) for x in real]):
        records = run(config)
    assert [x.get("passes") for x in records] == [None] * 11 + [2, None, 2, 2, None]
    assert records[11]["grad_norm"] is None and records[-1]["skipped_steps"] == 2
    for step, name in (12, "embed_tokens.weight"), (14, "layers.mlp.up_proj.weight in layer 1"):
        (alarm,) = records[step - 1]["alarms"]
        assert alarm.startswith("the gradient norm, inf, is above its usual limit, ")
        assert alarm.endswith(
            f", and largest, inf, for {name}; a second pass had the same bits, so it follows from "
            "the data and the parameters"
        )
    norms = records[13]["parameter_norms"]
    assert norms["layers.mlp.up_proj.weight"][1] is None
    assert all(np.isfinite(norms[name]).all() for name in norms if "up_proj" not in name)
    for name, value in {"_NORM": -99, "_LEAST_FACTOR": 0.01}.items():
        monkeypatch.setattr(guard, name, value)
    with planted([]):
        often = run(named(guarded, "often"))
    np.testing.assert_array_equal(losses(often), losses(clean))
    assert [x.get("passes") for x in often] == [None] * 10 + [2] * 6


def test_too_many_faults_end_the_run(guarded):
    with (
        planted([Fault(15, GRADIENT, 5, 0, passes=3, moves=True)]),
        pytest.raises(UserError, match=r"^three passes of step 15 had three results, the last two"),
    ):
        run(named(guarded, "three"))
    config = changed(named(guarded, "many"), guard={"interval": 1, "max_faults": 1})
    faults = [Fault(3, GRADIENT, 5, 0), Fault(7, GRADIENT, 5, 0)]
    with planted(faults), pytest.raises(UserError) as caught:
        run(config)
    assert str(caught.value).startswith("step 7 had other bits when it was repeated, in the grad")
    assert ": 2 faults, more than guard.max_faults = 1; find the device with " in str(caught.value)
    assert [x["step"] for x in faults_of(config)] == [3, 7]
    # It resumes before the last fault, and still counts the first one.
    with planted([]):
        assert [x["step"] for x in run(config)] == list(range(6, 17))
    config = changed(config, run={"steps": 18})
    with planted([Fault(17, GRADIENT, 5, 0)]), pytest.raises(UserError, match="^step 17 had other"):
        run(config)


@pytest.mark.parametrize("kind", [PARAMETER, MOMENT])
def test_a_damaged_state_ends_the_run(guarded, kind):
    config = named(guarded, kind)
    with planted([Fault(8, kind, 3, 2, array=1, device=3)]), pytest.raises(UserError) as caught:
        run(config)
    what = "nu of " if kind == MOMENT else ""
    assert str(caught.value).startswith(
        "the state was not in step 8 as the step before had left it: "
        f"{what}layers.input_layernorm.weight in layer 0 on device 3 (process 0): a device is"
    )
    assert [x["step"] for x in written(config)] == [1, 2, 3, 4, 5, 6, 7]
    if kind == PARAMETER:  # the same command resumes from the newest checkpoint
        with planted([]):
            assert [x["step"] for x in run(config)] == list(range(6, 17))


def test_places_of_differing_sums_are_named(guarded):
    sums = StateSums(StateBuilder(guarded, build_mesh(guarded)))
    wrong, norms = np.zeros((4, len(sums.names)), bool), "nu of layers.input_layernorm.weight in la"
    wrong[3, [sums.names.index(x) for x in ("norm.weight", "nu of norm.weight")]] = True
    assert sums.places(wrong) == "norm.weight, nu of norm.weight on device 3 (process 0)"
    wrong[:, [i for i, name in enumerate(sums.names) if name.startswith(norms)]] = True
    assert sums.places(wrong) == (
        "norm.weight, nu of layers.input_layernorm.weight in layer 0, nu of layers.input_layernorm."
        "weight in layer 1 and 1 more on device 0 (process 0), device 1 (process 0), device 2 "
        "(process 0) and 1 more"
    )


@pytest.mark.parametrize(
    ("differ", "where"),
    [
        ({}, "no parameter, but in the loss"),
        ({"a": [0, 1], "b": [1], "c": [0]}, "a in layers 0 to 1, b in layer 1, c in layer 0"),
        ({"b": [2], "c": [0, 2], "d": [], "n": [()]}, "n, b in layer 2, c in layers 0 to 2"),
        ({"a": [0], "b": [0], "c": [0], "n": [()]}, "n, a in layer 0, b in layer 0 and 1 more"),
    ],
)
def test_gradients_that_differ_between_passes_are_named(guarded, differ, where):
    """Of parameters a to d of three layers, and n of none."""
    guard = Guard(guarded, StateBuilder(guarded, build_mesh(guarded)))
    step = TakenStep(15, "step", {}, wants_state=False)
    for repeat in range(2):
        sums = {x: np.zeros(() if x == "n" else 3, np.uint32) for x in "abcdn"}
        for name, layers in differ.items():
            for layer in layers:
                sums[name][layer] += np.uint32(repeat)
        found = Findings(True, False, False, None, sums, repeat)  # pyright: ignore[reportArgumentType]
        guard.dispatched(step, {"guard": found, "loss": 1.0, "grad_norm": 1.0})
        assert guard.holds(step)
    (alarm,) = step.notes["alarms"]
    assert alarm.startswith(f"{DIFFERED}{where}: a device is faulty; ")


def test_limits_of_usual_values():
    usual = Outliers()
    for _ in range(9):
        usual.add(2.0, 1.0)
    usual.add(float("nan"), 1.0)
    usual.add(0.0, 0.0)  # without labels
    assert usual.limits() == (np.inf, np.inf)
    usual.add(2.0, 1.0)
    np.testing.assert_allclose(usual.limits(), (2.1, 5.0))
    # 12 * 1.4826 * 0.1 and exp(6 * 1.4826 * 0.2), as they vary more.
    for step in range(50):
        usual.add(2 + 0.1 * (-1) ** step, np.exp(0.2 * (-1) ** step))
    np.testing.assert_allclose(usual.limits(), (2 + 1.77912, np.exp(1.77912)))
    other = Outliers()
    other.go_to(json.loads(json.dumps(usual.state())))
    assert other.limits() == usual.limits()
