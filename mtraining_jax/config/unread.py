"""Warnings about options that have no effect because of another field."""

from collections.abc import Iterable, Iterator

from mtraining_jax.config.fields import toml_value
from mtraining_jax.config.schema import Config
from mtraining_jax.config.validate import DENSE_STEPS


def unread(config: Config, names: Iterable[str]) -> list[str]:
    """A message for each unused field.

    For fields set on the command line, where they are most likely a mistake. Files set unused
    fields on purpose, as values for other patterns or sources.
    """
    return [
        f"{name} has no effect: {reason}"
        for name in dict.fromkeys(names)
        if (reason := next(_reasons(config, name), None)) is not None
    ]


def _reasons(config: Config, name: str) -> Iterator[str]:
    section, _, field = name.rpartition(".")
    audit, optimizer, profile = config.audit, config.optimizer, config.profile
    if name.startswith("eval.") and field != "interval" and not config.eval.interval:
        yield "eval.interval = 0 disables evaluation"
    if section == "audit" and not audit.interval and not audit.gradient_interval:
        if field not in ("interval", "gradient_interval"):
            yield "audit.interval = 0 and audit.gradient_interval = 0 disable audits"
    if name == "profile.steps" and profile.start is None:
        yield "profile.start = none disables tracing"
    if name in ("sparsity.tune_min", "sparsity.tune_max") and config.sparsity.tune == "none":
        yield 'sparsity.tune = "none" disables tuning'
    if name in DENSE_STEPS and not config.sparsity.settings.sparse:
        yield f"sparsity.kind = {toml_value(config.sparsity.kind)} computes all pairs in every step"
    if name in ("optimizer.final_lr_ratio", "optimizer.decay_steps"):
        if optimizer.schedule == "constant":
            yield 'optimizer.schedule = "constant" does not decay the learning rate'
    if name == "data.balance" and config.data.balance != "none":
        if config.parallel.replicas == 1:
            yield "parallel.replicas = 1 has a single data-parallel replica"
        if not config.data.has_documents:
            yield 'all sequences have the same work without documents (data.mode = "pack")'
    yield from _of_another_plugin(config, section, field)


def _of_another_plugin(config: Config, section: str, field: str) -> Iterator[str]:
    """For a field of patterns or sources that are not selected."""
    holder = {"sparsity": config.sparsity, "data": config.data, "eval.data": config.eval.data}.get(
        section
    )
    if holder is None:
        return
    owners = type(holder).owners.get(field)
    selector = holder.plugins.selector
    chosen = getattr(holder, selector)
    if owners is not None and chosen not in owners:
        yield (
            f"{section}.{selector} = {toml_value(chosen)} does not use it, only "
            f"{' or '.join(map(toml_value, owners))}"
        )
