"""TensorBoard event files."""

from mtraining_jax.config import Config
from mtraining_jax.reporting.audit import PER_HEAD
from mtraining_jax.reporting.record import Record

TENSORBOARD_NAME = "tensorboard"


class TensorBoardWriter:
    """One curve for each number of a record, and one for each layer of a list; alarms as text.

    Args:
        config: of the run.
        last_step: points of later steps are no longer shown.
    """

    def __init__(self, config: Config, last_step: int) -> None:
        # Not at the top: the import takes a while, and the writer may be switched off.
        from tensorboardX import SummaryWriter

        folder = config.run.folder / TENSORBOARD_NAME
        self.where = str(folder)
        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, record: Record) -> None:
        """Adds a point to each curve."""
        for name, value in record.items():
            if name.endswith(PER_HEAD):  # thousands of curves
                continue
            if name == "alarms":
                for sentence in value:
                    self._writer.add_text(name, sentence, record["step"])
                continue
            values = value if isinstance(value, list) else [value]
            for layer, number in enumerate(values):
                tag = f"{name}/{layer:02d}" if isinstance(value, list) else f"train/{name}"
                if number is not None and not isinstance(number, str) and name != "step":
                    self._writer.add_scalar(tag, number, record["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()
