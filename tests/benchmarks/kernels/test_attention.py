"""The attention benchmark: what it counts, what it compiles, and a run on a tiny problem."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from benchmarks.kernels import attention
from benchmarks.kernels.errors import relative_errors
from benchmarks.kernels.masks import BLOCK, Work, block_mask, causal_tiles, slash_mask
from benchmarks.kernels.programs import Attention, abstract_inputs
from benchmarks.kernels.rows import OWN, Row, Shape
from pallas_kernels import BlockSparseIndex
from pallas_kernels.mosaic_gpu import backend as hopper
from tests.pallas_kernels.helpers.quick_pallas import quicken_lowering

WIDE = Shape(131072, 16, 2, 128)


@pytest.mark.parametrize("name", "ABD")
def test_work_counts_every_executed_tile_and_column_once(name):
    mask = slash_mask(name, np.random.default_rng(0), heads=2, seq_len=4096)
    tiles = bars = 0
    for diagonals, verticals in zip(mask.diagonals, mask.verticals, strict=True):
        for i, d in itertools.product(range(mask.num_blocks), diagonals):
            tiles += d <= i
        for i, token in itertools.product(range(mask.num_blocks), verticals):
            distance = i - token // BLOCK
            bars += distance >= 0 and distance not in diagonals
    assert mask.work() == Work(tiles, bars)


def test_masks_have_the_density_they_are_known_by():
    rng = np.random.default_rng(1)
    every = causal_tiles(16, 131072)
    for name, density, columns in (("A", 0.022, 500), ("B", 0.067, 1410), ("D", 1.0, 0)):
        work = slash_mask(name, rng, 16, 131072).work()
        assert work.tiles / every == pytest.approx(density, rel=0.1)
        assert work.bars / (16 * 1024) == pytest.approx(columns, rel=0.05)
    assert block_mask(rng, 16, 131072).sum() / every == pytest.approx(0.064, rel=0.1)


def test_rates_and_densities_of_a_row():
    work = Work(tiles=causal_tiles(16, 131072) // 10, bars=0)
    row = Row(WIDE, "B", OWN, work, forward=10.0, backward=25.0)
    assert row.density() == (pytest.approx(0.1), 0.0)
    for which in ("forward", "backward"):  # as fast per operation, 2.5 times as many
        executed, dense = row.rates(which)
        assert dense == pytest.approx(4 * 128 * 16 * 131072**2 / 2 / 10e-3 / 1e12)
        assert executed / dense == pytest.approx(0.1, rel=1e-2)
    assert row.rates("forward") == pytest.approx(row.rates("backward"))


def test_parts_lower_for_a_hopper_gpu_with_lists_built_beforehand(monkeypatch):
    """Building takes no attention kernel, forward one, backward delta's and two more."""
    quicken_lowering(monkeypatch)
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    kernels, shape = Attention(None), Shape(2048, 4, 2, 128)
    q, k, v, dout = abstract_inputs(shape)

    def lower(f, *args):
        lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
        return lowered.out_info, lowered.as_text().count("custom_call @mosaic_gpu")

    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        mask = jax.ShapeDtypeStruct((1, 4, 16, 16), bool)
        index = jax.eval_shape(lambda m: BlockSparseIndex.from_block_mask(m, BLOCK), mask)
        built, count = lower(kernels.build, q, k, v, index)
        assert count == 0
        for name in ("query_work", "key_work", "fused_work"):
            monkeypatch.setattr(hopper, name, lambda *_, **__: pytest.fail("planned again"))
        (out, lse), count = lower(kernels.forward, q, k, v, built)
        assert count == 1
        _, count = lower(kernels.backward, q, k, v, dout, out, lse, built)
        assert count == 3


def rows_of(text):
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| 2048 |")]
    return [[x.strip() for x in cells[3:5]] for cells in rows], rows


TINY = [
    "--seq-len", "2048", "--masks", "A", "--head-dim", "16", "--repeats", "1",
    "--error-seq-len", "0", "--backend", "xla", "--seed", "7",
]  # fmt: skip


def test_a_run_on_cpu_gives_a_table(tmp_path, monkeypatch):
    # A head so small that unoptimised programs run in little time; others have groups.
    monkeypatch.setitem(attention.ALL_HEADS, 16, (1, 1))
    out = tmp_path / "table.md"
    text = attention.main([*TINY, "--workers", "0", "--out", str(out)])
    assert out.read_text() == text and "seed 7" in text
    names, rows = rows_of(text)
    assert names == [["A", OWN]]
    assert float(rows[0][9]) > 0  # total ms


def test_errors_are_those_of_rounding_and_show_a_wrong_result():
    class Wrong(Attention):
        def attention(self, q, k, v, index):
            return super().attention(q, k, v, index) * 1.25

    def errors(kernels):
        found = relative_errors(kernels, 3, Shape(512, 2, 1, 64), "D", cudnn=False)
        return list(found["D", OWN].values())

    assert all(1e-4 < x < 5e-3 for x in errors(Attention("xla")))
    assert errors(Wrong("xla")) == pytest.approx([0.25] * 4, rel=0.05)
