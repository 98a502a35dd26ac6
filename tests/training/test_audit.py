"""Audits of a run and their alarms."""

import json

import numpy as np
import pytest

from mtraining_jax.reporting.audit import audit_record, audit_text, worst_head
from mtraining_jax.tools.audit.alarms import Alarms
from mtraining_jax.utils.errors import UserError
from tests.training.common import VERTICAL_SLASH, changed, run, written

pytestmark = pytest.mark.usefixtures("drawn_alone")


def test_audits_of_all_steps_raise_alarms_and_are_drawn(config, capsys):
    """With two replicas and two micro-batches."""
    config = changed(
        config,
        run={"steps": 3},
        parallel={"replicas": 2, "nodes": 1, "devices_per_node": 1},
        data={"batch_size": 4},
        optimizer={"accumulation_steps": 2},
        audit={"alarm_gradient": 1.0, "interval": 1, "num_queries": 16, "masks": ("0.1",)},
        checkpoint={"last_step": False},
        metrics={"report": True},
    )
    records = run(config)
    said = capsys.readouterr().out
    page = config.run.folder / "report.html"
    assert f"{config.run.folder}, report.html at the end" in said and f"     {page}\n" in said
    drawn = page.read_text(encoding="utf-8")
    for title in ("Loss", "Recall by head", "in step 3", "Gradient cosine"):
        assert title in drawn
    assert ["recall" in record for record in records] == [True, True, True]
    assert 0 < records[0]["recall_worst"] < records[0]["recall"] < 1
    assert 0 < records[0]["local_gradient_cosine"] < 1
    assert (config.run.folder / "masks" / "step_0000001.png").stat().st_size > 2000
    assert [record.get("compile_seconds", 0) > 0 for record in records] == [True, False, False]
    # Reported at the second occurrence in a row.
    assert records[0]["alarms"] == []
    alarm, *_ = records[1]["alarms"]
    assert "has a cosine of 0." in alarm and "increase sparsity.tau = 0.6" in alarm
    assert records[2]["alarms"] == []
    assert written(config) == records


def figures(**changes):
    found = {
        "recall": np.full((2, 3), 0.9),
        "local_gradient_cosine": np.full((2, 3), 0.95),
        "index_gap": np.full((2, 3), 0.01),
    }
    for name, (place, value) in changes.items():
        found[name][place] = value
    return audit_record(found)


def test_a_record_has_means_and_the_worst_head():
    record = figures(recall=((1, 2), 0.3), index_gap=((0, 1), np.nan))
    assert record["recall"] == pytest.approx(4.8 / 6)
    assert record["recall_worst"] == 0.3 and record["recall_worst_per_layer"] == [0.9, 0.3]
    assert worst_head(record, "recall") == (1, 2)
    assert record["index_gap"] == pytest.approx(0.01)
    assert record["index_gap_per_head"][0] == [0.01, None, 0.01]
    assert record["index_gap_worst_per_layer"] == [0.01, 0.01]
    ratios = audit_record({"local_gradient_ratio": np.array([[1.1, 0.5], [1.5, 0.9]])})
    assert ratios["local_gradient_ratio_worst_per_layer"] == [0.5, 1.5]
    assert worst_head(ratios, "local_gradient_ratio") == (0, 1)
    assert audit_text(record)[0] == "recall 80.0% (worst head 30.0%, layer 1 head 2)"
    nothing = audit_record({"recall": np.full((1, 2), np.nan)})
    assert nothing["recall"] is None and nothing["recall_worst_per_layer"] == [None]


def test_an_alarm_names_layer_head_and_option_when_it_is_so_twice(config):
    config = changed(config, sparsity=VERTICAL_SLASH)
    alarms = Alarms(config)
    low = figures(recall=((1, 2), 0.25))
    assert alarms.step(figures())["alarms"] == [] and alarms.step(low)["alarms"] == []
    assert alarms.step(low)["alarms"] == [
        "layer 1 head 2 has a recall of 25.0%, less than audit.alarm_recall = 0.3; "
        "increase sparsity.top_p = 0.9"
    ]
    assert alarms.step(low)["alarms"] == []  # it is known
    assert alarms.step(figures())["alarms"] == [] and alarms.step(low)["alarms"] == []
    assert len(alarms.step(low)["alarms"]) == 1
    gap = figures(index_gap=((0, 1), 0.4), local_gradient_cosine=((0, 0), -0.1))
    alarms.step(gap)["alarms"]
    of_gradient, of_gap = alarms.step(gap)["alarms"]
    assert "layer 0 head 0 has a cosine of -0.100 between" in of_gradient
    assert "layer 0 head 1 has a recall 0.400 higher for the last queries than for others" in of_gap
    assert "for others, more than 0.2; " in of_gap
    assert 'sparsity.kind = "sampled_rows"' in of_gap
    # A resumed run continues the count, and does not repeat an alarm.
    once, again = Alarms(config), Alarms(config)
    once.step(low)["alarms"]
    again.restore(1, json.loads(json.dumps(once.save())))
    assert len(again.step(low)["alarms"]) == 1
    once.restore(1, again.save())
    assert once.step(low)["alarms"] == []
    with pytest.raises(UserError, match="audit alarms is not readable"):
        once.restore(1, {"recall": "often"})
    silent = Alarms(changed(config, audit={"alarm_recall": 0.0}))
    assert silent.step(low)["alarms"] == silent.step(low)["alarms"] == []
