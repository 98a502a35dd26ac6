"""The plan of a run on packed documents."""

import jax
import jax.numpy as jnp

from mtraining_jax.parallel.mesh import DOCUMENTS
from mtraining_jax.planning.compiled import abstract_batch
from mtraining_jax.planning.memory import index_bytes
from mtraining_jax.training.parts import build_mesh
from tests.training.common import LONGROPE, changed, tiny_config


def test_a_batch_of_documents_and_the_bits_of_dense_ones_are_planned(tmp_path):
    config = tiny_config(tmp_path, sparsity={"kind": "dense"})
    assert index_bytes(config) == 0
    config = changed(config, data={"mode": "pack", "eos": 0})
    mesh = build_mesh(config)
    found = abstract_batch(config, mesh)["documents"]
    assert found.shape == (2, 128 // 8, 3) and found.dtype == jnp.int32
    assert found.sharding == jax.NamedSharding(mesh, DOCUMENTS)
    # A word of 32 bits for each row of 16 blocks, of 2 sequences and 2 heads, over 4 ranks.
    assert index_bytes(config) == 4 * 16 * 2 * 2 // 4
    assert "documents" not in abstract_batch(changed(config, data={"mode": "concat"}), mesh)
    assert "document_lengths" not in abstract_batch(config, mesh)
    stretched = changed(config, model={"rope_scaling": LONGROPE})
    assert abstract_batch(stretched, mesh)["document_lengths"].shape == (2, 128)
