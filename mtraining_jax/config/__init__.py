"""Configuration of a run: typed fields, TOML files, overrides and validation. Imports no JAX."""

from mtraining_jax.config.files import available_configs, config_folder
from mtraining_jax.config.load import config_from_dict, config_of_model, load_config
from mtraining_jax.config.render import config_to_dict, config_to_toml, help_text
from mtraining_jax.config.schema import Config
from mtraining_jax.config.sections import (
    AuditConfig,
    CheckpointConfig,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    LossConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RunConfig,
    SparsityConfig,
)
from mtraining_jax.config.validate import validate

__all__ = [
    "AuditConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "LossConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "RunConfig",
    "SparsityConfig",
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
