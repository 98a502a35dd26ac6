"""Draws the README's picture: time of a training sequence against its length, and learned masks.

    python -m benchmarks.plot_results docs/images/results.png --model SMOLLM2_FOLDER

The times are those of the table of training steps in docs/benchmarks.md, of models with several
lengths; lines of steps that compute random blocks are dotted. The masks are what `SampledRows`
selects in some heads of a checkpoint (`python -m examples.smollm2 SMOLLM2_FOLDER`) on 8192 tokens
of Python's standard library. Needs matplotlib: the extra "plot".
"""

import argparse
import re
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from benchmarks.quality.stepped_model import SteppedModel, read_model
from mtraining_jax import SampledRows, sparse_attention

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MASK_TOKENS = 8192
HEADS = ((1, 1), (5, 3), (7, 7), (11, 4), (17, 3), (26, 0))  # (layer, head) of SmolLM2-135M
SELECTED, RANDOM = "sparse", "sparse, random blocks"
COLORS = {"dense": "#8c8c8c", SELECTED: "#c44e52", RANDOM: "#c44e52"}
MARKERS = {"Qwen2.5-3B": "o", "Qwen2.5-Coder-1.5B": "^", "SmolLM2-135M": "s"}


class Step(NamedTuple):
    """A measured training step."""

    model: str
    tokens: int
    attention: str  # a key of COLORS
    gpu_seconds: float  # per sequence
    seconds: str  # of the step, as the table has it
    source: str  # path of the table that it comes from, relative to the page


def read_steps(page: str) -> list[Step]:
    """The rows of the table of training steps in the markdown of a page.

    Raises:
        ValueError: if it has no such row.
    """
    steps = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[2] in COLORS:
            model, tokens, attention, _, gpus, sequences, seconds, source = cells
            link = re.search(r"\]\((\S+)\)", source)
            if link is None:
                raise ValueError(f"no link to a table in {line!r}")
            time = float(seconds.removesuffix(" s")) * int(gpus) / int(sequences)
            steps.append(Step(model, int(tokens), attention, time, seconds, link[1]))
    if not steps:
        raise ValueError("no row of a dense or sparse training step")
    return steps


def learned_masks(folder: Path) -> list[tuple[str, np.ndarray]]:
    """Title and selected blocks, bool [blocks, blocks], of some heads of a checkpoint."""
    library = Path(argparse.__file__).parent
    text = "\n".join(path.read_text(errors="replace") for path in sorted(library.glob("a*.py")))
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:MASK_TOKENS]
    model = SteppedModel(read_model(folder, MASK_TOKENS, "float32"), MASK_TOKENS)
    rows, blocks = jnp.arange(127, MASK_TOKENS, 128), jnp.arange(MASK_TOKENS // 128)
    masks = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        out, (_, index) = sparse_attention(q, k, v, pattern=SampledRows(), return_residuals=True)
        for head in (head for number, head in HEADS if number == layer):
            mask = np.asarray(index.computes(rows, blocks))[0, head, ..., -1]
            density = mask.sum() / np.tri(len(mask)).sum()
            masks.append((f"layer {layer}, head {head}: {density:.0%}", mask))
        return out

    model.losses(np.asarray(tokens), attend)
    return masks


def draw(steps: list[Step], masks: list[tuple[str, np.ndarray]], path: Path) -> None:
    """Writes the picture; without masks the strip is omitted."""
    figure = Figure(figsize=(9, 5.6 if masks else 4), layout="constrained")
    rows = figure.add_gridspec(2 if masks else 1, 1, height_ratios=[3, 1.15] if masks else [1])
    axes = figure.add_subplot(rows[0])
    for number, model in enumerate(dict.fromkeys(step.model for step in steps)):
        of_model = [step for step in steps if step.model == model]
        if len({step.tokens for step in of_model}) == 1:
            continue  # a point among lines
        times = {
            kind: {step.tokens: step.gpu_seconds for step in of_model if step.attention == kind}
            for kind in COLORS
        }
        for kind, points in filter(lambda item: item[1], times.items()):
            axes.plot(
                list(points), list(points.values()), color=COLORS[kind], marker=MARKERS[model],
                linewidth=2, linestyle=":" if kind == RANDOM else "-", label=f"{model}, {kind}",
            )  # fmt: skip
        sparse = times[SELECTED] | times[RANDOM]
        for tokens in sorted(set(times["dense"]) & set(sparse)):
            low, high = sparse[tokens], times["dense"][tokens]
            axes.annotate(
                f" {high / low:.1f} x ", (tokens, (low * high) ** 0.5), color="#444444", fontsize=9,
                ha=("left", "right")[number % 2],
            )  # fmt: skip
            axes.plot([tokens, tokens], [low, high], color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    lengths = [2**power for power in range(15, 22)]
    axes.set_xticks(lengths, [f"{n >> 10}K" if n < 1 << 20 else f"{n >> 20}M" for n in lengths])
    axes.set(yscale="log", xlabel="context length (tokens)", ylabel="GPU seconds per sequence")
    axes.minorticks_off()
    axes.set_title("Time of a training step, forward, backward and optimizer (H200)", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if masks:
        colors = ListedColormap(["#ffffff", "#f0e3df", COLORS["sparse"]])
        strip = rows[1].subgridspec(1, len(masks))
        for column, (title, mask) in enumerate(masks):
            one = figure.add_subplot(strip[column])
            shown = np.where(np.tri(len(mask), dtype=bool), np.where(mask, 2, 1), 0)
            one.imshow(shown, cmap=colors, vmin=0, vmax=2, interpolation="nearest")
            one.set_title(title, fontsize=7.5)
            one.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    """Reads the page and the checkpoint, and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--model", type=Path, help="SmolLM2 folder; without it no masks are drawn")
    parser.add_argument("--page", type=Path, default=PAGE, help="markdown with the table of steps")
    args = parser.parse_args(argv)
    if not args.page.is_file():
        parser.error(f"{args.page}: no such file")
    try:
        steps = read_steps(args.page.read_text())
    except ValueError as error:
        parser.error(f"{args.page}: {error}")
    draw(steps, learned_masks(args.model) if args.model else [], args.picture)


if __name__ == "__main__":
    main()
