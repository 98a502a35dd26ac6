"""Makes the small checkpoints of tests/checkpoints with transformers, and their golden outputs.

`python tests/models/make_checkpoints.py FOLDER [NAME ...]` writes one folder per checkpoint:
config.json and model.safetensors as transformers saves them, and golden.npz with its outputs in
fp32 on a CPU. The weights of qwen2_tiny_yarn are those of qwen2_tiny and are stored once. It needs
torch and transformers, and nothing of this repository.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

EVERY = 8  # the golden logits are those of every eighth position
SEED = 2
SIZES = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
# Factors of longrope, one per frequency: head_dim / 2.
SHORT, LONG = [1 + 0.2 * i for i in range(4)], [1 + 2.5 * i for i in range(4)]
QWEN2 = SIZES | {
    "num_hidden_layers": 3, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MASKED = "qwen2_tiny"  # has golden outputs with label masks
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.1.mlp."
# Weights in fp32: other tests have recorded results of these models. Other weights are bfloat16.
FLOAT32 = ("qwen2_tiny", "qwen2_tiny_yarn", "llama3_tiny")
# Configuration, and the tensors with golden gradients.
CHECKPOINTS = {
    "qwen2_tiny": (
        Qwen2Config(**QWEN2, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        (ATTENTION + "q_proj.bias", "model.layers.2.mlp.down_proj.weight"),
    ),
    "qwen2_tiny_yarn": (
        Qwen2Config(
            **QWEN2 | {"max_position_embeddings": 256},
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (ATTENTION + "q_proj.bias", "model.layers.2.mlp.down_proj.weight"),
    ),
    "qwen3_tiny": (
        Qwen3Config(
            **SIZES, head_dim=32, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        (ATTENTION + "q_proj.weight", ATTENTION + "k_norm.weight", MLP + "down_proj.weight"),
    ),
    "qwen3_moe_tiny": (
        Qwen3MoeConfig(
            **SIZES, head_dim=16, tie_word_embeddings=True, moe_intermediate_size=16,
            num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        (ATTENTION + "q_proj.weight", "model.layers.0.mlp.gate.weight"),
    ),
    "llama3_tiny": (
        LlamaConfig(
            **SIZES, head_dim=16, tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        ),
        (ATTENTION + "q_proj.weight", MLP + "down_proj.weight"),
    ),
    "mistral_tiny": (
        MistralConfig(
            **SIZES, head_dim=16, tie_word_embeddings=False, sliding_window=64,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        (ATTENTION + "q_proj.weight", MLP + "down_proj.weight"),
    ),
    "gemma3_tiny": (
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 3}, head_dim=32, tie_word_embeddings=True,
            sliding_window=64, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        (
            ATTENTION + "q_proj.weight", ATTENTION + "k_norm.weight",
            "model.layers.2.mlp.down_proj.weight",
        ),
    ),
    "gpt_oss_tiny": (
        GptOssConfig(
            **SIZES | {"num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 24},
            head_dim=16, sliding_window=64, num_local_experts=4, num_experts_per_tok=2,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
            },
        ),
        (
            ATTENTION + "k_proj.weight", ATTENTION + "o_proj.bias", ATTENTION + "sinks",
            "model.layers.1.self_attn.sinks", "model.layers.0.mlp.router.weight",
            "model.layers.0.mlp.router.bias", MLP + "experts.gate_up_proj",
            MLP + "experts.gate_up_proj_bias", MLP + "experts.down_proj_bias",
        ),
    ),
    "phi3_tiny_longrope": (
        Phi3Config(
            **SIZES, tie_word_embeddings=False, original_max_position_embeddings=64,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT,
                "long_factor": LONG, "original_max_position_embeddings": 64,
                "partial_rotary_factor": 1.0,
            },
        ),
        (ATTENTION + "qkv_proj.weight", MLP + "gate_up_proj.weight"),
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    """Writes one checkpoint and its golden outputs."""
    config, gradients = CHECKPOINTS[name]
    dtype = torch.float32 if name in FLOAT32 else torch.bfloat16
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter_name, parameter in parameters.items():
            # Large enough that every part of the network matters to the output.
            if parameter_name.endswith("norm.weight"):
                mean = 0 if config.model_type == "gemma3_text" else 1  # Gemma adds 1
                parameter.copy_(mean + 0.2 * torch.randn_like(parameter))
            else:
                scale = 0.4 if parameter_name.endswith("bias") else 0.15
                if parameter_name.endswith(("gate_up_proj", "sinks")):
                    scale = 0.6  # reaches the limits of gpt-oss
                parameter.copy_(scale * torch.randn_like(parameter))
            parameter.copy_(parameter.to(dtype))  # outputs are those of the weights as saved
    # 144 tokens: longer than the 64 to which YaRN and longrope refer.
    tokens = torch.randint(0, config.vocab_size, (2, 144))
    result = model(tokens, labels=tokens)
    result.loss.backward()
    gradient_of = {f"grad:{x}": parameters[x].grad.numpy().copy() for x in gradients}
    (folder / name).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        folder / name / "golden.npz",
        input_ids=tokens.numpy().astype(np.int32),
        logits=result.logits.detach().numpy()[:, ::EVERY],
        loss=result.loss.detach().numpy(),
        **gradient_of,
        **(masked(model, tokens) if name == MASKED else {}),
    )
    model.to(dtype).save_pretrained(folder / name)
    (folder / name / "generation_config.json").unlink(missing_ok=True)


def masked(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Outputs for documents with label masks: mean loss over their trained labels, gradients."""
    documents = [tokens[0, :120], tokens[1, :70], tokens[0, 50:140], tokens[1, 60:125]]
    trained = [(torch.arange(len(x)) // 9 + i) % (i + 2) == 0 for i, x in enumerate(documents)]
    count = sum(int(mask[1:].sum()) for mask in trained)
    model.zero_grad()
    losses = [
        model(ids[None], labels=torch.where(mask, ids, -100)[None], num_items_in_batch=count).loss
        for ids, mask in zip(documents, trained, strict=True)
    ]
    sum(losses).backward()
    gradients = {name: x.grad.numpy() for name, x in model.named_parameters()}
    squares = sum(np.square(x, dtype=np.float64).sum() for x in gradients.values())
    return {
        "masked_ids": torch.cat(documents).numpy().astype(np.int32),
        "masked_lengths": np.array([len(x) for x in documents]),
        "masked_trained": torch.cat(trained).numpy(),
        "masked_loss": sum(losses).detach().numpy(),
        "masked_grad_norm": np.sqrt(squares),
        **{f"masked_grad:{x}": gradients[x] for x in CHECKPOINTS[MASKED][1]},
    }


if __name__ == "__main__":
    for checkpoint in sys.argv[2:] or CHECKPOINTS:
        make(checkpoint, Path(sys.argv[1]))
