"""The model of rings over networks: cases added up by hand, and the paper's figures."""

import dataclasses
import json

import pytest

from benchmarks.ring import model
from benchmarks.ring.cases import Row
from benchmarks.ring.model import Step, hop_ms, paper_ms
from benchmarks.ring.programs import Problem

FAST = Step(compute=10, inner=1, outer=2)  # every hop hides
SLOW = Step(compute=1, inner=2, outer=5)  # nothing but hops


@pytest.mark.parametrize(
    ("ring", "step", "nodes", "devices", "forward", "backward"),
    [
        # Hidden: compute alone; backward ends with the gradients' hop home, twice a hop.
        ("flat", FAST, 1, 4, 40, 40 + 2),
        ("flat", FAST, 2, 2, 40, 40 + 4),
        ("hierarchical", FAST, 2, 2, 40, 2 * (10 + 10 + 2) + 4),
        ("gather", FAST, 1, 4, 40, 40 + 2 * 3),
        ("gather", FAST, 2, 2, 40, 40 + 2 * 1 + 2 * 2),
        # Exposed: 3 hops of 5, then the last step; backward 5, (5 + 10) twice, 10, and home.
        ("flat", SLOW, 2, 2, 3 * 5 + 1, 5 + 2 * 15 + 10 + 10),
        # A turn inside takes 2 + 1, and back 2 + 4 + 4; the outer hop 5, back 10 and 10.
        ("hierarchical", SLOW, 2, 2, 5 + 3, 10 + 10 + 10),
        # Gathering 2 (own 1), then arrival 5 + 2 (the rest 1), then 2; back: 2, 7, 14, 14.
        ("gather", SLOW, 2, 2, 2 + 7 + 2, 2 + 7 + 14 + 14),
        ("gather", SLOW, 3, 2, 2 + 7 + 7 + 2, 2 + 7 + 21 + 14 + 14),
        ("gather", SLOW, 1, 4, 6 + 3, 6 + 3 + 12),
        ("flat", SLOW, 1, 1, 1, 1),
        ("hierarchical", SLOW, 1, 1, 1, 1),
        ("gather", SLOW, 1, 1, 1, 1),
    ],
)
def test_cases_added_up_by_hand(ring, step, nodes, devices, forward, backward):
    forward_of, backward_of = model.RINGS[ring]
    assert forward_of(step, nodes, devices) == forward
    assert backward_of(step, nodes, devices) == backward


def test_the_paper_reports_what_its_figures_give():
    assert paper_ms("flat") == pytest.approx(34.10, abs=0.005)
    assert paper_ms("hierarchical") == pytest.approx(19.53, abs=0.005)


def test_a_hop_takes_its_bytes_over_the_link():
    # 16384 tokens x 2 heads x 128 x (keys and values) x 2 bytes = 16.8 MB
    assert hop_ms(524288, 32, 2, 128, 25.0, 0.0) == pytest.approx(0.671, abs=1e-3)
    assert hop_ms(524288, 32, 2, 128, 300.0, 0.1) == pytest.approx(0.156, abs=1e-3)


@pytest.fixture
def rows(tmp_path):
    """A file of rows: a flat ring, a gathered one on two nodes, a zigzag, which has no model."""
    flat = Row(
        Problem(524288, "striped", "flat", 4, 1, True), "B", flops=1.0,
        forward=30.0, both=120.0, silent=112.0, select=1.0,
    )  # fmt: skip
    problem = dataclasses.replace(flat.problem, ring="gather", nodes=2)
    gather = dataclasses.replace(flat, problem=problem, forward=28.0, both=112.0, silent=108.0)
    zigzag = dataclasses.replace(flat, problem=dataclasses.replace(flat.problem, layout="zigzag"))
    path = tmp_path / "ring.json"
    path.write_text(json.dumps([dataclasses.asdict(x) for x in (flat, gather, zigzag)]))
    return ["--rows", str(path), "--latency-ms", "0"]


def cells(text):
    """Those of the table's lines: ring, where measured, forward, backward, all."""
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| 524288")]
    return [[x.strip() for x in line[3:-1]] for line in lines]


def test_on_its_own_host_a_ring_takes_what_it_took(rows):
    found = cells(model.main([*rows, "--nodes", "1", "--devices", "4"]))
    assert found == [
        ["flat", "1 x 4 GPUs, flat", "30.00", "90.00", "121.00"],
        ["hierarchical", "1 x 4 GPUs, flat", "30.00", "90.00", "121.00"],
        ["gather", "2 x 2 GPUs, gather", "28.00", "84.00", "113.00"],
    ]


def test_on_more_gpus_each_has_less_work_and_sends_as_much(rows):
    found = cells(model.main([*rows, "--outer-gb-s", "1e12"]))
    # Links between nodes are instant. Of 32 ranks each has an eighth of the work of 4, the 108 ms
    # without communication; beyond them the flat ring took 12 ms and the gathered one 4.
    expected = [108 / 8 + more + 1 for more in (12, 12, 4)]
    assert [float(x[4]) for x in found] == pytest.approx(expected)
    # 31 hops of 0.671 ms are more than the steps in between.
    flat, hierarchical, _ = cells(model.main(rows))
    assert float(flat[2]) == pytest.approx(31 * 0.671 + (27 / 8 + 3) / 32, abs=0.01)
    assert float(hierarchical[2]) == pytest.approx(27 / 8 + 3, abs=0.01)
