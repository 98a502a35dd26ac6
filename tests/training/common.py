"""A run so small that it compiles in seconds, on data that it can learn."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax import trainer as training
from mtraining_jax.config import Config, validate

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 61
# Vertical-slash, instead of the row blocks of `tiny_config`.
VERTICAL_SLASH = {
    "kind": "vertical_slash", "num_probe_queries": 8, "min_verticals": 2, "min_slashes": 2,
    "max_verticals": 8, "max_slashes": 4, "sink_tokens": 2,
}  # fmt: skip


def tiny_config(folder: Path, **sections: dict) -> Config:
    """A run of 2 layers on a 1 x 2 x 2 mesh; `sections` override single fields."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "tokens.npy"
    if not data.exists():
        # Each token mostly follows from the previous one, which is easy to learn.
        rng = np.random.default_rng(0)
        follows, tokens = rng.permutation(VOCAB), [0]
        for surprise in rng.random(20_000) < 0.1:
            tokens.append(int(rng.integers(VOCAB)) if surprise else int(follows[tokens[-1]]))
        np.save(data, np.array(tokens, np.uint16))
    table = {
        "run": {"name": "test", "output_dir": str(folder / "runs"), "steps": 4},
        "model": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 6,
            "num_kv_heads": 3,
            "head_dim": 16,
            "intermediate_size": 40,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "dtype": "float32",
        },
        "sparsity": {
            "kind": "sampled_rows",  # compiles in two thirds of the time of the default
            "block_size": 8,
            "probe_queries_per_block": 2,
            "tau": 0.6,
            "local_blocks": 1,
        },
        "parallel": {"nodes": 2, "devices_per_node": 2},
        "data": {"source": "tokens", "paths": [str(data)], "seq_len": 128, "batch_size": 2},
        "optimizer": {"lr": 1e-2},
        "loss": {"chunk_size": 24},
        "metrics": {"tensorboard": False, "report": False},
        "guard": {"enabled": False},  # a third of the time; the run that tests share has it
    }
    for section, fields in sections.items():
        table[section] = table.get(section, {}) | fields
    config = Config.from_record(table, "a test")
    validate(config)
    return config


def changed(config: Config, **sections: dict) -> Config:
    """Returns the configuration with some fields changed."""
    table = config.to_dict()
    for section, fields in sections.items():
        table[section] = table[section] | fields
    return Config.from_record(table, "a test")


def run(config: Config, signals: Any = None) -> list[dict]:
    """Trains as the command does, and returns the records of the steps."""
    return list(training.run(config, signals=signals).records)


def losses(records: list[dict]) -> np.ndarray:
    return np.array([record["loss"] for record in records], np.float64)


def written(config: Config) -> list[dict]:
    """Reads metrics.jsonl; a killed run may leave an incomplete last line."""
    lines = (config.run.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def start_process(
    config: Config, folder: Path, *arguments: str, program: Path = ROOT / "train.py"
) -> subprocess.Popen:
    """Starts `train.py` with this configuration; stdout and stderr go to one pipe."""
    path = folder / "config.toml"
    path.write_text(config.to_toml())
    environment = {name: value for name, value in os.environ.items() if "SLURM" not in name}
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(program), "--config", str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )


def dumps(value: object) -> str:
    """JSON text, to compare nested values."""
    return json.dumps(value, sort_keys=True)
