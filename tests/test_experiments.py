"""Tests of the experiments: configurations, tasks, measurements, result files and the report."""

import hashlib
import json
import types

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import (
    chats,
    compare,
    data,
    decision,
    measure,
    pictures,
    report,
    result_lines,
    run,
    synthetic,
    variants,
)
from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.models.label_scores import LabelScores
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.random_bits import Stream

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5,
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


@pytest.fixture
def overrides(tmp_path):
    """Overrides that replace the checkpoint, which is not part of the repository."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return lambda tier: {"model.init_from": tmp_path} if tier != "b" else {}


@pytest.mark.parametrize(
    ("tier", "names"),
    [
        *variants.TIERS.items(),
        *((tier, (arm, *extra)) for (tier, arm), extra in variants.EXTRA_PATTERNS.items()),
    ],
)
def test_arms_and_extra_patterns_differ_only_in_the_pattern(tier, names, overrides):
    configs = [variants.arm_config(tier, name, overrides(tier)) for name in names]
    assert len({str(config.sparsity) for config in configs}) == len(configs)
    for section in ("model", "data", "optimizer", "loss", "metrics", "parallel"):
        assert len({str(getattr(config, section)) for config in configs}) == 1
    config, sizes = configs[0], data.TIERS[tier]
    assert config.data.seq_len == sizes.seq_len == config.model.max_position_embeddings
    # No sequence is read twice.
    assert config.run.steps * config.data.batch_size <= sizes.rows


def answers(tokens):
    """The token that recall or copying predicts at each position; -1 where neither applies."""
    found, first = np.full(len(tokens), -1), tokens[0]
    half = len(tokens) // 2
    known = {}
    for place in range(1, len(tokens)):
        before = tokens[place - 1]
        if synthetic.TASKS[first - 1] == "copy":
            found[place] = tokens[place - half] if place > half else -1
        elif before in known:
            found[place] = known[before]
        if before >= 4096:  # a key, or a digit of a passkey: what follows it
            known.setdefault(before, tokens[place])
    return found


@pytest.mark.parametrize("task", synthetic.TASKS)
@pytest.mark.parametrize("length", [256, 2048])
def test_answers_can_be_recalled_and_lie_where_the_task_says(task, length):
    problem = synthetic.problem(task, length, 8192, seed=5)
    tokens, asked = problem
    assert np.array_equal(answers(tokens)[asked], tokens[asked])
    places = np.flatnonzero(asked)
    if task == "copy":
        assert len(places) == length // 2 - 1
    elif task == "needle_any":
        assert len(places) == 4 * min(256, length // 32)
        assert places.min() > length // 4
        assert (places < length - 64).sum() > len(places) / 2
    else:
        assert places.min() >= length - 64
    again = synthetic.problem(task, length, 8192, seed=5)
    assert np.array_equal(tokens, again.tokens)
    assert not np.array_equal(tokens, synthetic.problem(task, length, 8192, seed=6).tokens)


def test_training_rows_match_the_recorded_digest():
    rows = [synthetic.training_row(n, 8192, data.VOCABULARY_A, seed=1) for n in range(4)]
    assert [row[0] for row in rows] == [1, 2, 3, 4]
    digest = hashlib.sha256(np.concatenate(rows).astype("<u2").tobytes()).hexdigest()
    assert digest[:16] == "243b7434090d8beb"


def test_shared_fields_are_written_once_and_numbers_are_rounded(tmp_path):
    path = tmp_path / "c-s0.jsonl"
    step, loss = {"what": "train", "tier": "c"}, {"what": "loss", "tier": "c"}
    lines = [
        {"what": "run", "tier": "c", "date": "today"},
        {**step, "step": 1, "loss": 2.12345678, "density": 1.0, "recall": 0.9},
        {**step, "step": 2, "loss": 2.0, "dense_step": True},
        {**loss, "inferred": "dense", "number": 0, "loss_by_position": [3.14159265, 2.0]},
    ]
    result_lines.append_lines(path, lines)
    # A later call continues the table. Other shared fields need a new header.
    result_lines.append_lines(path, [{**lines[-1], "number": 1}])
    result_lines.append_lines(path, [{**lines[-1], "inferred": "window"}])
    header = '{"what":"loss","tier":"c","inferred":"%s","columns":["number","loss_by_position"]}'
    assert path.read_text().splitlines() == [
        '{"what":"run","tier":"c","date":"today"}',
        '{"what":"train","tier":"c","columns":["step","loss","density","recall","dense_step"]}',
        "[1,2.12346,1,0.9]",
        "[2,2,null,null,true]",
        header % "dense",
        "[0,[3.14159,2]]",
        "[1,[3.14159,2]]",
        header % "window",
        "[0,[3.14159,2]]",
    ]
    lines[1]["loss"], lines[3]["loss_by_position"] = 2.12346, [3.14159, 2]
    again = [{**lines[3], "number": 1}, {**lines[3], "inferred": "window"}]
    assert result_lines.read_lines(path) == [*lines, *again]
    path.write_text('{"what":"loss","columns":["number"]}\n[1,2]\n')
    with pytest.raises(UserError, match="line 2 has more values than columns: 1"):
        result_lines.read_lines(path)


class FakeEngine:
    """Predicts everything with dense attention and nothing with other patterns."""

    def __init__(self, kind="dense"):
        self.kind, self.programs = kind, types.SimpleNamespace(score=self.score)

    def with_pattern(self, settings):
        return FakeEngine("sparse" if settings.sparse else "dense")

    def score(self, ids, labels):
        assert len(ids) == len(labels)
        right = np.full(len(ids), self.kind == "dense")
        loss = np.where(right, 0.0, 2.0).astype(np.float32)
        return LabelScores(loss, right), 1.0 if self.kind == "dense" else 0.25


def test_measuring_resumes_where_it_stopped(tmp_path, overrides):
    results = tmp_path / "a-s0.jsonl"
    configs = {
        arm: variants.arm_config("a", arm, overrides("a") | {"data.seq_len": 256})
        for arm in ("dense", "sampled_rows")
    }

    def measured(deadline=None):
        return measure.Measurement(
            "a", "dense", 0, results=results, data=tmp_path, deadline=deadline, samples=2
        ).run(FakeEngine(), configs)

    assert not measured(deadline=0.0)
    assert result_lines.read_lines(results) == []
    assert measured()
    lines = result_lines.read_lines(results)
    assert len(lines) == 2 * 2 * len(synthetic.TASKS)
    assert {x["score"] for x in lines if x["inferred"] == "dense"} == {1.0}
    assert {(x["score"], x["loss"]) for x in lines if x["inferred"] != "dense"} == {(0.0, 2.0)}
    assert measured()
    assert result_lines.read_lines(results) == lines


def test_losses_of_different_validation_sequences_do_not_pair(tmp_path, overrides):
    results = tmp_path / "c-s0.jsonl"

    def measure_dense_with(pattern, token):
        held = np.full((2, 256), token, np.uint16)
        np.save(tmp_path / "heldout.npy", held)
        digest = hashlib.sha256(held.tobytes()).hexdigest()
        sources = {"kinds": ["text", "text"], "heldout.npy": {"sha256 of ids": digest}}
        (tmp_path / "sources.json").write_text(json.dumps(sources))
        config = variants.arm_config("c", pattern, overrides("c"))
        made = measure.Measurement("c", "dense", 0, results=results, data=tmp_path)
        assert made.run(FakeEngine(), {pattern: config})

    measure_dense_with("window", token=1)
    measure_dense_with("xattention", token=1)
    found, partial = compare.losses_of(compare.read(tmp_path), "c")
    assert not partial and compare.paired(*found.values(), "last").shape == (1, 2)
    results.unlink()
    measure_dense_with("window", token=1)
    measure_dense_with("xattention", token=2)
    with pytest.raises(UserError, match="dense used with xattention and dense used with window"):
        compare.losses_of(compare.read(tmp_path), "c")


def synthetic_losses(differences, sequences=24, seeds=3, buckets=13, spread=0.01):
    """Lines of a tier: losses that fall with position, plus a difference for each arm."""
    random = np.random.default_rng(3)
    common = random.normal(0, 0.3, (seeds, sequences, 1)) + np.linspace(4, 2, buckets)
    for (trained, inferred), difference in differences.items():
        own = common + difference + random.normal(0, spread, common.shape)
        for seed in range(seeds):
            for number in range(sequences):
                yield {
                    "what": "loss",
                    "tier": "c",
                    "seed": seed,
                    "number": number,
                    "trained": trained,
                    "inferred": inferred,
                    "loss_by_position": own[seed, number].tolist(),
                    "tokens_by_position": [2**k for k in range(buckets)],
                    "loss_of_last": float(own[seed, number, -1]),
                    "density": 0.2,
                }


def test_the_report_applies_the_decision_rule(tmp_path):
    lines = list(
        synthetic_losses(
            {
                ("dense", "dense"): 0.0,
                ("dense", "sampled_rows"): 0.05,
                ("sampled_rows", "dense"): 0.001,
                ("sampled_rows", "sampled_rows"): 0.01,
                ("vertical_slash", "dense"): 0.012,
                ("xattention", "dense"): 0.05,
                ("window", "dense"): 0.05,
                ("window", "window"): 0.1,
            },
            spread=0.03,
        )
    )
    for n, arm in enumerate(("dense", "sampled_rows")):
        lines += [
            {
                "what": "task",
                "tier": "c",
                "seed": 0,
                "trained": arm,
                "inferred": "dense",
                "task": "needle",
                "length": 8192,
                "number": i,
                "depth": i / 9,
                "score": float(i >= n),
                "density": 0.5,
            }
            for i in range(10)
        ]
    for step in range(1, 5):
        lines.append(
            {
                "what": "train",
                "tier": "c",
                "seed": 0,
                "trained": "dense",
                "step": step,
                "loss": 4.0 - step,
                "step_seconds": 2.0,
                "density": 1.0,
            }
        )
    path = tmp_path / "results"
    result_lines.append_lines(path / "c.jsonl", lines)
    written = report.write(compare.read(path), tmp_path / "out")
    text = written[0].read_text()
    assert "- Valid: dense gains" in text
    # Needles lose ten points, so close losses are not enough.
    verdict = "not decided, needles -10.0 points; training with the pattern helps inference"
    assert f"`sampled_rows`: {verdict}" in text
    assert "`vertical_slash`: not decided" in text
    assert "`xattention`: **unequal**" in text
    assert "| dense | 0 | 4 | 0.0000 | 2.000 | 1.000 | – |" in text
    assert "| sampled_rows | dense | 0.500 | 90.0 ± 10.0 |" in text
    assert {x.name for x in written[1:]} <= {"c-loss-by-position.png"}


def test_a_picture_compares_training_losses_of_the_same_batches(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))

    def losses(arm, seed, values):
        about = {"what": "train", "tier": "q", "seed": seed, "trained": arm}
        return [about | {"step": step, "loss": x} for step, x in enumerate(values, 1)]

    dense = losses("dense", 0, [5.0, 4.0, 3.0, 2.0])
    assert pictures.draw_training("q", dense, tmp_path) is None
    # The sparse arm has not reached step 4; seed 1 has no dense arm.
    sparse = losses("sampled_rows", 0, [5.5, 4.3, 3.5]) + losses("sampled_rows", 1, [1.0, 1.0])
    pictures.draw_training("q", dense + sparse, tmp_path)
    ((levels, differences),) = (figure.axes for figure in figures)
    assert [line.get_xdata().tolist() for line in levels.lines] == [[1.5, 2.5], [1.5, 2.5]]
    np.testing.assert_allclose(levels.lines[1].get_ydata(), [4.9, 3.9])
    np.testing.assert_allclose(differences.lines[1].get_ydata(), [0.4, 0.4])
    # Two standard errors of 0.5 and 0.3: the standard deviation 0.1414 over the root of 2, twice.
    (band,) = differences.collections
    assert band.get_paths()[0].vertices[:, 1].min() == pytest.approx(0.2)


def test_an_arm_with_dense_steps_is_compared_with_its_sparse_pattern(tmp_path):
    arm = "sampled_rows_dense_last"
    lines = list(
        synthetic_losses(
            {
                ("dense", "dense"): 0.0,
                ("dense", "sampled_rows"): 0.05,
                (arm, "dense"): 0.0,
                (arm, "sampled_rows"): -0.01,
            },
            spread=0.004,
        )
    )
    found, _ = compare.losses_of(lines, "c")
    (said,) = [line for line in decision.verdicts(found, {}) if arm in line]
    assert said.startswith(f"- `{arm}`: equal; training with the pattern helps inference with it")
    assert "(-0.05" in said
    scores = {
        ("copy", 64, one, used): {(0, n): float(n >= lost) for n in range(100)}
        for one, used, lost in (("dense", "dense", 0), (arm, "sampled_rows", 25))
    }
    assert f"`{arm}` -25.0 [" in decision.task_verdicts(scores)[0]
    report.write(lines, tmp_path)


def test_differences_are_reported_by_seed_and_in_percent_of_the_dense_loss():
    pairs = {("dense", "dense"): 0.0, ("window", "dense"): 0.1, ("start", "dense"): 1.0}
    lines = [
        x | {"seed": 3 if x["trained"] == "xattention" else x["seed"]}
        for x in synthetic_losses(pairs | {("xattention", "xattention"): 0.2}, seeds=2, spread=0.0)
        if (x["trained"], x["seed"]) not in (("start", 1), ("xattention", 1))
    ]
    for x in lines:  # the same for all seeds, so that the mean is known
        if x["trained"] != "start":
            x["loss_by_position"] = [2.1 if x["trained"] == "window" else 2.0] * 13
            x["loss_of_copies"] = 0.4 if x["trained"] == "window" else 0.25
    head, _, dense, window, start, other = report.long_table(compare.losses_of(lines, "c")[0])
    assert head.startswith("| trained | used with | density | loss | minus dense |")
    assert dense == "| dense | dense | 0.200 | 2.0000 | – | – | – | – |"
    rest = "2.1000 | +0.1000 [+0.1000, +0.1000] | +5.00 | 0: +0.1000, 1: +0.1000 | "
    rest += "+0.1500 [+0.1500, +0.1500] |"
    assert window == f"| window | dense | 0.200 | {rest}"
    assert start.endswith(" | – | – |")
    # Dense has no such seed: only the loss is reported.
    assert other == "| xattention | xattention | 0.200 | 2.0000 | – | – | – | – |"
    lines = [x for x in lines if x["trained"] == "window"]
    *_, alone = report.long_table(compare.losses_of(lines, "c")[0])
    assert alone == "| window | dense | 0.200 | 2.1000 | – | – | – | – |"


def test_intervals_follow_the_spread_of_sequences_and_seeds():
    differences = np.random.default_rng(0).normal(0.5, 1.0, (1, 400))
    found = compare.band(differences)
    expected = 1.96 * differences.std() / 20
    assert found.mean == pytest.approx(differences.mean())
    assert (found.high - found.low) / 2 == pytest.approx(expected, rel=0.05)
    assert found.p == pytest.approx(2 / compare.DRAWS)
    # Different seeds widen the interval, even with many sequences.
    apart = np.array([[-1.0], [0.0], [1.0]]) + np.zeros((3, 400))
    assert compare.band(apart).low < -0.6


def test_arms_are_trained_and_measured_within_the_time(tmp_path, capsys, monkeypatch):
    commands, statuses = [], [0, 0, 75]

    def start(self, command, folder):
        commands.append(command)
        return statuses.pop(0)

    monkeypatch.setattr(run.TimeBudget, "start", start)
    (tmp_path / variants.run_name("b", "dense", 0) / "checkpoints" / "600").mkdir(parents=True)
    about = ["--tier=b", "--arms=dense,window", f"--folder={tmp_path}"]
    assert run.main(about) == 75
    assert "run the same command again to resume" in capsys.readouterr().out
    measured, trained, second = commands  # dense was trained before
    assert measured[1:5] == ["-m", "experiments.measure", "--tier=b", "--arm=dense"]
    assert "train.py" in trained and "--run.name=b_window_s0" in trained
    assert "--arm=window" in second
    statuses[:] = [1]
    with pytest.raises(SystemExit):
        run.main(about)
    assert "evaluating dense failed with exit status 1" in capsys.readouterr().err


def test_answers_of_chats_are_in_their_texts(tmp_path):
    lines = [f"This is line number {i} of the play, with spaces." for i in range(300)]
    play = chats.Play("\n\n".join(["EXIT.", *lines, "EXIT."]), ByteTokenizer())
    asked = set()
    for number in range(20):
        (first, *others) = chats.chat(play, 4096, Stream(0, number))["messages"]
        _, text, question = first["content"].split("\n\n")
        assert 2000 < len(text) < 4096 + 200  # with two secrets
        found = text.splitlines()
        turns = [question, *(message["content"] for message in others)]
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            if question.startswith("Which line follows"):
                assert found[found.index(question.split('"')[1]) + 1] == answer
                kind = "line"
            else:
                name = question.split()[-1].rstrip("?")
                kind = "absent" if "does not say" in answer else "secret"
                assert (answer in found) == (kind == "secret") and name in answer
                assert sum(f"number of {name} is" in line for line in found) == (kind == "secret")
            asked.add(kind)
    assert asked == {"line", "absent", "secret"}
    records = [chats.needle(play, 2048, number, Stream(2, number)) for number in range(10)]
    for record in records:
        _, text, _ = record["prompt"][0]["content"].split("\n\n")
        (place,) = [i for i, x in enumerate(text.splitlines()) if record["answer"] in x]
        assert place == round(record["depth"] * (len(text.splitlines()) - 1))
    file = tmp_path / "answers.jsonl"
    texts = [record["answer"] if record["depth"] < 1 else "none" for record in records]
    answers = (json.dumps(x | {"text": text}) for x, text in zip(records, texts, strict=True))
    file.write_text("\n".join(answers))
    assert chats.score(file) == {0: (2, 2), 0.25: (2, 2), 0.5: (2, 2), 0.75: (2, 2), 1: (0, 2)}
