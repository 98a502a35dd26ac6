"""Former names of fields, accepted in files, checkpoints and on the command line for one release."""

from collections.abc import Mapping
from typing import Any

RENAMED = {
    "audit.every_steps": "audit.interval",
    "audit.gradient_every": "audit.gradient_interval",
    "audit.rows": "audit.num_queries",
    "checkpoint.every_steps": "checkpoint.interval",
    "data.documents": "data.mask_documents",
    "eval.batches": "eval.num_batches",
    "eval.every_steps": "eval.interval",
    "metrics.recall_every": "audit.interval",
    "metrics.recall_rows": "audit.num_queries",
    "parallel.data": "parallel.replicas",
    "run.log_every": "run.log_interval",
    "sparsity.dense_below": "sparsity.min_sparse_tokens",
    "sparsity.dense_end": "sparsity.dense_suffix_tokens",
    "sparsity.dense_every": "sparsity.dense_interval",
    "sparsity.dense_first": "sparsity.dense_warmup_steps",
    "sparsity.dense_last": "sparsity.dense_cooldown_steps",
    "sparsity.dense_start": "sparsity.dense_prefix_tokens",
    "sparsity.last_q": "sparsity.num_probe_queries",
    "sparsity.least_share": "sparsity.min_block_mass",
    "sparsity.local_share": "sparsity.local_fraction",
    "sparsity.random_share": "sparsity.random_block_prob",
    "sparsity.sampled_rows": "sparsity.probe_queries_per_block",
    "sparsity.tune_high": "sparsity.tune_max",
    "sparsity.tune_low": "sparsity.tune_min",
}


def with_new_names(table: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces former field names; a field given by both names keeps both, which is an error."""
    found = dict(table)
    for old, new in RENAMED.items():
        (section, name), (new_section, new_name) = old.split("."), new.split(".")
        values = found.get(section)
        if not isinstance(values, dict) or name not in values:
            continue
        others = found.get(new_section, {})
        if not isinstance(others, dict) or new_name in others:
            continue
        found[section] = {key: value for key, value in values.items() if key != name}
        found[new_section] = {**found.get(new_section, {}), new_name: values[name]}
    return found
