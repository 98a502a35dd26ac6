"""The sizes of a model: static, hashable and validated. Does not import JAX."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self, get_args

from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.lora.adapters import LoraSpec, is_adapter, target_problems, with_adapters
from mtraining_jax.models.parameters import LAYERS, ParamTable, with_frozen
from mtraining_jax.models.rope import RopeScaling, make_scaling
from mtraining_jax.utils.limits import MAX_HEADS, MAX_LAYERS, MAX_WIDTH

# Fields of attention that only some families have.
ATTENTION = (
    "sliding_window",
    "full_attention_interval",
    "window_rope_theta",
    "query_pre_attn_scalar",
)
_LARGEST = {
    "vocab_size": MAX_WIDTH, "hidden_size": MAX_WIDTH, "intermediate_size": MAX_WIDTH,
    "num_layers": MAX_LAYERS, "num_heads": MAX_HEADS, "num_kv_heads": MAX_HEADS,
    "head_dim": MAX_HEADS, "num_experts": MAX_HEADS,
}  # fmt: skip

ComputeDtype = Literal["bfloat16", "float32"]
RematPolicy = Literal["none", "mlp", "attention", "attention_offload", "full_offload", "full"]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The sizes of a decoder.

    Attributes:
        family: a name of `models.families`, or package.module:Name.
        sliding_window: keys that a query sees in layers with a window; None if all layers are full.
        full_attention_interval: with a window, every n-th layer is full; None if none is.
        window_rope_theta: base of RoPE in layers with a window, without scaling; None for the RoPE
            of full layers.
        query_pre_attn_scalar: logits are divided by its square root; None for head_dim.
        dtype: compute dtype of the layers; trained parameters are always fp32.
        remat: what the backward pass recomputes; see `remat.py`.
        mlp_chunk_size: tokens per device with MLP activations in memory at a time; not with "none".
        mlp_kept_chunks: number of such chunks that save their first two products with remat "mlp".
        initializer_range: standard deviation of initial matrices.
        num_experts: experts of a layer; 0 if it has one MLP.
        num_experts_per_tok: experts that compute a token.
        norm_topk_prob: whether the weights of these sum to 1.
        router_aux_loss_coef: factor on the auxiliary loss, see `experts.mixture.balance_loss`.
        lora: adapters; with them, all other parameters are frozen.
        trainable: parts of names; if there are any, parameters without one are frozen. Frozen
            matrices are stored in `dtype`.
    """

    vocab_size: int  # V
    hidden_size: int  # E
    num_layers: int  # L
    num_heads: int  # Hq
    num_kv_heads: int  # Hk, divides Hq
    head_dim: int  # D, even
    intermediate_size: int  # F
    family: str = "qwen2"
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None  # W
    full_attention_interval: int | None = None
    window_rope_theta: float | None = None
    query_pre_attn_scalar: float | None = None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: ComputeDtype = "bfloat16"
    remat: RematPolicy = "attention"
    mlp_chunk_size: int = 16384
    mlp_kept_chunks: int = 0
    initializer_range: float = 0.02
    num_experts: int = 0  # G
    num_experts_per_tok: int = 0  # K
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.0
    lora: LoraSpec | None = None
    trainable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, allowed = getattr(self, field.name), get_args(field.type)
            number = field.type in (int, float) and field.default != 0
            if number and not value > 0:
                raise ValueError(f"{field.name} = {value} must be positive")
            if field.default == 0 and not value >= 0:
                raise ValueError(f"{field.name} = {value} must not be negative")
            if field.name in _LARGEST and value > (largest := _LARGEST[field.name]):
                raise ValueError(f"{field.name} = {value} must be at most {largest}")
            if field.name in ("dtype", "remat") and value not in allowed:
                raise ValueError(f'{field.name} = "{value}" must be one of {", ".join(allowed)}')
        FAMILIES.get(self.family)
        problems = list(spec_problems(self))
        if self.lora is not None:
            layer = FAMILIES.get(self.family)().layer(self)
            problems += target_problems(layer, self.lora.targets)
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Takes the fields from any object or mapping; ValueError if one is missing or invalid."""
        if isinstance(config, cls):
            return config
        names = [field.name for field in dataclasses.fields(cls)]
        if isinstance(config, Mapping):
            values = {name: config[name] for name in names if name in config}
        else:
            values = {name: getattr(config, name) for name in names if hasattr(config, name)}
        if not values:
            raise ValueError(f"a {type(config).__name__} is not a model; pass a ModelSpec")
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
        table = FAMILIES.get(self.family)().parameters(self)
        return with_frozen(table, self.dtype, self.trains)

    @functools.cached_property
    def layer(self) -> ParamTable:
        """The parameters of one layer, with adapters, by their name in it."""
        table = FAMILIES.get(self.family)().layer(self)
        table = table if self.lora is None else with_adapters(table, self.lora)
        return with_frozen(table, self.dtype, lambda name: self.trains(LAYERS + name))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens; None for a full layer."""
        return layer_windows(self)

    def in_window(self, window: int | None) -> Self:
        """The same sizes with the RoPE of layers with this window."""
        if window is None or self.window_rope_theta is None:
            return self
        return dataclasses.replace(self, rope_theta=self.window_rope_theta, rope_scaling=None)

    def trains(self, name: str) -> bool:
        """Whether a parameter, by dotted name, is trained."""
        if self.lora is not None:
            return is_adapter(name)
        return not self.trainable or any(part in name for part in self.trainable)


def layer_windows(values: Any) -> tuple[int | None, ...]:
    """The window of each layer of a `ModelSpec` or of a configuration; None for a full layer."""
    interval, window = (
        values.full_attention_interval or values.num_layers + 1,
        values.sliding_window,
    )
    # Of layers that differ in nothing else, a window as long as the context is none.
    if len(FAMILIES.get(values.family).attention) == 1 and window is not None:
        window = window if window < values.max_position_embeddings else None
    return tuple(window if layer % interval else None for layer in range(1, values.num_layers + 1))


def windows_text(values: Any) -> str | None:
    """Describes the windows of a model's layers, if it has some."""
    number, layers = values.num_layers - layer_windows(values).count(None), values.num_layers
    if not number:
        return None
    of = "all" if number == layers else f"{number} of {layers}"
    return f"windows of {values.sliding_window:,} tokens in {of} layers"


def spec_problems(values: Any, prefix: str = "") -> Iterator[str]:
    """Yields messages for fields of a `ModelSpec`, or of a configuration, that contradict."""
    if values.num_heads % values.num_kv_heads:
        yield (
            f"{prefix}num_heads = {values.num_heads} must be a multiple of {prefix}num_kv_heads = "
            f"{values.num_kv_heads}, because each key/value head serves as many query heads"
        )
    if values.head_dim % 2:
        yield f"{prefix}head_dim = {values.head_dim} must be even, because RoPE rotates pairs"
    family = FAMILIES.get(values.family)
    has_experts = family.has_experts
    if has_experts and not 0 < values.num_experts_per_tok <= values.num_experts:
        yield (
            f"{prefix}num_experts_per_tok = {values.num_experts_per_tok} must be 1 to "
            f"{prefix}num_experts = {values.num_experts}"
        )
    for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_coef"):
        if not has_experts and getattr(values, name) != getattr(ModelSpec, name):
            value = f"{prefix}{name} = {getattr(values, name)}"
            yield f'{value} needs a {prefix}family with experts, not "{values.family}"; remove it'
    for name, needed in family.fixed.items():
        if (value := getattr(values, name, needed)) != needed:
            yield f"{prefix}{name} = {value} is unsupported by {values.family}; it must be {needed}"
    for name in ATTENTION:
        value = getattr(values, name)
        given = f"{prefix}{name} = {value}"
        if value is not None and name not in family.attention:
            having = ", ".join(x for x in FAMILIES.names if name in FAMILIES.get(x).attention)
            yield f"{given} needs a {prefix}family that has it: {having}"
        elif value is not None and value <= (least := int(name == "sliding_window")):
            yield f"{given} must be more than {least}"
        elif value is not None and values.sliding_window is None and name in ATTENTION[1:3]:
            yield f"{given} needs {prefix}sliding_window"
    if values.mlp_kept_chunks and values.remat != "mlp":
        yield (
            f'{prefix}mlp_kept_chunks = {values.mlp_kept_chunks} needs {prefix}remat = "mlp", but '
            f'it is "{values.remat}"'
        )
    if values.rope_scaling is not None:
        for problem in values.rope_scaling.problems(values.head_dim):
            yield f"{prefix}rope_scaling.{problem}"
        has_sections = "window_rope_theta" in family.attention
        if has_sections and not getattr(values.rope_scaling, "truncate", True):
            yield (
                f"{prefix}rope_scaling.truncate = False is unsupported by {values.family}, where "
                "transformers ignores it; remove it"
            )
