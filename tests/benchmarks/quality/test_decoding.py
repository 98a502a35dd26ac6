"""Rules that new tokens select by, on a tiny model and on drawn keys."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.quality.decoding import BLOCK, Rule, main, visible
from mtraining_jax.utils.errors import UserError

TINY = Path(__file__).parents[2] / "checkpoints" / "llama3_tiny"


def drawn(length, keys, kv_heads=2, group=2, dim=16):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(length, kv_heads * group, dim)) * 4
    return jnp.asarray(q, jnp.float32), jnp.asarray(rng.normal(size=(keys, kv_heads, dim)), "f4")


@pytest.mark.parametrize("rule", ["mean:1:0.5", "union:4:0.5", "head:2:0.5"])
def test_blocks_are_the_heaviest_of_the_token_that_selects(rule):
    first, length = 8 * BLOCK, 6
    q, k = drawn(length, first + length)
    rule = Rule.parse(rule)
    seen = np.asarray(visible(rule, q, k, first)[0])
    for token in range(length):
        at = token - token % rule.every
        logits = np.einsum("hgd,shd->hgs", q[at].reshape(2, 2, -1), k[: first + at + 1]) / 4
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mass = np.add.reduceat(weights, np.arange(0, first + at + 1, BLOCK), axis=-1)
        for kv in range(2):
            heads = mass[kv].mean(0)[None] if rule.kind == "mean" else mass[kv]
            kept = []
            for row in heads:
                wanted = {0, 7, 8}  # the first block, the own one and the one before
                for block in np.argsort(-row):
                    if block not in wanted and sum(row[list(wanted)]) < 0.5:
                        wanted.add(int(block))
                kept.append(wanted)
            if rule.kind == "union":
                kept = [set.union(*kept)]
            for head in range(2):
                blocks = kept[head % len(kept)]
                found = set((np.flatnonzero(seen[token, 2 * kv + head]) // BLOCK).tolist())
                assert found == blocks
    assert not seen[:, :, first + length - 1][:-1].any()  # causal


def test_blocks_with_a_share_of_the_mean_mass_are_kept():
    first, length = 8 * BLOCK, 3
    q, k = drawn(length, first + length)
    seen = np.asarray(visible(Rule.parse("share:1:0.8"), q, k, first)[0])
    some = 0
    for token in range(length):
        logits = np.einsum("hgd,shd->hgs", q[token].reshape(2, 2, -1), k[: first + token + 1]) / 4
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        mass = np.add.reduceat(weights, np.arange(0, first + token + 1, BLOCK), axis=-1)
        mass = (mass / mass.sum(-1, keepdims=True)).mean(1)
        for kv in range(2):
            wanted = {0, 7, 8} | set(np.flatnonzero(mass[kv] >= 0.8 / 9).tolist())
            some += len(wanted) - 3
            found = set((np.flatnonzero(seen[token, 2 * kv]) // BLOCK).tolist())
            assert found == wanted
    assert 0 < some < 6 * length * 2


def test_codes_select_almost_like_exact_keys():
    q, k = drawn(4, 6 * BLOCK + 4, dim=64)
    exact, coded = (
        np.asarray(visible(Rule.parse(f"{kind}:1:1"), q, k, 6 * BLOCK)[0])
        for kind in ("share", "codes")
    )
    assert 0 < (exact != coded).mean() < 0.1


def test_coarse_keys_of_full_precision_select_like_exact_ones():
    q, k = drawn(4, 6 * BLOCK + 4)
    exact = visible(Rule.parse("mean:1:0.5"), q, k, 6 * BLOCK)[0]
    found = visible(Rule.parse("means:1:0.5:1"), q, k, 6 * BLOCK)[0]
    np.testing.assert_array_equal(found, exact)
    one = {rule: float(visible(Rule.parse(rule), q, k, 6 * BLOCK)[1]) for rule in (
        "bounds:1:0.1:32", "pooled:1:0.1:32", "bounds:1:1", "dense",
    )}  # fmt: skip
    assert one["dense"] == one["bounds:1:1"] == 1 and one["bounds:1:0.1:32"] < 0.7
    with pytest.raises(UserError, match="most:1:1 is not a rule"):
        Rule.parse("most:1:1")


def test_a_rule_that_keeps_everything_has_the_loss_of_dense_answers(tmp_path, monkeypatch):
    np.save(tmp_path / "texts.npy", np.random.default_rng(1).integers(0, 288, (2, 512)))
    options = ["--model", str(TINY), "--texts", str(tmp_path / "texts.npy"), "--seq-len=512"]
    options += ["--answer=128", "--prompt=dense", "--out", str(tmp_path / "out.jsonl")]
    rules = ["--rules", "dense", "bounds:1:1", "mean:1:0.1"]
    monkeypatch.setattr("sys.argv", ["decoding", *options, *rules])
    main()
    rows = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [0] * 3 + [1] * 3
    for dense, whole, few in (rows[:3], rows[3:]):
        assert dense["density"] == whole["density"] == 1 > few["density"]
        assert abs(dense["loss"] - whole["loss"]) < 1e-5 < abs(dense["loss"] - few["loss"])
