"""The sections of a configuration: types, ranges, defaults and help texts of their fields.

A section is a frozen dataclass that pydantic validates strictly: a value of another type is an
error, not converted (but an integer is a valid float). "Attributes:" are the help texts.
"""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, InstanceOf
from pydantic.dataclasses import dataclass

from mtraining_jax.config.kinds import PATTERN_KIND, ROPE_KIND, SOURCE_KIND
from mtraining_jax.data.source import Source
from mtraining_jax.data.sources import SOURCES
from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.rope import RopeScaling
from mtraining_jax.patterns.options.base import PatternOptions
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.utils.limits import (
    Decay,
    Ge,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Seed,
    Text,
    TextList,
    UnitFraction,
)

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _registered(family: str) -> str:
    FAMILIES.get(family)
    return family


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RunConfig:
    """General settings of the run.

    Attributes:
        name: Name of the run; defaults to the name of the configuration file.
        output_dir: Parent folder of all runs; this run writes to OUTPUT_DIR/NAME.
        seed: Seed of the parameter initialization.
        steps: Total number of optimizer steps.
        log_interval: Print metrics every N steps.
        step_timeout_seconds: Stop the run if a step takes longer; most likely a device hangs.
        compile_cache_dir: Folder of JAX's persistent compilation cache; never disables it. auto
            uses OUTPUT_DIR/compiled on GPUs and no cache on the CPU.
    """

    name: Text = "run"
    output_dir: PathText = "runs"
    seed: Seed = 0
    steps: PositiveInt = 1000
    log_interval: PositiveInt = 1
    step_timeout_seconds: PositiveInt = 1800
    compile_cache_dir: PathText = "auto"

    @property
    def folder(self) -> Path:
        """The folder that this run writes to."""
        return Path(self.output_dir) / self.name


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """The transformer.

    With init_from, fields that the checkpoint's config.json sets may be omitted; see override.

    Attributes:
        family: Model family, as model_type in config.json, or your own as package.module:Class.
        vocab_size: Vocabulary size.
        hidden_size: Width of the residual stream.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key/value heads; must divide num_heads.
        head_dim: Head dimension; even, and 64 or 128 for the GPU kernels.
        intermediate_size: Width of the feed-forward layer (MLP).
        max_position_embeddings: Maximum sequence length of the model, in tokens.
        rope_theta: Base of the rotary position embedding (RoPE).
        rope_scaling: RoPE scaling for longer contexts; none disables it.
        rms_norm_eps: Epsilon of RMSNorm, added to the mean square.
        tie_word_embeddings: Share the token embedding with the output layer.
        dtype: Type of activations; parameters and optimizer state are always float32.
        init_from: Folder of a Hugging Face checkpoint to start from; none initializes randomly.
        override: Fields for which this configuration wins over the checkpoint of init_from.
            Allowed: rope_theta, rope_scaling, max_position_embeddings, rms_norm_eps and
            initializer_range. Any other field that differs from the checkpoint's config.json is an
            error.
        remat: What the backward pass recomputes, from most memory to least. none: nothing; mlp:
            half of the MLP; attention: each layer except its attention; attention_offload: the
            same, with layer inputs offloaded to host memory; full: entire layers.
        mlp_chunk_size: Tokens per device whose MLP activations are in memory at a time.
        mlp_kept_chunks: With remat = "mlp": MLP chunks that are kept, not recomputed; costs memory.
        initializer_range: Standard deviation of randomly initialized matrices.
    """

    family: Annotated[str, AfterValidator(_registered), FAMILIES] = "qwen2"
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt = 32768
    rope_theta: PositiveFloat = 1e6
    rope_scaling: Annotated[InstanceOf[RopeScaling], ROPE_KIND] | None = None
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    init_from: PathText | None = None
    override: TextList = ()
    remat: Literal["none", "mlp", "attention", "attention_offload", "full"] = "attention"
    mlp_chunk_size: PositiveInt = 16384
    mlp_kept_chunks: NonNegativeInt = 0
    initializer_range: PositiveFloat = 0.02


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SparsityConfig:
    """Which query-key pairs attention computes.

    Attributes:
        pattern: Options of the pattern that `kind` selects.
        tune: Tune the mass fraction per data-parallel replica so that all replicas finish together.
            Each replica uses the fraction (tau, or top_p of vertical_slash) at which its predicted
            time is the mean, minimum or maximum over all replicas at the configured fraction. Has
            an effect only with documents: without them all replicas have the same work.
        tune_min: Lower limit of the tuned mass fraction.
        tune_max: Upper limit of the tuned mass fraction.
        dense_warmup_steps: Dense warm-up: compute all pairs in the first N steps of the run.
        dense_cooldown_steps: Dense cooldown: compute all pairs in the last N of run.steps.
        dense_interval: Compute all pairs in every Nth step; 0 disables.
    """

    pattern: Annotated[InstanceOf[PatternOptions], PATTERN_KIND] = field(
        default_factory=PATTERN_KIND.default_options
    )
    tune: Literal["none", "mean", "min", "max"] = "none"
    tune_min: PositiveFraction = 0.85
    tune_max: PositiveFraction = 0.97
    dense_warmup_steps: NonNegativeInt = 0
    dense_cooldown_steps: NonNegativeInt = 0
    dense_interval: NonNegativeInt = 0

    @property
    def kind(self) -> str:
        """Name of the pattern."""
        return PATTERNS.name_of(type(self.pattern))

    @property
    def block_size(self) -> int:
        """Block size in tokens, of the pattern and of the stripes assigned to devices."""
        return self.pattern.block_size


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ParallelConfig:
    """The device mesh, replicas x nodes x devices_per_node, and how sequences are sharded over it.

    Attributes:
        replicas: Number of data-parallel replicas; each processes different sequences of the batch.
        nodes: Number of nodes that a sequence is sharded over (outer ring).
        devices_per_node: Number of devices per node that a sequence is sharded over (inner ring).
        layout: striped assigns blocks round-robin, best for sparse attention; zigzag two chunks.
        ring: How keys and values are exchanged; the results are the same. gather: all-gather the
            keys within a node while those of the next node arrive (fastest as far as measured);
            hierarchical: a ring within each node instead, with less memory; flat: one ring over all
            devices.
        backend: Attention kernels. auto selects mosaic_gpu on Hopper GPUs, triton on older ones
            (compute capability 8.x, with the extra ampere), and xla elsewhere.
        fsdp: Shard parameters and optimizer state over the devices instead of replicating them.
        cpu_devices: Number of virtual CPU devices per process. A number forces the CPU even if
            there is a GPU; none uses the devices that JAX finds, GPUs before the CPU.
    """

    replicas: PositiveInt = 1
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 1
    layout: Literal["striped", "zigzag"] = "striped"
    ring: Literal["gather", "hierarchical", "flat"] = "gather"
    backend: Literal["auto", "xla", "mosaic_gpu", "triton"] = "auto"
    fsdp: bool = False
    cpu_devices: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """Training data; every source adds fields of its own.

    Attributes:
        source_options: The source that `source` selects, with its options.
        tokenizer: bytes (ids 0-255 are bytes, 256 ends a document) or the path of a tokenizer.json.
        eos: Token that ends a document, as id or string; none: the tokenizer's (bytes: 256).
        seq_len: Sequence length in tokens.
        batch_size: Sequences per optimizer step, over all devices and accumulation steps.
        mode: How documents become sequences. concat joins documents and splits them every seq_len
            tokens; exact keeps only documents of exactly seq_len tokens; pack puts entire documents
            together with little padding and masks attention between them.
        mask_documents: Mask attention between documents; mode = "pack" always does.
        shuffle: Shuffle the sequences, in a new order every epoch.
        seed: Seed of the shuffle.
        balance: Assign the sequences of a batch to data-parallel replicas so that their work is
            even. length estimates the work from document lengths; density also uses the density
            that earlier steps measured for documents of that length. Without documents all
            sequences count the same.
    """

    source_options: Annotated[InstanceOf[Source], SOURCE_KIND] = field(
        default_factory=SOURCE_KIND.default_options
    )
    tokenizer: PathText = "bytes"
    eos: NonNegativeInt | Text | None = None
    seq_len: Annotated[int, Ge(2)] = 4096
    batch_size: PositiveInt = 1
    mode: Literal["concat", "exact", "pack"] = "concat"
    mask_documents: bool = False
    shuffle: bool = True
    seed: Seed = 0
    balance: Literal["none", "length", "density"] = "none"

    @property
    def source(self) -> str:
        """Name of the source."""
        return SOURCES.name_of(type(self.source_options))

    @property
    def has_documents(self) -> bool:
        """Whether attention is masked between documents."""
        return self.mask_documents or self.mode == "pack"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EvalConfig:
    """Validation: the loss on data that is not trained on.

    Attributes:
        interval: Evaluate every N steps and after the last step; 0 disables.
        num_batches: Batches per evaluation, the same every time.
        attention: same: with the sparse pattern of training; dense: with all pairs; both: report
            both losses. A run with dense attention is evaluated once in any case.
        data: Validation data: the fields of [data], with its values as defaults. If
            eval.data.source is set, source-specific fields do not default to those of [data].
    """

    interval: NonNegativeInt = 0
    num_batches: PositiveInt = 8
    attention: Literal["same", "dense", "both"] = "same"
    data: DataConfig | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimizerConfig:
    """AdamW, its learning rate schedule, gradient clipping and skipped steps.

    Attributes:
        lr: Peak learning rate.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Epsilon, added to the root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        clip_norm: Clip the global norm of the gradient to this; 0 disables.
        schedule: Shape of the decay from lr, after warm-up, to final_lr_ratio * lr.
        warmup_steps: Steps of learning rate warm-up from 0 to lr.
        decay_steps: Step of the run at which the schedule ends; none: run.steps.
        final_lr_ratio: Final learning rate as a fraction of lr.
        accumulation_steps: Gradient accumulation: micro-batches per optimizer step, to save memory.
        trainable: Train only parameters with a name that contains one of these; empty trains all.
        max_skipped_steps: Steps with a non-finite loss or gradient are skipped; stop after more
            than N in a row.
    """

    lr: PositiveFloat = 2e-5
    b1: Decay = 0.9
    b2: Decay = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: NonNegativeFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    final_lr_ratio: UnitFraction = 0.0
    accumulation_steps: PositiveInt = 1
    trainable: TextList = ()
    max_skipped_steps: NonNegativeInt = 10


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LossConfig:
    """Next-token cross entropy.

    Attributes:
        chunk_size: Logits are in memory for at most this many tokens per device at a time.
        weighting: token: mean over all tokens; document: mean over documents of their mean
            (LongAlign). document needs data.mode = "pack" or data.mask_documents; the pieces of a
            split document count as documents.
    """

    chunk_size: PositiveInt = 1024
    weighting: Literal["token", "document"] = "token"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CheckpointConfig:
    """Saving and resuming.

    Attributes:
        interval: Save a checkpoint every N steps; 0 saves only at the end.
        last_step: Save a checkpoint after the last step; false saves time in speed measurements.
        keep: Number of newest checkpoints to keep; older ones are deleted.
        resume: Whether to resume from the newest checkpoint. auto: if there is one; true: fail if
            there is none; false: start from scratch.
        async_save: Continue training while a checkpoint is written.
        export_hf: Export the trained model for Hugging Face transformers, in bfloat16, to
            RUN_FOLDER/hf.
    """

    interval: NonNegativeInt = 0
    last_step: bool = True
    keep: PositiveInt = 2
    resume: bool | Literal["auto"] = "auto"
    async_save: bool = True
    export_hf: bool = False


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MetricsConfig:
    """Where metrics are written.

    Attributes:
        jsonl: Write metrics.jsonl, one line per step.
        tensorboard: Write TensorBoard event files.
        wandb: Send metrics to Weights & Biases (needs the extra wandb).
    """

    jsonl: bool = True
    tensorboard: bool = True
    wandb: bool = False


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class AuditConfig:
    """Audits: the accuracy of sparse attention, measured during training; ignored in dense runs.

    Attributes:
        interval: Compare attention with dense attention every N steps, from step 1; 0 disables.
        num_queries: Queries per audit: a quarter from the last 64, the others from everywhere.
        gradient_interval: Compare all gradients with dense attention's every N steps; 0 disables.
        gradient_tokens: Truncate sequences to N tokens for that; none: 8192, or all if fewer.
        masks: Heads, as LAYER.HEAD from 0.0; audits draw their masks into RUN_FOLDER/masks.
        alarm_recall: Warn if a head's recall is below this in two audits in a row; 0 disables.
        alarm_gradient: Warn if the cosine with dense gradients is below this twice; 0 disables.
        alarm_gap: Warn if the last queries' recall exceeds others' by this twice; 1 disables.
    """

    interval: NonNegativeInt = 0
    num_queries: Annotated[int, Ge(4)] = 64
    gradient_interval: NonNegativeInt = 0
    gradient_tokens: PositiveInt | None = None
    masks: TextList = ()
    alarm_recall: UnitFraction = 0.3
    alarm_gradient: UnitFraction = 0.5
    alarm_gap: UnitFraction = 0.2


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ProfileConfig:
    """Profiler trace of a few steps, written to RUN_FOLDER/profile.

    Attributes:
        start: First traced step, counted from 1; none disables tracing.
        steps: Number of traced steps.
    """

    start: PositiveInt | None = None
    steps: PositiveInt = 2


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DistributedConfig:
    """How the processes of a run on several machines connect.

    Attributes:
        initialize: auto joins the processes of SLURM, Kubernetes or these fields; never joins none.
        coordinator: HOST:PORT of process 0, if no scheduler provides it.
        num_processes: Number of processes; requires coordinator.
        process_id: Index of this process, from 0; requires coordinator.
        timeout_seconds: How long to wait for the other processes at startup.
        heartbeat_timeout_seconds: Stop if another process sends no heartbeat for this long.
    """

    initialize: Literal["auto", "never"] = "auto"
    coordinator: Text | None = None
    num_processes: PositiveInt | None = None
    process_id: NonNegativeInt | None = None
    timeout_seconds: PositiveInt = 300
    heartbeat_timeout_seconds: PositiveInt = 100
