"""A run in a bucket of Google Cloud Storage.

Orbax writes the checkpoints there. Other files are in a local folder, because runs append to them,
which buckets cannot; they are copied as a whole.
"""

import contextlib
import logging
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from etils import epath

from mtraining_jax.callbacks import Callback
from mtraining_jax.config import Config
from mtraining_jax.config.sections import GCS
from mtraining_jax.training.processes.distributed import is_first
from mtraining_jax.utils.errors import UserError

# What a start on another host appends to, or shows in the page of the run.
_FETCHED = "*", "masks/*", "samples/*"


def check_bucket(url: str) -> None:
    """Raises a UserError if a folder of a bucket cannot be read or written; leaves no file."""
    if find_spec("gcsfs") is None:
        raise UserError(f"{url} needs gcsfs: uv run --extra gcs, or pip install gcsfs")
    from google.cloud import storage  # installed with gcsfs

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it raises the errors that it logs
    with _reaching(url, "cannot be written"):
        path = epath.Path(url) / f".{uuid.uuid4().hex}"
        path.write_text("test")
        path.unlink()
        # Orbax asks for the kind of bucket.
        storage.Client().get_bucket(url.removeprefix(GCS).partition("/")[0])


class BucketCopy(Callback):
    """Copies between the local folder of a run and its bucket, in process 0; else does nothing."""

    def __init__(self, config: Config) -> None:
        url = config.run.bucket if is_first() else None
        self._bucket = None if url is None else epath.Path(url)
        self._folder = config.run.folder
        self._copied: dict[Path, tuple[int, int]] = {}  # sizes and times

    def fetch(self) -> None:
        """Copies what a run continues, replacing local files; raises a UserError."""
        if self._bucket is None:
            return
        with _reaching(self._bucket, "its files could not be copied from there"):
            for path in [path for pattern in _FETCHED for path in self._bucket.glob(pattern)]:
                local = self._folder / path.relative_to(self._bucket)
                if not path.is_dir():
                    local.parent.mkdir(parents=True, exist_ok=True)
                    path.copy(local, overwrite=True)
                    self._copied[local] = _stamp(local)

    def saved(self, step: int) -> None:
        del step
        self.push()

    def push(self) -> None:
        """Copies local files that have changed; raises a UserError."""
        if self._bucket is None:
            return
        what = f"files of {self._folder} could not be copied there"
        with _reaching(self._bucket, what):
            for local in sorted(self._folder.rglob("*")):
                if local.is_file() and self._copied.get(local) != (stamp := _stamp(local)):
                    target = self._bucket / local.relative_to(self._folder)
                    epath.Path(local).copy(target, overwrite=True)
                    self._copied[local] = stamp


def _stamp(path: Path) -> tuple[int, int]:
    info = path.stat()
    return info.st_size, info.st_mtime_ns


@contextlib.contextmanager
def _reaching(place: object, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # several libraries raise many types
        line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise UserError(
            f"{place}: {what} ({line}); check the name of the bucket, the network, the "
            "credentials (gcloud auth application-default login) and their rights"
        ) from error
