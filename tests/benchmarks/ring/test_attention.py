"""The ring benchmark: its plan, its stand-ins for communication, and runs on tiny problems."""

import dataclasses
import json

import jax

from benchmarks import options
from benchmarks.kernels import masks
from benchmarks.kernels import programs as kernel_programs
from benchmarks.kernels.masks import BLOCK
from benchmarks.ring import attention, cases, table
from benchmarks.ring import programs as ring_programs
from benchmarks.ring.cases import Row
from benchmarks.ring.programs import Problem, RingPrograms

TINY = ["--heads", "1", "--kv-heads", "1", "--head-dim", "16", "--repeats", "1", "--seed", "3"]
SMALL = dict(heads=2, kv_heads=1, dim=16, backend="xla")


def test_programs_without_communication_have_none_and_run_the_same_kernels():
    # Of the rings the only one that gathers within nodes and turns between them as well.
    problem = Problem(4096, "striped", "gather", 4, 2, True, **SMALL)
    programs = RingPrograms(problem, jax.devices())
    collectives = ("ppermute", "psum", "all_gather", "reduce_scatter", "pmax")

    def primitives(f, *args):
        text = str(jax.make_jaxpr(f)(*args))
        return {c for c in collectives if f" {c}[" in text or f"{c}_invariant[" in text}

    inputs = (*programs.inputs, programs.index)
    assert primitives(programs.both, *inputs) >= {"ppermute", "psum"}
    try:
        jax.clear_caches()  # what was traced with communication, and below without
        assert not primitives(programs.silent, *inputs)
    finally:
        jax.clear_caches()


def test_scaling_compares_rates_with_one_gpu_that_has_as_much_work():
    def row(seq_len, gpus, both):
        problem = Problem(seq_len, "striped", "flat", gpus, 1, False)
        return Row(problem, "D", flops=float(seq_len) ** 2, forward=1.0, both=both)

    assert table.one_gpu_length(524288, 4) == 262144
    assert table.one_gpu_length(524288, 8) == 186368  # 185364 rounded to 2048
    many, alone = row(524288, 4, 10.0), row(262144, 1, 9.0)
    text = table.tables([many, alone])
    assert "## 4 GPUs as 1 x 4, striped, flat" in text and "## 1 GPU, striped, flat" in text
    assert " 0.900 |" in text  # 4 times the work on 4 GPUs, in 10 / 9 of the time
    assert many.backward == 9.0


def test_a_run_on_virtual_devices_gives_tables_and_rows(tmp_path, monkeypatch):
    # Blocks of half the size: unoptimised programs run in a quarter of the time.
    monkeypatch.setattr(masks, "BLOCK", BLOCK // 2)
    for module in (cases, kernel_programs, ring_programs):
        monkeypatch.setattr(module, "BLOCK", BLOCK // 2)
    for module in (options, table):
        monkeypatch.setattr(module, "UNIT", options.UNIT // 2)
    pattern = dataclasses.replace(ring_programs.PATTERN, block_size=BLOCK // 2)
    monkeypatch.setattr(ring_programs, "PATTERN", pattern)
    out = tmp_path / "ring.md"
    text = attention.main([
        "--seq-len", "1024", "--gpus", "2", "--rings", "gather", "--layouts", "striped",
        "--masks", "A", "--workers", "0", "--out", str(out), *TINY,
    ])  # fmt: skip
    assert out.read_text() == text and "## 2 GPUs as 1 x 2, striped, gather" in text
    cells = next(line for line in text.splitlines() if line.startswith("| 1024 | A")).split("|")
    assert float(cells[3]) > 0 and float(cells[5]) > 0  # forward, both
    (row,) = json.loads(out.with_suffix(".json").read_text())
    for name in ("forward", "both", "step", "select", "silent"):
        assert row[name] > 0, name
