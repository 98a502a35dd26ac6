"""The sizes of a model: static, hashable and validated. Does not import JAX."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.parameters import ParamTable
from mtraining_jax.models.rope import RopeScaling, make_scaling

REMAT_POLICIES = ("none", "mlp", "attention", "attention_offload", "full")
COMPUTE_DTYPES = ("bfloat16", "float32")

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_chunk_size",
)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The sizes of a decoder.

    Attributes:
        vocab_size: rows of the embedding, V.
        hidden_size: width of the residual stream, E.
        num_layers: decoder layers, L.
        num_heads: query heads, Hq.
        num_kv_heads: key and value heads, Hk; divides Hq.
        head_dim: width of a head, D; even.
        intermediate_size: width of the gated MLP.
        family: decoder family; a name of `models.families`.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the rotary frequencies, or None for plain RoPE.
        max_position_embeddings: context length of the model in tokens.
        rms_norm_eps: added to the mean square.
        tie_word_embeddings: whether the embedding is also the output matrix.
        dtype: compute dtype of the layers; parameters are always fp32.
        remat: what the backward pass recomputes; see `remat.py`.
        mlp_chunk_size: tokens per device with intermediate activations in memory at a time; not
            used with remat "none".
        mlp_kept_chunks: number of such chunks that save their first two products with remat "mlp".
        initializer_range: standard deviation of initial matrices.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    family: str = "qwen2"
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    remat: Literal["none", "mlp", "attention", "attention_offload", "full"] = "attention"
    mlp_chunk_size: int = 16384
    mlp_kept_chunks: int = 0
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")
        for name, allowed in (("dtype", COMPUTE_DTYPES), ("remat", REMAT_POLICIES)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f'{name} = "{value}" must be one of {", ".join(allowed)}')
        if self.mlp_kept_chunks < 0:
            raise ValueError(f"mlp_kept_chunks = {self.mlp_kept_chunks} must not be negative")
        FAMILIES.get(self.family)
        if problems := list(spec_problems(self)):
            raise ValueError("; ".join(problems))

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Takes the fields from any object or mapping; missing ones keep their defaults.

        Raises ValueError if a field without a default is missing or a value is invalid.
        """
        if isinstance(config, cls):
            return config
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(config, Mapping):
            values = {name: config[name] for name in names if name in config}
        else:
            values = {name: getattr(config, name) for name in names if hasattr(config, name)}
        if values.get("head_dim") is None and values.get("num_heads"):
            values["head_dim"] = values.get("hidden_size", 0) // values["num_heads"]
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and values.get(field.name) is None:
                raise ValueError(f"{field.name} is missing")
        try:
            values["rope_scaling"] = make_scaling(values.get("rope_scaling"))
        except ValueError as error:
            raise ValueError(f"rope_scaling: {error}") from None
        return cls(**values)

    @functools.cached_property
    def parameters(self) -> ParamTable:
        """All parameters by dotted name, with stacked layers."""
        return FAMILIES.get(self.family)().parameters(self)


def spec_problems(values: Any, prefix: str = "") -> Iterator[str]:
    """Yields messages for fields of a `ModelSpec`, or of a configuration, that contradict."""
    if values.num_heads % values.num_kv_heads:
        yield (
            f"{prefix}num_heads = {values.num_heads} must be a multiple of {prefix}num_kv_heads = "
            f"{values.num_kv_heads}, because each key/value head serves as many query heads"
        )
    if values.head_dim % 2:
        yield f"{prefix}head_dim = {values.head_dim} must be even, because RoPE rotates pairs"
    if values.mlp_kept_chunks and values.remat != "mlp":
        yield (
            f'{prefix}mlp_kept_chunks = {values.mlp_kept_chunks} needs {prefix}remat = "mlp", but '
            f'it is "{values.remat}"'
        )
    if values.rope_scaling is not None:
        for problem in values.rope_scaling.problems(values.head_dim):
            yield f"{prefix}rope_scaling.{problem}"
