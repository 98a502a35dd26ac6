"""Exports the trained model as a Hugging Face checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtraining_jax.config import Config
from mtraining_jax.data.tokenizer import BYTES, HuggingFaceTokenizer, make_tokenizer
from mtraining_jax.models.huggingface.config import (
    GENERATION_FILE,
    read_end_tokens,
    read_hf_values,
    read_json,
    sparse_entry,
)
from mtraining_jax.models.huggingface.peft import MODEL_CONFIG
from mtraining_jax.tools.export.write import config_like, save_hf, save_peft
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint import read_state, run_folder
from mtraining_jax.training.checkpoint.end_tokens import END_TOKENS, end_of_turn, end_tokens
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.utils.hub import local_folder, repository

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = "chat_template*", "additional_chat_templates/*.jinja"
# Files of a checkpoint to copy: its tokenizer in any format, and what belongs to its weights.
_OF_TOKENIZER = (
    "tokenizer*", "tokenization_*.py", "vocab*", "merges*", "*.model", "*.tiktoken", "tekken.json",
    "added_tokens.json", "special_tokens_map.json", *_TEMPLATES,
)  # fmt: skip
_OF_WEIGHTS = GENERATION_FILE, "LICEN[CS]E*", "NOTICE*", "USE_POLICY*"

_Files = dict[str, Path | dict[str, Any]]


def export_state(
    config: Config, builder: StateBuilder, state: TrainState, eos: Sequence[int]
) -> list[Path]:
    """Writes a state into RUN_FOLDER/hf, replacing an older export; all processes call it.

    The tokenizer is data.tokenizer, or that of model.init_from if training read token ids. Adapters
    are merged, and also written into RUN_FOLDER/adapter. Returns the written folders.

    `eos` has the `end_tokens` of the run.
    """
    copied, start = exported_files(config, eos), config.model.start
    spec, sparsity = builder.spec, config.sparsity
    entry = sparse_entry(sparsity.kind, sparsity.pattern, spec.family)
    merged = save_hf(
        config.run.folder / "hf",
        spec,
        builder.unflatten(state.model),
        copied=copied,
        replace=True,
        like=start,
        eos=eos,
        sparsity=entry if None in spec.windows else None,
    )
    if not state.base:
        return [merged]
    # PEFT writes neither, but the base knows neither the new context nor the new end tokens.
    copied |= {MODEL_CONFIG: config_like(spec, spec.dtype, start, eos)}
    if eos:
        copied = {GENERATION_FILE: {"eos_token_id": list(eos)}, **copied}
    folder = start and str(start.absolute())
    name, revision = repository(config.model.init_from or "") or (folder, None)
    how = {"base": state.base, "base_name": name, "revision": revision, "copied": copied}
    adapter = config.run.folder / "adapter"
    return [merged, save_peft(adapter, spec, state.parameters, **how)]


def export_checkpoint(config: Config, step: int) -> list[Path]:
    """Exports a checkpoint of the run; see `export_state`."""
    builder = StateBuilder(config, build_mesh(config))
    folder = run_folder.checkpoint_folder(config)
    state, record = read_state(folder, step, builder.abstract(), config, builder.base)
    eos = end_tokens(config, record["loader"].get(END_TOKENS, ()))
    return export_state(config, builder, state, eos)


def exported_files(config: Config, eos: Sequence[int]) -> _Files:
    """Returns paths or contents of the files to add to an export, by name.

    They are those of model.init_from and data.tokenizer, except for what training changed: the
    context length, how texts begin, the end tokens, and the token that ends a turn.
    """
    start, data = config.model.start, config.data
    files = {} if start is None else _found(start, _OF_WEIGHTS)
    if data.tokenizer != BYTES:
        tokenizer = local_folder(data.tokenizer)
        # Without a class here, transformers selects one by model type, which may tokenize
        # differently from tokenizer.json.
        files[_SETTINGS] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        is_named = tokenizer.name == _TOKENIZER
        files |= _found(tokenizer.parent, _OF_TOKENIZER if is_named else (_SETTINGS, *_TEMPLATES))
        files[_TOKENIZER] = tokenizer
        if data.bos is not None:
            loaded = make_tokenizer(data.tokenizer, 0 if data.eos is None else data.eos, data.bos)
            if isinstance(loaded, HuggingFaceTokenizer) and loaded.bos != loaded.usual_bos:
                files[_TOKENIZER] = loaded.with_bos()
    elif start is not None and data.source_options.holds_ids:
        files |= _found(start, _OF_TOKENIZER)
    old = None if start is None else read_hf_values(start)["max_position_embeddings"]
    new = config.model.max_position_embeddings
    if GENERATION_FILE in files:
        found: dict[str, Any] = {"eos_token_id": list(eos)} if eos else {}
        if start is not None and read_end_tokens(start) == list(eos):
            found = {}
        length = _content(files[GENERATION_FILE]).get("max_length")
        if old is not None and _is_length(length, old, new, least=old):
            found["max_length"] = new
        _change(files, GENERATION_FILE, found)
    if _SETTINGS in files:
        settings = _content(files[_SETTINGS])
        if _is_length(settings.get("model_max_length"), old, new):
            _change(files, _SETTINGS, {"model_max_length": new})
        _end_turns(config, files)
    return files


def _found(folder: Path, patterns: Sequence[str]) -> _Files:
    paths = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return {str(path.relative_to(folder)): path for path in paths if path.is_file()}


def _is_length(value: Any, old: int | None, new: int, least: int = 0) -> bool:
    """Whether a field states a context length that is no longer right."""
    if old == new or not isinstance(value, int | float):
        return False
    return value == old or least <= value < new


def _end_turns(config: Config, files: _Files) -> None:
    """Names the end of a turn as the tokenizer's end token, if the checkpoint does not know it.

    As templates of chat models expect. Not if the template itself inserts the end token.
    """
    start, turn = config.model.start, end_of_turn(config.data)
    if turn is None or (start is not None and turn[0] in read_end_tokens(start)):
        return
    templates = [
        x.read_text("utf-8") for x in files.values() if isinstance(x, Path) and x.suffix == ".jinja"
    ]
    templates.append(str(_content(files[_SETTINGS]).get("chat_template")))
    if any("eos_token" in template for template in templates):
        return
    for name in (_SETTINGS, "special_tokens_map.json"):
        if name in files:
            _change(files, name, {"eos_token": turn[1]})


def _content(file: Path | Mapping[str, Any]) -> Mapping[str, Any]:
    return read_json(file) if isinstance(file, Path) else file


def _change(files: _Files, name: str, fields: Mapping[str, Any]) -> None:
    """Replaces fields of a JSON file; without any it is copied as it is."""
    if fields:
        files[name] = {**_content(files[name]), **fields}
