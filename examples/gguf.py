"""Converts GGUF files, the format of llama.cpp, to Hugging Face folders.

The package gguf of llama.cpp's authors (`pip install gguf`, or the extra gguf) reads the files and
dequantizes their tensors. Three architectures are supported, llama, qwen2 and gemma3, with the
tokenizers smollm, qwen2 and SentencePiece's. Tensors are converted one at a time, and a folder
appears only when complete.
"""

import functools
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from mtraining_jax.utils.errors import UserError

# Shape and reader of each tensor by its Hugging Face name.
Tensors = Mapping[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# Larger files are split; this is also what a conversion needs in memory.
MAX_SHARD_BYTES = 2_000_000_000
# Names of a layer's tensors in GGUF and in the checkpoint.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Those of Gemma, which has a norm after each part of a layer as well.
_GEMMA_LAYER = _LAYER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Every sixth layer of Gemma 3 attends to all tokens; the others rotate by other angles.
_GEMMA_FULL_LAYERS, _GEMMA_WINDOW_THETA = 6, 10000.0
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens


class _Architecture(NamedTuple):
    """What differs between architectures, in Hugging Face's and llama.cpp's words.

    llama.cpp rotates adjacent numbers of a head in RoPE for some architectures, and Hugging Face
    always numbers that are half a head apart. `permuted`: GGUF has the rows of q and k reordered.
    `norm_offset`: what GGUF has added to the weights of norms.
    """

    name: str
    model_type: str
    permuted: bool
    biases: tuple[str, ...]
    fields: dict[str, Any]
    layer: dict[str, str] = _LAYER
    norm_offset: float = 0.0


class _Tokenizer(NamedTuple):
    """The steps before byte-level BPE, and whether documents have a start token."""

    normalizer: dict[str, Any] | None
    split: dict[str, Any]
    use_regex: bool
    has_start: bool


_ARCHITECTURES = {
    "llama": _Architecture(
        "LlamaForCausalLM",
        "llama",
        True,
        (),
        {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": _Architecture(
        "Qwen2ForCausalLM",
        "qwen2",
        False,
        ("attn_q", "attn_k", "attn_v"),
        {"hidden_act": "silu", "use_sliding_window": False},
    ),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        False,
        (),
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        _GEMMA_LAYER,
        1.0,
    ),
}
_SPACE = "\u2581"  # in tokens of SentencePiece
_OTHER_ENDS = "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"
_TOKENIZERS = {
    "smollm": _Tokenizer(None, {"type": "Digits", "individual_digits": True}, True, True),
    "qwen2": _Tokenizer(
        {"type": "NFC"},
        {
            "type": "Split",
            # Contractions, words with what precedes them, single digits, punctuation, whitespace.
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        False,
        False,
    ),
}


class Gguf:
    """A file; its tensors are read on demand.

    Attributes:
        metadata: numbers, strings, and lists of them, by name.
        names: names of the tensors.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise UserError(
                f"GGUF files need the package gguf: uv run --extra gguf, or pip install gguf "
                f"({error})"
            ) from None
        try:
            reader = gguf.GGUFReader(path)
            self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        except (IndexError, KeyError, ValueError) as error:
            raise UserError(f"{path} is not a complete GGUF file: {error}") from None
        self._path, self._dequantize = path, gguf.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.names = self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in Hugging Face's order: a matrix is [out, in]."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, fp32.

        Raises:
            UserError: if it is quantized in a way that the package cannot read.
        """
        found = self._tensors[name]
        try:
            return self._dequantize(found.data, found.tensor_type).reshape(self.shape(name))
        except NotImplementedError as error:
            raise UserError(f"tensor {name} of {self._path} is not supported: {error}") from None


def config_json(file: Gguf, dtype: str, tied: bool) -> dict[str, Any]:
    """Returns the contents of config.json."""
    data, kind = file.metadata, file.metadata["general.architecture"]
    heads, width = data[f"{kind}.attention.head_count"], data[f"{kind}.embedding_length"]
    # Without a type, llama.cpp scales linearly by the factor.
    usual = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scale_linear": 1.0}
    head_dim, fields = width // heads, dict(_ARCHITECTURES[kind].fields)
    if kind == "gemma3":
        head_dim, layers = data["gemma3.attention.key_length"], data["gemma3.block_count"]
        kinds = "full_attention", "sliding_attention"
        fields |= {
            "query_pre_attn_scalar": head_dim,
            "sliding_window": data["gemma3.attention.sliding_window"],
            "layer_types": [kinds[n % _GEMMA_FULL_LAYERS > 0] for n in range(1, layers + 1)],
            "rope_local_base_freq": _GEMMA_WINDOW_THETA,
        }
        usual |= {"rope.freq_base_swa": _GEMMA_WINDOW_THETA, "final_logit_softcapping": 0.0}
        usual |= {"attention.sliding_window_pattern": _GEMMA_FULL_LAYERS}
    else:
        usual["attention.sliding_window"] = 0
    usual |= dict.fromkeys(("rope.dimension_count", "attention.key_length"), head_dim)
    for name, needed in usual.items():
        if (found := data.get(f"{kind}.{name}", needed)) != needed:
            raise UserError(f"{kind}.{name} = {found} in the GGUF file must be {needed}")
    # Turns and messages of chat models may end with other tokens than documents.
    ends = data["tokenizer.ggml.eos_token_id"], *map(data.get, _OTHER_ENDS)
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "architectures": [_ARCHITECTURES[kind].name],
        "model_type": _ARCHITECTURES[kind].model_type,
        "vocab_size": len(data["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": data[f"{kind}.feed_forward_length"],
        "num_hidden_layers": data[f"{kind}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": data[f"{kind}.attention.head_count_kv"],
        "head_dim": head_dim,
        "max_position_embeddings": data[f"{kind}.context_length"],
        # Six digits, because GGUF stores fp32, where 1e-5 is 9.99999975e-06.
        "rms_norm_eps": float(f"{data[f'{kind}.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(data[f"{kind}.rope.freq_base"]),
        "tie_word_embeddings": tied,
        **fields,
        "bos_token_id": data["tokenizer.ggml.bos_token_id"],
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "torch_dtype": dtype,
    }


def _tokenizer(file: Gguf) -> _Tokenizer:
    kind = file.metadata["tokenizer.ggml.model"], file.metadata.get("tokenizer.ggml.pre")
    if kind[0] != "gpt2" or kind[1] not in _TOKENIZERS:
        known = (
            " or ".join(str(("gpt2", name)) for name in _TOKENIZERS) + ", or 'llama' in a gemma3"
        )
        raise UserError(f"the tokenizer in the GGUF file is {kind}; it must be {known}")
    return _TOKENIZERS[kind[1]]


def tokenizer_json(file: Gguf) -> dict[str, Any]:
    """Returns the contents of tokenizer.json: a split into words, then byte-level BPE.

    With SentencePiece, as in Gemma, spaces are letters and the text is not split.

    Raises:
        UserError: if the file has another type of tokenizer.
    """
    data, spm = file.metadata, _is_sentencepiece(file)
    tokens = {
        token: (number, kind)
        for number, (token, kind) in enumerate(
            zip(data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"], strict=True)
        )
        if kind != _UNUSED
    }
    # Where spaces are letters, a token of several spaces is found in the changed text.
    whole = {"single_word": False, "lstrip": False, "rstrip": False}
    parts = _sentencepiece(file) if spm else _byte_level(_tokenizer(file))
    merges = _merges(file) if spm else [x.split(" ") for x in data["tokenizer.ggml.merges"]]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "special": kind == _CONTROL,
                "normalized": spm and kind == _USER_DEFINED,
                **whole,
            }
            for token, (number, kind) in tokens.items()
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        **parts,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>" if spm else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": spm,
            "byte_fallback": spm,
            "ignore_merges": False,
            "vocab": {token: number for token, (number, _) in tokens.items()},
            "merges": merges,
        },
    }


def _is_sentencepiece(file: Gguf) -> bool:
    data = file.metadata
    model, before = data["tokenizer.ggml.model"], data.get("tokenizer.ggml.add_space_prefix", True)
    return (data["general.architecture"], model, before) == ("gemma3", "llama", False)


def _byte_level(steps: _Tokenizer) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": steps.use_regex}
    byte_level["use_regex"] = steps.use_regex
    split = {"type": "Sequence", "pretokenizers": [steps.split, byte_level]}
    names = "normalizer", "pre_tokenizer", "decoder", "post_processor"
    return dict(zip(names, (steps.normalizer, split, byte_level, None), strict=True))


def _sentencepiece(file: Gguf) -> dict[str, Any]:
    data = file.metadata
    number = data["tokenizer.ggml.bos_token_id"]
    start, text = data["tokenizer.ggml.tokens"][number], {"Sequence": {"id": "A", "type_id": 0}}
    before = [{"SpecialToken": {"id": start, "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": [*before, text],
        "pair": [*before, text, text],
        "special_tokens": {start: {"id": start, "ids": [number], "tokens": [start]}},
    }
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "post_processor": template if data.get("tokenizer.ggml.add_bos_token", True) else None,
    }


def _merges(file: Gguf) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token of SentencePiece, highest score first."""
    names = "tokens", "scores", "token_type"
    columns = (file.metadata[f"tokenizer.ggml.{name}"] for name in names)
    scores = {token: x for token, x, kind in zip(*columns, strict=True) if kind == _NORMAL}
    pairs = [
        (-score, len(token[:at]), token[:at], token[at:])
        for token, score in scores.items()
        for at in range(1, len(token))
        if token[:at] in scores and token[at:] in scores
    ]
    return [pair[2:] for pair in sorted(pairs)]


def tokenizer_config_json(file: Gguf) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json, with the chat template."""
    data = file.metadata
    tokens = data["tokenizer.ggml.tokens"]
    has_start = _is_sentencepiece(file) or _tokenizer(file).has_start
    template = data.get("tokenizer.chat_template")  # base models have none
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[data["tokenizer.ggml.bos_token_id"]] if has_start else None,
        "eos_token": tokens[data["tokenizer.ggml.eos_token_id"]],
        **({} if template is None else {"chat_template": template}),
    }


def checkpoint_tensors(file: Gguf, tied: bool) -> Tensors:
    """Returns shape and reader of each tensor by its Hugging Face name.

    Raises:
        KeyError: if a tensor is missing.
        UserError: if there are tensors that the architecture does not have.
    """
    kind = file.metadata["general.architecture"]
    architecture = _ARCHITECTURES[kind]
    permuted = {
        "attn_q": file.metadata[f"{kind}.attention.head_count"],
        "attn_k": file.metadata[f"{kind}.attention.head_count_kv"],
    }
    permuted = permuted if architecture.permuted else {}
    # A file may have a tied matrix twice, and then quantizes the output less.
    twice = tied and "output.weight" in file.names
    embedding = "output.weight" if twice else "token_embd.weight"
    source = {"model.embed_tokens.weight": embedding, "model.norm.weight": "output_norm.weight"}
    if not tied:
        source["lm_head.weight"] = "output.weight"
    heads = {}
    for layer in range(file.metadata[f"{kind}.block_count"]):
        for theirs, ours in architecture.layer.items():
            for part in ("weight", "bias") if theirs in architecture.biases else ("weight",):
                name = f"blk.{layer}.{theirs}.{part}"
                source[f"model.layers.{layer}.{ours}.{part}"] = name
                heads[name] = permuted.get(theirs)
    used = {"token_embd.weight", *source.values()}
    if unknown := sorted(file.names - used):
        raise UserError(f"the GGUF file has tensors that {kind} does not have: {unknown[0]}")

    def read(name: str) -> np.ndarray:
        tensor = file.tensor(name)
        if heads.get(name):
            split = tensor.reshape(heads[name], -1, 2, tensor.shape[1])
            tensor = split.swapaxes(1, 2).reshape(tensor.shape)
        return tensor - architecture.norm_offset if "norm" in name else tensor

    return {
        ours: (file.shape(name), functools.partial(read, name)) for ours, name in source.items()
    }


def write_folder(
    folder: Path,
    gguf: Path,
    *,
    dtype: str = "bfloat16",
    tied: bool | None = None,
    notes: dict[str, str] | None = None,
) -> Path:
    """Converts a GGUF file to a Hugging Face folder, which appears only when complete.

    Args:
        folder: folder to create.
        gguf: a model with one of the architectures and tokenizers named above.
        dtype: dtype of the tensors, "bfloat16" or "float32".
        tied: whether the output shares its matrix with the embedding. By default it does if the
            file has no output matrix.
        notes: extra text files by name.

    Raises:
        UserError: if the folder exists or cannot be written, or the file is unreadable or of
            another model.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists")
    file = Gguf(gguf)
    kind = file.metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        known = " or ".join(_ARCHITECTURES)
        raise UserError(f"{gguf} has the architecture {kind}; it must be {known}")
    tied = "output.weight" not in file.names if tied is None else tied
    try:
        texts = {
            "config.json": config_json(file, dtype, tied),
            "tokenizer.json": tokenizer_json(file),
            "tokenizer_config.json": tokenizer_config_json(file),
        }
        tensors = checkpoint_tensors(file, tied)
    except KeyError as missing:
        raise UserError(f"{gguf} lacks {missing}") from None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as hidden:
            made = Path(hidden) / folder.name
            made.mkdir()
            for name, text in texts.items():
                (made / name).write_text(json.dumps(text, ensure_ascii=False, indent=1))
            for name, text in (notes or {}).items():
                (made / name).write_text(text)
            _save(made, tensors, DTYPES[dtype])
            made.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be written: {error}") from None
    return folder


def _save(folder: Path, tensors: Tensors, dtype: Any) -> None:
    """Writes the tensors, one file after another."""
    shards, size = [[]], 0
    for name, (shape, _) in tensors.items():
        added = math.prod(shape) * np.dtype(dtype).itemsize
        if shards[-1] and size + added > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += added
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        weight_map |= dict.fromkeys(names, file)
        shard = {name: np.ascontiguousarray(tensors[name][1](), dtype) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
        (folder / "model.safetensors.index.json").write_text(index)
