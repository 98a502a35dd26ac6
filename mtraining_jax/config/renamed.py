"""Former names of fields, accepted with a notice for one release."""

import copy
import functools
import logging
from collections.abc import Mapping
from typing import Any

from mtraining_jax.utils.printable import printable

RENAMED = {
    "audit.every_steps": "audit.interval",
    "audit.gradient_every": "audit.gradient_interval",
    "audit.rows": "audit.num_queries",
    "checkpoint.every_steps": "checkpoint.interval",
    "data.documents": "data.mask_documents",
    "eval.batches": "eval.num_batches",
    "eval.data.documents": "eval.data.mask_documents",
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


def with_current_names(table: Mapping[str, Any], source: str | None = None) -> dict[str, Any]:
    """A copy with current names; a field given by both names keeps both, which is an error.

    Prints a notice if there is a `source` that a user wrote; stored records have none.
    """
    found, renamed = copy.deepcopy(dict(table)), []
    for old, new in RENAMED.items():
        (section, name), (new_section, new_name) = old.rsplit(".", 1), new.rsplit(".", 1)
        values: Any = found
        for part in section.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        if not isinstance(values, dict) or name not in values:
            continue
        target = values if section == new_section else found.setdefault(new_section, {})
        if isinstance(target, dict) and new_name not in target:
            target[new_name] = values.pop(name)
            renamed.append(old)
    if source is not None:
        notify(source, *renamed)
    return found


@functools.cache  # once per source
def notify(source: str, *names: str) -> None:
    """Prints a notice that fields were renamed."""
    if names:
        text = ", ".join(f"{name} is now {RENAMED[name]}" for name in names)
        logging.getLogger(__name__).warning("note: %s: %s", printable(source), text)
