"""Plants 60 random faults into runs and prints which the guard noticed, and what became of them.

    python -m tests.training.guard.table [--interval N] [--gpu]

Each fault flips a random bit at a random step of a short run on 8 CPU devices, or on one GPU, with
`guard.interval` (1: every step is repeated; 0: none without a suspicion).
"""

import argparse
import contextlib
import io
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.guard.guard import FAULTS
from mtraining_jax.utils.errors import UserError
from tests.training.common import changed, run, tiny_config
from tests.training.guard.plants import KINDS, KV, Fault, planted

_FIRST, _LAST, _ALL = 12, 20, 60
# Sizes that the Hopper kernels take.
_OF_GPU = {
    "model": {
        "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": "bfloat16",
        "max_position_embeddings": 1024,
    },
    "sparsity": {"block_size": 128, "probe_queries_per_block": 16},
    "data": {"seq_len": 1024},
}  # fmt: skip


def main(interval: int, gpu: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    if gpu:
        kinds, sizes = [x for x in KINDS if x != KV], _OF_GPU
        mesh: dict[str, Any] = {"nodes": 1, "devices_per_node": 1}
    else:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        kinds, sizes = list(KINDS), {}
        mesh = {"replicas": 2, "nodes": 2, "devices_per_node": 2, "fsdp": True}
        mesh |= {"ring": "hierarchical"}
    config = tiny_config(
        folder,
        run={"name": "start", "steps": _FIRST},
        parallel=mesh,
        checkpoint={"interval": 1, "keep": 1},
        guard={"enabled": True, "interval": interval},
        **sizes,
    )
    quiet(config, [])
    clean = started(config, "clean")
    quiet(clean, [])
    right, rng, found = checksums(clean), np.random.default_rng(0), []
    for kind in kinds:
        for number in range(_ALL // len(kinds)):
            fault = Fault(
                int(rng.integers(_FIRST + 1, _LAST)), kind, int(rng.integers(2**16)),
                int(rng.integers(32)), int(rng.integers(64)) % 13,
                int(rng.integers(8)) % jax.device_count(),
            )  # fmt: skip
            own = started(config, f"{kind}_{number}")
            ended = quiet(own, [fault])
            if ended:
                quiet(own, [])  # resumes
            noticed = (own.run.folder / FAULTS).exists()
            same = checksums(own) == right
            found.append((kind, fault.bit, noticed, same))
            print(json.dumps([*map(str, (kind, fault.step, fault.bit)), noticed, same]), flush=True)
            shutil.rmtree(own.run.folder)
    print("\n| fault | bits | planted | noticed | no effect | kept |\n|---|---|--:|--:|--:|--:|")
    for kind in kinds:
        for bits, name in (
            (range(30, 31), "highest"),
            (range(30), "others"),
            (range(31, 32), "sign"),
        ):
            rows = [x for x in found if x[0] == kind and x[1] in bits]
            count = Counter("noticed" if x[2] else "same" if x[3] else "kept" for x in rows)
            wrong = sum(x[2] and not x[3] for x in rows)
            assert not wrong, "a fault that was noticed changed the result"
            cells = kind, name, len(rows), count["noticed"], count["same"], count["kept"]
            print("|", " | ".join(map(str, cells)), "|")


def started(config, name):
    own = changed(config, run={"name": name, "steps": _LAST})
    shutil.copytree(config.run.folder, own.run.folder)
    return own


def quiet(config, faults):
    """Runs, and returns whether the guard ended the run."""
    with contextlib.redirect_stdout(io.StringIO()), planted(faults):
        try:
            run(config)
        except UserError:
            return True
    return False


def checksums(config):
    path = checkpoint_folder(config) / str(config.run.steps) / "record" / "metadata"
    return json.loads(path.read_text())["checksums"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interval", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    main(args.interval, args.gpu)
