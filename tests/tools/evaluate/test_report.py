"""Tables and pictures of results, with a different number of each: 3 models, 2 attentions,
4 lengths, 5 depths and 6 samples."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from mtraining_jax.tools.evaluate.report import write_report
from mtraining_jax.tools.evaluate.report.cells import Lines
from mtraining_jax.tools.evaluate.report.tables import tables
from mtraining_jax.tools.evaluate.results import Results

MODELS, ATTENTIONS, LENGTHS, DEPTHS = "abc", ("dense", "sparse"), (512, 1024, 2048, 4096), 5
TASKS = "needle", "passkey"
SETTINGS = {
    "models": {x: {"name": x.upper(), "step": 3} for x in MODELS},
    "seed": 7,
    "generate": False,
    "tasks": {"needle": {"depths": 5, "file": None}, "passkey": {}},
}
FACTS = {"date": "2026-11-22", "devices": "1 x fake", "versions": "0", "command": "test"}


def score(model, attention, task, length, number):
    """A random number from 0 to 1."""
    place = [MODELS.index(model), ATTENTIONS.index(attention), TASKS.index(task)]
    seed = [*place, LENGTHS.index(length), number]
    return np.random.default_rng(seed).random()


def lines():
    for model in MODELS:
        for attention in ATTENTIONS:
            for length in LENGTHS:
                key = {"model": model, "attention": attention, "length": length}
                for task in TASKS:
                    for number in range(6):
                        yield {
                            **key, "task": task, "number": number,
                            "prompt_hash": f"{task}, {length}, {number}",
                            "depth": number % DEPTHS / 4 if task == "needle" else None,
                            "cut_tokens": 0, "density": 0.1 * (number + 1),
                            "score": score(model, attention, task, length, number),
                            "seconds": number + LENGTHS.index(length) / 10,
                        }  # fmt: skip
            for number in range(2):
                loss = MODELS.index(model) + 0.1 * ATTENTIONS.index(attention) * (number + 1)
                yield {
                    "model": model, "attention": attention, "length": 8, "number": number,
                    "task": "text", "prompt_hash": "0", "loss_by_position": [loss, loss + 4, loss],
                    "loss_of_last": loss + 8, "loss": loss,
                    "density": 0.25 * (number + 1), "seconds": 2 + number,
                }  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The text of the report, and its figures by file name."""
    folder, drawn = tmp_path_factory.mktemp("report"), {}

    def saved(figure, path, **_):
        drawn[Path(path).name] = figure

    with Results(folder, SETTINGS) as results:
        results.note(FACTS | {"date": "2026-11-21"})
        results.note(FACTS)
        for line in lines():
            results.add(line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", saved)
        write_report(folder, Console(file=io.StringIO()))
    return (folder / "results.md").read_text(), drawn


def rows(report, title):
    """The cells of a table of the report, by the names in its first columns."""
    part = report[0].split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [re.split(r" *\| *", x)[1:-1] for x in part.splitlines() if x.startswith("|")]
    names = cells[1].count("---")
    return {tuple(row[:names]): row[names:] for row in (cells[0], *cells[2:])}


def scores(*where):
    """Scores of all samples of a model, attention, task and length, in percent."""
    return 100 * np.array([score(*where, number) for number in range(6)])


def cell(values, sign=""):
    return f"{np.mean(values):{sign}.1f} ± {np.std(values, ddof=1) / 6**0.5:.1f} (6)"


def test_scores_are_means_of_samples_and_of_differences(report):
    found = rows(report, "Scores")
    assert found.pop(("task", "model", "attention")) == [str(x) for x in LENGTHS]
    expected = {}
    for task in TASKS:
        for x in MODELS:
            for y in ATTENTIONS:
                expected[task, x.upper(), y] = [cell(scores(x, y, task, n)) for n in LENGTHS]
            expected[task, x.upper(), "sparse - dense"] = [
                cell(scores(x, "sparse", task, n) - scores(x, "dense", task, n), "+")
                for n in LENGTHS
            ]
        for x, other in ("ab", "bc"):
            for y in ATTENTIONS:
                expected[task, f"{other} - {x}".upper(), y] = [
                    cell(scores(other, y, task, n) - scores(x, y, task, n), "+") for n in LENGTHS
                ]
    for x in MODELS:
        for y in ATTENTIONS:
            means = expected["mean of 2 tasks", x.upper(), y] = []
            for n in LENGTHS:
                both = [scores(x, y, task, n) for task in TASKS]
                error = np.sum([np.var(s, ddof=1) / 6 for s in both]) ** 0.5 / 2
                means.append(f"{np.mean(both):.1f} ± {error:.1f} (2)")
    assert found == expected
    assert len({tuple(x) for x in expected.values()}) == len(expected)


def test_tables_of_models_and_times(report):
    found = rows(report, "Training and inference")
    assert "## Training and inference\n\nPercent, mean of 2 tasks. Rows: " in report[0]
    assert list(found)[:5] == [("length", "model"), ("512", "A"), ("512", "B"), ("512", "C"),
                               ("1024", "A")]  # fmt: skip
    for n in LENGTHS:
        for x in MODELS:
            means = [[scores(x, y, task, n) for task in TASKS] for y in ATTENTIONS]
            shown = [text.partition(" ")[0] for text in found[str(n), x.upper()]]
            assert shown == [f"{np.mean(both):.1f}" for both in means]
    found = rows(report, "Times and density")
    assert len(found) == 1 + 5 * 3 * 2
    assert found["8", "C", "dense"] == ["2.5", "37.5%", "2"]  # documents have no score
    assert found["1024", "B", "sparse"] == ["2.6", "35.0%", "12"]


def test_the_loss_by_position(report):
    found = rows(report, "Loss by position, 8 tokens")
    head = [f"{x}, {y}" for x in "ABC" for y in (*ATTENTIONS, "sparse - dense")]
    assert found[("tokens",)] == head
    # The difference is 0.1 in one document and 0.2 in the other.
    difference = "+0.150 ± 0.050"
    for name, more in {"from 1": 0, "from 2": 4, "from 4": 0, "last 64": 8}.items():
        expected = []
        for number in range(3):
            expected += [f"{number + more:.3f}", f"{number + more + 0.15:.3f}", difference]
        assert found[(name,)] == expected
    assert "mean over 2 documents" in report[0]


def test_settings_and_commands_are_listed(report):
    assert report[0].startswith(
        "# Evaluation of A and B and C\n\n- a: A (step 3)\n- b: B (step 3)\n- c: C (step 3)\n"
        "- seed: 7\n- generate: no\n- tasks: needle (depths=5), passkey\n\n## Scores\n"
    )
    assert report[0].endswith(
        "## Commands\n\n- 2026-11-21, 1 x fake, 0: `test`\n- 2026-11-22, 1 x fake, 0: `test`\n"
    )


def ticks(axis):
    return [x.get_text() for x in axis.get_ticklabels()]


def panels(figure):
    """By title: names of rows and columns, the texts of the cells, and their colors."""
    found = {}
    for ax in figure.axes[:-1]:  # the last one is the scale
        texts = {tuple(reversed(x.get_position())): x for x in ax.texts}
        for place, text in texts.items():
            value = ax.images[0].get_array()[place]
            assert text.get_text() == f"{100 * value:.0f}"
            assert text.get_color() == ("black" if value > 0.6 else "white")
        if ax.get_visible():
            grid = np.asarray(ax.images[0].get_array())
            found[ax.get_title()] = ticks(ax.yaxis), ticks(ax.xaxis), grid
    return found


def test_pictures_show_the_scores(report):
    drawn = report[1]
    assert list(drawn) == ["depths-needle.png", "scores.png", "trained-inferred.png", "loss-8.png"]
    for name in drawn:
        assert f"({name})" in report[0]
        assert drawn[name].texts[-1].get_text() == "2026-11-22, 1 x fake, 0"
    titles = [f"{x}\n{y}" for x in "ABC" for y in ATTENTIONS]
    lengths = [str(n) for n in LENGTHS]

    by_depth = panels(drawn["depths-needle.png"])
    assert list(by_depth) == [f"{title}, up to 2 samples a cell" for title in titles]
    for title, (down, across, grid) in by_depth.items():
        assert (down, across) == (["0%", "25%", "50%", "75%", "100%"], lengths)
        x, y = title.partition(",")[0].lower().split("\n")
        for j, n in enumerate(LENGTHS):
            single = scores(x, y, "needle", n) / 100
            np.testing.assert_allclose(grid[:, j], [(single[0] + single[5]) / 2, *single[1:5]])

    by_run = panels(drawn["scores.png"])
    assert list(by_run) == titles
    for title, (down, across, grid) in by_run.items():
        assert (down, across) == (list(TASKS), lengths)
        x, y = title.lower().split("\n")
        expected = [[scores(x, y, task, n).mean() / 100 for n in LENGTHS] for task in TASKS]
        np.testing.assert_allclose(grid, expected)

    trained = panels(drawn["trained-inferred.png"])
    assert list(trained) == [f"{n} tokens" for n in LENGTHS]
    for n, (down, across, grid) in zip(LENGTHS, trained.values(), strict=True):
        assert (down, across) == (["A", "B", "C"], list(ATTENTIONS))
        means = [[[scores(x, y, t, n) for t in TASKS] for y in ATTENTIONS] for x in MODELS]
        np.testing.assert_allclose(grid, np.mean(means, axis=(2, 3)) / 100)
    for name, labels in {
        "depths-needle.png": ("length, tokens", "depth of the needle", "score of needle"),
        "scores.png": ("length, tokens", "", "mean score"),
        "trained-inferred.png": ("attention at inference", "trained model", "mean score"),
    }.items():
        ax, *_, scale = drawn[name].axes
        assert (ax.get_xlabel(), ax.get_ylabel(), scale.get_ylabel()) == labels
        assert ax.images[0].get_clim() == (0, 1)


def test_a_picture_shows_the_loss_by_position(report):
    (ax,) = report[1]["loss-8.png"].axes
    names = [x.get_text() for x in ax.get_legend().get_texts()]
    assert names == [f"{x}, {y}" for x in "ABC" for y in ATTENTIONS]
    for number, curve in enumerate(ax.containers):
        line, _, (bars,) = curve.lines
        mean = number // 2 + 0.15 * (number % 2)
        assert np.allclose(np.array(line.get_ydata(), float), [mean, mean + 4, mean])
        assert line.get_linestyle() == ("--" if number % 2 else "-")
        ends = np.array(bars.get_segments())[:, :, 1]
        np.testing.assert_allclose(np.diff(ends)[:, 0], 0.1 * (number % 2), atol=1e-12)
    assert ticks(ax.xaxis) == ["1", "2", "4"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "tokens of context, from this power of two to the next", "loss, nats"
    )  # fmt: skip


@pytest.mark.parametrize("some", ["a", "dense"])
def test_one_model_or_attention_has_no_table_of_both(tmp_path, monkeypatch, some):
    """And prompts that were cut are counted."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **how: None)
    chosen = [x for x in lines() if some in (x["model"], x["attention"])]
    with Results(tmp_path, {}) as results:
        for line in chosen:
            results.add(line | {"cut_tokens": line["number"] * (line["task"] == "passkey")})
    written = write_report(tmp_path, Console(file=io.StringIO()))
    text = written[0].read_text()
    assert "## Scores" in text and "Training and inference" not in text
    names = ["results.md", "depths-needle.png", "scores.png", "loss-8.png"]
    assert [path.name for path in written] == names
    # Whatever the number of models and attentions that answer a prompt.
    assert "\n20 of 48 prompts were too long; up to 5 tokens were removed from" in text


def test_models_are_compared_on_the_same_prompts_only():
    key = {"task": "needle", "attention": "dense", "length": 512}
    prompts = {"one": "xyz", "other": "xwz"}  # as with different tokenizers
    scores = {"one": (1.0, 1.0, 0.5), "other": (0.75, 0.0, 0.5)}
    found = Lines(
        key | {"model": x, "number": i, "score": scores[x][i], "prompt_hash": prompts[x][i]}
        for x in prompts
        for i in range(3)
    )
    first, second = (("other", "dense"), ("one", "dense"))
    assert found.difference(first, second, "needle", 512) == (-0.125, 0.125, 2)
    nothing = [line | {"prompt_hash": line["model"]} for line in found.scored]
    assert Lines(nothing).difference(first, second, "needle", 512) is None


def test_documents_of_several_tasks_all_count():
    key = {"model": "one", "attention": "dense", "length": 4, "number": 0, "seconds": 1}
    losses = {"documents": [1.0, 2.0], "package:Own": [3.0, 6.0]}
    lines = [
        key | {"task": task, "loss_by_position": x, "loss_of_last": 5.0}
        for task, x in losses.items()
    ]
    found = Lines([*lines, lines[0] | {"model": "two"}])
    times, table = tables(found)
    assert times.rows == [  # an older line has no density
        ("4", "one", "dense", "1", "–", "2"),
        ("4", "two", "dense", "1", "–", "1"),
    ]
    assert [row[1] for row in table.rows] == ["2.000", "4.000", "5.000"]
    assert "mean over 2 documents" in table.note
    assert "mean over 2 documents" in table.note
