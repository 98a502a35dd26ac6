"""Evaluations of a fake model: what they write, how they resume, what they refuse."""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from mtraining_jax.cli.evaluate import parse
from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.tools.evaluate import command
from mtraining_jax.tools.evaluate.progress import Watch
from mtraining_jax.tools.evaluate.report import write_report, write_results
from mtraining_jax.tools.evaluate.results import Results, read_lines, read_settings
from mtraining_jax.tools.evaluate.runner import Plan, check, evaluate
from mtraining_jax.tools.evaluate.tasks import GROUPS, Document, Task, make_tasks
from mtraining_jax.tools.evaluate.tasks.sized import DepthTask
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from tests.tools.evaluate.fake_model import FakeModel


@options(kw_only=True)
class Sevens(Task):
    """A document that repeats one byte; there are three."""

    def count(self, tokenizer, length):
        return 3

    def sample(self, length, number, seed, tokenizer):
        ids = np.full(length, 7, np.int32)
        return Document(task=self.name, length=length, number=number, name=f"{number}", ids=ids)


def plan(lengths=(2048, 4096), samples=5, **options):
    return Plan(make_tasks(["needle"], {"depths": 5}), lengths, samples, **options)


def models(**changes):
    return {"dense": FakeModel(**changes), "sparse": FakeModel(window=1300, **changes)}


def run(folder, plan, models, settings=None, label="model"):
    console = Console(file=io.StringIO(), width=200)
    with contextlib.suppress(KeyboardInterrupt):
        with Results(folder, settings or {"seed": 0}) as results, Watch(console) as watch:
            evaluate(plan, models, label, results, watch)
    return console.file.getvalue()


def without_times(folder):
    return [
        {name: value for name, value in line.items() if "seconds" not in name}
        for line in read_lines(folder)
    ]


def test_a_window_misses_what_dense_finds(tmp_path):
    printed = run(tmp_path, plan(), models())
    lines = list(read_lines(tmp_path))
    assert len(lines) == 2 * 2 * 5
    by_depth = {
        attention: [x["score"] for x in lines if x["attention"] == attention]
        for attention in ("dense", "sparse")
    }
    assert by_depth["dense"] == [1] * 10
    assert by_depth["sparse"] == [0, 1, 1, 0, 1, 0, 1, 0, 0, 1]
    first = lines[0]
    assert first["how"] == "forced" and first["depth"] == 0 and first["answer_tokens"] == 8
    assert first["log_prob"] == -1 and first["right_tokens"] == 8 and first["density"] == 1
    assert first["prompt_tokens"] + 32 <= 2048 and len(first["prompt_hash"]) == 64
    assert lines[0]["prompt_hash"] == lines[1]["prompt_hash"] != lines[2]["prompt_hash"]
    assert "needle, 4096 tokens: dense 1.000, sparse 0.400 (5 samples)" in printed


@pytest.mark.parametrize("stop_after", [0, 3, 9])
def test_a_killed_evaluation_resumes_where_it_stopped(tmp_path, stop_after):
    run(tmp_path / "whole", plan(), models())
    folder = tmp_path / "cut"
    run(folder, plan(), models(stop_after=stop_after))
    path = folder / "samples.jsonl"
    there = len(path.read_text().splitlines())
    assert there < 20
    with path.open("a") as file:
        file.write('{"model": "model", "attention": "den')  # incomplete after a kill
    rest = models()
    printed = run(folder, plan(), rest)
    assert sum(model.asked for model in rest.values()) == 20 - there
    assert ("of 20 samples are already evaluated" in printed) == (there > 0)
    assert without_times(folder) == without_times(tmp_path / "whole")
    again = models()
    run(folder, plan(samples=6), again)  # further samples are added
    assert sum(model.asked for model in again.values()) == 4
    assert len(list(read_lines(folder))) == 24


def test_results_without_a_token_at_the_beginning_are_not_resumed_with_one(tmp_path):
    class WithBos(ByteTokenizer):
        def encode(self, text, bos=True):
            return np.append(np.uint16(0), super().encode(text)) if bos else super().encode(text)

    run(tmp_path, plan(samples=1), models())
    with pytest.raises(UserError, match='sample 0 of task "needle" at length 2048 had another'):
        run(tmp_path, plan(samples=1), models(tokenizer=WithBos()))


def test_a_prompt_with_an_id_that_the_model_lacks_is_named(tmp_path):
    with pytest.raises(UserError) as caught:
        run(tmp_path, plan(samples=1), models(vocab_size=122))
    assert str(caught.value) == (
        'sample 0 of task "needle" at length 2048 has token id 122, but the model has only ids '
        "from 0 to 121"
    )


def test_results_with_other_settings_are_refused_and_nothing_is_written(tmp_path):
    settings = {"seed": 0, "models": {"model": {"name": "a", "step": 4}}}
    run(tmp_path, plan(samples=1), models(), settings)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"has results with models.model.step = 4, but this evalua"):
        Results(tmp_path, {"models": {"model": {"name": "a", "step": 5}}})
    # Another seed that is not in the settings: the prompts differ.
    with pytest.raises(UserError, match='sample 0 of task "needle" at length 2048 had another'):
        run(tmp_path, plan(samples=2, seed=3), models(), settings)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    with Results(tmp_path, {"models": {"second": {"name": "b"}}}) as results:
        assert results.settings["models"].keys() == {"model", "second"}
    path = tmp_path / "samples.jsonl"
    path.write_text('{"model": "model"}\n' + path.read_text())
    with pytest.raises(UserError, match="line 1 is not a result of an evaluation"):
        Results(tmp_path, settings)


def test_a_task_with_more_ids_than_the_model_is_refused():
    tasks = make_tasks(["needle", "mqar"], {"pairs": "4", "vocab_size": "64"})
    check(Plan(tasks, (512,), 1), FakeModel(vocab_size=64), "tiny")
    with pytest.raises(UserError, match='"mqar" has 64 token ids, but tiny has a vocabulary of on'):
        check(Plan(tasks, (512,), 1), FakeModel(vocab_size=63), "tiny")


def test_settings_without_a_line_are_ignored(tmp_path):
    with Results(tmp_path, {"seed": 0}):
        pass
    with Results(tmp_path, {"seed": 1}):
        pass
    assert json.loads((tmp_path / "settings.json").read_text()) == {"seed": 1}
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(UserError, match="settings.json is not a JSON object"):
        read_settings(tmp_path)


def test_an_impossible_plan_is_found_before_anything_runs():
    with pytest.raises(UserError, match="length 4096 is more than the 3000 positions of tiny"):
        check(plan(), FakeModel(max_positions=3000), "tiny")
    with pytest.raises(UserError, match='task "needle" uses text, but tiny has no tokenizer'):
        check(plan(), FakeModel(tokenizer=None), "tiny")
    bad = FakeModel()
    bad.forced = lambda *_: type("F", (), {"log_probs": np.array([np.nan])})
    with pytest.raises(UserError, match="a non-finite loss on sample 0"):
        evaluate(plan(), {"dense": bad}, "model", _Nothing(), _Nothing())


@pytest.mark.parametrize("name", ["needle", "mqar", "ruler_vt"])
def test_a_length_that_is_too_short_for_a_named_task_is_found_before_anything_runs(name):
    named = Plan(make_tasks([name], {}), (8192, 100), 2)
    with pytest.raises(UserError, match=f'^length 100 is too short for task "{name}"; .* 1?[0-9]'):
        check(named, FakeModel(vocab_size=8192), "tiny")
    optional = dataclasses.replace(named, optional={name})
    skipped = check(optional, FakeModel(vocab_size=8192), "tiny").skipped
    assert skipped.keys() == {(name, 100)} and "length 100 is too short" in skipped[name, 100]
    with pytest.raises(UserError, match="^length 100 is too short"):  # nothing remains
        check(dataclasses.replace(optional, lengths=(100,)), FakeModel(vocab_size=8192), "tiny")


def test_samples_longer_than_the_measured_one_are_found_too(monkeypatch):
    (needle,) = make_tasks(["needle"], {})
    with pytest.raises(UserError) as error:
        needle.check_length(100, 1, 0, ByteTokenizer())
    smallest = int(re.findall("take ([0-9]+) tokens", str(error.value))[0])
    one_piece = ByteTokenizer().encode(needle.build(1, 100, -1, 0).prompt)
    assert smallest == len(one_piece) + needle.max_new_tokens
    build = type(needle).build

    def longer(self, size, length, number, seed):
        draft = build(self, size, length, number, seed)
        return dataclasses.replace(draft, prompt=draft.prompt + "?" * 200 * (number == 3))

    monkeypatch.setattr(type(needle), "build", longer)
    needle.check_length(smallest + 100, 3, 0, ByteTokenizer())
    with pytest.raises(UserError, match=f"length {smallest + 100} is too short"):
        needle.check_length(smallest + 100, 4, 0, ByteTokenizer())


def test_a_group_skips_tasks_at_lengths_that_are_too_short(tmp_path, monkeypatch):
    model = FakeModel()
    model.loaded = None
    monkeypatch.setattr(command, "_load", lambda *_: {"dense": model})
    monkeypatch.setattr(command, "max_positions", lambda *_: 8192)
    monkeypatch.setattr(command, "digests_of", lambda _: {})
    out = tmp_path / "out"
    names = "--tasks ruler_generated needle --lengths 2048 8192 --samples 1 --generate"
    request = parse(f"--model {tmp_path} {names} --output {out}".split())
    console = Console(file=io.StringIO(), width=300)
    command.run(request, console, "test")
    notes = [x for x in console.file.getvalue().splitlines() if x.startswith("note: ")]
    (note,) = notes
    assert note.startswith('note: skipped: length 2048 is too short for task "ruler_vt"; its short')
    found = {(line["task"], line["length"]) for line in read_lines(out)}
    tasks = {*GROUPS["ruler_generated"], "needle"}
    assert found == {(x, n) for x in tasks for n in (2048, 8192)} - {("ruler_vt", 2048)}
    # A task asked for by name is an error.
    names = "--tasks ruler_generated ruler_vt --lengths 2048"
    named = parse(f"--model {tmp_path} {names} --output {tmp_path / 'named'}".split())
    with pytest.raises(UserError, match='length 2048 is too short for task "ruler_vt"'):
        command.run(named, console, "test")


def test_results_of_other_code_of_a_task_or_its_base_are_refused(tmp_path, monkeypatch):
    model, console = FakeModel(), Console(file=io.StringIO())
    model.loaded, base = None, tmp_path / "base.py"
    monkeypatch.setattr(command, "_load", lambda *_: {"dense": model})
    monkeypatch.setattr(command, "max_positions", lambda *_: 8192)
    monkeypatch.setattr(command, "digests_of", lambda _: {})
    getfile = inspect.getfile
    monkeypatch.setattr(inspect, "getfile", lambda x: base if x is DepthTask else getfile(x))
    names = f"--tasks needle --lengths 2048 --samples 1 --output {tmp_path / 'out'}"
    for code, refused in ("depths", False), ("depths", False), ("other depths", True):
        base.write_text(code)
        problem = "tasks.needle.digest of code and files = "
        expected = pytest.raises(UserError, match=problem) if refused else contextlib.nullcontext()
        with expected:
            command.run(parse(f"--model {tmp_path} {names}".split()), console, "test")


def test_the_report_is_written_after_each_task(tmp_path):
    reports = []

    def after_task():
        reports.append(write_results(tmp_path).read_text())

    tasks = make_tasks(["needle", "passkey", "ruler_niah_single_1"], {})
    several = Plan(tasks, (2048, 4096), 1, generate=True)
    with Results(tmp_path, {}) as results, Watch(Console(file=io.StringIO())) as watch:
        evaluate(several, {"dense": FakeModel()}, "model", results, watch, after_task)
    assert len(reports) == 2  # the last one is the caller's
    assert ["| passkey | " in report for report in reports] == [False, True]
    assert all("| needle | model | dense | 100.0 (1) | 100.0 (1) |" in x for x in reports)


@pytest.mark.parametrize("terminal", [False, True])
def test_only_a_terminal_has_a_progress_bar(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with Watch(console) as watch:
        watch.start(3, 1, "samples.jsonl")
    printed = console.file.getvalue()
    assert printed.startswith("1 of 3 samples are already evaluated for this model: samples.jsonl")
    assert ("1/3" in printed) == terminal


def test_progress_adds_up_over_models_and_prints_means_of_each_task():
    console = Console(file=io.StringIO(), width=200)
    with Watch(console) as watch:
        for start in (3, 0), (4, 1):
            watch.start(*start, "samples.jsonl")
            for task, scores in {"needle": (0.25, 1.0), "text": (0.5,)}.items():
                watch.at(task)
                for score in scores:
                    watch.add({"attention": "sparse", "loss" if task == "text" else "score": score})
        assert (watch.done, watch.total) == (7, 7)
        watch.add({"attention": "dense", "loss": 8.0, "score": 9.0})
        watch.add({"attention": "dense", "loss": 8.0})
    assert console.file.getvalue().splitlines() == [
        "needle: sparse 0.625 (2 samples)",
        "text: sparse 0.500 (1 sample)",
        "1 of 4 samples are already evaluated for this model: samples.jsonl",
        "needle: sparse 0.625 (2 samples)",
        "text: sparse 0.500, dense 8.500 (2 samples)",
    ]


def test_results_are_utf8_in_every_locale(tmp_path):
    line = {"model": "m", "attention": "dense", "task": "t", "length": 1, "number": 0, "text": "✓"}
    code = f"""
from mtraining_jax.tools.evaluate.results import Results
with Results({str(tmp_path)!r}, {{}}) as results:
    results.add({ascii(line)})
"""
    ascii_locale = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", code], env=ascii_locale, check=True)
    assert list(read_lines(tmp_path)) == [line]


class _Nothing:
    """Empty results, and a watcher that does nothing."""

    def __contains__(self, key):
        return False

    def __getattr__(self, name):
        return lambda *_: None


def test_answers_are_generated_on_request(tmp_path):
    run(tmp_path, plan(lengths=(2048,), samples=2, generate=True), {"dense": FakeModel()})
    (first, _) = read_lines(tmp_path)
    assert first["how"] == "generated" and first["score"] == 1
    assert first["answer"].endswith(". That is it.") and first["prefill_seconds"] == 0.5


def test_a_report_has_tables_and_pictures(tmp_path):
    folder = tmp_path / "results"
    both = {"model": {"name": "trained dense"}, "second": {"name": "trained sparse"}}
    tasks = [*make_tasks(["needle"], {"depths": 5}), Sevens(name="sevens")]
    for label, worse in (("model", 0.0), ("second", 0.5)):
        run(folder, Plan(tasks, (2048, 4096), 5), models(worse=worse), {"models": both}, label)
    with Results(folder, {}) as results:
        facts = {"date": "2026-11-22", "devices": "1 x fake", "versions": "0", "command": "test"}
        results.note(facts)
    console = Console(file=io.StringIO(), width=200)
    written = write_report(folder, console)
    assert [path.name for path in written] == [
        "results.md",
        "depths-needle.png",
        "scores.png",
        "trained-inferred.png",
        "loss-2048.png",
        "loss-4096.png",
    ]
    for path in written[1:]:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 8000
    text = written[0].read_text()
    for row in (
        "| needle | trained dense | dense | 100.0 (5) | 100.0 (5) |",
        "| needle | trained dense | sparse | 60.0 ± 24.5 (5) | 40.0 ± 24.5 (5) |",
        "| needle | trained dense | sparse - dense | -40.0 ± 24.5 (5) | -60.0 ± 24.5 (5) |",
        "| needle | trained sparse - trained dense | sparse | +0.0 (5) | +0.0 (5) |",
        "| 2048 | trained sparse | 100.0 | 60.0 ± 24.5 |",
        "## Loss by position, 4096 tokens",
        "- 2026-11-22, 1 x fake, 0: `test`",
    ):
        assert row in text
    # The losses are 1, 1/2, 1/3, ...; those of the second model are larger by 0.5.
    assert "mean over 3 documents" in text
    assert "| from 2 | 0.417 | 0.417 | +0.000 | 0.917 | 0.917 | +0.000 |" in text
    assert "from 1K" in text and "| last 64" in text
    # 5 prompts of density 0.25 and 3 documents of 0.125.
    assert re.search(r"\| 2048 \| trained dense \| sparse \| \S+ \| 20.3% \| 8 \|", text)
    assert "trained sparse" in console.file.getvalue()
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="contains no evaluation results"):
        write_report(folder, console)


def test_a_line_is_json_of_finite_numbers(tmp_path):
    key = {"model": "m", "attention": "dense", "task": "t", "length": 8, "number": 0}
    with Results(tmp_path, {}) as results:
        with pytest.raises(ValueError, match="JSON"):
            results.add({**key, "score": float("nan")})
        with pytest.raises(ValueError, match="must have model, attention, task, length, number"):
            results.add({"score": 1.0})
        results.add({**key, "score": 1.0})
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["score"] == 1
