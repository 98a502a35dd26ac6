"""The version of the package."""

import importlib.metadata

try:
    VERSION = importlib.metadata.version("mtraining-jax")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    VERSION = "unknown"
