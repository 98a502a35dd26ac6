"""Provenance of measurements: a description of each run, and a check before results are resumed."""

import datetime
import hashlib
import sys
from pathlib import Path

import jax

from experiments.result_lines import Line, read_lines
from mtraining_jax.config import Config
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.utils.errors import UserError


def header(engine: Engine, config: Config, about: Line) -> Line:
    """The line that describes a measurement: command, date, device, versions and a config hash."""
    device = jax.devices()[0]
    return {
        "what": "run",
        **about,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "jax": jax.__version__,
        "model": engine.loaded.source,
        "config": hashlib.sha256(repr(config).encode()).hexdigest()[:16],
    }


def check_same_settings(results: Path, new: Line) -> None:
    """Compares the line from `header` with those of existing results.

    Raises:
        UserError: if the file has results of the same model with another configuration.
    """
    same = ("what", "tier", "seed", "trained")
    for line in read_lines(results):
        if all(line.get(name) == new[name] for name in same) and line["config"] != new["config"]:
            raise UserError(
                f"{results} has measurements of {new['trained']}, seed {new['seed']}, with "
                f"other settings or from another version of this code ({line['date']}); use other "
                "--folder and --results paths"
            )
