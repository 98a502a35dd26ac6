"""Paired comparison of evaluations: means, errors, p values and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import paired_tasks
from mtraining_jax.utils.errors import UserError


def write(folder: Path, scores: dict[str, list[float]], **changes: object) -> Path:
    """An evaluation with these scores by task."""
    folder.mkdir()
    lines = [
        {
            "model": "model",
            "attention": "dense",
            "task": task,
            "length": 64,
            "number": i,
            "how": "forced",
            "score": x,
            "prompt_hash": f"{task}{i}",
        }
        | changes
        for task, values in scores.items()
        for i, x in enumerate(values)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def cells(*folders: Path) -> list[list[str]]:
    return [row[1:] for row in paired_tasks.rows(folders)]


def test_differences_are_paired_by_prompt_and_tasks_count_equally(tmp_path: Path) -> None:
    base = write(tmp_path / "dense", {"a": [1, 0, 0, 0], "b": [0.5, 0.5]})
    other = write(tmp_path / "sparse", {"a": [1, 1, 0, 0], "b": [0.5, 0.5]})
    assert cells(base, other) == [
        ["a", "dense", "4", "25.0", "", "", ""],
        ["a", "sparse", "4", "50.0", "+25.0 ± 25.0", "1.00", "70.0"],
        ["b", "dense", "2", "50.0", "", "", ""],
        ["b", "sparse", "2", "50.0", "+0.0 ± 0.0", "1.00", ""],
        ["mean of 2", "dense", "6", "37.5", "", "", ""],
        ["mean of 2", "sparse", "6", "50.0", "+12.5 ± 12.5", "1.00", "35.0"],
    ]


def test_p_is_the_share_of_sign_flips_that_differ_as_much() -> None:
    # All eight prompts improve: only 2 of the 2^8 sign patterns are as extreme.
    gap = paired_tasks.difference([np.array([[1.0, 0.0]] * 8)])
    assert gap.mean == 1 and gap.error == 0 and gap.p == pytest.approx(2 / 2**8, abs=0.002)


def test_the_error_of_a_mean_of_tasks_adds_their_variances() -> None:
    one, two = np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    gap = paired_tasks.difference([one, two])
    assert gap.mean == pytest.approx((1 / 2 - 2 / 3) / 2)
    assert gap.error == pytest.approx(np.sqrt(0.5 / 2 + (1 / 3) / 3) / 2)


def test_a_task_that_only_the_base_has_is_not_compared(tmp_path: Path) -> None:
    base = write(tmp_path / "dense", {"a": [1, 0], "b": [1, 1]})
    other = write(tmp_path / "sparse", {"a": [0, 0]})
    assert [row[:2] for row in cells(base, other)] == [
        ["a", "dense"], ["a", "sparse"], ["b", "dense"], ["mean of 2", "dense"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_hash": "x"}, "prompt 0 of a, 64 tokens, differs"),
        ({"how": "generated"}, "scoring of prompt 0 of a, 64 tokens, differs"),
    ],
)
def test_other_prompts_and_scorings_are_refused(
    changes: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base = write(tmp_path / "dense", {"a": [1, 0]})
    other = write(tmp_path / "sparse", {"a": [1, 0]}, **changes)
    with pytest.raises(SystemExit):
        paired_tasks.main([str(base), str(other)])
    assert message in capsys.readouterr().err


def test_a_folder_of_several_attentions_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "both", {"a": [1, 0]})
    # Also if no prompt has two scores.
    sparse = write(tmp_path / "sparse", {"b": [1]}, attention="sparse") / "samples.jsonl"
    with (folder / "samples.jsonl").open("a") as file:
        file.write(sparse.read_text())
    with pytest.raises(UserError, match="both has several models or kinds of attention; give one"):
        paired_tasks.scores_of(folder)


def test_a_folder_without_scores_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        paired_tasks.main([str(tmp_path)])
    assert "has no scores in samples.jsonl" in capsys.readouterr().err
