"""What a user should know of a configuration that is right, before it runs."""

from mtraining_jax.config.schema import Config


def advice(config: Config) -> list[str]:
    """Sentences; none for most configurations.

    Args:
        config: a checked configuration.
    """
    found = []
    sparse = config.sparsity.settings.sparse and not config.dense_steps.count()
    if config.checkpoint.export_hf and sparse:
        # SmolLM2-135M at 32768 tokens: 1.0 % of the loss, 0.4 % with a tenth (docs/quality.md).
        found.append(
            "transformers will use the exported model with dense attention, where one that is "
            "trained sparse loses a little; with --sparsity.dense_last="
            f"{max(1, config.run.steps // 10)} the last tenth of the steps is dense, which mends "
            "most of it"
        )
    return found
