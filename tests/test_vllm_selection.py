"""The blocks of a paged cache are those of the rule without pages; needs torch."""

import inspect
import runpy
from pathlib import Path

import numpy as np
import pytest

from mtraining_jax.patterns.sampled_rows import SampledRows
from tests.models.huggingface.new_tokens import selected_blocks

FILE = Path(__file__).parent.parent / "examples" / "vllm_selection.py"
HEADS, KEY_HEADS, DIM, SCALE = 6, 2, 16, 0.3


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def select(torch):
    return runpy.run_path(str(FILE))["select_blocks"]


def paged(rng, keys, page_size):
    """Scatters keys of sequences [S, Hk, D] over pages; returns the pages and block tables."""
    counts = [-(-len(k) // page_size) for k in keys]
    free = rng.permutation(sum(counts) + 3)
    cache = np.full((len(free), page_size, KEY_HEADS, DIM), np.nan, np.float32)
    tables = np.full((len(keys), max(counts) + 1), -1, np.int32)  # one more than is needed
    for row, (k, count) in enumerate(zip(keys, counts, strict=True)):
        tables[row, :count], free = free[:count], free[count:]
        for number, page in enumerate(tables[row, :count]):
            part = k[number * page_size : (number + 1) * page_size]
            cache[page, : len(part)] = part
    return cache, tables


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"tau": 0.8, "min_sparse_tokens": 0},
        {"tau": 0.7, "sink_blocks": 2, "local_blocks": 1, "min_sparse_tokens": 1000},
        {"tau": 0.9, "min_block_mass": 0.03, "min_sparse_tokens": 1001},
        {"tau": 1.0, "min_sparse_tokens": 0},
    ],
)
def test_blocks_are_those_of_the_rule_without_pages(select, torch, page_size, options):
    rng = np.random.default_rng(0)
    lengths = 1, 128, 1000, 0, 2049, 5000  # the last needs two gathers
    q = 2 * rng.normal(size=(len(lengths), HEADS, DIM)).astype(np.float32)
    keys = [rng.normal(size=(n, KEY_HEADS, DIM)).astype(np.float32) for n in lengths]
    arrays = q, *paged(rng, keys, page_size), np.asarray(lengths, np.int32)
    found = select(*(torch.tensor(x) for x in arrays), scale=SCALE, **options)
    blocks, counts, mask = (x.numpy() for x in found)
    assert blocks.dtype == counts.dtype == np.int32 and blocks.shape == mask.shape
    assert blocks.shape[2] == (40 if page_size == 16 else 41)
    for row, k in enumerate(keys):
        expected = np.zeros(mask.shape[1:], bool)
        if len(k):
            kept = selected_blocks(q[row], k, SCALE, **options)
            expected[:, : kept.shape[1]] = kept
        assert (mask[row] == expected).all()
        for head in range(KEY_HEADS):
            listed = np.flatnonzero(expected[head])
            assert counts[row, head] == len(listed)
            assert (blocks[row, head, : len(listed)] == listed).all()
            assert (blocks[row, head, len(listed) :] == -1).all()
    assert options["tau"] == 1 or 4 < counts[5].max() < 36


def test_defaults_are_those_of_the_pattern(select):
    parameters = inspect.signature(select).parameters.values()
    defaults = {x.name: x.default for x in parameters if x.default is not inspect.Parameter.empty}
    assert len(defaults) == 5 and defaults.items() <= vars(SampledRows()).items()


def test_short_sequences_and_the_layout_of_vllm(select, torch):
    """The cache of vLLM 0.33 has keys and values side by side, and pages by heads."""
    rng = np.random.default_rng(1)
    q = torch.tensor(3 * rng.normal(size=(1, HEADS, DIM))).bfloat16()
    keys = rng.normal(size=(900, KEY_HEADS, DIM)).astype(np.float32)
    cache, tables = (torch.tensor(x) for x in paged(rng, [keys], 128))
    both = torch.cat([cache, cache], -1).bfloat16().transpose(1, 2).contiguous()
    key_cache = both.transpose(1, 2).split(DIM, dim=-1)[0]
    arguments = q, key_cache, tables, torch.tensor([900], dtype=torch.int32)
    rounded = torch.tensor(keys).bfloat16().float().numpy()
    expected = selected_blocks(q[0].float().numpy(), rounded, SCALE, tau=0.8)
    how = {"scale": SCALE, "tau": 0.8}
    found = select(*arguments, **how, min_sparse_tokens=900)[2]
    assert (found[0, :, :8].numpy() == expected).all() and not expected.all()
    assert (select(*arguments, **how, min_sparse_tokens=901)[1] == 8).all()
    with pytest.raises(ValueError, match="pages of 48 tokens must divide a block of 128"):
        select(q, key_cache[:, :48], *arguments[2:], scale=SCALE)
