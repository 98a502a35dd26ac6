"""The model of rings over networks: cases added up by hand, and the paper's figures."""

import dataclasses
import json

import pytest

from benchmarks import ring_model
from benchmarks.ring_cells import Row
from benchmarks.ring_model import Step, hop_ms, paper_ms
from benchmarks.ring_programs import Problem

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
    forward_of, backward_of = ring_model.RINGS[ring]
    assert forward_of(step, nodes, devices) == forward
    assert backward_of(step, nodes, devices) == backward


def test_the_paper_reports_what_its_figures_give():
    assert paper_ms("flat") == pytest.approx(34.10, abs=0.005)
    assert paper_ms("hierarchical") == pytest.approx(19.53, abs=0.005)


def test_a_hop_takes_its_bytes_over_the_link():
    # 16384 tokens x 2 heads x 128 x (keys and values) x 2 bytes = 16.8 MB
    assert hop_ms(524288, 32, 2, 128, 25.0, 0.0) == pytest.approx(0.671, abs=1e-3)
    assert hop_ms(524288, 32, 2, 128, 300.0, 0.1) == pytest.approx(0.156, abs=1e-3)


def test_a_table_from_measured_rows(tmp_path):
    problem = Problem(524288, "striped", "flat", 4, 1, True)
    row = Row(
        problem, "B", 10, flops=1.0, forward=30.0, both=120.0, local=112.0, choose=1.0,
    )
    other = dataclasses.replace(row, problem=dataclasses.replace(problem, ring="gather"))
    path = tmp_path / "ring.json"
    path.write_text(json.dumps([dataclasses.asdict(x) for x in (row, other)]))
    options = ["--rows", str(path), "--latency-ms", "0", "--outer-gb-s", "25"]
    text = ring_model.main(options)
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| 524288")]
    assert [cells[4].strip() for cells in lines] == ["flat", "hierarchical", "gather"]
    # A rank of 32 has an eighth of the 112 ms of a rank of 4, a quarter of it forward; 32 steps
    # of 0.109 ms are less than 31 hops of 0.671.
    forward = 112 / 8 / 4
    assert float(lines[0][5]) == pytest.approx(31 * 0.671 + forward / 32, abs=0.01)
    assert float(lines[1][5]) == pytest.approx(forward, abs=0.01)
    # With instant links everything hides, and the index comes on top.
    text = ring_model.main([*options, "--inner-gb-s", "1e12", "--outer-gb-s", "1e12"])
    assert text.count(f"| {112 / 8 + 1:.2f} |") == 3
