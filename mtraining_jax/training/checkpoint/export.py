"""Exports the trained model as a Hugging Face checkpoint."""

from pathlib import Path
from typing import Any

from mtraining_jax.config import Config
from mtraining_jax.data.documents import DocumentSource
from mtraining_jax.data.sources import selected_source
from mtraining_jax.data.tokenizer import BYTES, make_tokenizer
from mtraining_jax.models.huggingface import save_hf
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import Checkpoints, run_folder
from mtraining_jax.training.state import StateBuilder, TrainState

HF_NAME = "hf"

# Files of a checkpoint other than its tensors: tokenizer and generation defaults.
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_GENERATION = "generation_config.json"
_COPIED = (
    _TOKENIZER,
    _TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    _GENERATION,
)


def export_state(config: Config, builder: StateBuilder, state: TrainState) -> Path:
    """Writes a state into RUN_FOLDER/hf, replacing an older export; all processes call it.

    Tensors are bfloat16. The tokenizer is data.tokenizer, or that of model.init_from if training
    read token ids. Returns the folder.
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
        eos=_eos(config),
    )


def export_checkpoint(config: Config, step: int) -> Path:
    """Exports a checkpoint of the run; see `export_state`."""
    builder = StateBuilder(config, build_mesh(config))
    checkpoints = Checkpoints(
        run_folder.checkpoint_folder(config), keep=config.checkpoint.keep, async_save=False
    )
    try:
        state, _ = checkpoints.restore(step, builder.abstract(), config)
    finally:
        checkpoints.close()
    return export_state(config, builder, state)


def _tokenizer_files(config: Config) -> dict[str, Path | dict[str, Any]]:
    start = None if config.model.init_from is None else Path(config.model.init_from)
    found: dict[str, Path | dict[str, Any]] = {}
    if config.data.tokenizer == BYTES:
        return {} if start is None else _files_of(start)
    own = Path(config.data.tokenizer).expanduser()
    if own.name == _TOKENIZER:
        found = _files_of(own.parent)
    if start is not None and _GENERATION not in found:
        found |= {k: path for k, path in _files_of(start).items() if k == _GENERATION}
    found[_TOKENIZER] = own
    # Without a class here, transformers selects one by model type, which may tokenize differently
    # from tokenizer.json.
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return {_TOKENIZER_CONFIG: plain, **found}


def _files_of(folder: Path) -> dict[str, Path | dict[str, Any]]:
    return {name: folder / name for name in _COPIED if (folder / name).is_file()}


def _eos(config: Config) -> int | None:
    """Returns the token id that ended the training documents, if known."""
    data = config.data
    source = selected_source(data)
    if isinstance(source, DocumentSource) and not source.holds_ids:
        return make_tokenizer(data.tokenizer, data.eos).eos
    return data.eos if isinstance(data.eos, int) else None
