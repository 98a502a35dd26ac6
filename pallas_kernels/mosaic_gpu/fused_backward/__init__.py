"""The backward kernel for all gradients at once; `backend.py` decides when it runs."""
