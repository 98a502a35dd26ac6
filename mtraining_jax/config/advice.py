"""Hints about a valid configuration, printed before the run."""

from mtraining_jax.config.schema import Config


def advice(config: Config) -> list[str]:
    """Hints for the user; none for most configurations."""
    found = []
    sparse = config.sparsity.settings.sparse and not config.dense_steps.count()
    if config.checkpoint.export_hf and sparse:
        # SmolLM2-135M at 32768 tokens: 1.0 % of the loss, 0.4 % with a tenth (docs/quality.md).
        found.append(
            "Hugging Face transformers runs the exported model with dense attention, where a model "
            "trained with sparse attention has a slightly higher loss; "
            f"--sparsity.dense_cooldown_steps={max(1, config.run.steps // 10)} (a tenth of the steps) "
            "recovers most of it"
        )
    return found
