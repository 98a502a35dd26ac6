import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from mtraining_jax.models.huggingface import read
from mtraining_jax.models.huggingface.config import check_same_model, read_hf_config
from mtraining_jax.models.huggingface.peft import PEFT_CONFIG, PEFT_FILE
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.models.lora.adapters import LoraSpec, is_adapter
from mtraining_jax.models.rope import LinearScaling, YarnScaling
from mtraining_jax.models.transformer import param_shardings
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.tools.export import write
from mtraining_jax.tools.export.write import save_hf, save_peft
from mtraining_jax.utils.errors import UserError
from tests.models.common import assert_states_close, drawn, tiny_spec


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A small untied checkpoint of two files, with a YaRN config."""
    directory = tmp_path_factory.mktemp("hf") / "original"
    spec = untied()
    return save_hf(directory, spec, drawn(spec)[1], dtype="float32", max_shard_bytes=60_000)


def untied(**changes):
    scaling = YarnScaling(4.0, 64, attention_factor=1.5, truncate=False)
    values = {"tie_word_embeddings": False, "rope_scaling": scaling}
    return tiny_spec(**(values | changes))


@pytest.fixture
def checkpoint(original, tmp_path):
    """A copy to damage."""
    return shutil.copytree(original, tmp_path / "checkpoint")


def all_tensors(directory):
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def assert_same_tensors(actual, expected):
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        np.testing.assert_array_equal(actual[name], tensor, err_msg=name)


def test_round_trip_of_shards_in_bfloat16_on_a_mesh(original, tmp_path):
    spec = untied()
    shardings = param_shardings(spec, make_mesh(2, 2, 2), fsdp=True)
    state = load_hf(original, spec, shardings)
    first = save_hf(tmp_path / "first", spec, state, max_shard_bytes=20_000)
    index = json.loads((first / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in first.glob("*.safetensors"))
    assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    tensors = all_tensors(first)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    for path in first.glob("*.safetensors"):
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 20_000

    again = load_hf(first, spec, shardings)
    second = save_hf(tmp_path / "second", spec, again)
    assert_same_tensors(all_tensors(second), tensors)


def test_loading_restores_the_saved_state_in_the_requested_sharding(original):
    spec = untied()
    shardings = param_shardings(spec, make_mesh(1, 2, 4), fsdp=True)
    state = load_hf(original, spec, shardings)
    assert_states_close(state, drawn(spec)[1], tolerance=0)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding and leaf.dtype == np.float32


def test_a_device_reads_only_its_slices(original, monkeypatch):
    taken = {}
    open_tensor = read.Tensors.open

    class Counting:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner

        def __getattr__(self, attribute):
            return getattr(self.inner, attribute)

        def __getitem__(self, index):
            block = self.inner[index]
            taken[self.name] = taken.get(self.name, 0) + block.size
            return block

    monkeypatch.setattr(
        read.Tensors, "open", lambda self, name: Counting(name, open_tensor(self, name))
    )
    spec = untied()
    # One shard of eight: as in a process with one device.
    shardings = param_shardings(spec, make_mesh(1, 2, 4), fsdp=True)
    make_array = jax.make_array_from_callback

    def first_shard_only(shape, sharding, callback):
        index = sharding.devices_indices_map(shape)[jax.devices()[0]]
        callback(index)
        return np.zeros(shape, np.float32)

    monkeypatch.setattr(read.jax, "make_array_from_callback", first_shard_only)
    load_hf(original, spec, shardings)
    assert taken["model.layers.1.mlp.up_proj.weight"] == 48 * 32 // 8
    assert taken["lm_head.weight"] == 64 * 32 // 8
    assert taken["model.norm.weight"] == 32

    # Replicated on all eight devices, still read once.
    taken.clear()
    monkeypatch.setattr(read.jax, "make_array_from_callback", make_array)
    load_hf(original, spec, param_shardings(spec, make_mesh(1, 2, 4), fsdp=False))
    assert taken["model.layers.1.mlp.up_proj.weight"] == 48 * 32


# config.json


def rewrite_config(directory, **changes):
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    return directory


def test_config_round_trip(original):
    assert read_hf_config(original, dtype="float32", remat="none") == untied()


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_the_older_spelling_of_yarn(checkpoint, kind):
    scaling = {kind: "yarn", "factor": 16.0, "original_max_position_embeddings": 32768}
    changes = {"rope_theta": 5e5, "rope_scaling": scaling}
    rewrite_config(checkpoint, rope_parameters="absent", head_dim="absent", **changes)
    spec = read_hf_config(checkpoint)
    assert spec.rope_scaling == YarnScaling(16.0, 32768)
    assert spec.rope_theta == 5e5
    assert spec.head_dim == 8


def test_yarn_without_the_original_length_keeps_it_open(checkpoint):
    rewrite_config(checkpoint, rope_parameters="absent", rope_scaling={"type": "yarn", "factor": 2})
    assert read_hf_config(checkpoint).rope_scaling.original_max_position_embeddings is None


def test_plain_rope(checkpoint):
    rope = {"rope_type": "default", "rope_theta": 10.0}
    rewrite_config(checkpoint, rope_scaling="absent", rope_parameters=rope)
    spec = read_hf_config(checkpoint)
    assert spec.rope_scaling is None and spec.rope_theta == 10.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
            "GPT2LMHeadModel .*; supported model types are gemma3_text, gpt_oss, llama",
        ),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "Qwen2ForTokenClassification"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu" is unsupported; it must be "silu"'),
        ({"use_sliding_window": True}, "use_sliding_window=true is unsupported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"quantization_config": {}}, "quantization_config is not supported"),
        ({"is_causal": False}, "is_causal=false is unsupported; it must be true"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config=.* is unsupported; it must be null"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings="false" must be true or false'),
        ({"rms_norm_eps": None}, "rms_norm_eps=null must be a number"),
        ({"rms_norm_eps": True}, "rms_norm_eps=true must be a number"),
        (
            {"text_config": {"model_type": "gemma3_text"}, "architectures": ["XForAll"]},
            'XForAll; only its text model .*, as docs/training.md shows in "Text models"',
        ),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers is missing"),
        ({"hidden_size": "wide"}, "hidden_size='wide'; it must be an integer"),
        ({"num_key_value_heads": 3}, "num_heads = 4 must be a multiple of num_kv_heads = 3"),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            'rope type "dynamic" is unsupported; it must be one of default, yarn, linear, llama3',
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing"),
        ({"rope_parameters": [1]}, "must be an object"),
        (
            {"rope_scaling": "absent", "rope_parameters": {"full_attention": {}}},
            "rope_parameters has full_attention, but all layers of qwen2 have the same RoPE",
        ),
        ({"rope_theta": 7.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "contradict each"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters contradict each"),
        (
            {"rope_scaling": "absent", "rope_parameters": {"rope_theta": -1}},
            "rope_theta = -1.0 must be positive",
        ),
    ],
)
def test_an_unsupported_config_is_refused(checkpoint, changes, message):
    rewrite_config(checkpoint, **changes)
    with pytest.raises(UserError, match=message) as caught:
        read_hf_config(checkpoint)
    assert str(checkpoint / "config.json") in str(caught.value)


def test_a_damaged_or_missing_config_is_refused(checkpoint):
    with pytest.raises(UserError, match="^rematerialize is not a field of a model; choose from"):
        read_hf_config(checkpoint, rematerialize="full")
    path = checkpoint / "config.json"
    path.write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        read_hf_config(checkpoint)
    path.write_text("[]")
    with pytest.raises(UserError, match="must contain a JSON object"):
        read_hf_config(checkpoint)
    path.unlink()
    with pytest.raises(UserError, match="cannot read .*config.json: No such file"):
        read_hf_config(checkpoint)


def test_a_folder_with_a_model_and_adapters_is_refused(checkpoint):
    # transformers would load the adapters.
    (checkpoint / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has adapters of PEFT next to config.json; move adapter"):
        load_hf(checkpoint, untied())


def test_a_checkpoint_of_another_model_is_refused(checkpoint):
    check_same_model(untied(remat="full", dtype="bfloat16"), checkpoint)
    with pytest.raises(UserError, match="has vocab_size = 64, but .* has vocab_size = 65"):
        load_hf(checkpoint, untied(vocab_size=65))
    with pytest.raises(UserError, match="has num_hidden_layers = 3, but .* has num_layers = 2"):
        load_hf(checkpoint, untied(num_layers=2))
    with pytest.raises(UserError, match="it has tie_word_embeddings = False"):
        load_hf(checkpoint, untied(tie_word_embeddings=True))


def test_other_rotary_positions_are_refused_unless_asked_for(checkpoint):
    other = untied(rope_scaling=None, rope_theta=7.0)
    with pytest.raises(UserError, match="has rope_theta = 1000000.0, but .* has rope_theta = 7.0"):
        check_same_model(other, checkpoint)
    with pytest.raises(UserError, match="'rope_type': 'yarn', .*, but .* has rope_scaling = None"):
        load_hf(checkpoint, other, override=["rope_theta"])
    load_hf(checkpoint, other, override=["rope_theta", "rope_scaling"])
    check_same_model(other, checkpoint, override=["rope_theta", "rope_scaling"])


# Damaged tensors. The first file has the embedding.


def rewrite_tensors(directory, change):
    """Applies `change` to the tensors of the file with the final norm, and fixes the index."""
    index_path = directory / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    file = index["weight_map"]["model.norm.weight"]
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)
    kept = {name: other for name, other in index["weight_map"].items() if other != file}
    index["weight_map"] = kept | dict.fromkeys(tensors, file)
    index_path.write_text(json.dumps(index))
    return directory / file


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("lm_head.weight", None, "checkpoint has no tensor lm_head.weight"),
        (
            "model.norm.weight",
            np.ones(31, np.float32),
            r"tensor model.norm.weight has shape \[31\], but the model needs \[32\]",
        ),
        (
            "lm_head.weight",
            np.ones((60, 32), np.float32),
            r"lm_head.weight has shape \[60, 32\].* needs \[64, 32\]",
        ),
        (
            "model.norm.weight",
            np.ones(32, np.int8),
            "norm.weight has dtype I8; it must be one of F32, BF16, F",
        ),
        (
            "model.layers.3.mlp.up_proj.weight",
            np.ones((48, 32), np.float32),
            "model.layers.3.mlp.up_proj.weight does not belong to thi",
        ),
    ],
)
def test_a_wrong_tensor_is_named(checkpoint, name, tensor, message):
    def change(tensors):
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor

    rewrite_tensors(checkpoint, change)
    with pytest.raises(UserError, match=f"{checkpoint.parent}.*{message}"):
        load_hf(checkpoint, untied())


def with_tensor(folder, name, tensor):
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensor}, folder / "model.safetensors")


def test_a_tied_model_ignores_only_a_copy_of_its_embedding(tmp_path):
    spec = tiny_spec()
    _, state = drawn(spec)
    directory = save_hf(tmp_path / "out", spec, state, dtype="float32")
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    with_tensor(directory, "lm_head.weight", embedding)
    assert_states_close(load_hf(directory, spec), state, tolerance=0)
    # transformers 5.24 does not tie tensors that differ.
    embedding[-1, -1] += 1e-3
    with_tensor(directory, "lm_head.weight", embedding)
    message = "lm_head.weight differs from model.embed_tokens.weight, .*set it to false there"
    with pytest.raises(UserError, match=message):
        load_hf(directory, spec)
    with_tensor(directory, "lm_head.weight", embedding[1:])
    with pytest.raises(UserError, match=r"lm_head.weight has shape \[63, 32\]"):
        load_hf(directory, spec)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, "bfloat16"])
def test_rotary_frequencies_must_be_those_of_config_json(tmp_path, dtype):
    spec = tiny_spec(rope_scaling=LinearScaling(4.0), rope_theta=5e6)
    directory = save_hf(tmp_path / "out", spec, drawn(spec)[1], dtype="float32")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    plain = 5e6 ** -(np.arange(4) / 4)
    for frequencies in (plain, plain / 4):  # older files have those before scaling
        with_tensor(directory, name, frequencies.astype(np.dtype(dtype)))
        load_hf(directory, spec)
    # Those of the file, also if the run changes them.
    load_hf(directory, tiny_spec(rope_theta=7.0), override=["rope_theta", "rope_scaling"])
    with_tensor(directory, name, (4e6 ** -(np.arange(4) / 4)).astype(np.dtype(dtype)))
    message = "inv_freq has frequencies of another RoPE than config.json, where rope_theta = 500000"
    with pytest.raises(UserError, match=message):
        load_hf(directory, spec)


def extra(path):
    save_file(load_file(path) | {"model.extra.weight": np.ones(3, np.float32)}, path)


def without_embedding(path):
    tensors = load_file(path)
    tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path)


def truncated(keep):
    return lambda path: path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (extra, " has tensor model.extra.weight, which model.safetensors.index.json does not"),
        (Path.unlink, " does not exist"),
        (without_embedding, " lacks tensor model.embed_tokens.weight"),
        *((truncated(x), " is truncated or not a safetensors file") for x in (0, 4, 100, -1)),
    ],
)
def test_a_damaged_shard_is_named(checkpoint, change, message):
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    change(path)
    with pytest.raises(UserError, match=f"{path}{message}"):
        load_hf(checkpoint, untied())


def test_a_damaged_index_is_named(checkpoint):
    path = checkpoint / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"model.norm.weight": "../other.safetensors"}}')
    with pytest.raises(UserError, match="not a plain file name"):
        load_hf(checkpoint, untied())
    path.write_text("{}")
    with pytest.raises(UserError, match='index.json has no "weight_map"'):
        load_hf(checkpoint, untied())
    path.unlink()
    with pytest.raises(UserError, match="has neither model.safetensors nor"):
        load_hf(checkpoint, untied())


# Writing


def test_only_new_or_empty_folders_are_written(tmp_path):
    spec = tiny_spec()
    out = tmp_path / "out"
    out.mkdir()
    save_hf(out, spec, drawn(spec)[1])
    assert read_hf_config(out).vocab_size == spec.vocab_size
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UserError, match="out exists and is not an empty folder"):
        save_hf(out, spec, drawn(spec)[1])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file/out"):
        save_hf(tmp_path / "file" / "out", spec, drawn(spec)[1])


def test_the_original_context_of_another_config_json_is_not_copied(original, checkpoint, tmp_path):
    rewrite_config(checkpoint, original_max_position_embeddings=100)
    assert read_hf_config(checkpoint).rope_scaling.original_max_position_embeddings == 100
    spec = untied()
    out = save_hf(tmp_path / "out", spec, drawn(spec)[1], dtype="float32", like=checkpoint)
    assert read_hf_config(out).rope_scaling == spec.rope_scaling


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    saved = []

    def full_disk(tensors, path, metadata):
        if saved:
            raise OSError(28, "No space left on device")
        saved.append(path)
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(write, "save_file", full_disk)
    spec = tiny_spec()
    with pytest.raises(UserError, match="cannot write .*out: .*No space left on device"):
        save_hf(tmp_path / "out", spec, drawn(spec)[1], max_shard_bytes=10_000)
    assert saved and list(tmp_path.iterdir()) == []


def test_a_folder_is_kept_until_it_is_replaced(tmp_path, monkeypatch):
    """Also if a process was killed when it had moved the folder away."""
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "model.safetensors").write_text("older")
    (tmp_path / ".out.tmp").mkdir()

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    spec = tiny_spec()
    with monkeypatch.context() as patch:
        patch.setattr(write, "save_file", full_disk)
        with pytest.raises(UserError, match="No space left on device"):
            save_hf(tmp_path / "out", spec, drawn(spec)[1], replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_text() == "older"
    save_hf(tmp_path / "out", spec, drawn(spec)[1], replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_file(tmp_path / "out" / "model.safetensors")


def test_what_a_killed_process_left_is_removed(tmp_path):
    spec = tiny_spec()
    for name in (".out.tmp", ".out.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    save_hf(tmp_path / "out", spec, drawn(spec)[1])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    save_hf(tmp_path / "out", spec, drawn(spec)[1], replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_adapters_replace_older_ones_with_the_same_bytes(tmp_path):
    spec = tiny_spec(lora=LoraSpec(2, 4.0, ("q_proj",)))
    shapes = {n: x.shape for n, x in spec.parameters.items() if is_adapter(n)}
    rng, folder = np.random.default_rng(0), tmp_path / "adapter"
    adapters = {n: jnp.asarray(rng.normal(size=x), jnp.float32) for n, x in shapes.items()}
    base = {"norm.weight": jnp.ones(8)}
    files = set()
    for _ in range(6):  # the order of two entries of metadata is random
        save_peft(folder, spec, adapters, base=base, base_name="b")
        files.add((folder / PEFT_FILE).read_bytes())
        (folder / "older.txt").write_text("of the older one")
    assert len(files) == 1 and len(load_file(folder / PEFT_FILE)) == 2 * spec.num_layers
    (folder / "older.txt").unlink()
    assert {x.name for x in folder.iterdir()} == {PEFT_CONFIG, PEFT_FILE}
    (folder / PEFT_CONFIG).unlink()
    with pytest.raises(UserError, match="adapter exists and is not an empty folder"):
        save_peft(folder, spec, adapters, base=base, base_name="b")
    assert [x.name for x in folder.iterdir()] == [PEFT_FILE]


def test_fields_that_do_not_describe_what_is_written_are_dropped(original, tmp_path):
    spec = untied()
    like = shutil.copytree(original, tmp_path / "like")
    config = json.loads((like / "config.json").read_text())
    stale = {"_name_or_path": "x", "auto_map": {"AutoModel": "x.Y"}}
    stale |= {"original_max_position_embeddings": 7, "sparse_attention": {}}
    own = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "my_field": 4}
    own |= {"transformers_version": "4.51.0"}
    (like / "config.json").write_text(json.dumps(config | stale | own))
    for eos, expected in (((), 2), ([5], 5), ([5, 2], [5, 2])):
        out = save_hf(tmp_path / "out", spec, drawn(spec)[1], like=like, eos=eos, replace=True)
        written = json.loads((out / "config.json").read_text())
        dtypes = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
        assert written == config | own | dtypes | {"eos_token_id": expected}


def test_invalid_arguments_are_refused(tmp_path):
    spec = tiny_spec()
    with pytest.raises(UserError, match='dtype="float16" must be one of bfloat16, float32'):
        save_hf(tmp_path / "out", spec, drawn(spec)[1], dtype="float16")
    with pytest.raises(UserError, match="max_shard_bytes=0 must be positive"):
        save_hf(tmp_path / "out", spec, drawn(spec)[1], max_shard_bytes=0)
    with pytest.raises(UserError, match="embed.* has shape .* in state, but config needs"):
        save_hf(tmp_path / "out", tiny_spec(vocab_size=99), drawn(spec)[1])
    assert not (tmp_path / "out").exists()


def test_a_pure_dict_is_written_too(tmp_path):
    spec = tiny_spec()
    _, state = drawn(spec)
    save_hf(tmp_path / "out", spec, nnx.to_pure_dict(state), dtype="float32")
    assert_states_close(load_hf(tmp_path / "out", spec), state, tolerance=0)


def test_a_file_may_be_as_large_as_the_limit_and_its_folder_in_a_new_one(tmp_path):
    spec = tiny_spec(tie_word_embeddings=False)
    whole = save_hf(tmp_path / "new" / "whole", spec, drawn(spec)[1], dtype="float32")
    total = sum(x.nbytes for x in load_file(whole / "model.safetensors").values())
    for name, limit, files in (("one", total, 1), ("two", total - 1, 2)):
        out = save_hf(tmp_path / name, spec, drawn(spec)[1], dtype="float32", max_shard_bytes=limit)
        assert len(list(out.glob("*.safetensors"))) == files
