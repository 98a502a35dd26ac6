"""Derived sizes of a configuration."""

from mtraining_jax.config import Config


def test_derived_sizes():
    config = Config.load(
        "tiny",
        {
            "parallel.replicas": "2",
            "parallel.nodes": "2",
            "parallel.devices_per_node": "3",
            "parallel.cpu_devices": "12",
            "data.seq_len": "1536",
            "data.batch_size": "24",
            "optimizer.accumulation_steps": "4",
            "sparsity.block_size": "32",
        },
    )
    assert config.mesh_shape == (2, 2, 3)
    assert (config.ranks, config.devices) == (6, 12)
    assert config.batch_shape == (24, 1536)
    assert config.tokens_per_step == 24 * 1536
    assert config.row_parts == 8
    assert (config.local_rows, config.local_tokens) == (3, 3 * 256)
    assert config.sequence_unit == 6 * 32


def test_zigzag_has_two_chunks_per_rank():
    config = Config.load("tiny", {"parallel.layout": "zigzag"})
    assert config.sequence_unit == 2 * 8 * 32
