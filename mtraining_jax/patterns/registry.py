"""The built-in patterns by name."""

from mtraining_jax.utils.plugins import Registry

_PATTERNS = "mtraining_jax.patterns"
PATTERNS = Registry(
    "sparse pattern",
    base=f"{_PATTERNS}.base:Pattern",
    public="mtraining_jax.Pattern",
    built_in={
        "dense": f"{_PATTERNS}.dense:Dense",
        "vertical_slash": f"{_PATTERNS}.vertical_slash:VerticalSlash",
        "fixed": f"{_PATTERNS}.budgets:FixedBudget",
        "xattention": f"{_PATTERNS}.xattention:XAttention",
        "sampled_rows": f"{_PATTERNS}.sampled_rows:SampledRows",
        "minference": f"{_PATTERNS}.budgets:MInference",
        "flex_prefill": f"{_PATTERNS}.flex_prefill:FlexPrefill",
        "moba": f"{_PATTERNS}.moba:MoBA",
        "block_topk": f"{_PATTERNS}.block_topk:BlockTopK",
    },
    moved={"replay": "benchmarks.replay:Replay"},
)
