"""Loading models from folders of runs and of Hugging Face checkpoints."""

import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers

from mtraining_jax.data.chat.conversation import Conversation
from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.tools.evaluate import load as evaluation_load
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.load import load
from mtraining_jax.training.checkpoint import Checkpoints
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.utils.errors import UserError
from tests.data.tokenizer_folders import write_tokenizer
from tests.models.common import CHECKPOINTS
from tests.training.common import VERTICAL_SLASH, tiny_config

QWEN2 = CHECKPOINTS / "qwen2_tiny"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run with a checkpoint, and its parameters."""
    return saved_run(tmp_path_factory.mktemp("load"))


def saved_run(folder, place=None, **sections):
    """A run in `folder` that has saved `place` next to its position in the data."""
    config = tiny_config(
        folder,
        run={"name": "test", "output_dir": str(folder / "runs")},
        sparsity=VERTICAL_SLASH | sections.pop("sparsity", {}),
        **sections,
    )
    rng = np.random.default_rng(0)

    def some(x: jax.ShapeDtypeStruct) -> jax.Array:
        values = rng.integers(0, 100, x.shape) / 8  # exact in bfloat16
        return jax.device_put(values.astype(x.dtype), x.sharding)

    state = jax.tree.map(some, StateBuilder(config, make_mesh(1, 2, 2)).abstract())
    checkpoints = Checkpoints(checkpoint_folder(config), keep=2, async_save=False)
    checkpoints.save(3, state, place or {}, config)
    checkpoints.close()
    return config.run.folder, {name: np.asarray(x) for name, x in state.parameters.items()}


def parameters(loaded) -> dict[str, np.ndarray]:
    names = jax.tree.leaves(parameter_names(loaded.state))
    return dict(zip(names, jax.tree.leaves(loaded.state), strict=True))


def test_the_newest_checkpoint_of_a_run_is_read_with_its_configuration(run):
    folder, expected = run
    found = load(folder, attention="sparse", dtype="bfloat16")
    assert found.source == f"{folder}, step 3"
    for name, x in parameters(found).items():
        np.testing.assert_array_equal(np.asarray(x, np.float32), expected[name])
        is_matrix = name.endswith("proj.weight") or name == "embed_tokens.weight"
        assert x.dtype == ("bfloat16" if is_matrix else "float32"), name
    network = found.network
    assert isinstance(network.settings, VerticalSlash)
    assert (network.settings.block_size, network.settings.num_probe_queries) == (8, 8)
    assert network.spec.max_position_embeddings == 128
    # The run had 4 devices, the test has 8.
    assert network.mesh.devices.shape == (1, 1, 8)
    assert network.unit == 8 * 8  # stripes of one block
    assert found.tokenizer is None  # the run read token ids


def test_overrides_take_precedence_over_the_run(run):
    folder, _ = run
    overrides = {
        "sparsity.top_p": 0.5,
        "parallel.nodes": "2",
        "parallel.devices_per_node": 1,
        "parallel.layout": "zigzag",
        "parallel.fsdp": True,
    }
    engine = Engine.load(folder, attention="sparse", overrides=overrides)
    network = engine.loaded.network
    assert network.settings.top_p == 0.5
    assert network.mesh.devices.shape == (1, 2, 1) and network.fsdp
    assert network.unit == 2 * 2 * 8
    padded = [network.padded_length(32 * units) for units in range(1, 14)]
    assert [x // 32 for x in padded] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    assert network.padded_length(33) == 64
    dense = engine.dense()
    assert dense.loaded.network.settings == Dense(8)
    assert dense.loaded.state is engine.loaded.state


def test_dense_use_of_a_sparse_model_has_a_note(run, tmp_path):
    folder, _ = run
    note = load(folder, attention="dense").note_on_dense_use()
    assert note == (
        f"note: {folder}, step 3 was trained with sparse attention, so dense attention loses a "
        "little quality; use --attention=sparse for best quality"
    )
    # It does not depend on the pattern in use.
    assert (
        load(folder, attention="dense", overrides={"sparsity.kind": "dense"}).note_on_dense_use()
        == note
    )
    for name, sparsity in {"last": {"dense_cooldown_steps": 1}, "dense": {"kind": "dense"}}.items():
        cooled_down, _ = saved_run(tmp_path / name, sparsity=sparsity)
        assert load(cooled_down, attention="dense").note_on_dense_use() is None
    for name, density in {"short": 1.0000003, "long": 0.99}.items():  # documents
        folder, _ = saved_run(tmp_path / name, place={"lowest_density": density})
        noted = load(folder, attention="dense").note_on_dense_use() is not None
        assert noted == (name == "long")
    assert load(QWEN2, attention="dense").note_on_dense_use() is None


def test_dense_attention_has_any_block_size():
    # sampled_rows, the default pattern, does not allow fewer than 16 tokens.
    found = load(QWEN2, attention="dense", overrides={"sparsity.block_size": 8})
    assert found.network.settings == Dense(8)


def test_a_run_on_token_files_has_the_tokenizer_that_it_names(tmp_path):
    path = tmp_path / "tokenizer.json"
    words = {"<|endoftext|>": 0, "unknown": 1, "hello": 2}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "unknown")).save(str(path))
    folder, _ = saved_run(tmp_path, data={"tokenizer": str(path)})
    found = load(folder, attention="dense")
    assert found.tokenizer.name == str(path) and found.stop_ids == {0}
    assert found.tokenizer.encode("hello").tolist() == [2]


def test_a_run_on_token_files_knows_its_end_tokens(tmp_path):
    """Also if its tokenizer has two usual ones."""
    words = {"unknown": 0, "<|endoftext|>": 1, "</s>": 2, "hello": 3}
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "unknown")).save(str(path))
    data = {"data": {"tokenizer": str(path)}}
    folder, _ = saved_run(tmp_path / "new", place={"end_tokens": [2, 3]}, **data)
    found = load(folder, attention="dense")
    assert found.stop_ids == {2, 3} and found.tokenizer.eos == 2
    # Earlier versions did not save them, but the folder it started from may still exist.
    start = shutil.copytree(QWEN2, tmp_path / "start")
    old, _ = saved_run(tmp_path / "old", **data)
    record = next((old / "checkpoints" / "3" / "record").iterdir())
    saved = json.loads(record.read_text())
    saved["config"]["model"]["init_from"] = str(start)
    record.write_text(json.dumps(saved))
    with pytest.raises(
        UserError, match=r"has <\|endoftext\|> and </s>; .* or name it as eos_token"
    ):
        load(old, attention="dense")
    (start / "generation_config.json").write_text('{"eos_token_id": [1, 9]}')
    found = load(old, attention="dense")
    assert found.stop_ids == {1, 9} and found.tokenizer.eos == 1
    shutil.rmtree(start)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load(old, attention="dense").stop_ids == {2}


def test_a_hugging_face_folder_has_its_tokenizer_and_end_tokens(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(QWEN2, folder)
    assert load(folder, attention="dense").tokenizer is None
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    found = load(folder, attention="sparse", tokenizer="bytes")
    assert isinstance(found.tokenizer, ByteTokenizer)
    assert found.stop_ids == {7, 9} and found.tokenizer.eos == 7
    assert found.network.spec.dtype == "float32"
    assert found.network.settings == SampledRows()


def test_errors_are_reported(run, tmp_path):
    folder, _ = run
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    dense = {"sparsity.kind": "dense"}
    for path, how, message in [
        (tmp_path, {}, f"{tmp_path} contains no model: neither checkpoints/STEP of a run nor con"),
        (folder / "checkpoints" / "3", {}, rf"Hugging Face checkpoint; did you mean {folder}\?"),
        (other, {}, r"model_type gpt2\); supported model types are"),
        (folder, {"attention": "all"}, 'attention = "all" must be "dense" or "sparse"'),
        (folder, {"overrides": dense, "attention": "sparse"}, "needs a sparse pattern, but"),
        (folder, {"overrides": {"sparsity.top_p": "2"}}, "sparsity.top_p = 2 is not allowed"),
        (folder, {"overrides": {"sparsity.topp": "2"}}, "did you mean sparsity.top_p"),
        (
            folder,
            {"overrides": {"sparsity.num_probe_queries": "64"}, "attention": "sparse"},
            "sparsity.num_probe_queries = 64",
        ),
        (folder, {"overrides": {"parallel.nodes": "9"}}, "one replica, of at most 8 devices"),
        (folder, {"overrides": {"parallel.replicas": "2"}}, r"2 \* 1 \* 8 does not fit"),
        (folder, {"tokenizer": "bytes"}, "data.eos = 256 of .* vocabulary: model.vocab_size = 61"),
    ]:
        with pytest.raises(UserError, match=message):
            load(path, **({"attention": "dense"} | how))


def test_prompts_begin_as_the_documents_of_training_did(tmp_path, caplog):
    name = write_tokenizer(tmp_path / "t", "llama3", chat_template="{{ bos_token }}he")
    (tmp_path / "a.txt").write_text("he")
    data = {"source": "text", "paths": [str(tmp_path / "a.txt")], "tokenizer": name}
    text, chat = "hello", Conversation([{"role": "user", "content": "he"}], None, "a test")

    def prompts(name, **fields):
        folder, _ = saved_run(tmp_path / name, data=data | fields, model={"vocab_size": 264})
        return Engine.load(folder).encode([text, chat], 1)

    def lists(arrays):
        return [x.tolist() for x in arrays]

    assert lists(prompts("a")) == [[262, 259], [262, 256]] and not caplog.messages
    assert lists(prompts("b", bos=False)) == [[259], [262, 256]]
    (note,) = caplog.messages
    assert note == (
        "note: documents begin without a beginning-of-sequence token in the training of "
        f"{tmp_path / 'b' / 'runs' / 'test'} (data.bos = false), and so do prompts"
    )
    caplog.clear()
    # A checkpoint from before data.bos.
    read = evaluation_load.read_record
    with pytest.MonkeyPatch.context() as patch:

        def older(folder, step):
            record = read(folder, step)
            del record["config"]["data"]["bos"]
            return record

        patch.setattr(evaluation_load, "read_record", older)
        found = Engine.load(tmp_path / "a" / "runs" / "test").encode([text], 1)
    assert lists(found) == [[259]] and "(data.bos = false)" in caplog.messages[0]
