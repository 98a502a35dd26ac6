"""What each metric counts: padding, untrained tokens or only labels, by the table in the docs.

Every metric of a record that is over tokens is compared with a value by hand, from a model that
reads each document alone. So a new metric needs a line in the table, and a value here.
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtraining_jax.data.loader import Loader
from mtraining_jax.reporting.flops import matrix_flops
from mtraining_jax.selection.metrics import causal_pairs
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.state import StateBuilder
from tests.training.common import ROOT, VOCAB, changed, run, tiny_config
from tests.training.conftest import use_shared_programs

pytestmark = pytest.mark.usefixtures("drawn_alone")

SEQ_LEN, BLOCK, BATCH, COEFFICIENT = 128, 8, 2, 0.5
LENGTHS = (50, 21, 21, 50, 21, 50, 21)  # three sequences, the last validation batch has one
# Documents are too short for sparse attention, and the learning rate for changes.
SECTIONS = {
    "model": {
        "family": "qwen3_moe", "num_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "router_aux_loss_coef": COEFFICIENT,
    },
    "sparsity": {"min_sparse_tokens": 64},
    "parallel": {"nodes": 1, "devices_per_node": 1},
    "optimizer": {"lr": 1e-30},
    "audit": {"interval": 1, "num_queries": 32},
    "checkpoint": {"last_step": False},
}  # fmt: skip
SUFFIXES = re.compile("(_worst)?(_per_layer|_per_head|_by_position|_predicted|_untuned)?(/.*)?$")


def documented():
    """What each metric counts, by the table in docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    table = text.split("### What is counted")[1].split("\n###")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    found = {}
    for counts, metrics in rows:
        for name in re.findall("`(.*?)`", metrics):
            assert name not in found, name
            found[name] = counts.strip()
    return found


@pytest.fixture(scope="module")
def record_and_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    rng, tokens = np.random.default_rng(3), sum(LENGTHS)
    ids, trained = rng.integers(0, VOCAB, tokens), rng.random(tokens) < 0.5
    arrays = {"": ids.astype(np.uint16), ".lengths": np.array(LENGTHS), ".mask": trained}
    for name in ("a.npy", "validation.npy"):
        for end, array in arrays.items():
            with open(folder / f"{name}{end}", "wb") as file:
                np.save(file, array)
    data = {"paths": [str(folder / "a.npy")], "mode": "pack", "batch_size": BATCH, "shuffle": False}
    compiled = os.environ["JAX_COMPILATION_CACHE_DIR"]
    where = {"output_dir": str(folder / "runs"), "steps": 1, "compile_cache_dir": compiled}
    config = tiny_config(folder, data=data, run=where, **SECTIONS)
    paths = (str(folder / "validation.npy"),)
    validation = changed(config, data={"paths": paths}).data
    config = changed(config, eval={"interval": 1, "attention": "both", "data": validation})
    (record,) = run(config)
    use_shared_programs()
    return record, config


def documents_of(config):
    """Ids [n, T], label mask [n, T] and sequence [n] of all documents, by their length T."""
    loader = Loader(config.data, permutation=np.arange(SEQ_LEN), vocab_size=VOCAB, block_size=BLOCK)
    found = {n: [] for n in LENGTHS}
    for sequence in range(loader.num_sequences):
        for start, n in zip(*loader.packs.pieces(sequence), strict=True):
            at = np.arange(start, start + n)
            stream = loader.corpus.stream
            found[n].append((stream.take(at), stream.trained(at), sequence))
    loader.close()
    return {n: tuple(map(np.array, zip(*of, strict=True))) for n, of in found.items()}


def attention(q, k, v):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, jnp.repeat(k, q.shape[2] // k.shape[2], 2))
    causal = np.tri(q.shape[1], dtype=bool)
    weights = jax.nn.softmax(jnp.where(causal, logits / q.shape[-1] ** 0.5, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, jnp.repeat(v, q.shape[2] // v.shape[2], 2)), {}


def by_hand(config, documents):
    """Losses of labels by position, the auxiliary loss and load, and the gradient norm of a step.

    `documents` are those of `documents_of`; a step reads the first sequences, `losses` are of all.
    """
    builder = StateBuilder(config, build_mesh(config))
    parameters = builder.fresh().parameters

    def of_step(parameters):
        model = nnx.merge(builder.graphdef, builder.unflatten(parameters))
        losses, probabilities, counts = [], np.zeros((3, 4)), np.zeros((3, 4))
        for n, (ids, trained, sequence) in documents.items():
            hidden, layers = model(jnp.asarray(ids), jnp.arange(n), attention)
            found = jax.nn.log_softmax(model.logits(hidden))[:, :-1]
            found = -jnp.take_along_axis(found, ids[:, 1:, None], -1)[..., 0]
            row, at = np.nonzero(trained[:, 1:])
            losses.append((found[row, at], at + 1, sequence[row]))
            of_sequence = (sequence == np.arange(3)[:, None]).astype(np.float32)
            probabilities += of_sequence @ layers["experts"].probabilities[0]
            counts += of_sequence @ layers["experts"].counts[0]
        losses, positions, sequences = map(jnp.concatenate, zip(*losses, strict=True))
        tokens = probabilities.sum(1, keepdims=True)
        auxiliary = 4 * ((probabilities / tokens) * (counts / tokens)).sum(1)[:BATCH].mean()
        load = (counts.max(1) / counts.mean(1))[:BATCH].mean()
        loss = jnp.where(sequences < BATCH, losses, 0).sum() / (sequences < BATCH).sum()
        values = loss, auxiliary, load, losses, positions, sequences
        return loss + COEFFICIENT * auxiliary, values

    (_, values), gradient = jax.jit(jax.value_and_grad(of_step, has_aux=True))(parameters)
    norm = np.sqrt(sum(float(jnp.sum(x**2)) for x in gradient.values()))
    return *map(np.asarray, values), norm


def test_every_metric_counts_what_the_table_says(record_and_config):
    record, config = record_and_config
    documents, seconds = documents_of(config), record["step_seconds"]
    loss, auxiliary, load, losses, positions, sequences, norm = by_hand(config, documents)
    real = pairs = tiles = 0
    for n, (_, _, sequence) in documents.items():
        count, blocks = np.count_nonzero(sequence < BATCH), -(-n // BLOCK)
        real, pairs = real + count * n, pairs + count * causal_pairs(blocks * BLOCK)
        tiles += count * causal_pairs(blocks) * BLOCK**2
    labels, share = int((sequences < BATCH).sum()), pairs / BATCH / causal_pairs(SEQ_LEN)
    assert labels < 0.6 * real < 0.6 * BATCH * SEQ_LEN
    heads, products = config.model.num_heads, matrix_flops(config) * BATCH * SEQ_LEN
    per_pair = 14 * config.model.head_dim * heads
    attention_flops, executed = per_pair * pairs, per_pair * tiles
    buckets = [losses[(positions >= 2**k) & (positions < 2 ** (k + 1))] for k in range(7)]
    by_position = [x.mean() if x.size else None for x in buckets]
    wanted = {
        "tokens": BATCH * SEQ_LEN, "tokens_per_second": BATCH * SEQ_LEN / seconds,
        "real_tokens": real, "real_tokens_per_second": real / seconds,
        "labels": labels, "labels_per_second": labels / seconds,
        "loss": loss, "auxiliary_loss": auxiliary, "grad_norm": norm,
        "expert_load": load, "expert_load_per_layer": [load],
        "document_pairs": share, "document_pairs_per_layer": [share],
        "attention_flops_executed": executed,
        "attention_flops_dense_equivalent": attention_flops,
        "flops_executed": products + executed,
        "flops_dense_equivalent": products + attention_flops,
        "flops_model": products + attention_flops * 6 / 7, "mfu": None,
        "tflops_per_device_executed": (products + executed) / seconds / 1e12,
        "tflops_per_device_dense_equivalent": (products + attention_flops) / seconds / 1e12,
    }  # fmt: skip
    for name in ("eval_loss", "eval_loss_dense"):
        wanted |= {name: losses.mean(), f"{name}_by_position": by_position}
    # All pairs are computed; tests/tools/audit/test_audit.py has an oracle for those of a pattern.
    figures = {"output_error": 0.0, "starved_keys": 0.0, "starved_mass": 0.0, "density": 1.0}
    names = "recall", "local_gradient_cosine", "local_gradient_ratio"
    for name, value in (figures | dict.fromkeys(names, 1.0)).items():
        wanted |= {name: value, f"{name}_per_layer": [value]}
        if name != "density":
            wanted |= {f"{name}_worst": value, f"{name}_worst_per_layer": [value]}
            wanted[f"{name}_per_head"] = [[value] * heads]
    table = documented()
    over_tokens = {x for x in record if table[SUFFIXES.sub("", x)] != "no tokens"}
    assert over_tokens == wanted.keys()
    for name, value in wanted.items():
        found, expected = (np.array(x, np.float64) for x in (record[name], value))
        atol = 0.0 if expected.any() else 1e-4
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=atol, err_msg=name)
