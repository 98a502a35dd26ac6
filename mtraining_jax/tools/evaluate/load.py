"""Loads a model from the folder of a run or of a Hugging Face checkpoint.

Digests identify a model by content, so that stored answers are not taken for those of another one.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from flax import nnx
from jax.sharding import Mesh

from mtraining_jax.config import Config
from mtraining_jax.config.init_from import as_toml
from mtraining_jax.config.load import NO_OVERRIDES, Overrides, with_bos
from mtraining_jax.data.documents import DocumentSource, check_ends
from mtraining_jax.data.files import named_files
from mtraining_jax.data.tokenizer import BYTES, HuggingFaceTokenizer, Tokenizer, make_tokenizer
from mtraining_jax.models.huggingface.checksums import digest
from mtraining_jax.models.huggingface.config import (
    CONFIG_FILE,
    FREE,
    read_end_tokens,
    read_hf_values,
)
from mtraining_jax.models.huggingface.peft import MODEL_CONFIG, PEFT_CONFIG, read_peft_config
from mtraining_jax.models.huggingface.read import check_base, load_parameters, load_peft
from mtraining_jax.models.lora.adapters import is_adapter
from mtraining_jax.models.parameters import LAYERS
from mtraining_jax.models.sharding import named_shapes, parameter_names
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import abstract_state, param_shardings
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.reporting.history import LOWEST_DENSITY
from mtraining_jax.tools.evaluate.engine.network import Network
from mtraining_jax.tools.evaluate.engine.options import AnswerKind
from mtraining_jax.training.checkpoint import newest_step, read_parameters, read_record
from mtraining_jax.training.checkpoint.end_tokens import END_TOKENS
from mtraining_jax.training.checkpoint.run_folder import CHECKPOINTS_NAME
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import toml_value
from mtraining_jax.utils.hub import HUB, local_folder
from mtraining_jax.utils.jax_platform import check_devices
from mtraining_jax.utils.printable import printable
from mtraining_jax.utils.text import counted

AttentionKind = Literal["dense", "sparse"]

# Sections of a run's configuration that matter for inference.
_SECTIONS = ("model", "sparsity", "parallel", "data", "loss", "lora")
_TOKENIZER_FILE = "tokenizer.json"
_DENSE = 0.999  # densities above are dense; they have rounding errors


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A loaded model, and where it comes from."""

    network: Network
    state: nnx.State  # parameters on the mesh: matrices in the compute dtype, vectors fp32
    tokenizer: Tokenizer | None
    stop_ids: frozenset[int]  # end a text
    source: str  # the folder, and the step of a run
    trained_sparse: bool = False  # without dense cooldown or periodic dense steps

    def note(self) -> str | None:
        """What a user should know of the attention of prompts and answers, if anything."""
        if not self.network.settings.sparse:
            return self.note_on_dense_use()
        if self.network.answers != "dense" or self.network.settings.for_new_tokens() is not None:
            return None
        return "note: with this pattern, new tokens attend to all earlier ones"

    def note_on_dense_use(self) -> str | None:
        if not self.trained_sparse:
            return None
        return (
            f"note: {self.source} was trained with sparse attention, so dense attention loses a "
            "little quality; use --attention=sparse for best quality"
        )

    def needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(
                f"{self.source} has no tokenizer; set one with --tokenizer=PATH/tokenizer.json or "
                "--tokenizer=bytes (in Python tokenizer=...)"
            )
        return self.tokenizer


def load(
    folder: str | Path,
    attention: AttentionKind,
    overrides: Overrides = NO_OVERRIDES,
    dtype: str | None = None,
    tokenizer: str | None = None,
    answers: AnswerKind | None = None,
) -> Loaded:
    """Loads a model; for arguments and errors see `Engine.load`."""
    folder = local_folder(folder, weights=True)
    checkpoints = folder / CHECKPOINTS_NAME
    step = newest_step(checkpoints)
    is_adapter_folder = step is None and _is_adapter_folder(folder)
    if attention not in ("dense", "sparse"):
        raise UserError(f'attention = "{attention}" must be "dense" or "sparse"')
    check_devices()
    if dtype is not None:
        overrides = {**overrides, "model.dtype": dtype}
    if step is None:
        source, trained_sparse, ends = str(folder), False, read_end_tokens(folder)
        # bfloat16 is slow on a CPU.
        usual = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        table: dict[str, Any] = {"model": {"init_from": source, "dtype": usual}, "parallel": {}}
        if is_adapter_folder:
            table["lora"], model_table = _adapters(folder, overrides)
            table["model"] |= model_table
            ends = ends or read_end_tokens(model_table["init_from"])
    else:
        source = f"{folder}, step {step}"
        record = read_record(checkpoints, step)
        saved, place = record["config"], record["loader"]
        if (ends := place.get(END_TOKENS)) is None:  # in older checkpoints
            start = saved["model"].get("init_from")
            ends = [] if start is None else read_end_tokens(local_folder(start))
        table = {name: dict(saved.get(name, {})) for name in _SECTIONS}
        if not table["lora"].get("rank"):
            # The saved sizes are complete, and the folder of the initial weights may be gone.
            table["model"] |= {"init_from": None, "override": []}
        table["parallel"]["cpu_devices"] = None
        # Older checkpoints lack these fields.
        sparsity = table["sparsity"]
        dense_steps = sparsity.get("dense_cooldown_steps") or sparsity.get("dense_interval")
        trained_sparse = sparsity.get("kind", "dense") != "dense" and not dense_steps
        trained_sparse &= place.get(LOWEST_DENSITY, 0) < _DENSE  # short documents are dense
    table["parallel"] |= _devices(table["parallel"])
    options = [name for name in overrides if name.startswith("sparsity.")]
    if attention == "dense" and options == ["sparsity.block_size"]:
        # The configured pattern is not used, and may not allow this block size.
        overrides = {**overrides, "sparsity.kind": "dense"}
    config = Config.from_record(table, source, overrides)
    if step is not None:
        with contextlib.suppress(UserError):  # token files may be gone
            config = with_bos(config, table)
    parallel = config.parallel
    if config.devices > (count := jax.device_count()) or parallel.replicas > 1:
        factors = f"{parallel.replicas} * {parallel.nodes} * {parallel.devices_per_node}"
        raise UserError(
            f"{source}: parallel.replicas * parallel.nodes * parallel.devices_per_node = {factors} "
            f"does not fit: there is one replica, of at most {counted(count, 'device')}; set fewer "
            "or, on a CPU, more --cpu-devices"
        )
    try:
        spec = ModelSpec.from_config(config.model)
        spec = dataclasses.replace(spec, lora=config.lora.spec)
        mesh = make_mesh(1, parallel.nodes, parallel.devices_per_node)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None
    pattern = _settings(config, attention, source)
    network = Network(
        spec,
        mesh,
        pattern,
        parallel.layout,
        parallel.ring,
        None if parallel.backend == "auto" else parallel.backend,
        parallel.fsdp,
        _answers(answers, config.sparsity.kind, pattern),
        config.loss.chunk_size,
    )
    found = _find_tokenizer(folder, config, step is not None, tokenizer, ends)
    stop_ids = frozenset(ends or ([] if found is None else [found.eos]))
    state = in_compute_dtype(_read(folder, step, config, spec, mesh), spec)
    trained_sparse &= None in spec.windows
    return Loaded(network, state, found, stop_ids, source, trained_sparse)


def max_positions(folder: str | Path, overrides: Overrides = NO_OVERRIDES) -> int:
    """Returns the maximum context length of a model, without reading its parameters."""
    folder, name = local_folder(folder, weights=True), "max_position_embeddings"
    checkpoints = folder / CHECKPOINTS_NAME
    if (changed := str(overrides.get(f"model.{name}", ""))).isdecimal():  # else it is refused
        return int(changed)
    if (step := newest_step(checkpoints)) is not None:
        return read_record(checkpoints, step)["config"]["model"][name]
    if not _is_adapter_folder(folder):
        return read_hf_values(folder)[name]
    _, model_table = _adapters(folder, overrides)
    return model_table.get(name) or read_hf_values(model_table["init_from"])[name]


def _is_adapter_folder(folder: Path) -> bool:
    """Whether a Hugging Face folder has adapters of PEFT; checks that it has a model at all."""
    if (folder / PEFT_CONFIG).is_file():
        return True
    if (folder / CONFIG_FILE).is_file():
        return False
    near = (x for x in folder.parents[:2] if newest_step(x / CHECKPOINTS_NAME) is not None)
    hf = folder / "hf"  # of checkpoint.export_hf
    close = hf if (hf / CONFIG_FILE).is_file() else next(near, None)
    hint = f"; did you mean {close}?" if close else ""
    raise UserError(
        f"{folder} contains no model: neither {CHECKPOINTS_NAME}/STEP of a run nor {CONFIG_FILE} "
        f"or {PEFT_CONFIG} of a Hugging Face checkpoint{hint}"
    )


def in_compute_dtype(state: nnx.State, spec: ModelSpec) -> nnx.State:
    """Casts matrices to the compute dtype, to halve the bytes that are read.

    Layers would cast them anyway, so results do not change. The buffers of `state` are donated.
    """
    names = parameter_names(state)

    def cast(name: str, x: jax.Array) -> jax.Array:
        is_matrix = x.ndim > (2 if name.startswith(LAYERS) else 1)
        return x.astype(spec.dtype) if is_matrix else x

    run = jax.jit(
        lambda state: jax.tree.map(cast, names, state),
        out_shardings=jax.tree.map(lambda x: x.sharding, state),
        donate_argnums=0 if spec.dtype == "float32" else (),
    )
    return run(state)


def _devices(parallel: Mapping[str, Any]) -> dict[str, int]:
    """Returns the mesh of the run if it has all devices, otherwise one of all devices."""
    nodes, local = parallel.get("nodes", 0), parallel.get("devices_per_node", 0)
    if nodes * local != jax.device_count():
        nodes, local = jax.process_count(), jax.local_device_count()
    return {"replicas": 1, "nodes": nodes, "devices_per_node": local}


def _settings(config: Config, attention: AttentionKind, source: str) -> Pattern:
    """Returns settings of the configured pattern, or of dense attention with its block size."""
    if attention == "dense":
        return Dense(block_size=config.sparsity.block_size)
    settings = config.sparsity.pattern
    if not settings.sparse:
        raise UserError(
            f'attention = "sparse" needs a sparse pattern, but {source} has sparsity.kind = '
            f'"{config.sparsity.kind}"; set one, as in --sparsity.kind=vertical_slash'
        )
    return settings


def _answers(answers: AnswerKind | None, kind: str, pattern: Pattern) -> AnswerKind:
    if answers is None:
        return "dense" if pattern.for_new_tokens() is None else "sparse"
    if answers not in get_args(AnswerKind):
        kinds = ", ".join(f'"{x}"' for x in get_args(AnswerKind))
        raise UserError(f'answers = "{answers}" must be one of {kinds}')
    if answers != "dense" and not pattern.sparse:
        raise UserError(f'answers = "{answers}" needs sparse attention, with --attention=sparse')
    if answers == "sparse" and pattern.for_new_tokens() is None:
        raise UserError(
            f'answers = "sparse" does not fit sparsity.kind = "{kind}" with sparsity.block_size = '
            f"{pattern.block_size}: new tokens select with sampled_rows and xattention, in blocks "
            'of 128; use "dense"'
        )
    return answers


def _adapters(folder: Path, overrides: Overrides) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the sections lora and model for a folder of PEFT."""
    _, named = read_peft_config(folder)
    base = overrides.get("model.init_from", named)
    if base is None or not (start := local_folder(base, weights=True)).is_dir():
        what = "no base model" if base is None else f"{base} as base model, which is not a folder"
        way = f"give its folder with --model.init_from=FOLDER, or {HUB}OWNER/NAME"
        raise UserError(f"{folder / PEFT_CONFIG} names {what}; {way}")
    base = str(start)
    family = read_hf_values(base, overrides.get("model.family"))["family"]
    lora, _ = read_peft_config(folder, family)
    fields = {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)}
    model: dict[str, Any] = {"init_from": base}
    if (changed := folder / MODEL_CONFIG).is_file():  # by the run, for example its context length
        values = read_hf_values(changed, overrides.get("model.family"))
        model |= {name: as_toml(values[name]) for name in FREE} | {"override": list(FREE)}
    return fields | {"init_from": str(folder)}, model


def _read(folder: Path, step: int | None, config: Config, spec: ModelSpec, mesh: Mesh) -> nnx.State:
    """Reads the parameters of a run, a Hugging Face checkpoint, or adapters and their base."""
    shardings, model = param_shardings(spec, mesh, config.parallel.fsdp), config.model
    wanted = named_shapes(abstract_state(spec), shardings)
    saved, base, found = wanted, {}, {}
    if step is None or spec.lora is not None:
        if model.init_from is None:  # not of a Hugging Face checkpoint
            raise UserError(
                f"{folder} has adapters of a random model, which cannot be evaluated; train "
                "adapters of a checkpoint: model.init_from"
            )
        saved = {name: x for name, x in wanted.items() if is_adapter(name)}
        base_shapes = {name: x for name, x in wanted.items() if name not in saved}
        start = folder if spec.lora is None else model.init_from
        base = load_parameters(start, spec, base_shapes, override=model.override)
    if step is not None:
        found = read_parameters(folder / CHECKPOINTS_NAME, step, saved)
        needed = read_record(folder / CHECKPOINTS_NAME, step).get("base")
        check_base(folder / CHECKPOINTS_NAME / str(step), needed, base)
    elif saved:
        found = load_peft(folder, spec, saved, base)
    found |= base
    return jax.tree.map(lambda name: found[name], parameter_names(shardings))


def _find_tokenizer(
    folder: Path, config: Config, is_run: bool, name: str | None, ends: Sequence[int]
) -> Tokenizer | None:
    data, start = config.data, config.model.start or folder  # of a base, or the folder
    eos = data.eos if is_run else None
    if eos is None and (not is_run or data.source_options.holds_ids):
        eos = next(iter(ends), None)
    if name is None and is_run:
        # Token files and random ids need none, but the run may name the one they were made with.
        if isinstance(data.source_options, DocumentSource) or data.tokenizer != BYTES:
            name = data.tokenizer
    elif name is None:
        files = [x / _TOKENIZER_FILE for x in (folder, start)]
        name = next((str(file) for file in files if file.is_file()), None)
    if name is None:
        return None
    tokenizer = make_tokenizer(name, eos, None if name == BYTES else data.bos)
    check_ends(tokenizer, config.model.vocab_size)
    if tokenizer.bos != tokenizer.usual_bos:
        logging.getLogger(__name__).warning(
            "note: documents begin %s in the training of %s (data.bos = %s), and so do prompts",
            printable(tokenizer.beginning),
            printable(str(folder)),
            toml_value(data.bos),
        )
    return tokenizer


def digests_of(loaded: Loaded) -> dict[str, str]:
    """Returns digests of all that determines the answers of a model, whatever its files."""
    network, tokenizer = loaded.network, loaded.tokenizer
    names = jax.tree.leaves(parameter_names(loaded.state))
    parameters = dict(zip(names, jax.tree.leaves(loaded.state), strict=True))
    files = []
    if isinstance(tokenizer, HuggingFaceTokenizer):
        paths = Path(tokenizer.name), tokenizer.settings_file
        files = [path for path in paths if path.is_file()]
    ends = tokenizer and (tokenizer.bos, tokenizer.eos), sorted(loaded.stop_ids)
    found = {
        "parameters": digest(parameters, exact=True),
        "configuration": digest_of(network.spec),
        "tokenizer": digest_of(type(tokenizer).__name__, ends, *files),
    }
    if network.settings.sparse:
        budgets = named_files(vars(network.settings))
        found["sparsity"] = digest_of(network.settings, *budgets)
    return found


def digest_of(*contents: object) -> str:
    """Returns a digest of values, and of the contents of files (`Path`)."""
    found = []
    for content in contents:
        if isinstance(content, Path):
            with content.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        found.append(repr(content))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
