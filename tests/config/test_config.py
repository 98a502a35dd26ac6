"""Configuration: files, overrides, round trips and error messages."""

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtraining_jax.config import (
    Config,
    available_configs,
    config_folder,
    config_from_dict,
    config_of_model,
    config_to_dict,
    config_to_toml,
    help_text,
    load_config,
    renamed,
    validate,
)
from mtraining_jax.config.sections import ModelConfig, OptimizerConfig, RunConfig
from mtraining_jax.config.tables import all_fields
from mtraining_jax.data.source import Source
from mtraining_jax.data.sources import SOURCES
from mtraining_jax.patterns.options.base import PatternOptions
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.selection.scores import estimate
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.limits import MAX_BLOCKS, MAX_POSITIONS

MODEL = """
[model]
vocab_size = 300
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
intermediate_size = 64
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def minimal(write) -> Path:
    return write(MODEL)


@pytest.fixture
def columns(write) -> Path:
    """Uses a pattern that all rings support."""
    return write(MODEL + '[sparsity]\nkind = "vertical_slash"\n')


def messages(name: str | Path, **overrides: str) -> list[str]:
    """The error lines of loading a configuration; `__` in a keyword is a dot."""
    pairs = [(key.replace("__", "."), value) for key, value in overrides.items()]
    with pytest.raises(UserError) as error:
        load_config(name, pairs)
    return str(error.value).splitlines()


def override(path: Path, **overrides: str) -> Config:
    return load_config(path, [(key.replace("__", "."), v) for key, v in overrides.items()])


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", available_configs())
def test_every_shipped_configuration_loads(name):
    assert load_config(name).run.name == name


def test_tiny_and_its_dense_twin_differ_in_name_and_kind_only():
    tiny, dense = (config_to_dict(load_config(name)) for name in ("tiny", "tiny_dense"))
    assert tiny["sparsity"]["kind"] == "sampled_rows" and dense["sparsity"]["kind"] == "dense"
    assert dense["sparsity"].items() - {("kind", "dense")} <= tiny["sparsity"].items()
    del tiny["sparsity"], dense["sparsity"]
    assert tiny["run"].pop("name") != dense["run"].pop("name")
    assert tiny == dense


def test_a_file_gives_its_name_to_the_run(minimal, write):
    config = load_config(minimal)
    assert config.run.name == "mine" and config.run.folder == Path("runs/mine")
    assert load_config(write(MODEL + "[run]\nname = 'other'")).run.name == "other"


def test_a_folder_of_runs_may_have_folders(minimal):
    assert override(minimal, run__name="tests/first").run.folder == Path("runs/tests/first")


@pytest.mark.parametrize("name", ["..", ".", "a/../..", "/tmp/a", "a/", "a\nb", "a" * 201])
def test_a_run_has_the_name_of_a_folder_inside_that_of_all_runs(minimal, name):
    (line,) = messages(minimal, run__name=name)
    assert line.startswith('run.name = "') and len(line) < 200
    assert "is not allowed: it must be the name of a folder in run.output_dir, " in line


def test_a_path_may_begin_at_home(minimal, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = override(minimal, run__output_dir="~/runs", data__tokenizer="~/t.json")
    assert config.run.output_dir == f"{tmp_path}/runs"
    assert config.data.tokenizer == f"{tmp_path}/t.json"
    assert load_config("~/mine.toml") == load_config(minimal)
    (line,) = messages(minimal, model__init_from="~/model")
    assert f"{tmp_path}/model/config.json" in line


def test_names_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny").run.name == "tiny"


def test_unknown_name_suggests_the_nearest():
    (line,) = messages("tiny_dens")
    assert line.startswith(
        'unknown configuration "tiny_dens"; did you mean tiny_dense? Choose one of '
    )


def test_a_name_is_not_the_name_of_a_file(tmp_path, monkeypatch):
    (line,) = messages("configs")
    assert line.startswith('unknown configuration "configs"; choose one of ')
    monkeypatch.chdir(tmp_path)
    (line,) = messages("tiny.toml")
    assert line == ("the configuration file tiny.toml does not exist; did you mean --config tiny?")
    Path("mine.toml").touch()
    assert messages("mine")[0].startswith('unknown configuration "mine"; did you mean mine.toml? ')


def test_missing_file_suggests_the_nearest(tmp_path, minimal):
    assert messages(tmp_path / "mina.toml") == [
        f"the configuration file {tmp_path / 'mina.toml'} does not exist; did you mean {minimal}?"
    ]


def test_a_folder_is_not_a_file(tmp_path):
    (path := tmp_path / "folder.toml").mkdir()
    assert messages(path) == [f"{path} cannot be read: Is a directory"]
    (path / "config.toml").touch()
    assert messages(path)[0].endswith(f"Is a directory; did you mean {path / 'config.toml'}?")


def test_malformed_toml_names_the_line(write):
    path = write("[run]\nsteps = 3\nseed 4\n")
    (line,) = messages(path)
    assert line.startswith(f"{path} is not valid TOML: ") and "line 3" in line


def test_a_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_text(MODEL, encoding="utf-8-sig")
    assert load_config(path).model.hidden_size == 32


def test_numbers_of_too_many_digits(minimal, write):
    digits = "9" * 5000  # Python converts at most 4300
    assert messages(minimal, run__steps=f"0x{digits}") == [
        "command line: run.steps = a number of too many digits is not allowed: it must be an "
        "integer (at least 1), at most 9007199254740991"
    ]
    (line,) = messages(minimal, run__steps=digits)
    assert line.startswith('command line: run.steps = "9999') and len(line) < 200
    path = write(f"[run]\nsteps = {digits}\n")
    assert messages(path) == [f"{path} has a number of too many digits"]


def test_paths_that_are_not_local_files(tmp_path):
    link = tmp_path / "link.toml"
    link.symlink_to("nowhere.toml")
    (tmp_path / "links.toml").touch()
    assert messages(link) == [
        f"the configuration file {link} is a link to nowhere.toml, which does not exist"
    ]
    os.mkfifo(path := tmp_path / "fifo.toml")
    assert messages(path) == [f"{path} is not a regular file"]
    (line,) = messages("gs://bucket/run.toml")
    assert line.startswith(
        "the configuration file gs://bucket/run.toml is a URL, but only local paths are supported: "
    )
    (line,) = messages("tiny", model__init_from="hf://org/model")
    assert line.startswith("model.init_from = hf://org/model is a URL, but only local paths are ")


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b"# caf\xe9\n")
    assert messages(path) == [f"{path} is not UTF-8 text: invalid byte at 5"]


# ---- base files --------------------------------------------------------------------------------


def test_a_file_adds_to_its_base_and_wins(tmp_path, write):
    (tmp_path / "first.toml").write_text(
        f"{MODEL}[run]\nname = 'first'\nsteps = 3\n"
        "[model.rope_scaling]\nfactor = 2.0\nbeta_slow = 2.0"
    )
    (tmp_path / "inner").mkdir()
    second = "base = '../first.toml'\n[data]\nseq_len = 256\nseed = 5\n[loss]\nchunk_size = 8"
    (tmp_path / "inner" / "second.toml").write_text(second)
    path = write(
        "base = 'inner/second.toml'\n[data]\nseed = 6\n[model]\nrope_scaling = {factor = 4.0}"
    )
    config = override(path, loss__chunk_size="9")
    assert (config.model.num_layers, config.run.steps, config.data.seq_len) == (2, 3, 256)
    assert (config.data.seed, config.loss.chunk_size) == (6, 9)
    scaling = config.model.rope_scaling
    assert scaling is not None and (scaling.factor, scaling.beta_slow) == (4.0, 2.0)
    assert config.run.name == "mine"  # not inherited


def test_a_base_may_be_a_name(write):
    config = load_config(write("base = 'tiny'\n[data]\nseed = 5"))
    assert config.data.seed == 5 and config.model == load_config("tiny").model


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ("'other.toml'", 'base = "other.toml": the configuration file {folder}/other.toml does '),
        ("'tinny'", 'base = "tinny": unknown configuration "tinny"; did you mean tiny? '),
        ("3", "base = 3 must be the name of a configuration or the path of a TOML file"),
        ("''", 'base = "" must be the name of a configuration or the path of a TOML file'),
        ("'mine.toml'", 'base = "mine.toml": the base files form a cycle: {folder}/'),
        (
            "'a.toml'",
            'base = "a.toml": {folder}/a.toml: base = "mine.toml": the base files form a cycle: '
            "{folder}/mine.toml -> {folder}/a.toml -> {folder}/mine.toml",
        ),
    ],
)
def test_wrong_bases(tmp_path, write, base, sentence):
    (tmp_path / "a.toml").write_text("base = 'mine.toml'")
    path = write(f"base = {base}")
    (line,) = messages(path)
    assert line.startswith(f"{path}: " + sentence.format(folder=tmp_path))


def test_a_mistake_in_a_base_names_its_file(tmp_path, write):
    base = tmp_path / "first.toml"
    base.write_text(MODEL + "[run]\nsteps = 'x'\nlog_every = 0\n[sparcity]\nkind = 'dense'")
    path = write("base = 'first.toml'\n[run]\nlog_every = 'y'")
    wrong = "is not allowed: it must be an integer (at least 1)"
    assert messages(path) == [
        f"{base}: sparcity is not a section; did you mean sparsity?",
        f'{path}: run.log_interval = "y" {wrong}',
        f'{base}: run.steps = "x" {wrong}',
    ]


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[sparcity]\nkind = 'dense'", "sparcity is not a section; did you mean sparsity?"),
        ("[optimizer]\nlearn_rate = 1.0", "optimizer.learn_rate is not a field; "),
        ("[optimizer]\nlrr = 1.0", "optimizer.lrr is not a field; did you mean optimizer.lr?"),
        ('[run]\nbase = "tiny"', "run.base is not a field; write base = ... above the first"),
        ("[run]\nlr = 1.0", "run.lr is not a field; did you mean optimizer.lr?"),
        ("[loss]\nxyz = 1", "loss.xyz is not a field; loss has chunk_size"),
        ("xyz = 1", "xyz is not a section or field; the sections are run, model, "),
        (
            "[audit]\nrows = 8\n[metrics]\nrecall_rows = 8",
            "metrics.recall_rows was renamed to audit.num_queries",
        ),
        ("steps = 1", "steps is not a section or field; did you mean run.steps?"),
        (
            "[model.rope_scaling]\nfactor = 2.0\nbeta_fats = 1.0",
            "model.rope_scaling.beta_fats is not a field; did you mean "
            "model.rope_scaling.beta_fast?",
        ),
        ("loss = 3", "loss = 3 must be a section: write [loss]"),
        ("[eval]\nevery = 3", "eval.every is not a field; did you mean eval.interval?"),
    ],
)
def test_unknown_names(write, text, sentence):
    path = write(f"{text}\n{MODEL}")
    (line,) = messages(path)
    assert line.startswith(f"{path}: {sentence}")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("run.seed", 2**63, "an integer (at least 0 and less than 4294967296)"),
        ("run.steps", 2**53, "an integer (at least 1), at most 9007199254740991"),
        ("data.eos", 2**63, ", at most 9007199254740991"),
    ],
)
def test_integers_out_of_range(write, name, value, allowed):
    with pytest.raises(UserError, match=re.escape(f"{name} = {value} is not allowed: it must be")):
        load_config(write(MODEL), [(name, str(value))])
    with pytest.raises(UserError, match=re.escape(allowed)):
        load_config(write(MODEL), [(name, str(value))])


def test_a_misspelled_required_field_is_reported_once(write):
    path = write(MODEL.replace("num_layers", "num_layer"))
    assert messages(path) == [
        f"{path}: model.num_layer is not a field; did you mean model.num_layers?"
    ]


def test_missing_fields(write):
    path = write("[run]\nsteps = 3\n")
    required = [n for n, field in all_fields().items() if n.count(".") == 1 and field.required]
    assert messages(path) == [
        f'{path}: {", ".join(required)} are missing; set them, or inherit them with base = "NAME"'
    ]
    path = write(MODEL.replace("num_layers = 2\n", ""))
    assert messages(path) == [
        f"{path}: model.num_layers is missing: it must be an integer (at least 1 and at most 4096)"
    ]


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("sparsity.kind", "sampled_row", "sampled_rows"),
        ("data.source", "pyton_stdlib", "python_stdlib"),
        ("model.family", "qwen_3", "qwen3"),
        ("model.remat", "atention", "attention"),
    ],
)
def test_a_misspelled_value_is_recognized(name, value, meant):
    with pytest.raises(UserError) as error:
        load_config("tiny", [(name, value)])
    hint = f'{name} = "{value}" is not allowed; did you mean "{meant}"? It must be '
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("model.num_layers", '"two"', "an integer (at least 1 and at most 4096)"),
        ("model.num_layers", "2.5", "an integer (at least 1 and at most 4096)"),
        ("model.num_layers", "true", "an integer (at least 1 and at most 4096)"),
        ("model.num_layers", "0", "an integer (at least 1 and at most 4096)"),
        ("model.dtype", '"float16"', '"bfloat16" or "float32"'),
        ("model.rope_scaling", "2", "a table of type, factor, "),
        ("model.rope_scaling", '{factor = "x"}', None),
        ("optimizer.lr", '"fast"', "a finite number (greater than 0)"),
        ("optimizer.lr", "-0.001", "a finite number (greater than 0)"),
        ("optimizer.lr", "inf", "a finite number (greater than 0)"),
        ("optimizer.b1", "1.0", "a finite number (at least 0 and less than 1)"),
        ("optimizer.trainable", "[1]", "a list of non-empty strings"),
        ("optimizer.trainable", '[""]', "a list of non-empty strings"),
        ("sparsity.kind", "3", 'one of "dense", '),
        ("sparsity.kind", '"x"', 'one of "dense", '),
        ("sparsity.tau", "1.5", "a finite number (greater than 0 and at most 1)"),
        ("parallel.fsdp", "1", "true or false"),
        ("parallel.cpu_devices", "0", "an integer (at least 1 and at most 1024) or none"),
        ("data.seq_len", "1", "an integer (at least 2)"),
        ("eval.data", "3", "a table of source, tokenizer, "),
        ("data.eos", "-1", "an integer (at least 0) or a non-empty string or none"),
        ("checkpoint.resume", '"maybe"', 'true or false or "auto"'),
        ("run.name", '""', "a non-empty string"),
        ("run.name", "2024-05-06", "a non-empty string"),
    ],
)
def test_wrong_values(write, name, value, allowed):
    section, field = name.split(".")
    lines = [line for line in MODEL.splitlines() if not line.startswith(f"{field} =")]
    header = [] if section == "model" else [f"[{section}]"]
    path = write("\n".join([*lines, *header, f"{field} = {value}"]))
    (line,) = messages(path)
    if allowed is None:
        inner = "model.rope_scaling.factor"
        expected = f'{path}: {inner} = "x" is not allowed: it must be a finite number (at least 1)'
        assert line == expected
    else:
        assert line.startswith(f"{path}: {name} = {value} is not allowed: it must be {allowed}")


def test_a_table_of_the_command_line_is_not_blamed_on_the_file(write):
    path = write(MODEL + "[model.rope_scaling]\nfactor = 2.0")
    for value, name in (('{factor = "x"}', "factor"), ("{factor = 2.0, beta = 1}", "beta")):
        with pytest.raises(UserError) as error:
            load_config(path, [("model.rope_scaling", value)])
        assert str(error.value).startswith(f"command line: model.rope_scaling.{name}")
    with pytest.raises(UserError, match=r"command line: model\.rope_scaling\.factor"):
        load_config(path, [("model.rope_scaling", "{}"), ("model.rope_scaling.factor", "x")])


def test_long_values_are_cut(write):
    (line,) = messages(write(MODEL + f"[sparsity]\nkind = '{'x' * 500}'"))
    assert "xxx... is not allowed" in line and line.count("x") < 120


def test_every_mistake_gets_a_line(write):
    path = write(MODEL + "[data]\nseq_len = -1\nbatch_sise = 1\n[spasity]\n")
    lines = messages(path, optimizer__lr="quick", run__stepps="3")
    assert [line.split(": ")[0] for line in lines].count("command line") == 2
    assert len(lines) == 5


def test_whole_floats_are_valid_integers(write):
    assert load_config(write(f"{MODEL}[run]\nsteps = 1e3\n")).run.steps == 1000


def test_integers_are_valid_floats(write):
    lr = load_config(write(MODEL + "[optimizer]\nlr = 1\n")).optimizer.lr
    assert lr == 1.0 and isinstance(lr, float)


# ---- overrides ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("run.steps", "7", 7),
        ("run.steps", "1_000", 1000),
        ("run.steps", "1e3", 1000),
        ("run.name", "plain text", "plain text"),
        ("run.name", '"quoted"', "quoted"),
        ("run.name", "123", "123"),
        ("run.name", "none", "none"),
        ("run.output_dir", "1\nsteps=2", "1\nsteps=2"),
        ("run.compile_cache_dir", "/tmp/x", "/tmp/x"),
        ("optimizer.lr", "1e-4", 1e-4),
        ("optimizer.lr", "2", 2.0),
        ("optimizer.schedule", "cosine", "cosine"),
        ("optimizer.trainable", '["a", "b"]', ("a", "b")),
        ("optimizer.trainable", "self_attn", ("self_attn",)),
        ("optimizer.trainable", "[]", ()),
        ("parallel.fsdp", "false", False),
        ("parallel.fsdp", "False", False),
        ("model.remat", "none", "none"),
        ("model.rope_scaling", "none", None),
        ("data.eos", "5", 5),
        ("data.eos", "none", None),
        ("checkpoint.resume", "true", True),
        ("checkpoint.resume", "auto", "auto"),
        ("optimizer.lr", 0.5, 0.5),
    ],
)
def test_overrides(minimal, name, text, value):
    section, field = name.split(".")
    found = getattr(getattr(load_config(minimal, [(name, text)]), section), field)
    assert found == value and type(found) is type(value)


def test_the_last_override_counts(minimal):
    assert load_config(minimal, [("run.steps", "3"), ("run.steps", "4")]).run.steps == 4


def test_an_override_reaches_into_a_table(minimal, write):
    scaling = override(minimal, model__rope_scaling__factor="4").model.rope_scaling
    assert scaling is not None and scaling.factor == 4.0
    path = write(MODEL + "[model.rope_scaling]\nfactor = 2.0\nbeta_slow = 2.0")
    scaling = override(path, model__rope_scaling__factor="8").model.rope_scaling
    assert (scaling.factor, scaling.beta_slow) == (8.0, 2.0)
    assert override(path, model__rope_scaling="none").model.rope_scaling is None


def test_wrong_overrides(minimal):
    assert messages(minimal, run__steps="many") == [
        'command line: run.steps = "many" is not allowed: it must be an integer (at least 1)'
    ]
    assert messages(minimal, run__stesp="1") == [
        "command line: run.stesp is not a field; did you mean run.steps?"
    ]
    assert messages(minimal, run="1") == [
        "command line: run is a section; set one of its fields: run.FIELD=VALUE"
    ]
    assert messages(minimal, data__source="text", data__paths="[a.txt]") == [
        'command line: data.paths=[a.txt] is not a TOML list; write it like ["one", "two"]'
    ]


# ---- combinations of fields --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"data__seq_len": "2000", "parallel__nodes": "2", "parallel__devices_per_node": "4"},
            "data.seq_len = 2000 is not a multiple of parallel.nodes * parallel.devices_per_node * "
            "sparsity.block_size = 2 * 4 * 128 = 1024; use 1024 or 2048",
        ),
        (
            {"data__seq_len": "100"},
            "data.seq_len = 100 is not a multiple of parallel.nodes * parallel.devices_per_node * "
            "sparsity.block_size = 1 * 1 * 128 = 128; use 128",
        ),
        (
            {"data__seq_len": "384", "parallel__layout": "zigzag"},
            "data.seq_len = 384 is not a multiple of 2 * parallel.nodes * "
            "parallel.devices_per_node * sparsity.block_size = 2 * 1 * 1 * 128 = 256; use 256 or "
            "512",
        ),
        (
            {
                "data__batch_size": "5",
                "parallel__replicas": "2",
                "optimizer__accumulation_steps": "2",
            },
            "data.batch_size = 5 is not a multiple of parallel.replicas * "
            "optimizer.accumulation_steps = 2 * 2 = 4; use 4 or 8",
        ),
        (
            {"model__num_heads": "5"},
            "model.num_heads = 5 must be a multiple of model.num_kv_heads = 2, because each "
            "key/value head serves as many query heads",
        ),
        (
            {"model__mlp_kept_chunks": "2", "model__remat": "full"},
            'model.mlp_kept_chunks = 2 needs model.remat = "mlp", but it is "full"',
        ),
        ({"model__head_dim": "7"}, "model.head_dim = 7 must be even, because RoPE rotates pairs"),
        (
            {"model__max_position_embeddings": "1024"},
            "data.seq_len = 4096 is more than model.max_position_embeddings = 1024",
        ),
        (
            {"model__rope_scaling": "{factor = 2.0, beta_fast = 1.0, beta_slow = 2.0}"},
            "model.rope_scaling.beta_fast = 1.0 must not be less than "
            "model.rope_scaling.beta_slow = 2.0",
        ),
        (
            {"sparsity__last_q": "256"},
            "sparsity.num_probe_queries = 256 must not exceed sparsity.block_size = 128",
        ),
        (
            {"sparsity__kind": "fixed"},
            "sparsity.budget_file = none is not allowed; set it to a MInference JSON file",
        ),
        (
            {"sparsity__min_verticals": "200", "sparsity__max_verticals": "100"},
            "sparsity.min_verticals = 200 must not exceed sparsity.max_verticals = 100",
        ),
        (
            {"sparsity__kind": "replay", "audit__every_steps": "5"},
            "audit.interval = 5 needs a pattern that selects pairs, and sparsity.kind = "
            '"replay" does not; set audit.interval = 0',
        ),
        (
            {"sparsity__kind": "dense", "sparsity__tune": "mean"},
            'sparsity.tune = "mean" tunes the mass fraction of a pattern, and sparsity.kind = '
            '"dense" has none; set sparsity.kind = "sampled_rows", or "vertical_slash" with '
            'sparsity.preset = "safe"',
        ),
        (
            {
                "sparsity__kind": "vertical_slash",
                "sparsity__preset": "joint",
                "sparsity__tune": "min",
            },
            'sparsity.tune = "min" tunes the mass fraction of a pattern, and sparsity.kind = '
            '"vertical_slash" with sparsity.preset = "joint" has none; set sparsity.kind = '
            '"sampled_rows", or "vertical_slash" with sparsity.preset = "safe"',
        ),
        (
            {"sparsity__kind": "sampled_rows", "sparsity__tau": "0.8", "sparsity__tune": "max"},
            'sparsity.tune = "max" starts from sparsity.tau = 0.8, which must lie between '
            "sparsity.tune_min = 0.85 and sparsity.tune_max = 0.97",
        ),
        (
            {"sparsity__tune": "max", "sparsity__tune_min": "0.9", "sparsity__tune_max": "0.8"},
            "sparsity.tune_min = 0.9 is more than sparsity.tune_max = 0.8",
        ),
        (
            {"run__steps": "9", "sparsity__dense_first": "4", "sparsity__dense_last": "6"},
            "sparsity.dense_warmup_steps = 4 + sparsity.dense_cooldown_steps = 6 is more than "
            "run.steps = 9: dense warm-up and cooldown must fit into the run",
        ),
        (
            {"sparsity__kind": "replay", "sparsity__dense_every": "5"},
            'sparsity.dense_interval = 5 cannot be combined with sparsity.kind = "replay", which '
            "measures speed and does not select pairs; set 0",
        ),
        (
            {"sparsity__dense_first": "2", "sparsity__dense_every": "5", "sparsity__tune": "mean"},
            "sparsity.dense_warmup_steps = 2, sparsity.dense_interval = 5 cannot be combined with "
            'sparsity.tune = "mean", which learns densities from every step: dense steps have none '
            'to learn from; set sparsity.tune = "none"',
        ),
        (
            {"sparsity__dense_last": "2", "data__balance": "density"},
            'sparsity.dense_cooldown_steps = 2 cannot be combined with data.balance = "density", '
            "which learns densities from every step: dense steps have none to learn from; set "
            'data.balance = "length"',
        ),
        (
            {"sparsity__kind": "replay", "sparsity__min_slashes": "5000"},
            "sparsity.min_slashes = 5000 must not exceed sparsity.max_slashes = 4096",
        ),
        (
            {"sparsity__kind": "replay", "sparsity__least_share": "0.04"},
            "sparsity.min_block_mass = 0.04 is an option of sparsity.preset = 'joint', but "
            "sparsity.preset is 'safe'; set sparsity.preset = 'joint' or "
            "sparsity.min_block_mass = 0",
        ),
        (
            {"profile__start": "1000", "profile__steps": "2"},
            "profile.start = 1000 and profile.steps = 2 end at step 1001, after run.steps = 1000",
        ),
        (
            {"parallel__cpu_devices": "2", "parallel__backend": "mosaic_gpu"},
            'parallel.backend = "mosaic_gpu" needs a GPU, and parallel.cpu_devices = 2 runs on the '
            "CPU",
        ),
        (
            {
                "parallel__cpu_devices": "2",
                "parallel__nodes": "4",
                "distributed__initialize": "never",
            },
            "parallel.replicas * parallel.nodes * parallel.devices_per_node = 1 * 4 * 1 = 4 "
            "devices, more than the 2 of parallel.cpu_devices = 2 in 1 process; reduce one of "
            "these fields or set parallel.cpu_devices = 4",
        ),
        ({"data__source": "jsonl"}, 'data.source = "jsonl" needs data.paths, the files to read'),
        (
            {"data__source": "synthetic", "data__mode": "exact"},
            'data.mode = "exact" is not possible with data.source = "synthetic": it must be '
            '"concat"',
        ),
        (
            {"data__source": "synthetic", "data__eos": "</s>"},
            'data.eos = "</s>" must be an id: data.source = "synthetic" has no tokenizer',
        ),
        (
            {"data__source": "synthetic", "data__bos": "<s>"},
            'data.bos = "<s>" must be an id: data.source = "synthetic" has no tokenizer',
        ),
        (
            {"data__source": "synthetic", "data__bos": "512"},
            "data.bos = 512 is outside the vocabulary: model.vocab_size = 300",
        ),
        (
            {"data__source": "text", "data__paths": '["a"]', "data__bos": "1"},
            'data.bos = 1 must be false or none: data.tokenizer = "bytes" has no '
            "beginning-of-sequence token",
        ),
        (
            {"model__vocab_size": "256"},
            'data.eos = 256 of data.tokenizer = "bytes" is outside the vocabulary: '
            "model.vocab_size = 256",
        ),
        (
            {"data__eos": "</s>"},
            'data.eos = "</s>" must be an id from 0 to 256: data.tokenizer = "bytes" has no named '
            "tokens",
        ),
        ({"data__eos": "300"}, "data.eos = 300 is outside the vocabulary: model.vocab_size = 300"),
        (
            {"optimizer__mu_dtype": "bfloat16", "optimizer__b1": "0.999"},
            'optimizer.mu_dtype = "bfloat16": the first moment decays by less than bfloat16 rounds '
            "away with optimizer.b1 = 0.999; set optimizer.b1 to at most 0.996, or "
            'optimizer.mu_dtype = "float32"',
        ),
        (
            {"optimizer__offload": "all", "parallel__replicas": "2", "data__batch_size": "2"},
            "parallel.replicas = 2 needs all gradients on the device, unlike optimizer.offload = "
            '"all"; set parallel.replicas = 1, or optimizer.offload = true',
        ),
        (
            {"optimizer__schedule": "linear", "optimizer__warmup_steps": "1001"},
            "optimizer.warmup_steps = 1001 is more than run.steps = 1000, where the schedule ends; "
            "use at most that, e.g. --optimizer.warmup_steps=100",
        ),
        (
            {
                "optimizer__schedule": "cosine",
                "optimizer__warmup_steps": "9",
                "optimizer__decay_steps": "8",
            },
            "optimizer.warmup_steps = 9 is more than optimizer.decay_steps = 8, where the schedule "
            "ends; use at most that, e.g. --optimizer.warmup_steps=0",
        ),
        (
            {"audit__every_steps": "1", "audit__num_queries": "5000"},
            "audit.num_queries = 5000 is more than data.seq_len = 4096",
        ),
        (
            {"audit__every_steps": "1", "audit__masks": '["0.0", "2.1"]'},
            'audit.masks has "2.1", which must be LAYER.HEAD, from 0.0 to 1.3',
        ),
        ({"audit__masks": "0.0"}, "audit.masks needs audits, and audit.interval = 0 disables them"),
        (
            {"audit__gradient_tokens": "1000"},
            "audit.gradient_tokens = 1000 is not a multiple of 128, as data.seq_len must be; use "
            "896 or 1024",
        ),
        (
            {"sparsity__kind": "xattention", "sparsity__stride": "48"},
            "sparsity.stride = 48 must divide sparsity.block_size = 128",
        ),
        (
            {"distributed__coordinator": "host:1234"},
            "distributed.coordinator without distributed.num_processes, distributed.process_id: "
            "set all three or none",
        ),
        (
            {
                "distributed__coordinator": "host:1234",
                "distributed__num_processes": "2",
                "distributed__process_id": "2",
            },
            "distributed.process_id = 2 must be less than distributed.num_processes = 2",
        ),
        (
            {
                "distributed__coordinator": "host",
                "distributed__num_processes": "2",
                "distributed__process_id": "0",
            },
            'distributed.coordinator = "host" must be HOST:PORT, for example "10.0.0.1:12345", '
            "with a port from 1 to 65535",
        ),
        (
            {"distributed__initialize": "never", "distributed__process_id": "0"},
            'distributed.initialize = "never" contradicts distributed.process_id',
        ),
    ],
)
def test_contradictions(columns, overrides, sentence):
    assert messages(columns, **overrides) == [sentence]


@pytest.mark.parametrize("name", available_configs())
def test_every_shipped_configuration_has_a_short_run(name):
    for steps in 1, 5:
        assert load_config(name, [("run.steps", str(steps))]).run.steps == steps


def test_warm_ups_of_a_file_fit_the_steps_of_the_command_line(write, caplog):
    warm_up = "warmup_steps = 40\nschedule = 'cosine'"
    path = write(f"{MODEL}\n[optimizer]\n{warm_up}\n[sparsity]\ndense_cooldown_steps = 30")
    config = override(path, run__steps="50")
    assert config.optimizer.warmup_steps == 40 and config.sparsity.dense_cooldown_steps == 30
    assert caplog.messages == []
    config = override(path, run__steps="20")
    assert config.optimizer.warmup_steps == 2 and config.sparsity.dense_cooldown_steps == 2
    assert caplog.messages == [
        "note: optimizer.warmup_steps = 2, instead of 40 in the file, to fit run.steps = 20",
        "note: sparsity.dense_cooldown_steps = 2, instead of 30 in the file, to fit run.steps = 20",
    ]
    # Typed together, they contradict each other.
    typed = {"run__steps": "20", "optimizer__warmup_steps": "40"}
    assert messages(path, **typed)[0].startswith("optimizer.warmup_steps = 40 is more than run.st")


@pytest.mark.parametrize("kind", ["dense", "sampled_rows", "vertical_slash"])
def test_longest_sequence(kind, minimal):
    fields = {"sparsity__kind": kind, "model__max_position_embeddings": str(2**24)}
    override(minimal, data__seq_len=str(MAX_POSITIONS), **fields)
    assert messages(minimal, data__seq_len=str(2 * MAX_POSITIONS), **fields) == [
        "data.seq_len = 16777216 is more than the supported 8388608 tokens, up to which rotary "
        "position embeddings are exact"
    ]
    fields |= {"data__seq_len": str(MAX_POSITIONS), "sparsity__block_size": "64"}
    if kind == "dense":
        assert override(minimal, **fields).data.seq_len == MAX_POSITIONS
    else:
        assert messages(minimal, **fields) == [
            "data.seq_len = 8388608 is more than the supported 4194304 tokens, 65536 blocks of "
            "sparsity.block_size = 64"
        ]
    assert MAX_BLOCKS == estimate.MAX_BLOCKS and MAX_POSITIONS <= estimate.MAX_TOKENS


def test_output_to_a_url(minimal):
    assert messages(minimal, run__output_dir="s3://bucket/runs") == [
        'run.output_dir = "s3://bucket/runs": use a mounted file system or gs://BUCKET/FOLDER, '
        "because Orbax writes arrays to no other kind of URL"
    ]
    for wrong in ("gs://", "gs:///runs", "gs://bucket/../.."):
        (line,) = messages(minimal, run__output_dir=wrong)
        assert line.endswith("is not allowed: it must be like gs://BUCKET/FOLDER")
    config = override(minimal, run__output_dir="gs://bucket/runs/", run__name="a")
    assert config.run.bucket == "gs://bucket/runs/a"
    assert config.run.folder == Path("runs/bucket/runs/a")
    skips = {"run__output_dir": "gs://bucket", "checkpoint__skip_damaged": "true"}
    (line,) = messages(minimal, **skips)
    assert line.startswith("checkpoint.skip_damaged = true needs a file system that renames")
    (line,) = messages(minimal, checkpoint__local_dir="gs://bucket/runs")
    assert line.endswith('"gs://bucket/runs" is a URL; use a folder on a disk of each host')


def test_options_are_typed(minimal):
    sparsity = load_config(minimal).sparsity
    assert (sparsity.kind, sparsity.pattern) == ("sampled_rows", PATTERNS.get("sampled_rows")())
    dense = dataclasses.replace(sparsity, pattern=PATTERNS.get("dense")(block_size=64))
    assert (dense.kind, dense.block_size) == ("dense", 64)
    with pytest.raises(ValueError, match="tau=2 must be a finite number .greater than 0"):
        PATTERNS.get("sampled_rows")(tau=2)


def test_valid_combinations(columns):
    """Each next to one that is refused."""
    warm_up = {"optimizer__warmup_steps": "5000"}
    assert override(columns, **warm_up).optimizer.warmup_steps == 5000  # a constant rate never ends
    (line,) = messages(columns, **warm_up, optimizer__schedule="cosine")
    assert line.startswith("optimizer.warmup_steps = 5000 is more than run.steps = 1000")

    devices = {"parallel__cpu_devices": "2", "parallel__nodes": "4"}
    assert override(columns, **devices).devices == 4  # more processes may come
    several = {"distributed__coordinator": "host:1", "distributed__process_id": "0"}
    processes = several | {"distributed__num_processes": "2"}
    assert override(columns, **devices, **processes).distributed.num_processes == 2
    (line,) = messages(columns, **devices, **processes | {"distributed__num_processes": "1"})
    assert "more than the 2 of parallel.cpu_devices = 2 in 1 process; reduce one" in line


def test_more_devices_than_there_are(columns):
    config = override(columns, parallel__replicas="2", parallel__nodes="4", data__batch_size="2")
    validate(config, device_count=8)
    with pytest.raises(UserError, match="= 8 devices, but JAX finds only 7 devices; reduce one"):
        validate(config, device_count=7)


@given(
    seq_len=st.integers(2, 32768),
    nodes=st.integers(1, 4),
    devices=st.integers(1, 8),
    layout=st.sampled_from(["striped", "zigzag"]),
)
def test_the_nearest_lengths_are_in_order(seq_len, nodes, devices, layout):
    table = tomllib.loads(MODEL)
    table["model"]["max_position_embeddings"] = 10**6
    table["sparsity"] = {"kind": "vertical_slash"}
    table["parallel"] = {"nodes": nodes, "devices_per_node": devices, "layout": layout}

    def check(length: int) -> None:
        config_from_dict(table | {"data": {"seq_len": length}}, "test")

    try:
        check(seq_len)
    except UserError as error:
        near = [int(n) for n in str(error).rpartition("; use ")[2].split(" or ")]
        for length in near:
            check(length)
        assert near[-1] > seq_len and (len(near) == 1 or near[0] < seq_len)


# ---- serialization -----------------------------------------------------------------------------


def test_it_is_frozen_hashable_and_strict():
    config = load_config("tiny")
    assert hash(config) == hash(load_config("tiny"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.steps = 3
    with pytest.raises(ValueError):
        RunConfig(steps="3")
    with pytest.raises(ValueError):
        RunConfig(stepps=3)


@pytest.mark.parametrize("name", available_configs())
def test_printed_text_loads_back(name, write):
    config = load_config(name)
    assert load_config(write(config_to_toml(config))) == config
    assert config_from_dict(config_to_dict(config), "a dict") == config


def test_printed_text_has_every_field():
    text = config_to_toml(load_config("tiny", [("model.rope_scaling", "{factor = 2.0}")]))
    for name in all_fields():
        leaf = name.rpartition(".")[2]
        assert f"\n{leaf} = " in text or f"\n# {leaf} = none" in text or f"[{name}]" in text


def test_none_is_the_default_wherever_it_is_allowed():
    # Printed text omits None.
    for field in all_fields().values():
        assert type(None) not in field.kinds or (not field.required and field.default is None)


@settings(deadline=None)  # a busy machine
@given(
    folder=st.text(min_size=1).filter(lambda text: text[0] != "~"),
    trainable=st.lists(st.text(min_size=1), max_size=3),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(min_value=0, max_value=2**32 - 1),
    factor=st.none() | st.floats(min_value=1, allow_infinity=False),
)
def test_any_value_survives_text(folder, trainable, lr, seed, factor):
    table = tomllib.loads(MODEL)
    table["run"] = {"output_dir": folder, "seed": seed}
    table["optimizer"] = {"lr": lr, "trainable": trainable}
    if factor is not None:
        table["model"]["rope_scaling"] = {"factor": factor}
    config = config_from_dict(table, "test")
    assert config.run.output_dir == folder and config.optimizer.trainable == tuple(trainable)
    assert config_from_dict(tomllib.loads(config_to_toml(config)), "text") == config


def test_help_lists_every_field():
    text = help_text()
    for name, field in all_fields().items():
        if not name.startswith("eval.data."):  # as those of [data]
            assert f"  --{name}  {field.allowed}; " in text
        assert field.doc.strip(), f"{name} has no description"


def test_the_paper_gives_the_defaults():
    assert OptimizerConfig() == OptimizerConfig(
        lr=2e-5, b1=0.9, b2=0.95, weight_decay=0.0, clip_norm=1.0, schedule="constant"
    )


def test_values_are_given_by_name_only():
    with pytest.raises(ValueError, match="positional"):
        ModelConfig(300, 32)


def test_the_folder_of_configurations_is_where_they_are():
    assert (config_folder() / "tiny.toml").is_file()


def test_the_command_line_has_no_slow_imports():
    slow = "{'jax', 'grain', 'pyarrow'}"
    code = f"import sys, mtraining_jax.cli.train; sys.exit(str({slow} & set(sys.modules) or ''))"
    found = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE)
    assert found.stderr.strip() == b""


def test_former_field_names_are_accepted(write, caplog):
    renamed.notify.cache_clear()
    text = f"[metrics]\nrecall_every = 7\nrecall_rows = 9\n{MODEL}[sparsity]\ndense_last = 3\n"
    config = load_config(write(text), [("parallel.data", "2"), ("data.batch_size", "2")])
    assert (config.audit.interval, config.audit.num_queries) == (7, 9)
    assert (config.sparsity.dense_cooldown_steps, config.parallel.replicas) == (3, 2)
    path = write(text)
    notes = [
        f"note: {path}: metrics.recall_every is now audit.interval, metrics.recall_rows is now "
        "audit.num_queries, sparsity.dense_last is now sparsity.dense_cooldown_steps",
        "note: command line: parallel.data is now parallel.replicas",
    ]
    assert caplog.messages == notes
    load_config(path)
    assert caplog.messages == notes  # once
    for old, new in renamed.RENAMED.items():
        assert old not in all_fields() and old.count(".") == new.count(".")


# ---- options of plug-ins -----------------------------------------------------------------------


OTHER = (
    'sparsity.top_p is an option of sparsity.kind = "vertical_slash" or "replay", but '
    'sparsity.kind = "sampled_rows"; remove it or change sparsity.kind'
)


def test_options_of_another_plugin_are_errors(write, minimal):
    path = write(f"{MODEL}[sparsity]\ntop_p = 0.5\n")
    assert messages(path) == [f"{path}: {OTHER}"]
    assert messages(minimal, sparsity__top_p="0.9") == [f"command line: {OTHER}"]
    assert override(path, sparsity__kind="vertical_slash").sparsity.pattern.top_p == 0.5
    path = write(f"{MODEL}[sparsity]\ntop_pp = 0.5\n")
    assert "did you mean sparsity.top_p?" not in messages(path)[0]
    path = write(f"{MODEL}[model.rope_scaling]\ntype = 'linear'\nfactor = 2.0\nbeta_fast = 3.0")
    assert "is an option of model.rope_scaling.type = " in messages(path)[0]


@dataclasses.dataclass(frozen=True)
class WithoutBlocks(PatternOptions):
    """Options with names of built-in patterns, but other types and defaults."""

    sink_tokens: str = "few"
    stride: float = 0.5
    tau: int = 3


@dataclasses.dataclass(frozen=True)
class Own(WithoutBlocks):
    """The same, of a complete pattern."""

    block_size: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSource(Source):
    """Options with names of built-in sources, but other types and defaults."""

    paths: int = 7
    text_field: float = 1.0


def test_own_plugins_may_use_names_of_others(write, monkeypatch):
    for registry in (PATTERNS, SOURCES):  # others must not know them
        monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    own = f"{MODEL}[sparsity]\nkind = '{__name__}:Own'\ntau = 5\n"
    path = write(f"{own}[data]\nsource = '{__name__}:OwnSource'\npaths = 8\n")
    config = override(path, sparsity__stride="2", sparsity__sink_tokens="many")
    assert config.sparsity.pattern == Own("many", 2.0, 5)
    assert config.data.source_options == OwnSource(paths=8)
    assert load_config(write(config_to_toml(config))) == config
    assert messages(path, sparsity__kind=f"{__name__}:WithoutBlocks") == [
        "WithoutBlocks lacks the field block_size, tokens per block"
    ]


def test_plugins_that_cannot_be_loaded(write):
    for section, name in (("data", "source"), ("model", "family")):
        lines = [*MODEL.splitlines(), f"[{section}]"] if section != "model" else MODEL.splitlines()
        path = write("\n".join([*lines, f"{name} = 'no.where:X'", "unknown_option = 3"]))
        line = messages(path)[0]
        assert line.startswith(f'{path}: {section}.{name}: "no.where:X" cannot be loaded as a ')


def test_options_of_a_plugin_that_is_selected_no_more_are_ignored(tmp_path, write):
    base = tmp_path / "first.toml"
    base.write_text(f"{MODEL}[sparsity]\nkind = 'vertical_slash'\ntop_p = 0.5\nblock_size = 64")
    path = write("base = 'first.toml'\n[sparsity]\nkind = 'sampled_rows'\ntau = 0.8")
    pattern = load_config(path).sparsity.pattern
    assert (pattern.tau, pattern.block_size) == (0.8, 64)
    assert override(path, sparsity__kind="dense").sparsity.block_size == 64
    base.write_text(f"{MODEL}[sparsity]\nkind = 'vertical_slash'")
    path = write("base = 'first.toml'\n[sparsity]\ntau = 0.8")
    assert messages(path)[0].startswith(f"{path}: sparsity.tau is an option of sparsity.kind = ")


def test_files_printed_by_earlier_versions_load(write):
    # They have the options of all kinds.
    options = "tau = 0.8\ntop_p = 0.9\nmax_slashes = 4096\nlast_q = 64\nkind = 'sampled_rows'"
    path = write(f"{MODEL}[sparsity]\n{options}\n[data]\npaths = []\n")
    assert load_config(path).sparsity.pattern == PATTERNS.get("sampled_rows")(tau=0.8)


def test_a_stored_configuration_may_have_options_of_all_plugins():
    table = {"model": tomllib.loads(MODEL)["model"], "sparsity": {"tau": 0.8, "top_p": 0.3}}
    assert config_of_model(table, "a run").sparsity.pattern.tau == 0.8
    changed = config_of_model(table, "a run", [("sparsity.kind", "vertical_slash")])
    assert changed.sparsity.pattern.top_p == 0.3
    with pytest.raises(UserError, match="command line: sparsity.stride is an option of"):
        config_of_model(table, "a run", [("sparsity.stride", "8")])
