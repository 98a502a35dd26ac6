from tests.pallas_kernels.contract import AttentionContract


class TestXla(AttentionContract):
    backend = "xla"
    other_block_sizes = (16,)
