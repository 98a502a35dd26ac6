"""The README's picture: what it reads from the page on benchmarks, and that it is drawn."""

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from matplotlib.axes import Axes  # noqa: E402

from benchmarks import plot_results  # noqa: E402

PAGE = plot_results.PAGE.read_text()


def test_times_are_gpu_seconds_per_sequence():
    steps = {(s.model, s.tokens, s.attention): s.gpu_seconds for s in plot_results.read_steps(PAGE)}
    assert steps["Qwen2.5-3B", 524288, "dense"] == pytest.approx(33.74 * 8)
    assert steps["SmolLM2-135M", 32768, "sparse"] == pytest.approx(0.68 / 4)


def test_steps_with_random_blocks_are_marked(monkeypatch, tmp_path):
    """All of the model that is not trained with selection are dotted, in lines and legend."""
    drawn, plot = [], Axes.plot

    def recorded(axes, *points, **options):
        drawn.append(options)
        return plot(axes, *points, **options)

    monkeypatch.setattr(Axes, "plot", recorded)
    plot_results.draw(plot_results.read_steps(PAGE), [], tmp_path / "results.png")
    styles = {x["label"]: x["linestyle"] for x in drawn if "label" in x}
    assert styles["Qwen2.5-3B, sparse, random blocks"] == ":"
    assert [name for name, style in styles.items() if style == ":"] == [
        "Qwen2.5-3B, sparse, random blocks"
    ]
    assert "Qwen2.5-3B, sparse" not in styles


def test_every_time_is_in_the_table_it_links_to():
    for step in plot_results.read_steps(PAGE):
        name, _, _ = step.source.partition("#")
        table = (plot_results.PAGE.parent / name).read_text()
        assert step.seconds.removesuffix(" s") in table, step


def test_a_picture_is_drawn(tmp_path):
    picture = tmp_path / "results.png"
    plot_results.main([str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    mask = ("layer 0, head 0: 50%", np.eye(8, dtype=bool))
    plot_results.draw(plot_results.read_steps(PAGE), [mask], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
