"""The pinned cases: calls of attention, and tiny training runs. All inputs come from NumPy."""

import copy
import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

BATCH, TOKENS, HEADS, KV_HEADS, DIM, BLOCK = 2, 256, 4, 2, 16, 16
# Documents that end inside of a block, and padding after the last one, in one of two sequences.
LENGTHS = [[70, 16, 101], [144, 112]]

_ROWS = {"block_size": BLOCK, "probe_queries_per_block": 4, "tau": 0.7, "min_sparse_tokens": 48}
_SLASHES = {
    "block_size": BLOCK, "top_p": 0.5, "max_verticals": 24, "max_slashes": 6, "sink_tokens": 2,
    "num_probe_queries": 8, "local_blocks": 1, "min_verticals": 4, "min_slashes": 2,
    "min_sparse_tokens": 48,
}  # fmt: skip
_FLEX = {
    "block_size": BLOCK, "gamma": 0.6, "js_threshold": 0.1, "min_budget": 16,
    "min_sparse_tokens": 48,
}  # fmt: skip
_ANTIDIAGONALS = {"block_size": BLOCK, "stride": 4, "tau": 0.6}
_MOBA = {"block_size": BLOCK, "chunk_size": 2 * BLOCK, "top_k": 3}
_BLOCKS = {"block_size": BLOCK, "top_blocks": 4}
_ADASPA = {"block_size": BLOCK, "sparsity": 0.4, "first_blocks": 1}
_DENSE = {"block_size": BLOCK}
_WINDOW = {"block_size": BLOCK, "window": 37}

_PACKED = {"lengths": LENGTHS}
_PADDED = {"valid_len": 203}
_BF16 = {"dtype": ml_dtypes.bfloat16}
# Meshes are replicas, nodes and devices per node.
_RING = {"mesh_shape": (1, 2, 2), "ring": "hierarchical"}
_FLAT = {"mesh_shape": (1, 1, 2), "ring": "flat", "layout": "zigzag"}
_GATHER = {"mesh_shape": (1, 1, 2)}
_REPLICAS = {"mesh_shape": (2, 2, 1)}

# Name of the case: class of the pattern, its fields, and options of `arguments`.
ATTENTION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sampled_rows-columns": ("SampledRows", _ROWS | {"columns": 16}, {}),
    "sampled_rows-packed-ring": ("SampledRows", _ROWS, _PACKED | _RING),
    "sampled_rows-gather-bf16": ("SampledRows", _ROWS, _GATHER | _BF16),
    "vertical_slash-padded": ("VerticalSlash", _SLASHES, _PADDED),
    "vertical_slash-packed-gather": ("VerticalSlash", _SLASHES, _PACKED | _GATHER),
    "flex_prefill-packed": ("FlexPrefill", _FLEX, _PACKED),
    "xattention-padded": ("XAttention", _ANTIDIAGONALS, _PADDED),
    "moba-padded-bf16": ("MoBA", _MOBA, _PADDED | _BF16),
    "moba-packed-gather": ("MoBA", _MOBA, _PACKED | _GATHER),
    "block_topk-replicas": ("BlockTopK", _BLOCKS, _REPLICAS),
    "adaspa": ("AdaSpa", _ADASPA, {"causal": False}),
    "dense-packed-sinks": ("Dense", _DENSE, _PACKED | {"sinks": True}),
    "dense-flat-bf16": ("Dense", _DENSE, _FLAT | _BF16),
    "window-packed": ("SlidingWindow", _WINDOW, _PACKED),
    "window-sinks-gather-bf16": ("SlidingWindow", _WINDOW, _GATHER | {"sinks": True} | _BF16),
}  # fmt: skip


@functools.cache
def inputs() -> dict[str, np.ndarray]:
    """q, k, v, sinks, and gradients of out and lse: multiples of 1/32 below 8.

    bfloat16 holds them exactly, and sums of their products are exact in any order, so no selection
    depends on one. Some keys and some distances are prominent, and heads differ in sharpness.
    """
    rng = np.random.default_rng(0)
    shapes = {
        "q": (BATCH, TOKENS, HEADS, DIM),
        "k": (BATCH, TOKENS, KV_HEADS, DIM),
        "v": (BATCH, TOKENS, KV_HEADS, DIM),
        "dout": (BATCH, TOKENS, HEADS, DIM),
        "dlse": (BATCH, HEADS, TOKENS),
        "sinks": (HEADS,),
    }
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    arrays["q"][..., 0] += 1.5
    arrays["k"][:, rng.choice(TOKENS, 8, replace=False), :, 0] += 5.0
    angle = np.arange(TOKENS)[None, :, None] * 0.3
    for name in "qk":
        arrays[name][..., 1] += 2.0 * np.cos(angle)
        arrays[name][..., 2] += 2.0 * np.sin(angle)
    arrays["q"] *= np.array([1.5, 0.25, 0.75, 1.0])[:, None]
    return {name: np.clip(np.round(x * 32), -255, 255) / 32 for name, x in arrays.items()}


def arguments(
    dtype: Any = np.float32, sinks: bool = False, **options: Any
) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the arguments of `adapter.attention`, and which tokens are real: bool [B, S].

    Padding has no gradient, so the gradients of other tokens do not depend on it.
    """
    real = np.zeros((BATCH, TOKENS), bool)
    for row, lengths in zip(real, options.get("lengths", [[TOKENS]] * BATCH), strict=True):
        start = 0
        for length in lengths:
            row[start : start + length] = True
            start += -(-length // BLOCK) * BLOCK
    real[:, options.get("valid_len", TOKENS) :] = False
    arrays = {name: inputs()[name].astype(dtype) for name in ("q", "k", "v", "dout")}
    arrays["dout"][~real] = 0
    arrays["dlse"] = (inputs()["dlse"] * real[:, None]).astype(np.float32)
    if sinks:
        arrays["sinks"] = inputs()["sinks"].astype(np.float32)
    return arrays | options, real


VOCAB, STEPS = 61, 4
_CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
_TINY: dict[str, dict[str, Any]] = {
    "run": {"name": "golden", "steps": STEPS},
    "model": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
    "sparsity": {
        "kind": "sampled_rows",
        "block_size": 8,
        "probe_queries_per_block": 2,
        "tau": 0.6,
        "local_blocks": 1,
    },
    "parallel": {"nodes": 1, "devices_per_node": 1},
    "data": {"source": "tokens", "seq_len": 128, "batch_size": 2},
    "optimizer": {"lr": 1e-2},
    "loss": {"chunk_size": 24},
    "metrics": {"tensorboard": False, "report": False},
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
# Fields that differ from `_TINY`; a run named "resumed..." stops after half of its steps.
TRAINING: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {"parallel": {"nodes": 2, "devices_per_node": 2}},
    "windows": {"model": {"family": "mistral", "sliding_window": 21}},
    "experts": {
        "model": {"family": "qwen3_moe", "remat": "none"} | _EXPERTS,
        "sparsity": {"kind": "dense"},
        "data": {"mask_documents": True, "eos": 14, "shuffle": False},
    },
    "lora": {
        "model": {
            "init_from": str(_CHECKPOINTS / "llama3_tiny"),
            "dtype": "float32",
            "remat": "none",
        },
        "lora": {"rank": 4, "dropout": 0.1},
        "sparsity": {"kind": "dense"},
        "optimizer": {"accumulation_steps": 2},
    },
    "resumed": {
        "model": {"remat": "none"},
        "sparsity": {"kind": "dense"},
        "optimizer": {"schedule": "cosine", "warmup_steps": 1},
        "checkpoint": {"interval": STEPS // 2},
    },
}


def configuration(name: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the configuration of a run with all of its files in `folder`."""
    table = copy.deepcopy(_TINY)
    for section, fields in TRAINING[name].items():
        # A base model has the sizes in its own configuration.
        base = {} if "init_from" in fields else table.get(section, {})
        table[section] = base | fields
    # Each token mostly follows from the one before it, which is easy to learn.
    rng = np.random.default_rng(0)
    follows, tokens = rng.permutation(VOCAB), [0]
    for surprise in rng.random(4000) < 0.1:
        tokens.append(int(rng.integers(VOCAB)) if surprise else int(follows[tokens[-1]]))
    np.save(folder / "tokens.npy", np.array(tokens, np.uint16))
    table["data"]["paths"] = [str(folder / "tokens.npy")]
    table["run"]["output_dir"] = str(folder / "runs")
    return table
