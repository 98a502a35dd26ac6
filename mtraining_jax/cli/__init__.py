"""Commands. Python and its packages are checked here, before any command imports them."""

import importlib.util
import sys

_NEEDED = ("flax", "grain", "jax", "numpy", "optax", "orbax", "pydantic", "rich", "safetensors")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
_PROBLEM = f"the package {_MISSING[0]} is not installed" if _MISSING else ""
if sys.version_info < (3, 12):  # noqa: UP036
    _PROBLEM = "mtraining-jax needs Python 3.12 or newer"
if _PROBLEM:
    _WAY = "in a checkout, type `pip install uv && uv sync`, then `. .venv/bin/activate`"
    print(f"error: {_PROBLEM}; {_WAY}", file=sys.stderr)
    sys.exit(2)
