"""Checks that a checkpoint matches the model of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict

from mtraining_jax.config import Config
from mtraining_jax.config.load import with_bos
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value

# Fields of the model that may change without changing its parameters.
_FREE_MODEL_FIELDS = (
    "dtype", "init_from", "remat", "mlp_chunk_size", "mlp_kept_chunks", "max_position_embeddings",
    "override",
)  # fmt: skip
_ADAPTER_FIELDS = "alpha", "targets"
# Sections and fields that a run may change without other results.
_FREE = ("checkpoint", "distributed", "run.name", "run.output_dir", "run.steps")


def changed_fields(path: Path, saved: dict[str, Any], config: Config) -> list[str]:
    """Describes fields with values that differ from those of the checkpoint `path`."""
    before = with_bos(Config.from_record(saved, str(path)), saved)
    before = flatten_dict(before.to_dict(), sep=".")
    now = flatten_dict(config.to_dict(), sep=".")
    return [
        f"{name} = {toml_value(now.get(name))}, was {toml_value(before.get(name))}"
        for name in now | before
        if now.get(name) != before.get(name) and not name.startswith(_FREE)
    ]


def check_same_model(path: Path, saved: dict[str, Any], config: Config) -> None:
    """Compares the configuration in a checkpoint with that of the run."""
    # The folder of the initial weights may no longer exist. Fields that were added later had their
    # defaults.
    model = saved["model"] | {"init_from": None, "override": []}
    table = {"model": model} | {name: saved.get(name, {}) for name in ("optimizer", "lora")}
    before, current = Config.from_record(table, str(path)).to_dict(), config.to_dict()
    fields = [("model", field) for field in current["model"] if field not in _FREE_MODEL_FIELDS]
    fields += [("lora", field) for field in ("rank", *_ADAPTER_FIELDS) if before["lora"]["rank"]]
    fields += [("lora", "rank"), ("optimizer", "trainable"), ("optimizer", "kind")]
    for section, field in fields:
        was, now = before[section][field], current[section][field]
        if was != now:
            whats = {"model": "of another model", "lora": "with other adapters"}
            what = whats.get(section, "with other trained parameters")
            if field == "kind":
                what = "with another optimizer"
            was, now = toml_value(was), toml_value(now)
            raise UserError(
                f"{path} is a checkpoint {what}: it has {section}.{field} = {was}, but this run "
                f"has {now}; set it to {was}, or start from scratch with another run.name or with "
                "checkpoint.resume=false"
            )


def check_shapes(path: Path, saved: Mapping[str, list[int]], needed: Mapping[str, Any]) -> None:
    """Compares the shapes of a checkpoint's parameters with those that are needed."""
    shapes = {name: list(x.shape) for name, x in needed.items()}
    for name in sorted(shapes.keys() | saved.keys()):
        if shapes.get(name) != saved.get(name):
            raise UserError(
                f"{path} is a checkpoint of another model: its parameter {name} has shape "
                f"{saved.get(name)}, but {shapes.get(name)} is needed"
            )
