"""Exports the trained model as a Hugging Face checkpoint."""

from pathlib import Path
from typing import Any

from mtraining_jax.config import Config
from mtraining_jax.data.tokenizer import BYTES, make_tokenizer
from mtraining_jax.models.huggingface.config import sparse_entry
from mtraining_jax.models.huggingface.write import save_hf, save_peft
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import read_state, run_folder
from mtraining_jax.training.state import StateBuilder, TrainState

# Files of a checkpoint other than its tensors: tokenizer and generation defaults.
_TOKENIZER, _GENERATION = "tokenizer.json", "generation_config.json"
_COPIED = (
    _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", _GENERATION,
)  # fmt: skip


def export_state(config: Config, builder: StateBuilder, state: TrainState) -> list[Path]:
    """Writes a state into RUN_FOLDER/hf, replacing an older export; all processes call it.

    The tokenizer is data.tokenizer, or that of model.init_from if training read token ids. Adapters
    are merged, and also written into RUN_FOLDER/adapter. Returns the written folders.
    """
    copied, start = _tokenizer_files(config), config.model.init_from
    spec, sparsity = builder.spec, config.sparsity
    entry = sparse_entry(sparsity.kind, sparsity.pattern, spec.family)
    merged = save_hf(
        config.run.folder / "hf",
        spec,
        builder.unflatten(state.model),
        copied=copied,
        replace=True,
        like=start,
        eos=_eos(config),
        sparsity=entry if None in spec.windows else None,
    )
    if not state.base:
        return [merged]
    copied = {name: file for name, file in copied.items() if name != _GENERATION}
    how = {"base": state.base, "base_folder": start and Path(start).absolute(), "copied": copied}
    adapter = config.run.folder / "adapter"
    return [merged, save_peft(adapter, spec, state.parameters, **how)]


def export_checkpoint(config: Config, step: int) -> list[Path]:
    """Exports a checkpoint of the run; see `export_state`."""
    builder = StateBuilder(config, build_mesh(config))
    folder = run_folder.checkpoint_folder(config)
    state, _ = read_state(folder, step, builder.abstract(), config, builder.base)
    return export_state(config, builder, state)


def _tokenizer_files(config: Config) -> dict[str, Path | dict[str, Any]]:
    """Returns paths or contents of the files to add to an export, by name."""
    start = config.model.init_from
    of_start = {} if start is None else _files_of(Path(start))
    if config.data.tokenizer == BYTES:
        return of_start
    tokenizer = Path(config.data.tokenizer).expanduser()
    files: dict[str, Path | dict[str, Any]] = {
        # Without a class here, transformers selects one by model type, which may tokenize
        # differently from tokenizer.json.
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}
    }
    files |= {name: path for name, path in of_start.items() if name == _GENERATION}
    if tokenizer.name == _TOKENIZER:
        files |= _files_of(tokenizer.parent)
    return files | {_TOKENIZER: tokenizer}


def _files_of(folder: Path) -> dict[str, Path | dict[str, Any]]:
    return {name: folder / name for name in _COPIED if (folder / name).is_file()}


def _eos(config: Config) -> int | None:
    data = config.data
    if not data.source_options.holds_ids:
        return make_tokenizer(data.tokenizer, data.eos).eos
    return data.eos if isinstance(data.eos, int) else None
