"""The trained model as a Hugging Face checkpoint."""

from pathlib import Path

from mtraining_jax.config import Config
from mtraining_jax.models.hf import save_hf
from mtraining_jax.training import parts, run_folder
from mtraining_jax.training.checkpoint import Checkpoints
from mtraining_jax.training.state import StateBuilder, TrainState

HF_NAME = "hf"

# Files of a checkpoint other than its tensors: the tokenizer, and defaults for generating text.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def export_state(config: Config, builder: StateBuilder, state: TrainState) -> Path:
    """Writes a state into RUN_FOLDER/hf, in place of an older export; all processes call it.

    Tensors are bfloat16. The tokenizer's files come from model.init_from or, without one, from
    data.tokenizer.

    Args:
        config: of the run.
        builder: of its states.
        state: with arrays on the devices.

    Returns:
        The folder.

    Raises:
        UserError: if it cannot be written.
    """
    parameters = builder.unflatten(state.parameters)
    target = config.run.folder / HF_NAME
    return save_hf(
        target,
        config.model,
        parameters,
        copied=_tokenizer_files(config),
        replace=True,
        like=config.model.init_from,
    )


def export_checkpoint(config: Config, step: int) -> Path:
    """Does the same with a checkpoint of the run.

    Raises:
        UserError: as `export_state`, and if devices or checkpoint do not fit the configuration.
    """
    builder = StateBuilder(config, parts.build_mesh(config))
    checkpoints = Checkpoints(
        run_folder.checkpoint_folder(config), keep=config.checkpoint.keep, async_save=False
    )
    try:
        state, _ = checkpoints.restore(step, builder.abstract(), config)
    finally:
        checkpoints.close()
    return export_state(config, builder, state)


def _tokenizer_files(config: Config) -> list[Path]:
    if config.model.init_from is not None:
        found = (Path(config.model.init_from) / name for name in _COPIED)
        return [path for path in found if path.is_file()]
    own = Path(config.data.tokenizer)
    return [own] if own.name == "tokenizer.json" and own.is_file() else []
