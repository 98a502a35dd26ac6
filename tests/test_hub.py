"""Models and data sets by name, from a server on this machine in place of Hugging Face's."""

import json
import logging
import re
import sys

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors.numpy import load, save

from mtraining_jax.cli import evaluate, generate
from mtraining_jax.config import Config
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.tools.evaluate.load import load as load_model
from mtraining_jax.tools.evaluate.load import max_positions
from mtraining_jax.tools.export.state import export_state
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import Checkpoints
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder, record_start
from mtraining_jax.training.processes import agreement
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils import hub
from mtraining_jax.utils.errors import UserError
from tests.data.tokenizer_folders import write_tokenizer
from tests.fake_hub import FakeHub
from tests.models.common import CHECKPOINTS

LLAMA = CHECKPOINTS / "llama3_tiny"
FILES = {name: (LLAMA / name).read_bytes() for name in ("config.json", "model.safetensors")}
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server, which huggingface_hub, imported again, takes from the environment."""
    server = FakeHub()

    def loaded():
        return [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
            patch.delenv(name, raising=False)
        for name in loaded():
            patch.delitem(sys.modules, name)
        yield server
        for name in loaded():
            del sys.modules[name]
    server.stop()


@pytest.fixture(autouse=True)
def later_process():
    """Forgets what this process has downloaded, as another process does not know it."""
    hub.downloaded.cache_clear()
    yield hub.downloaded.cache_clear


@pytest.fixture
def no_network(server):
    server.stop()
    yield
    server.start()


def table(start, **sections):
    """A configuration of the model `start`."""
    default = {
        "model": {"init_from": start, "mlp_chunk_size": 16},
        "sparsity": {"kind": "dense", "block_size": 8},
        "parallel": {"devices_per_node": 1},
        "data": {"source": "synthetic", "seq_len": 32},
    }
    return {name: default.get(name, {}) | sections.get(name, {}) for name in default | sections}


def with_weights(factor):
    """The files of a checkpoint with other weights."""
    tensors = load(FILES[WEIGHTS])
    name = "model.layers.0.mlp.down_proj.weight"
    return FILES | {WEIGHTS: save(tensors | {name: tensors[name] * np.float32(factor)})}


def refusal(start, **sections):
    with pytest.raises(UserError) as caught:
        Config.from_dict(table(start, **sections))
    (line,) = str(caught.value).splitlines()
    return line


def test_a_model_by_name_is_that_of_its_folder(server, tmp_path):
    files = FILES | {"original/consolidated.safetensors": b"x", "consolidated.safetensors": b"x"}
    write_tokenizer(tmp_path, "llama3")
    files |= {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    commit = server.commit("acme/whole", files | {"pytorch_model.bin": b"x"})
    config = Config.from_dict(table("hf://acme/whole"))
    assert config.model.init_from == f"hf://acme/whole@{commit}"
    assert config.data.tokenizer == f"hf://acme/whole@{commit}/tokenizer.json"
    assert Config.from_dict(config.to_dict()) == config
    of_folder = Config.from_dict(table(str(LLAMA)))
    assert config.model.num_layers == of_folder.model.num_layers == 2
    tokenizer = make_tokenizer(config.data.tokenizer)
    assert tokenizer.checksum == make_tokenizer(str(tmp_path / "tokenizer.json")).checksum
    downloaded = {path for method, path in server.requests if "/resolve/" in path}
    assert not [path for path in downloaded if path.endswith(WEIGHTS)]  # needed by a run only

    loaded = load_model("hf://acme/whole", "dense")
    assert loaded.source == str(config.model.start) and loaded.tokenizer is not None
    expected = load_model(LLAMA, "dense")
    for one, other in zip(*(jax.tree.leaves(x.state) for x in (loaded, expected)), strict=True):
        np.testing.assert_array_equal(one, other)
    downloaded = {path.rpartition("/")[2] for _, path in server.requests if "/resolve/" in path}
    assert downloaded == {*FILES, "tokenizer.json", "tokenizer_config.json"}


def test_a_revision_is_a_branch_a_tag_or_a_commit(server):
    first = server.commit("acme/tagged", with_weights(1), "v1")
    second = server.commit("acme/tagged", with_weights(1.1))
    server.repositories["acme/tagged"].refs["refs/pr/3"] = first
    for revision, commit in (
        ("", second),
        ("@v1", first),
        ("@main", second),
        ("@refs/pr/3", first),
    ):
        config = Config.from_dict(table(f"hf://acme/tagged{revision}"))
        assert config.model.init_from == f"hf://acme/tagged@{commit}"
        assert config.model.start.name == commit
    assert Config.from_dict(table(f"hf://acme/tagged@{first}")).model.start.name == first


def test_a_resumed_run_keeps_its_commit(server, tmp_path, later_process, monkeypatch):
    first = server.commit("acme/moving", with_weights(1))
    how = {"output_dir": str(tmp_path), "name": "mine"}

    def config(name="hf://acme/moving", **sections):
        later_process()
        return Config.from_dict(table(name, **{"run": how, "lora": {"rank": 2}} | sections))

    started = config()
    record_start(started, None)
    second = server.commit("acme/moving", with_weights(1.1))
    assert config().model.init_from == f"hf://acme/moving@{second}"  # no checkpoint to resume from
    save_checkpoint(started)
    for resumed in (config(), config("hf://acme/moving@main")):
        assert resumed.model.init_from == f"hf://acme/moving@{first}"
    for fresh in (
        config(f"hf://acme/moving@{second}"),
        config(checkpoint={"resume": False}),
        config(run=how | {"name": "other"}),
    ):
        assert fresh.model.init_from == f"hf://acme/moving@{second}"
    # A folder without a name in the configuration, and one that is loaded in another place.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "mine").rename(tmp_path / "runs/run")
    assert config(run={}).model.init_from == f"hf://acme/moving@{first}"
    stored = Config.from_record(table("hf://acme/moving"), "another run")
    assert stored.model.init_from == f"hf://acme/moving@{second}"
    (tmp_path / "runs/run").rename(tmp_path / "mine")
    # Adapters check that their base is the same.
    assert load_model(tmp_path / "mine", "dense").source == f"{tmp_path / 'mine'}, step 1"
    with pytest.raises(UserError, match="adapters of another base model"):
        load_model(tmp_path / "mine", "dense", {"model.init_from": f"hf://acme/moving@{second}"})


def save_checkpoint(config):
    """Saves the state of a run before its first step as that of step 1."""
    builder = StateBuilder(config, build_mesh(config))
    checkpoints = Checkpoints(checkpoint_folder(config), keep=1, async_save=False)
    checkpoints.save(1, builder.fresh(), {}, config)
    checkpoints.close()


def test_resumed_data_keeps_the_commit_of_each_path(server, tmp_path):
    name = "datasets/acme/grown"
    data = {"source": "jsonl", "paths": [f"hf://{name}@v1/a.jsonl", f"hf://{name}/a.jsonl"]}
    held_out = {"data": {"paths": [f"hf://{name}@v2/a.jsonl"]}, "interval": 1}
    for ref in ("v1", "v2", "main"):
        server.commit(name, {"a.jsonl": json_lines(ref)}, ref)

    def config():
        run = {"output_dir": str(tmp_path), "name": "mine"}
        return Config.from_dict(table(str(LLAMA), data=data, eval=held_out, run=run))

    started = config()
    record_start(started, None)
    (tmp_path / "mine" / "checkpoints" / "1").mkdir(parents=True)
    for ref in ("v1", "v2", "main"):
        server.commit(name, {"a.jsonl": json_lines(f"{ref}, changed")}, ref)
    assert config() == started
    (tmp_path / "mine" / "checkpoints" / "1").rename(tmp_path / "mine" / "checkpoints" / "1.tmp")
    assert config() != started


def test_adapters_by_name_and_of_a_base_by_name(server, tmp_path):
    files = FILES | {"LICENSE": b"terms", "generation_config.json": b"{}"}
    of_base = server.commit("acme/base", files)
    how = {"run": {"output_dir": str(tmp_path), "name": "lora"}, "lora": {"rank": 2}}
    config = Config.from_dict(table("hf://acme/base", **how))
    builder = StateBuilder(config, build_mesh(config))
    merged, adapter = export_state(config, builder, builder.fresh(), [7])
    assert (merged / "LICENSE").read_bytes() == b"terms"
    raw = json.loads((adapter / "adapter_config.json").read_text())
    assert (raw["base_model_name_or_path"], raw["revision"]) == ("acme/base", of_base)
    server.commit("acme/base", files | with_weights(1.1))
    assert load_model(adapter, "dense").stop_ids == {7}  # of the base at its revision
    server.commit("acme/base", files)

    raw["revision"] = None
    (adapter / "adapter_config.json").write_text(json.dumps(raw))
    commit = server.commit_folder("acme/adapter", adapter)
    with pytest.raises(UserError, match="give its folder with --model.init_from=FOLDER, or hf://O"):
        load_model("hf://acme/adapter", "dense")
    base = {"model.init_from": "hf://acme/base"}
    assert max_positions("hf://acme/adapter", base) == 512
    assert load_model("hf://acme/adapter", "dense", base).source.endswith(commit)
    lora = {"rank": 2, "init_from": "hf://acme/adapter"}
    config = Config.from_dict(table("hf://acme/base", **how | {"lora": lora}))
    assert config.lora.init_from == f"hf://acme/adapter@{commit}"
    StateBuilder(config, build_mesh(config)).fresh()


def test_processes_with_different_commits_do_not_start(server, later_process, monkeypatch):
    commits, compared = [], []
    monkeypatch.setattr(agreement, "assert_same_on_all_processes", lambda x, _: compared.append(x))
    for factor in (1, 1.1):
        commits.append(server.commit("acme/pushed", with_weights(factor)))
        later_process()
        agreement.check_same_configuration(Config.from_dict(table("hf://acme/pushed")))
    assert agreement.differences(*compared, 1) == {
        "model.init_from": f'model.init_from = "hf://acme/pushed@{commits[0]}" in process 0 but '
        f'"hf://acme/pushed@{commits[1]}" in process 1; it must be the same in all processes of a '
        "run"
    }


def test_the_cache_is_enough_without_a_network(server, later_process, caplog):
    commit = server.commit("acme/cached", FILES)
    load_model("hf://acme/cached", "dense")
    server.stop()
    try:
        for name in ("hf://acme/cached", f"hf://acme/cached@{commit}"):
            later_process()
            with caplog.at_level(logging.ERROR):
                assert load_model(name, "dense").source.endswith(commit)
    finally:
        server.start()


def test_without_a_network_and_cache(server, no_network):
    said = refusal("hf://acme/absent")
    assert re.fullmatch(
        r"model.init_from = hf://acme/absent cannot be downloaded \(\[Errno \d+\] Connection "
        r"refused\) and is not completely in the cache, .*/hub; check the network, or download it "
        "before",
        said,
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("acme/none", "does not exist, or is private: correct the name, or log in with `hf auth"),
        ("acme/here@v9", "has no such revision; after @ give a branch, tag or commit hash"),
        (f"acme/here@{'0' * 40}", "has no such revision; after @ give a branch, tag or commit"),
        ("acme/gated", "is gated: accept its terms on its page, and log in with `hf auth login`"),
        ("acme", "is not a valid name: it must be hf://OWNER/NAME[@REVISION], or hf://datasets/"),
        ("acme/a..b", "is not a valid name: it must be hf://OWNER/NAME[@REVISION], or hf://"),
        ("acme/empty", "/config.json: No such file or directory"),
    ],
)
def test_mistakes_end_in_a_sentence(server, name, sentence):
    server.commit("acme/here", FILES)
    server.commit("acme/gated", FILES)
    server.repositories["acme/gated"].gated = True
    server.commit("acme/empty", {"README.md": b"x"})
    said = refusal(f"hf://{name}")
    assert f"hf://{name}" in said and sentence in said


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal("hf://acme/tiny") == (
        "model.init_from = hf://acme/tiny needs huggingface_hub: pip install huggingface_hub, or "
        "uv run --extra hub"
    )


def rows(paths, source="jsonl"):
    """The locations and texts of documents, and the configuration."""
    data = {"source": source, "paths": paths}
    config = Config.from_dict(table(str(LLAMA), data=data))
    return list(config.data.source_options.documents()), config


def json_lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


LINES = {
    "train-0.jsonl": json_lines("a", "b"),
    "train-1.jsonl": json_lines("c"),
    "test.jsonl": json_lines("d"),
    "more/train-2.jsonl": json_lines("e"),
    "more/deep/train-3.jsonl": json_lines("f"),
    "more/train-4.csv": b"text",
}


@pytest.mark.parametrize(
    ("path", "texts", "num_downloads"),
    [
        ("/train-*.jsonl", "abc", 2),
        ("/**/train-*.jsonl", "feabc", 4),
        ("/more", "fe", 3),  # with the text file
        ("/more/*.jsonl", "e", 2),  # with those of deeper folders
        ("/test.jsonl", "d", 1),
        ("", "fedabc", 6),
    ],
)
def test_json_lines_of_a_data_set(server, path, texts, num_downloads):
    name = f"datasets/acme/{texts}"  # with a cache of its own
    commit = server.commit(name, LINES)
    found, config = rows([f"hf://{name}{path}"])
    assert "".join(text for _, text in found) == texts
    assert config.data.source_options.paths == (f"hf://{name}@{commit}{path}",)
    downloads = {x for _, x in server.requests if x.startswith(f"/{name}/resolve/")}
    assert len(downloads) == num_downloads


def test_parquet_of_a_data_set_at_a_tag(server, tmp_path, later_process):
    path, name = tmp_path / "train.parquet", "datasets/acme/tables"
    for tag, texts in (("v1", ["a", "b"]), ("main", ["c"])):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        server.commit(name, {"data/train.parquet": path.read_bytes()}, tag)
    for revision, texts in (("@v1", "ab"), ("", "c")):
        found, _ = rows([f"hf://{name}{revision}/data/*.parquet"], "parquet")
        assert "".join(text for _, text in found) == texts


def test_a_part_of_a_data_set_in_the_cache_is_not_all_of_it(server, later_process, monkeypatch):
    name = "datasets/acme/partly"
    commit = server.commit(name, LINES)
    rows([f"hf://{name}/train-0.jsonl"])
    later_process()
    # The variable is read when the package is imported.
    monkeypatch.setattr(sys.modules["huggingface_hub"].constants, "HF_HUB_OFFLINE", True)
    assert len(rows([f"hf://{name}@{commit}/train-0.jsonl"])[0]) == 2
    with pytest.raises(UserError) as caught:
        rows([f"hf://{name}/train-*.jsonl"])
    assert f"hf://{name}@{commit}/train-*.jsonl cannot be downloaded (" in str(caught.value)
    assert "is not completely in the cache" in str(caught.value)


def test_data_for_validation_is_pinned_too(server):
    name = "datasets/acme/both"
    commit = server.commit(name, LINES)
    data = {"source": "jsonl", "paths": [f"hf://{name}/train-0.jsonl"]}
    held_out = {"interval": 1, "data": {"paths": [f"hf://{name}/test.jsonl"]}}
    config = Config.from_dict(table(str(LLAMA), data=data, eval=held_out))
    assert config.eval.data is not None
    assert config.eval.data.source_options.paths == (f"hf://{name}@{commit}/test.jsonl",)


def test_a_data_set_that_does_not_exist():
    said = refusal(str(LLAMA), data={"source": "jsonl", "paths": ["hf://datasets/acme/x/*.jsonl"]})
    assert said.startswith(
        "data.paths = hf://datasets/acme/x/*.jsonl does not exist, or is private"
    )


def test_other_sources_read_local_files_only(server):
    server.commit("datasets/acme/ids", {"ids.bin": bytes(256)})
    data = {"source": "tokens", "paths": ["hf://datasets/acme/ids/ids.bin"]}
    config = Config.from_dict(table(str(LLAMA), data=data))
    with pytest.raises(UserError, match="ids.bin. is a URL, but only local paths are supported"):
        config.data.source_options.files()


@pytest.mark.parametrize(
    "arguments", ["generate --prompt x", "evaluate --tasks mqar --lengths 64 --output {}"]
)
def test_commands_take_names(server, arguments, tmp_path, monkeypatch, capsys):
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        monkeypatch.setenv(name, "1")  # the command sets these; monkeypatch restores them
    command, *rest = arguments.format(tmp_path).split()
    main = {"generate": generate.main, "evaluate": evaluate.main}[command]
    assert main(["--model=hf://acme/nowhere", *rest]) == 2
    assert "error: hf://acme/nowhere does not exist, or is private" in capsys.readouterr().err


def test_an_evaluation_is_named_after_the_model(server, tmp_path):
    words = "--model=hf://acme/whole --second-model=hf://acme/whole@v1 --tasks mqar --lengths 64"
    request = evaluate.parse(words.split())
    assert request.output.parts[-1] == "whole"
    assert request.models == {"model": "hf://acme/whole", "second": "hf://acme/whole@v1"}
    with pytest.raises(UserError, match="is the same folder as --model"):
        evaluate.parse(words.replace("@v1", "").split())
