"""Model families, one file each, registered by the model_type of Hugging Face."""

from mtraining_jax.utils.plugins import Registry

_HERE = "mtraining_jax.models.families"

FAMILIES = Registry(
    "model family",
    base=f"{_HERE}.family:Family",
    built_in={
        "qwen2": f"{_HERE}.qwen2:Qwen2",
        "qwen3": f"{_HERE}.qwen3:Qwen3",
        "llama": f"{_HERE}.llama:Llama",
        "mistral": f"{_HERE}.mistral:Mistral",
        "gemma3_text": f"{_HERE}.gemma3:Gemma3",
        "phi3": f"{_HERE}.phi3:Phi3",
        "qwen3_moe": f"{_HERE}.qwen3_moe:Qwen3Moe",
        "gpt_oss": f"{_HERE}.gpt_oss:GptOss",
    },
)
