"""Configuration of a run: typed fields, TOML files, overrides and validation. Imports no JAX."""

from mtraining_jax.config.files import available_configs, config_folder
from mtraining_jax.config.help import help_text
from mtraining_jax.config.load import (
    config_from_dict,
    config_of_model,
    config_to_dict,
    config_to_toml,
    load_config,
)
from mtraining_jax.config.schema import Config
from mtraining_jax.config.validate import validate

__all__ = [
    "Config",
    "available_configs",
    "config_folder",
    "config_from_dict",
    "config_of_model",
    "config_to_dict",
    "config_to_toml",
    "help_text",
    "load_config",
    "validate",
]
