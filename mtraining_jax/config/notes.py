"""Notes on a valid configuration, printed before the run."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from mtraining_jax.config.schema import Sections
from mtraining_jax.config.validate import DENSE_STEPS
from mtraining_jax.data.tokenizer import BYTES
from mtraining_jax.models.huggingface.config import sparse_entry
from mtraining_jax.models.spec import layer_windows


def notes(config: Sections, names: Iterable[str], path: str = "") -> list[str]:
    """Hints, and a sentence for each of the named fields that has no effect.

    The names are those of the command line, where such a field is most likely a mistake; `path` is
    the configuration file.
    """
    found, folder = [], Path(path).resolve().parent
    moved = folder != config.run.folder.resolve() and not {"run.name", "run.output_dir"} & {*names}
    if moved and Path(path).name == "config.toml" and (folder / "checkpoints").is_dir():
        found.append(
            f"{path} belongs to a run folder that was moved or copied; this run writes into "
            f"{config.run.folder}; to resume the moved one, set --run.output_dir={folder.parent} "
            f"--run.name={folder.name}"
        )
    for name in dict.fromkeys(names):
        if reason := next(_reasons(config, name), None):
            found.append(f"{name} has no effect: {reason}")
    is_text = not config.data.source_options.holds_ids
    has_tokenizer = (config.model.start or Path()).joinpath("tokenizer.json").is_file()
    as_bytes = is_text and config.data.tokenizer == BYTES and not has_tokenizer
    if config.model.init_from is not None and as_bytes:
        found.append(
            f"{config.model.init_from} has no tokenizer.json, so text is tokenized to bytes; set "
            "data.tokenizer to the tokenizer that the checkpoint was trained with"
        )
    pattern, seq_len = config.sparsity.pattern, config.data.seq_len
    full = None in layer_windows(config.model)
    least = pattern.shortest_sparse_document() if config.data.has_documents and full else 0
    if seq_len < least:
        own = "min_sparse_tokens" in vars(pattern)
        found.append(
            f"all documents use dense attention, because data.seq_len = {seq_len} is less than "
            f"{least} tokens; for sparse attention set "
            f"sparsity.{'min_sparse_tokens' if own else pattern.density_option} lower"
        )
    sparse = full and pattern.sparse and seq_len >= least and not config.dense_steps.count()
    if config.checkpoint.export_hf and sparse:
        tenth = "N" if config.run.epochs is not None else max(1, config.run.steps // 10)
        # SmolLM2-135M at 32768 tokens: 1.0 % of the loss, 0.4 % with a tenth (docs/quality.md).
        has_file = sparse_entry(config.sparsity.kind, pattern, config.model.family) is not None
        unless = " unless it imports the exported sparse_attention.py" if has_file else ""
        found.append(
            f"Hugging Face transformers runs the exported model with dense attention{unless}; a "
            "model trained with sparse attention then has a slightly higher loss; "
            f"--sparsity.dense_cooldown_steps={tenth} (a tenth of the steps) recovers most of it"
        )
    return found


def _reasons(config: Sections, name: str) -> Iterator[str]:
    """Why a field has no effect."""
    section, _, field = name.partition(".")
    audit, schedule = config.audit, config.optimizer.schedule
    if section == "eval" and field != "interval" and not config.eval.interval:
        yield "eval.interval = 0 disables evaluation"
    if section == "audit" and field != "interval" and not audit.interval:
        yield "audit.interval = 0 disables audits"
    if name == "model.override" and config.model.init_from is None:
        yield "model.init_from = none has no config.json to override"
    if name == "profile.steps" and config.profile.start is None:
        yield "profile.start = none disables tracing"
    if name in ("sparsity.tune_min", "sparsity.tune_max") and config.sparsity.tune == "none":
        yield 'sparsity.tune = "none" disables tuning'
    if name == "checkpoint.local_interval" and config.checkpoint.local_dir is None:
        yield "checkpoint.local_dir = none has no folder for checkpoints"
    if name in DENSE_STEPS and not config.sparsity.pattern.sparse:
        yield f'sparsity.kind = "{config.sparsity.kind}" computes all pairs in every step'
    is_pattern_option = section == "audit" or (section == "sparsity" and field != "block_size")
    if is_pattern_option and None not in layer_windows(config.model):
        yield "all layers have a sliding window, and no sparse pattern"
    if name in ("optimizer.final_lr_ratio", "optimizer.decay_steps") and schedule == "constant":
        yield 'optimizer.schedule = "constant" does not decay the learning rate'
    if name == "data.balance" and config.data.balance != "none":
        if config.parallel.replicas == 1:
            yield "parallel.replicas = 1 has a single data-parallel replica"
        if not config.data.has_documents:
            yield 'all sequences have the same work without documents (data.mode = "pack")'
