"""Language models in Flax NNX, and their Hugging Face checkpoints.

`spec.py`, `parameters.py`, `families/`, `rope/` and `huggingface/config.py` import no JAX, because
configurations need them.
"""
