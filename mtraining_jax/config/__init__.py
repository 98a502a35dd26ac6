"""Configuration of a run: typed fields, TOML files, overrides and validation. Imports no JAX."""

from mtraining_jax.config.load import (
    available_configs,
    config_folder,
    config_from_dict,
    config_of_model,
    load_config,
    load_own_plugins,
)
from mtraining_jax.config.render import config_to_dict, config_to_toml, help_text
from mtraining_jax.config.schema import (
    AuditConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    LossConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ProfileConfig,
    RopeScalingConfig,
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
    "RopeScalingConfig",
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
    "load_own_plugins",
    "validate",
]
