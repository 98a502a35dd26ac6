"""Where measurements come from: the first line of each call, and what may join it."""

import datetime
import hashlib
import re
import sys
from pathlib import Path

from experiments import arms
from experiments.arms import Line
from mtraining_jax.config import Config
from mtraining_jax.errors import UserError
from mtraining_jax.evaluation.engine import Engine

# Fields that came after the first results: left as they are, they change no setting.
_SINCE = r", (dense_(first|last|every|start|end)=(0|None)|random_share=0\.0)(?=[,)])"


def header(engine: Engine, config: Config, about: Line) -> Line:
    """What tells where lines come from."""
    import jax

    device = jax.devices()[0]
    return {
        "what": "run",
        **about,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device.device_kind,
        "jax": jax.__version__,
        "model": engine.loaded.source,
        "config": hashlib.sha256(re.sub(_SINCE, "", repr(config)).encode()).hexdigest()[:16],
    }


def check_same_settings(results: Path, found: Line) -> None:
    """Refuses to go on with lines that a model of other settings left.

    Args:
        results: the JSONL file.
        found: from `header`.

    Raises:
        UserError: if a header of the same model there tells another configuration.
    """
    same = ("what", "tier", "seed", "trained")
    for line in arms.read_lines(results):
        about_it = all(line.get(name) == found[name] for name in same)
        if about_it and line["config"] != found["config"]:
            raise UserError(
                f"{results} has measurements of {found['trained']}, seed {found['seed']}, with "
                f"other settings or by another version of this code ({line['date']}); name other "
                "places with --folder and --results"
            )
