"""Weights & Biases."""

import uuid
from pathlib import Path

from mtraining_jax.callbacks import Record
from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD
from mtraining_jax.utils.errors import UserError


class WandbWriter:
    """Logs records to the project `mtraining-jax`; resumed runs continue their W&B run."""

    def __init__(self, config: Config, last_step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "metrics.wandb = true needs the package wandb, which is not installed: pip install "
                "wandb, or uv run --extra wandb, or set metrics.wandb=false"
            ) from error
        self._run = wandb.init(  # pyright: ignore[reportAttributeAccessIssue]
            project="mtraining-jax",
            name=config.run.name,
            dir=str(config.run.folder),
            config=config.to_dict(),
            resume="allow",
            id=_run_id(config.run.folder / "wandb_id.txt", resumed=last_step > 0),
        )
        self.where = f"Weights & Biases ({self._run.url or 'offline'})"

    def write(self, record: Record) -> None:
        record = {name: x for name, x in record.items() if not name.endswith(PER_HEAD)}
        self._run.log(record, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _run_id(path: Path, resumed: bool) -> str:
    if resumed and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    new = uuid.uuid4().hex
    path.write_text(new + "\n", encoding="utf-8")
    return new
