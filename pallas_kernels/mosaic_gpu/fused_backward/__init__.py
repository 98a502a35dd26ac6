"""The backward kernel for all gradients at once; `backend.py` says when it runs."""
