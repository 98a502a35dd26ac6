"""Records bits.json again, and prints what moved: `python -m tests.golden.write`."""

import atexit
import contextlib
import io
import json
import os
import shutil
import tempfile
from pathlib import Path

import tests.conftest  # noqa: F401 (first: devices and flags of all tests)
from tests.golden import cases, record


def main() -> None:
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    old = record.read() if record.FILE.exists() else {}
    new: record.Entry = {"environment": record.environment(), "attention": {}, "training": {}}
    if old.get("environment") != new["environment"]:
        print(f"environment: {new['environment']}, was {old.get('environment')}")
    for name in cases.ATTENTION:
        new["attention"][name] = record.attention_entry(name)
        _report(name, old.get("attention", {}).get(name, {}), new["attention"][name])
    for name in cases.TRAINING:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            new["training"][name] = record.training_entry(name, Path(folder))
        _report(name, old.get("training", {}).get(name, {}), new["training"][name])
    record.FILE.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def _report(name: str, old: record.Entry, new: record.Entry) -> None:
    for sentence in record.differences(old, new, bits=True):
        print(f"{name}: {sentence}")


if __name__ == "__main__":
    main()
