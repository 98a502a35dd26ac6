import jax
import numpy as np
import pytest

from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.training.build import build_layout, build_mesh
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.step import positions_and_lengths
from tests.training.common import tiny_config


def test_batches_are_in_layout_order(tmp_path):
    config = tiny_config(tmp_path, data={"shuffle": False})
    mesh, layout = build_mesh(config), build_layout(config)
    batches = DeviceBatches(config, mesh, layout)
    first, second = next(batches), next(batches)
    batches.close()
    order = layout.permutation()
    assert sorted(order) == list(range(128)) and list(order) != list(range(128))
    tokens = np.load(tmp_path / "tokens.npy").astype(np.int32)
    for batch, begin in ((first, 0), (second, 256)):
        rows = tokens[begin : begin + 256].reshape(2, 128)
        np.testing.assert_array_equal(batch["tokens"], rows[:, order])
        labels = np.concatenate([rows[:, 1:], np.full((2, 1), -100)], axis=1)
        np.testing.assert_array_equal(batch["labels"], labels[:, order])
        positions, lengths = jax.jit(lambda batch: positions_and_lengths(batch, layout, mesh))(
            batch
        )
        np.testing.assert_array_equal(positions, [order, order])
        assert positions.sharding.is_equivalent_to(jax.NamedSharding(mesh, TOKENS), 2)
        assert lengths is None
        for array in batch.values():
            assert array.sharding == jax.NamedSharding(mesh, TOKENS)
            assert array.dtype == np.int32


def test_closed_batches_are_not_read_ahead(tmp_path):
    config = tiny_config(tmp_path)
    batches = DeviceBatches(config, build_mesh(config), build_layout(config))
    next(batches)
    batches.close()
    with pytest.raises(ValueError, match="closed"):
        next(batches)
