"""The numbers that define a Qwen2 model: static, hashable, checked once."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from mtraining_jax.errors import UserError

REMAT_POLICIES = ("none", "mlp", "attention", "attention_offload", "full")
COMPUTE_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071) as in config.json of a Hugging Face checkpoint.

    Attributes:
        factor: how many times longer the context becomes.
        original_max_position_embeddings: tokens the model was trained on, which set the range of
            frequencies that is blended. None reads max_position_embeddings instead, as
            transformers 4.48 did even when the field was there: two readings with different
            frequencies, so the checkpoint's config.json decides.
        beta_fast: rotations over the original context above which a frequency is kept.
        beta_slow: rotations below which a frequency is divided by `factor`.
        attention_factor: multiplies cos and sin; None is 0.1 ln(factor) + 1.
        truncate: round the borders of the blended range outwards to whole dimensions.
    """

    factor: float
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise UserError(f"model.rope_scaling.factor={self.factor} must be at least 1")
        original = self.original_max_position_embeddings
        if original is not None and original < 1:
            raise UserError(
                "model.rope_scaling.original_max_position_embeddings="
                f"{original} must be positive or absent"
            )
        if not self.beta_fast >= self.beta_slow > 0:
            raise UserError(
                f"model.rope_scaling.beta_fast={self.beta_fast} must not be below "
                f"beta_slow={self.beta_slow}, and both must be positive"
            )

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Takes the fields from a mapping or any object with these attributes; None is unset.

        Raises:
            UserError: if `factor` is missing, the type is not "yarn", or a value is impossible.
        """
        kind = _get(config, "type", None) or _get(config, "rope_type", None) or "yarn"
        if kind != "yarn":
            raise UserError(f'model.rope_scaling.type="{kind}" is unknown; allowed is "yarn"')
        values = {}
        for field in dataclasses.fields(cls):
            value = _get(config, field.name, None)
            if value is not None:
                values[field.name] = value
        if "factor" not in values:
            raise UserError("model.rope_scaling.factor is missing")
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A Qwen2 decoder.

    Attributes:
        vocab_size: rows of the embedding, V.
        hidden_size: width of the residual stream, E.
        num_layers: decoder layers, L.
        num_heads: query heads, Hq.
        num_kv_heads: key and value heads, Hk; divides Hq.
        head_dim: width of a head, D; even.
        intermediate_size: width of the gated MLP.
        rope_theta: base of the rotary frequencies.
        rope_scaling: YaRN, or None for plain RoPE.
        max_position_embeddings: tokens of context the model is meant for.
        rms_norm_eps: added to the mean square.
        tie_word_embeddings: the embedding is also the output matrix.
        dtype: what layers compute in; parameters are always fp32.
        remat: what the backward pass recomputes; see `remat.py`.
        mlp_chunk_size: tokens of one device whose intermediate activations exist at a time; not
            read with remat "none".
        mlp_kept_chunks: how many such chunks keep their first two products with remat "mlp".
        initializer_range: standard deviation of freshly drawn matrices.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 1_000_000.0
    rope_scaling: YarnScaling | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Literal["none", "mlp", "attention", "attention_offload", "full"] = "attention"
    mlp_chunk_size: int = 16384
    mlp_kept_chunks: int = 0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
            "mlp_chunk_size",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)} must be positive")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(
                f"model.head_dim={self.head_dim} must be even, for rotary positions turn pairs"
            )
        if self.dtype not in COMPUTE_DTYPES:
            raise UserError(f'model.dtype="{self.dtype}" is not one of {", ".join(COMPUTE_DTYPES)}')
        if self.remat not in REMAT_POLICIES:
            raise UserError(f'model.remat="{self.remat}" is not one of {", ".join(REMAT_POLICIES)}')
        if self.mlp_kept_chunks < 0:
            raise UserError(f"model.mlp_kept_chunks={self.mlp_kept_chunks} must not be negative")
        if self.mlp_kept_chunks and self.remat != "mlp":
            raise UserError(
                f'model.mlp_kept_chunks={self.mlp_kept_chunks} needs model.remat="mlp", and it is '
                f'"{self.remat}"'
            )

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Takes the fields from any object or mapping that has them; the rest keep defaults.

        `head_dim` of None is hidden_size / num_heads.

        Raises:
            UserError: if a field without a default is missing or a value is impossible.
        """
        if isinstance(config, cls):
            return config
        values = {}
        for field in dataclasses.fields(cls):
            value = _get(config, field.name, dataclasses.MISSING)
            if value is not dataclasses.MISSING:
                values[field.name] = value
        if values.get("head_dim") is None and values.get("num_heads"):
            values["head_dim"] = values.get("hidden_size", 0) // values["num_heads"]
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and values.get(field.name) is None:
                raise UserError(f"model.{field.name} is missing")
        scaling = values.get("rope_scaling")
        if scaling is not None and not isinstance(scaling, YarnScaling):
            values["rope_scaling"] = YarnScaling.from_config(scaling)
        return cls(**values)


def _get(config: Any, name: str, default: Any) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)
