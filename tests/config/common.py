"""The smallest configuration: sizes of a model."""

MODEL = """
[model]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
intermediate_size = 64
"""
