"""Steps of transformers on torch."""

import dataclasses
import importlib
import os
import time
from typing import Any

from benchmarks.report import versions
from benchmarks.step.peers.arms import (
    CLIP_NORM,
    INIT_STDDEV,
    LEARNING_RATE,
    RMS_NORM_EPS,
    ROPE_THETA,
    Sizes,
    on_cpu,
)

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_NAMES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
_NAMES |= {"num_kv_heads": "num_key_value_heads"}


class Step:
    """A model of transformers and its optimizer; `liger` replaces parts by Liger's kernels."""

    def __init__(self, sizes: Sizes, tokens: int, variant: str) -> None:
        self.torch = torch = importlib.import_module("torch")
        if not torch.cuda.is_available() and not on_cpu():
            raise ImportError("torch sees no CUDA device")
        self.sizes, self.count = sizes, tokens
        self.models = importlib.import_module("transformers")
        if variant == "liger":
            importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen2()

    def load(self) -> dict[str, Any]:
        torch, sizes = self.torch, self.sizes
        self.device = device = "cpu" if on_cpu() else "cuda"
        values = {_NAMES.get(name, name): x for name, x in dataclasses.asdict(sizes).items()}
        config = self.models.Qwen2Config(
            **values,
            max_position_embeddings=self.count,
            rms_norm_eps=RMS_NORM_EPS,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            initializer_range=INIT_STDDEV,
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        with torch.device(device):
            self.model = self.models.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        self.model.train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, fused=True)
        self.tokens = torch.from_numpy(sizes.tokens(self.count)).long().to(device)
        name = "cpu" if on_cpu() else torch.cuda.get_device_name()
        packages = "torch", "transformers", "liger-kernel", "triton"
        return {"device": name, "versions": versions(*packages), "backend": self._backend()}

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Takes steps; returns their losses and seconds."""
        losses, seconds = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
            loss.backward()
            self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            if not on_cpu():
                self.torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return losses, seconds

    def peak(self) -> int | None:
        """Bytes in use at most, so far."""
        return None if on_cpu() else self.torch.cuda.max_memory_allocated()

    def density(self) -> float:
        return 1.0

    def _backend(self) -> str:
        """The kernels that torch selects for this attention, and how it allocates."""
        torch, sizes = self.torch, self.sizes
        heads = sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads
        how = {"device": self.device, "dtype": torch.bfloat16, "requires_grad": True}
        q, k, v = (torch.empty(1, n, self.count, sizes.head_dim, **how) for n in heads)
        choice = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
        name = torch.nn.attention.SDPBackend(choice).name.lower()
        allocator = os.environ.get(_ALLOCATOR)
        return f"{name}, {_ALLOCATOR}={allocator}" if allocator else name
