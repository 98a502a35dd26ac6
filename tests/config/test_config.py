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

from mtraining_jax.config import Config, available_configs, config_folder, help_text, validate
from mtraining_jax.config.help import all_fields
from mtraining_jax.config.sections import ModelConfig, OptimizerConfig, RunConfig
from mtraining_jax.data.source import Source
from mtraining_jax.data.sources import SOURCES
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.selection.scores import estimate
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.limits import MAX_BLOCKS, MAX_POSITIONS
from tests.config.common import MODEL


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
    with pytest.raises(UserError) as error:
        override(name, **overrides)
    return str(error.value).splitlines()


def override(path: str | Path, **overrides: str) -> Config:
    return Config.load(path, {key.replace("__", "."): v for key, v in overrides.items()})


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", available_configs())
def test_every_shipped_configuration_loads(name):
    assert Config.load(name).run.name == name


def test_tiny_and_its_dense_twin_differ_in_name_and_kind_only():
    tiny, dense = (Config.load(name).to_dict() for name in ("tiny", "tiny_dense"))
    assert tiny["sparsity"]["kind"] == "sampled_rows" and dense["sparsity"]["kind"] == "dense"
    assert dense["sparsity"].items() - {("kind", "dense")} <= tiny["sparsity"].items()
    del tiny["sparsity"], dense["sparsity"]
    assert tiny["run"].pop("name") != dense["run"].pop("name")
    assert tiny == dense


def test_a_file_gives_its_name_to_the_run(minimal, write):
    config = Config.load(minimal)
    assert config.run.name == "mine" and config.run.folder == Path("runs/mine")
    assert Config.load(write(MODEL + "[run]\nname = 'other'")).run.name == "other"


def test_a_folder_of_runs_may_have_folders(minimal):
    assert override(minimal, run__name="tests/first").run.folder == Path("runs/tests/first")


def test_a_path_may_begin_at_home(minimal, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = override(minimal, run__output_dir="~/runs", data__tokenizer="~/t.json")
    assert config.run.output_dir == f"{tmp_path}/runs"
    assert config.data.tokenizer == f"{tmp_path}/t.json"
    assert Config.load("~/mine.toml") == Config.load(minimal)


def test_names_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Config.load("tiny").run.name == "tiny"


def test_a_name_is_not_the_name_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = messages("tiny.toml")
    assert line == ("the configuration file tiny.toml does not exist; did you mean --config tiny?")
    Path("mine.toml").touch()
    assert messages("mine")[0].startswith('unknown configuration "mine"; did you mean mine.toml? ')


def test_a_folder_is_not_a_file(tmp_path):
    (path := tmp_path / "folder.toml").mkdir()
    assert messages(path) == [f"{path} cannot be read: Is a directory"]
    (path / "config.toml").touch()
    assert messages(path)[0].endswith(f"Is a directory; did you mean {path / 'config.toml'}?")


def test_a_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_text(MODEL, encoding="utf-8-sig")
    assert Config.load(path).model.hidden_size == 32


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
    config = Config.load(write("base = 'tiny'\n[data]\nseed = 5"))
    assert config.data.seed == 5 and config.model == Config.load("tiny").model


# ---- names -------------------------------------------------------------------------------------


# ---- values ------------------------------------------------------------------------------------


def test_whole_floats_are_valid_integers(write):
    assert Config.load(write(f"{MODEL}[run]\nsteps = 1e3\n")).run.steps == 1000


def test_integers_are_valid_floats(write):
    lr = Config.load(write(MODEL + "[optimizer]\nlr = 1\n")).optimizer.lr
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
        ("run.steps", 7, 7),
        ("run.output_dir", Path("a/b"), "a/b"),
        ("optimizer.trainable", ["a"], ("a",)),
        ("optimizer.trainable", ("a", "b"), ("a", "b")),
        ("parallel.fsdp", True, True),
        ("parallel.fsdp", ..., True),
        ("data.eos", None, None),
    ],
)
def test_overrides(minimal, name, text, value):
    section, field = name.split(".")
    found = getattr(getattr(Config.load(minimal, {name: text}), section), field)
    assert found == value and type(found) is type(value)


def test_wrong_overrides_that_are_no_text(minimal):
    for name, value, sentence in [
        (
            "run.steps",
            "7x",
            'command line: run.steps = "7x" is not allowed: it must be an integer ',
        ),
        ("run.steps", -7, "overrides: run.steps = -7 is not allowed: it must be an integer (at "),
        ("run.steps", None, "overrides: run.steps = none is not allowed: it must be an integer "),
        ("run.name", 7, "overrides: run.name = 7 is not allowed: it must be a non-empty string"),
        ("run.stesp", 7, "overrides: run.stesp is not a field; did you mean run.steps?"),
        (
            "optimizer.name",
            "lion",
            "command line: optimizer.name is not a field; did you mean optimizer.kind?",
        ),
        ("run", 7, "overrides: run is a section; set one of its fields: run.FIELD=VALUE"),
    ]:
        with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
            Config.load(minimal, {name: value})
    with pytest.raises(UserError, match=r"^overrides=\['a'\] must be a dict of values by field, s"):
        Config.load(minimal, ["a"])


def test_an_override_reaches_into_a_table(minimal, write):
    scaling = override(minimal, model__rope_scaling__factor="4").model.rope_scaling
    assert scaling is not None and scaling.factor == 4.0
    path = write(MODEL + "[model.rope_scaling]\nfactor = 2.0\nbeta_slow = 2.0")
    scaling = override(path, model__rope_scaling__factor="8").model.rope_scaling
    assert (scaling.factor, scaling.beta_slow) == (8.0, 2.0)
    assert override(path, model__rope_scaling="none").model.rope_scaling is None


# ---- combinations of fields --------------------------------------------------------------------


@pytest.mark.parametrize("name", available_configs())
def test_every_shipped_configuration_has_a_short_run(name):
    for steps in 1, 5:
        assert Config.load(name, {"run.steps": str(steps)}).run.steps == steps


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


@pytest.mark.parametrize("kind", ["dense", "sampled_rows", "vertical_slash"])
def test_longest_sequence(kind, minimal):
    fields = {"sparsity__kind": kind, "model__max_position_embeddings": str(2**24)}
    fields |= {"data__seq_len": str(MAX_POSITIONS)}
    assert override(minimal, **fields).data.seq_len == MAX_POSITIONS
    assert override(minimal, **fields | {"sparsity__kind": "dense", "sparsity__block_size": "64"})
    assert MAX_BLOCKS == estimate.MAX_BLOCKS and MAX_POSITIONS <= estimate.MAX_TOKENS


def test_output_to_a_url(minimal):
    config = override(minimal, run__output_dir="gs://bucket/runs/", run__name="a")
    assert config.run.bucket == "gs://bucket/runs/a"
    assert config.run.folder == Path("runs/bucket/runs/a")


def test_options_are_typed(minimal):
    sparsity = Config.load(minimal).sparsity
    assert (sparsity.kind, sparsity.pattern) == ("sampled_rows", PATTERNS.get("sampled_rows")())
    dense = dataclasses.replace(sparsity, pattern=PATTERNS.get("dense")(block_size=64))
    assert (dense.kind, dense.block_size) == ("dense", 64)
    with pytest.raises(ValueError, match="tau=2 must be a finite number .greater than 0"):
        PATTERNS.get("sampled_rows")(tau=2)


def test_valid_combinations(columns):
    """Each next to one that is refused, in sentences.txt."""
    warm_up = {"optimizer__warmup_steps": "5000"}
    assert override(columns, **warm_up).optimizer.warmup_steps == 5000  # a constant rate never ends
    devices = {"parallel__cpu_devices": "2", "parallel__nodes": "4"}
    assert override(columns, **devices).devices == 4  # more processes may come
    several = {"distributed__coordinator": "host:1", "distributed__process_id": "0"}
    config = override(columns, **devices, **several, distributed__num_processes="2")
    assert config.distributed.num_processes == 2


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
        Config.from_dict(table | {"data": {"seq_len": length}}, "test")

    try:
        check(seq_len)
    except UserError as error:
        near = [int(n) for n in str(error).rpartition("; use ")[2].split(" or ")]
        for length in near:
            check(length)
        assert near[-1] > seq_len and (len(near) == 1 or near[0] < seq_len)


# ---- serialization -----------------------------------------------------------------------------


def test_it_is_frozen_hashable_and_strict():
    config = Config.load("tiny")
    assert hash(config) == hash(Config.load("tiny"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.steps = 3
    with pytest.raises(ValueError):
        RunConfig(steps="3")
    with pytest.raises(ValueError):
        RunConfig(stepps=3)


@pytest.mark.parametrize("name", available_configs())
def test_printed_text_loads_back(name, write):
    config = Config.load(name)
    assert Config.load(write(config.to_toml())) == config
    assert Config.from_dict(config.to_dict(), "a dict") == config


def test_printed_text_has_every_field():
    text = Config.load("tiny", {"model.rope_scaling": "{factor = 2.0}"}).to_toml()
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
    config = Config.from_dict(table, "test")
    assert config.run.output_dir == folder and config.optimizer.trainable == tuple(trainable)
    assert Config.from_dict(tomllib.loads(config.to_toml()), "text") == config


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
    with pytest.raises(TypeError, match="positional"):
        ModelConfig(300, 32)


def test_the_folder_of_configurations_is_where_they_are():
    assert (config_folder() / "tiny.toml").is_file()


def test_the_command_line_has_no_slow_imports():
    slow = "{'jax', 'grain', 'pyarrow'}"
    code = f"import sys, mtraining_jax.cli.train; sys.exit(str({slow} & set(sys.modules) or ''))"
    found = subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.PIPE)
    assert found.stderr.strip() == b""


# ---- options of plug-ins -----------------------------------------------------------------------


def test_options_of_a_plugin_that_the_command_line_selects(write):
    path = write(f"{MODEL}[sparsity]\ntop_p = 0.5\n")
    assert override(path, sparsity__kind="vertical_slash").sparsity.pattern.top_p == 0.5


@options
class WithoutBlocks(Pattern):
    """Options with names of built-in patterns, but other types and defaults."""

    sink_tokens: str = "few"
    stride: float = 0.5
    tau: int = 3


@options
class Own(WithoutBlocks):
    """The same, of a complete pattern."""

    block_size: int = 16


@options(kw_only=True)
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
    assert config.sparsity.pattern == Own(sink_tokens="many", stride=2.0, tau=5)
    assert config.data.source_options == OwnSource(paths=8)
    assert Config.load(write(config.to_toml())) == config
    assert messages(path, sparsity__kind=f"{__name__}:WithoutBlocks") == [
        "WithoutBlocks lacks the field block_size, tokens per block"
    ]
    (line,) = messages(path, sparsity__kind="tests.config.common:Undecorated")
    assert line == (
        "tests.config.common:Undecorated declares no options: decorate the class with "
        "mtraining_jax.options"
    )
    assert messages(path, sparsity__block_size="0") == [
        "sparsity.block_size = 0 must be at least 1"
    ]
    assert messages(path, sparsity__tau="x") == [
        'command line: sparsity.tau = "x" is not allowed: it must be an integer'
    ]


def test_options_of_a_plugin_that_is_selected_no_more_are_ignored(tmp_path, write):
    base = tmp_path / "first.toml"
    base.write_text(f"{MODEL}[sparsity]\nkind = 'vertical_slash'\ntop_p = 0.5\nblock_size = 64")
    path = write("base = 'first.toml'\n[sparsity]\nkind = 'sampled_rows'\ntau = 0.8")
    pattern = Config.load(path).sparsity.pattern
    assert (pattern.tau, pattern.block_size) == (0.8, 64)
    assert override(path, sparsity__kind="dense").sparsity.block_size == 64
    base.write_text(f"{MODEL}[sparsity]\nkind = 'vertical_slash'")
    path = write("base = 'first.toml'\n[sparsity]\ntau = 0.8")
    assert messages(path)[0].startswith(f"{path}: sparsity.tau is an option of sparsity.kind = ")


def test_files_printed_by_earlier_versions_load(write):
    # They have the options of all kinds.
    options = "tau = 0.8\ntop_p = 0.9\nmax_slashes = 4096\nkind = 'sampled_rows'"
    path = write(f"{MODEL}[sparsity]\n{options}\n[data]\npaths = []\n")
    assert Config.load(path).sparsity.pattern == PATTERNS.get("sampled_rows")(tau=0.8)


def test_removed_fields_are_ignored_if_a_run_stored_their_defaults():
    table = {"model": tomllib.loads(MODEL)["model"], "audit": {"interval": 5}}
    expected = Config.from_record(table, "a run")
    table["audit"] |= {"gradient_interval": 0, "gradient_tokens": None}
    assert Config.from_record(table, "a run") == expected
    table["audit"]["gradient_interval"] = 500
    with pytest.raises(UserError, match=r"^a run: audit.gradient_interval = 500 is not possible: "):
        Config.from_record(table, "a run")


def test_a_stored_configuration_may_have_options_of_all_plugins():
    table = {"model": tomllib.loads(MODEL)["model"], "sparsity": {"tau": 0.8, "top_p": 0.3}}
    assert Config.from_record(table, "a run").sparsity.pattern.tau == 0.8
    changed = Config.from_record(table, "a run", {"sparsity.kind": "vertical_slash"})
    assert changed.sparsity.pattern.top_p == 0.3
    with pytest.raises(UserError, match="command line: sparsity.stride is an option of"):
        Config.from_record(table, "a run", {"sparsity.stride": "8"})
