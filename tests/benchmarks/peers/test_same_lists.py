"""The benchmark of several projects' kernels, without other projects: lists, errors, results."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.kernels.programs import index_of
from benchmarks.kernels.rows import OWN
from benchmarks.peers import __main__ as command
from benchmarks.peers import measure
from benchmarks.peers.problems import (
    INPUTS,
    Problem,
    draw_bits,
    exact,
    lists,
    mask_of,
    read_input,
    samples,
    split_lists,
    write_inputs,
)
from pallas_kernels import BlockMaskIndex
from pallas_kernels.reference import reference_attention

PROBLEM = Problem.parse("384x2,4/2,D8,2")
SIZE = PROBLEM.num_blocks
COLUMNS = Problem.parse("2304x1,1/1,D8,A")
BITS = draw_bits(PROBLEM, seed=3)


@functools.cache
def oracle():
    """The pairs of the index: bool [B, H, S, S]."""
    return np.asarray(BlockMaskIndex(jnp.asarray(BITS), PROBLEM.num_blocks, 128).to_mask())


@jax.jit
def both_passes(q, k, v, dout, pairs):
    """Output and gradients of the reference."""
    out, vjp = jax.vjp(lambda *x: reference_attention(*x, pairs)[0], q, k, v)
    return out, *vjp(dout)


def whole(blocks):
    """Every pair of some blocks."""
    return blocks.repeat(128, -1).repeat(128, -2)


def unlisted(counts, numbers, size):
    """The inverse of lists: which blocks the first `counts` entries of each row name."""
    mask = np.zeros((*counts.shape, size), bool)
    for where in np.ndindex(counts.shape):
        mask[where][numbers[where][: counts[where]]] = True
    return mask


@pytest.mark.parametrize("by_keys", [False, True])
def test_lists_of_other_projects_have_the_pairs_of_the_index(by_keys):
    blocks = mask_of(np, BITS.view(np.int32), PROBLEM.num_blocks)
    given = blocks.swapaxes(-1, -2) if by_keys else blocks
    own, own_numbers, others, numbers = split_lists(np, given, None if by_keys else 2)
    assert own_numbers.shape[-1] == 1 and numbers.shape[-1] == (SIZE if by_keys else 2)
    cut, rest = unlisted(own, own_numbers, SIZE), unlisted(others, numbers, SIZE)
    assert not (cut & rest).any()
    if by_keys:
        cut, rest = cut.swapaxes(-1, -2), rest.swapaxes(-1, -2)
    np.testing.assert_array_equal(
        whole(cut) & np.tri(128 * SIZE, dtype=bool) | whole(rest), oracle()
    )
    counts, numbers = lists(np, blocks, 2)  # with the diagonal among the others
    np.testing.assert_array_equal(unlisted(counts, numbers, SIZE), blocks)
    assert (np.diff(numbers[counts == 2]) > 0).all()


@pytest.mark.parametrize(
    "name", ["640x2,4/2,D8,2", "384x1,2/1,D8,7", "384x1,2/1,D8,dense", COLUMNS.name]
)
def test_work_is_that_of_the_drawn_lists(name):
    problem = Problem.parse(name)
    drawn = mask_of(np, draw_bits(problem, 5).view(np.int32), problem.num_blocks)
    work, figures = problem.work(5), problem.figures(5)
    assert problem.name == name and work.tiles == drawn.sum()
    assert not np.triu(drawn, 1).any() and drawn[..., 0].any()
    pairs = 128 * 128 * drawn.sum()
    if problem.kind == "columns":
        for head, tokens in enumerate(problem.slashes(5).verticals):
            pairs += 128 * sum((~drawn[0, head, t // 128 :, t // 128]).sum() for t in tokens)
        assert work.bars > 0
    blocks = problem.num_blocks * (problem.num_blocks + 1) // 2
    causal = problem.batch * problem.heads * blocks * 128 * 128
    assert figures["density"] == pytest.approx(pairs / causal)
    if problem.kind == "dense":
        pairs = problem.batch * problem.heads * problem.seq_len**2 / 2
    assert figures["flops"] == 2 * 2 * problem.dim * pairs


@pytest.mark.parametrize(
    ("problem", "masked"), [(PROBLEM, True), (PROBLEM, False), (COLUMNS, True)]
)
def test_exact_samples_are_those_of_the_oracle(problem, masked, tmp_path):
    write_inputs(problem, tmp_path, seed=3)
    arrays = [read_input(tmp_path, x).view(ml_dtypes.bfloat16).astype(np.float32) for x in INPUTS]
    assert all(abs(x.std() - 1) < 0.02 for x in arrays)
    if problem is COLUMNS:
        pairs = np.asarray(index_of(problem.slashes(3), problem.num_blocks, 1024).to_mask())
    else:
        pairs = oracle() if masked else whole(mask_of(np, BITS.view(np.int32), SIZE))
    found, passes = exact(problem, tmp_path, 3, masked), both_passes(*arrays, pairs)
    for name, array in zip(("out", "dq", "dk", "dv"), map(np.asarray, passes), strict=True):
        for sample, (batch, head, block) in zip(found[name], samples(problem, name), strict=True):
            expected = array[batch, block * 128 : block * 128 + 128, head]
            np.testing.assert_allclose(sample, expected, atol=3e-5)


def test_a_worker_sends_times_errors_and_whether_bits_repeat(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_BURST_SECONDS", 1e-9)
    shape, calls = PROBLEM.shape("q"), []
    rng = np.random.default_rng(0)
    right = rng.standard_normal(shape).astype(np.float32)
    gradients = [right, *(rng.standard_normal(PROBLEM.shape("k")) for _ in "kv")]

    def block(array, batch, head, rows):
        return array[batch, rows, head]

    def backward(saved):
        calls.append(saved)
        return [gradients[0] + 1e-3 * len(calls), *gradients[1:]]

    kept = {}
    for name, array in zip(("out", "dq", "dk", "dv"), (right, *gradients), strict=True):
        parts = [array[b, 128 * j : 128 * j + 128, h] for b, h, j in samples(PROBLEM, name)]
        kept[name] = np.stack(parts)
    np.savez(tmp_path / "exact-True.npz", **kept)
    kernels = SimpleNamespace(
        problem=PROBLEM, folder=tmp_path, masked=True, build=lambda: "index",
        forward=lambda index: (right, index), backward=backward, total=lambda: None,
        wait=lambda x: x, same=np.array_equal, block=block, memory=lambda: (5, 12),
    )  # fmt: skip
    row = {}
    measure.measure(kernels, 2, row.update)
    assert row["out"] == row["dv"] == (0, 0) and row["forward_repeats"] is True
    assert row["dq"] == pytest.approx((1e-3, 1e-3), rel=0.1) and row["backward_repeats"] is False
    assert row["memory"] == 7
    assert {"build", "forward", "backward", "total"} < row.keys()


def test_the_table_has_rates_by_computed_blocks_and_says_what_failed():
    problem = Problem.parse("131072x1,16/16,D128,64")
    known = {"date": "2026-11-26", "device": "GPU", "versions": "jax 1, jaxlib 2"}
    known |= problem.figures(seed=0)
    row = known | {"problem": problem.name, "kernels": OWN, "forward": 16.0, "out": (1e-3, 2e-3)}
    failed = row | {"kernels": "cuDNN", "error": "KeyError: q"}
    row |= {"backward": 40.0, "build": 0.25, "total": 56.0, "memory": 3e9, "forward_repeats": True}
    row |= {"dq": (1, 2e-3), "dk": (2, 1e-3), "dv": (3, 1e-3), "backward_repeats": False}
    text = command.table([row, failed], ["no FlexAttention (no torch)"])
    assert "GPU: 2026-11-26, jax 1, jaxlib 2" in text
    assert (
        "| 131072 x 1 | 16/16, 128 | 64 | 0.121 | mtraining-jax | 0.25 | 16.00 | 40.00 | 56.00 "
        "| 533 / 533 | 1.0e-03, 2.0e-03 | 3.0e+00, 2.0e-03 | yes, no | 3.00 |"
    ) in text
    assert "| cuDNN | – | 16.00 | – | – | 533 / – | 1.0e-03, 2.0e-03 | – | –, – | – |" in text
    assert text.endswith(f"- {problem.name} cuDNN: KeyError: q\n- no FlexAttention (no torch)\n")
