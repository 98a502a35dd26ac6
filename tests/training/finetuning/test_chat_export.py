"""What a chat fine-tune of a base model exports: where answers end, and files of its tokenizer."""

import json
import os
import shutil
import warnings

import jax
import numpy as np
import pytest

from mtraining_jax import Engine, GenerateOptions
from mtraining_jax.config import Config, validate
from mtraining_jax.data.chat.conversation import read_conversation
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.models.huggingface.config import read_hf_values
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.tools.evaluate.load import load
from mtraining_jax.tools.export.write import save_hf
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.checkpoint.store import read_record
from tests.data.chat.chat_folders import template_of, write_folder
from tests.models.common import drawn, tiny_spec
from tests.training.common import run, tiny_config
from tests.training.conftest import use_shared_programs

END, TURN, OTHER = 266, 268, 271  # <|endoftext|>, <|im_end|>, <|eot|>
SPEC = tiny_spec(
    vocab_size=276, num_layers=1, num_heads=2, head_dim=16, max_position_embeddings=128,
    tie_word_embeddings=False,
)  # fmt: skip
GENERATION = {"eos_token_id": [END, OTHER], "max_length": 128, "temperature": 0.7}
# The next token depends on the newest one alone: an answer is "Yes", and ends with its turn.
NEXT = {"\n": "Y", "Y": "e", "e": "s", "s": "<|im_end|>", "a": "<|eot|>"}


def write_base(folder):
    """A model that was trained on conversations, as a base model that does not say so."""
    tokenizer = make_tokenizer(write_folder(folder / "t", template_of("smollm2", False), True), END)
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(SPEC.vocab_size, SPEC.hidden_size)).astype(np.float32)
    head = np.zeros_like(embedding)
    for before, after in NEXT.items():
        (i,), (j,) = tokenizer.encode(before), tokenizer.encode(after)
        head[j] += 4 * embedding[i]
    given = {"embed_tokens.weight": embedding, "lm_head.weight": head}

    def value(name: str, x: jax.Array) -> np.ndarray:
        is_norm = x.ndim == 1 or "layernorm" in name
        return given[name] if name in given else np.full(x.shape, float(is_norm), np.float32)

    state = drawn(SPEC)[1]
    state = jax.tree.map(value, parameter_names(state), state)
    out = save_hf(folder / "base", SPEC, state, dtype="float32", eos=[END])
    settings = json.loads((folder / "t" / "tokenizer_config.json").read_text())
    contents = {
        "tokenizer_config.json": settings | {"model_max_length": 128},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
        "generation_config.json": GENERATION,
    }
    config = json.loads((out / "config.json").read_text())
    contents["config.json"] = config | {"_name_or_path": "x", "auto_map": {"AutoModel": "x.Y"}}
    contents["config.json"]["original_max_position_embeddings"] = 77
    for name, content in contents.items():
        (out / name).write_text(json.dumps(content))
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(folder / "t" / name, out)
    (out / "additional_chat_templates").mkdir()
    (out / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].content }}")
    for name in ("tokenizer.model", "LICENSE.txt", "USE_POLICY.md", "vocab.txt", "README.md"):
        (out / name).write_text(f"the {name}")
    (out / "pytorch_model.bin").write_text("weights")
    return out


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A run that trains adapters for one step on conversations, with a longer context."""
    folder = tmp_path_factory.mktemp("chat")
    base = write_base(folder)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    (folder / "chats.jsonl").write_text(3 * (json.dumps({"messages": talk}) + "\n"))
    longer = {"max_position_embeddings": 256, "rope_theta": 5e4}
    longer["rope_scaling"] = {"type": "yarn", "factor": 2.0}
    longer["rope_scaling"]["original_max_position_embeddings"] = 128
    table = tiny_config(folder).to_dict() | {
        "model": {"init_from": str(base), "override": list(longer), "dtype": "float32", **longer},
        "data": {
            "source": "jsonl", "paths": [str(folder / "chats.jsonl")], "mode": "pack",
            "messages_field": "messages", "seq_len": 128, "batch_size": 1,
        },
        "lora": {"rank": 2},
        "optimizer": {"lr": 1e-6},
        "parallel": {"nodes": 1, "devices_per_node": 1},
        "checkpoint": {"export_hf": True},
    }  # fmt: skip
    cache = os.environ["JAX_COMPILATION_CACHE_DIR"]
    table["run"] |= {"steps": 1, "compile_cache_dir": cache}
    table["sparsity"] |= {"min_sparse_tokens": 256}
    config = Config.from_record(table, "a test")
    validate(config)
    run(config)
    use_shared_programs()
    return config


def test_a_run_its_adapters_and_its_export_stop_alike(chat):
    question = read_conversation([{"role": "user", "content": "Hi"}], None, "a test")
    engine, overrides = None, {"parallel.devices_per_node": 1}
    for name in (".", "adapter", "hf"):
        loaded = load(chat.run.folder / name, "dense", overrides, dtype="float32")
        engine = Engine(loaded, like=None if name == "hf" else engine)
        assert engine.stop_ids("Hi") == engine.stop_ids(question) == {END, OTHER, TURN}, name
        found = []
        for prompt in (question, 40 * "." + "Y", 40 * "." + "a"):  # padded to one length
            (ids,) = engine.encode([prompt], 8)
            found.append(engine.generate(ids, GenerateOptions(max_new_tokens=8)))
        assert [x.text for x in found] == ["Yes", "es", ""], name
        assert {x.stopped for x in found} == {"end"}, name
        # The folder of the base does not have the longer context.
        spec = engine.loaded.network.spec
        assert (spec.max_position_embeddings, spec.rope_theta) == (256, 5e4), name
        assert spec.rope_scaling == chat.model.rope_scaling, name


def test_every_file_of_the_tokenizer_goes_out(chat):
    base, out = chat.run.folder.parents[1] / "base", chat.run.folder / "hf"
    same = {
        "LICENSE.txt", "USE_POLICY.md", "additional_chat_templates/short.jinja",
        "chat_template.jinja", "tokenizer.json", "tokenizer.model", "vocab.txt",
    }  # fmt: skip
    new = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
    new |= {"special_tokens_map.json", "sparse_attention.py"}
    for name, own in (("hf", new), ("adapter", new - {"model.safetensors", "config.json"})):
        folder = chat.run.folder / name
        files = {str(x.relative_to(folder)) for x in folder.rglob("*") if x.is_file()}
        if name == "adapter":
            own = own - {"sparse_attention.py"} | {"adapter_config.json", "model_config.json"}
            own |= {"adapter_model.safetensors"}
        assert files == same | own, name
        assert all((folder / x).read_bytes() == (base / x).read_bytes() for x in same)
    assert read_hf_values(chat.run.folder / "adapter" / "model_config.json") == read_hf_values(out)


@pytest.mark.parametrize("name", ["hf", "adapter"])
def test_files_state_the_longer_context_and_all_end_tokens(chat, name):
    base, out = chat.run.folder.parents[1] / "base", chat.run.folder / name

    def read(folder, file):
        return json.loads((folder / file).read_text())

    changed = {"eos_token_id": [END, OTHER, TURN], "max_length": 256}
    assert read(out, "generation_config.json") == GENERATION | changed
    settings = read(base, "tokenizer_config.json")
    changed = {"eos_token": "<|im_end|>", "model_max_length": 256}
    assert read(out, "tokenizer_config.json") == settings | changed
    assert read(out, "special_tokens_map.json") == {"eos_token": "<|im_end|>"}
    config = read(out, "config.json" if name == "hf" else "model_config.json")
    assert config["eos_token_id"] == [END, OTHER, TURN] and config["pad_token_id"] is None
    assert config["max_position_embeddings"] == 256
    stale = {"_name_or_path", "auto_map", "original_max_position_embeddings"}
    assert not stale & config.keys()


def test_short_documents_are_not_sparse_steps(chat):
    place = read_record(checkpoint_folder(chat), 1)["loader"]
    assert place["end_tokens"] == [END, OTHER, TURN] and place["lowest_density"] > 0.999
    assert chat.sparsity.kind == "sampled_rows"
    assert load(chat.run.folder, "dense").note_on_dense_use() is None


def test_transformers_stops_by_itself(chat):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, question = chat.run.folder / "hf", [{"role": "user", "content": "Hi"}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages themselves
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        prompt = tokenizer.apply_chat_template(question, **how)
        found = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(found[0, prompt["input_ids"].shape[1] :]) == "Yes<|im_end|>"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.model_max_length == 256
    assert model.generation_config.eos_token_id == [END, OTHER, TURN]
    assert tokenizer.apply_chat_template(question, chat_template="short", tokenize=False) == "Hi"
    assert model.config.max_position_embeddings == 256
