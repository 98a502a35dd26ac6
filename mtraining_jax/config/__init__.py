"""Configuration of a run: typed fields, TOML files, overrides and validation. Imports no JAX."""

from mtraining_jax.config.files import available_configs, config_folder
from mtraining_jax.config.help import help_text
from mtraining_jax.config.load import Config, fields_with
from mtraining_jax.config.validate import validate

__all__ = ["Config", "available_configs", "config_folder", "fields_with", "help_text", "validate"]
