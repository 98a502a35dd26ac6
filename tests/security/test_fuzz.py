"""Corrupt and hostile files: each reader returns the content or raises a UserError.

`MTRAINING_FUZZ=1000` sets the number of files per reader (default: 40, the same in every run).
See also test_fuzz_documents.py.
"""

import contextlib
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtraining_jax.config import Config
from mtraining_jax.data.chat.conversation import read_conversation
from mtraining_jax.data.chat.template import ChatTemplate
from mtraining_jax.data.sources.token_files import open_token_file, read_lengths
from mtraining_jax.data.tokenizer import make_tokenizer
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import Tensors
from mtraining_jax.patterns.budgets import load_budgets
from mtraining_jax.reporting.writers import JsonlWriter
from mtraining_jax.utils.errors import UserError
from tests.data.chat.chat_folders import template_of, write_folder
from tests.security.fuzzing import FUZZ, damaged, otherwise, result_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("no_gigabytes")


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, at = {}, 0
    for name, (kind, shape, data) in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(x[2] for x in tensors.values())


TENSORS = safetensors({"a.weight": ("F32", [2, 3], bytes(24)), "b": ("BF16", [4], bytes(8))})


def read_tensors(folder):
    tensors = Tensors(folder)
    for name in tensors.files:
        found = tensors.open(name)
        found.get_shape(), found.get_dtype()  # noqa: B018 - like `load_hf`


@FUZZ
@given(content=damaged(TENSORS))
def test_safetensors(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    result_of(lambda: read_tensors(folder))


HEADER = json.loads(TENSORS[8 : 8 + int.from_bytes(TENSORS[:8], "little")])


@FUZZ
@given(header=otherwise(HEADER), length=st.none() | st.integers(0, 2**64 - 1))
def test_headers_of_safetensors(folder, header, length):
    text = json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + bytes(32))
    result_of(lambda: read_tensors(folder))


INDEX = {"metadata": {"total_size": 32}, "weight_map": {"a.weight": "one.safetensors", "b": "one"}}


@FUZZ
@given(index=otherwise(INDEX))
def test_indices_of_shards(tmp_path_factory, folder, index):
    home = folder / "shards"
    home.mkdir(exist_ok=True)
    (home / "one.safetensors").write_bytes(TENSORS)
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    result_of(lambda: read_tensors(home))


CONFIGS = {
    name: json.loads((ROOT / f"tests/checkpoints/{name}/config.json").read_text())
    for name in ("qwen2_tiny_yarn", "llama3_tiny", "phi3_tiny_longrope")
}


@pytest.mark.parametrize("name", CONFIGS)
@FUZZ
@given(data=st.data())
def test_config_json(folder, name, data):
    (folder / "config.json").write_text(json.dumps(data.draw(otherwise(CONFIGS[name]))))
    result_of(lambda: read_hf_config(folder))


@FUZZ
@given(content=damaged((ROOT / "configs/tiny.toml").read_bytes()))
def test_toml(folder, content):
    (folder / "run.toml").write_bytes(content)
    result_of(lambda: Config.load(folder / "run.toml"))


@FUZZ
@given(data=st.data())
def test_configurations(data):
    table = json.loads(json.dumps(Config.load("tiny").to_dict()))
    changed = data.draw(otherwise(table))
    if isinstance(changed, dict):  # always a dict from TOML and checkpoints
        result_of(lambda: Config.from_dict(changed, "a test"))


def npy(array: np.ndarray, path: Path) -> bytes:
    np.save(path, array)
    return path.read_bytes()


@FUZZ
@given(data=st.data())
def test_npy(folder, data):
    whole = npy(np.arange(24, dtype=np.uint16).reshape(4, 6), folder / "whole.npy")
    path = folder / "tokens.npy"
    path.write_bytes(data.draw(damaged(whole)))
    found = result_of(lambda: open_token_file(path, "uint16"))
    if found is not None:  # entirely within the file
        assert found.ids.nbytes <= path.stat().st_size
        int(found.ids.astype(np.int64).sum())
    result_of(lambda: read_lengths(path, 24))


@FUZZ
@given(
    shape=st.lists(st.sampled_from([-1, 0, 1, 4, 6, 2**32, 2**62, 2**63]), max_size=4),
    kind=st.sampled_from(["<u2", "<i8", "|O", "<f4", "|V0", "<U4", "|b1", ">u4", [("a", "<u2")]]),
    fortran=st.booleans(),
)
def test_headers_of_npy(folder, shape, kind, fortran):
    header = f"{{'descr': {kind!r}, 'fortran_order': {fortran}, 'shape': {tuple(shape)!r}, }}"
    text = header.encode().ljust(117) + b"\n"
    path = folder / "tokens.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(48))
    found = result_of(lambda: open_token_file(path, "uint16"))
    if found is not None:
        assert found.ids.nbytes <= path.stat().st_size
    result_of(lambda: read_lengths(path, 24))


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
    "added_tokens": [{"id": 2, "content": "</s>", "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": True}],
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2}, "unk_token": "a"},
}  # fmt: skip

SETTINGS = {
    "bos_token": {"content": "a"}, "added_tokens_decoder": {"3": {"content": "c", "lstrip": True}},
    "extra_special_tokens": ["d"], "split_special_tokens": False,
    "tokenizer_class": "GPT2Tokenizer",
}  # fmt: skip


@FUZZ
@given(table=otherwise(TOKENIZER), settings=otherwise(SETTINGS))
def test_tokenizers(folder, table, settings):
    (folder / "tokenizer.json").write_text(json.dumps(table))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    found = result_of(lambda: make_tokenizer(str(folder / "tokenizer.json")))
    if found is not None:
        result_of(lambda: found.encode("a b"))
        result_of(lambda: found.bos_token)


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "weight": 0},
    {"role": "tool", "content": "x"},
    {"from": "gpt", "value": "a", "reasoning": None},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@FUZZ
@given(
    messages=otherwise(MESSAGES),
    tools=otherwise(TOOLS),
    settings=otherwise({"chat_template": "{{ messages[0].content }}"}),
)
def test_conversations_and_chat_templates(folder, messages, tools, settings):
    home = folder / "chat"
    if not home.exists():
        write_folder(home, template_of("qwen2.5", marked=False))
    (folder / "tokenizer.json").write_bytes((home / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    def encode(folder, messages, tools):
        template = ChatTemplate(make_tokenizer(str(folder / "tokenizer.json"), "<|endoftext|>"))
        found = template.encode(read_conversation(messages, tools, "a file"))
        assert found.ids.size == found.trained.size

    result_of(lambda: encode(home, messages, tools))
    result_of(lambda: encode(folder, MESSAGES, TOOLS))


BUDGETS = [{"0": ["vertical_and_slash", 8, 4, 0.5], "1": ["block_sparse", 8, 4, 1]}]


@FUZZ
@given(table=otherwise(BUDGETS))
def test_budgets(folder, table):
    (folder / "budgets.json").write_text(json.dumps(table))
    found = result_of(lambda: load_budgets(folder / "budgets.json"))
    if found is not None:
        assert found.verticals.min() >= 0 and found.verticals.dtype == np.int32


@FUZZ
@given(content=damaged(b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n'))
def test_metrics_of_an_interrupted_run(folder, content):
    (folder / "metrics.jsonl").write_bytes(content)
    path, run = folder / "metrics.jsonl", SimpleNamespace(run=SimpleNamespace(folder=folder))
    with contextlib.suppress(UserError):
        JsonlWriter(run, 1).close()
        assert len(path.read_bytes().splitlines()) <= len(content.splitlines())
