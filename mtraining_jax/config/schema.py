"""The fields of a run: their types, ranges, defaults and meaning.

Every section is a frozen dataclass, checked by pydantic when it is built: a value of another type
or out of range is an error, never converted (a whole number is a valid real one). The docstring
under a field is its help text.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from mtraining_jax.config.sections import Plugins, assemble, assembled, one_of, selected
from mtraining_jax.config.sizes import Sizes
from mtraining_jax.data.sources import SOURCES
from mtraining_jax.field_types import (
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Text,
    TextList,
)
from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.rope import ROPE_KINDS, YarnScaling
from mtraining_jax.sparsity.pattern import Settings
from mtraining_jax.sparsity.registry import PATTERNS

_STRICT = ConfigDict(
    strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RunConfig:
    """The run as a whole."""

    name: Text = "run"
    """Name of the run; a configuration file that does not set it gives its own name."""
    output_dir: PathText = "runs"
    """Folder of all runs; this one writes into OUTPUT_DIR/NAME."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the parameters' random start."""
    steps: PositiveInt = 1000
    """Optimizer steps at which the run is complete."""
    log_every: PositiveInt = 1
    """Steps between two lines of printed metrics."""
    step_timeout_seconds: PositiveInt = 1800
    """How long a step may take; then the run ends, as devices most likely wait for each other."""
    compile_cache_dir: PathText = "auto"
    """Folder that keeps compiled programs for the next start; never keeps nothing.

    auto is OUTPUT_DIR/compiled on GPUs and nothing on the CPU.
    """

    @property
    def folder(self) -> Path:
        """The folder this run writes into."""
        return Path(self.output_dir) / self.name


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class _RopeScalingConfig:
    """Rotary embeddings stretched to contexts longer than the model was trained on."""

    type: Literal[*ROPE_KINDS] = YarnScaling.type
    """The method; yarn is https://arxiv.org/abs/2309.00071."""
    factor: Annotated[float, Field(ge=1)]
    """How many times longer the context becomes."""


RopeScalingConfig = assemble(
    "RopeScalingConfig", _RopeScalingConfig, ROPE_KINDS, "model.rope_scaling.type"
)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """The transformer.

    With init_from, what the checkpoint's config.json says may be left out here; see override.
    """

    family: one_of(FAMILIES) = "qwen2"
    """Kind of model, as config.json's model_type, or your own as package.module:Name."""
    vocab_size: PositiveInt
    """Number of token ids."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_layers: PositiveInt
    """Decoder layers."""
    num_heads: PositiveInt
    """Query heads."""
    num_kv_heads: PositiveInt
    """Key/value heads; must divide num_heads."""
    head_dim: PositiveInt
    """Width of one head; even, and 64 or 128 for the GPU kernels."""
    intermediate_size: PositiveInt
    """Width of the feed-forward layer."""
    max_position_embeddings: PositiveInt = 32768
    """Longest sequence, in tokens, that the model is meant for."""
    rope_theta: PositiveFloat = 1e6
    """Base of the rotary embedding's frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Stretching of the rotary embedding; none leaves it as it is."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Added to the mean square before its root."""
    tie_word_embeddings: bool = False
    """Use the token embedding as the output layer too."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations; parameters and optimizer state are float32 always."""
    init_from: PathText | None = None
    """Folder of a Hugging Face checkpoint to start from; none starts from random parameters."""
    override: TextList = ()
    """Of init_from: fields for which this configuration counts and not the checkpoint.

    rope_theta, rope_scaling, max_position_embeddings, rms_norm_eps or initializer_range. Any other
    field that differs from the checkpoint's config.json is an error.
    """
    remat: Literal["none", "mlp", "attention", "attention_offload", "full"] = "attention"
    """Computed again in the backward pass, from most memory to least.

    none: nothing; mlp: half of the MLP; attention: layers but their attention; attention_offload:
    the same, with the layers' inputs in host memory; full: layers.
    """
    mlp_chunk_size: PositiveInt = 16384
    """Tokens of one device whose feed-forward activations are in memory at a time."""
    mlp_kept_chunks: NonNegativeInt = 0
    """Of remat = "mlp": chunks whose MLP is not computed again either, as memory allows."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of random matrices at the start."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SparsityConfig:
    """Which pairs of query and key are computed."""

    kind: one_of(PATTERNS) = "sampled_rows"
    """sampled_rows, mixed_rows, xattention, prism, exact_rows: lists of key blocks for each block
    of queries, chosen in every forward pass; dense: all; vertical_slash: columns and diagonals for
    each head, chosen in every forward pass; fixed: the same with budgets from a file.

    replay is for measuring speed with random weights, whose attention is flat: every head computes
    random block diagonals and columns, or lists, of a density given beforehand. Nothing is chosen.
    A pattern of your own is named package.module:Name; its fields then belong to this section.
    """
    block_size: PositiveInt = 128
    """Tokens on one side of a block: of the sparse pattern and of the stripes dealt to devices."""
    tune: Literal["none", "mean", "min", "max"] = "none"
    """Groups of parallel.data keep more or less of the attention's mass, so that they end together.

    Each takes the share (tau, or top_p of vertical_slash) by which its predicted time becomes the
    mean, the least or the greatest of all groups' times at the configured share. Needs documents to
    have an effect, as groups differ by these.
    """
    tune_low: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Least share of the mass that tuning may keep."""
    tune_high: Annotated[float, Field(gt=0, le=1)] = 0.97
    """Greatest share of the mass that tuning may keep."""
    dense_first: NonNegativeInt = 0
    """Steps at the start of the run, from step 1 on, that compute all pairs."""
    dense_last: NonNegativeInt = 0
    """Steps at the end of the run that compute all pairs, counted back from run.steps."""
    dense_every: NonNegativeInt = 0
    """One step in so many computes all pairs, those whose number is a multiple of it; 0: none."""

    plugins: ClassVar[Plugins] = Plugins(PATTERNS, selector="kind")

    @property
    def settings(self) -> Settings:
        """The settings of the pattern that `kind` names.

        Raises:
            ValueError: beginning with the name of the field that is not possible.
        """
        cls = PATTERNS.get(self.kind)
        return cls(**selected(self, cls))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ParallelConfig:
    """The mesh of devices, data x nodes x devices_per_node, and how sequences spread over it."""

    data: PositiveInt = 1
    """Groups of devices that each work on other sequences of the batch."""
    nodes: PositiveInt = 1
    """Nodes that share one sequence (the outer ring)."""
    devices_per_node: PositiveInt = 1
    """Devices of one node that share one sequence (the inner ring)."""
    layout: Literal["striped", "zigzag"] = "striped"
    """striped deals blocks in turn, best for sparse attention; zigzag deals two chunks a device."""
    ring: Literal["gather", "hierarchical", "flat"] = "gather"
    """How keys travel; the results are the same.

    gather: devices of a node gather all keys of their node, while the next node's are on their
    way (fastest as far as measured); hierarchical: around the devices of a node instead, with less
    memory; flat: around all devices as one ring.
    """
    backend: Literal["auto", "xla", "mosaic_gpu", "triton"] = "auto"
    """Attention kernels.

    auto takes mosaic_gpu on Hopper GPUs, triton on those before (compute capability 8.x, with the
    extra ampere), and xla elsewhere.
    """
    fsdp: bool = False
    """Spread parameters and optimizer state over the devices instead of copying them to each."""
    cpu_devices: PositiveInt | None = None
    """Virtual devices of the CPU in each process.

    A number forces the CPU, even where there is a GPU; none takes the devices that JAX finds, GPUs
    before the CPU.
    """


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """What the model reads; every source has fields of its own."""

    source: one_of(SOURCES) = "python_stdlib"
    """python_stdlib: Python's own library; tokens: token ids in .npy or .bin files.

    synthetic is for measuring speed: random token ids over the model's vocabulary, as frequent as
    words are, in documents of very different lengths that repeat passages. A source of your own is
    named package.module:Name; its fields then belong to this section.
    """
    tokenizer: PathText = "bytes"
    """bytes (ids 0-255 are bytes, 256 ends a text) or the path of a tokenizer.json."""
    eos: NonNegativeInt | Text | None = None
    """Token that ends each text, its id or string; none takes the tokenizer's own (bytes: 256)."""
    seq_len: Annotated[int, Field(ge=2)] = 4096
    """Tokens of one sequence."""
    batch_size: PositiveInt = 1
    """Sequences in one optimizer step, over all devices and accumulation steps."""
    mode: Literal["concat", "exact", "pack"] = "concat"
    """concat joins texts and splits every seq_len; exact keeps records of just that length.

    pack puts whole texts together so that little room is left, and none sees another one.
    """
    documents: bool = False
    """Whether attention stays within each text, as it always does with mode pack."""
    shuffle: bool = True
    """Read sequences in random order, another in every epoch."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of that order."""
    balance: Literal["none", "length", "density"] = "none"
    """Deal the sequences of a batch to the groups of parallel.data so that their work is even.

    length weighs documents by their length; density also by the density that the steps before
    measured for documents of that length. Without documents all sequences weigh the same.
    """

    plugins: ClassVar[Plugins] = Plugins(SOURCES, selector="source")

    @property
    def has_documents(self) -> bool:
        """Whether batches say where documents are, and attention stays within each."""
        return self.documents or self.mode == "pack"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EvalConfig:
    """The loss on text that is held out: not trained on."""

    every_steps: NonNegativeInt = 0
    """Steps between two evaluations, which the last step ends with too; 0 never evaluates."""
    batches: PositiveInt = 8
    """Batches of each evaluation, the same every time."""
    attention: Literal["same", "dense", "both"] = "same"
    """same: with the pairs that training would choose; dense: with all pairs; both: side by side.

    A run that trains dense is evaluated once, whichever it is.
    """
    data: DataConfig | None = None
    """What is held out: fields as in [data], and like there where they are not given.

    Where eval.data.source is given, the fields of the source are not taken over.
    """


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimizerConfig:
    """AdamW, its schedule and its guards."""

    lr: PositiveFloat = 2e-5
    """Highest learning rate."""
    b1: Decay = 0.9
    """Decay of the mean of gradients."""
    b2: Decay = 0.95
    """Decay of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square."""
    weight_decay: NonNegativeFloat = 0.0
    """Share of a parameter taken off at each step, times the learning rate."""
    clip_norm: NonNegativeFloat = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 leaves all as they are."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes from lr, after the warm-up, to final_lr_ratio * lr."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the rate rises from 0 to lr."""
    decay_steps: PositiveInt | None = None
    """Step, counted from the start, at which the schedule ends; none is run.steps."""
    final_lr_ratio: Fraction = 0.0
    """Rate at the end of the schedule over lr."""
    accumulation_steps: PositiveInt = 1
    """Parts of the batch whose gradients are summed one after the other, to save memory."""
    trainable: TextList = ()
    """Parameters whose name contains one of these are trained, the rest is frozen; empty is all."""
    max_skipped_steps: NonNegativeInt = 10
    """Steps with a loss or gradient that is not finite are skipped; more in a row end the run."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LossConfig:
    """Cross entropy of the next token."""

    chunk_size: PositiveInt = 1024
    """Tokens of one device whose logits are in memory at a time."""
    weighting: Literal["token", "document"] = "token"
    """token: the mean over all tokens; document: over documents, of the mean in each (LongAlign).

    document needs data.mode = "pack" or data.documents; a document that is cut counts in pieces.
    """


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CheckpointConfig:
    """When the state of the run is saved, and whether it is read back."""

    every_steps: NonNegativeInt = 0
    """Steps between two checkpoints; 0 saves at the end only."""
    last_step: bool = True
    """Save the state of the last step as well; false saves time where only speed is measured."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; older ones are deleted."""
    resume: bool | Literal["auto"] = "auto"
    """auto goes on from the newest checkpoint, if any; true needs one; false starts anew."""
    async_save: bool = True
    """Go on training while a checkpoint is written."""
    export_hf: bool = False
    """Write the trained model for Hugging Face transformers, bfloat16, into RUN_FOLDER/hf."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MetricsConfig:
    """What is measured and where it is written."""

    jsonl: bool = True
    """Write metrics.jsonl, one line a step."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: bool = False
    """Send metrics to Weights & Biases (needs the extra wandb)."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class AuditConfig:
    """What the sparse pattern costs, measured while the run trains; dense runs have nothing."""

    every_steps: NonNegativeInt = 0
    """Steps between two audits, from step 1 on, which compare attention with dense; 0: never."""
    rows: Annotated[int, Field(ge=4)] = 64
    """Queries that are compared: a quarter of the last 64, the others from everywhere."""
    gradient_every: NonNegativeInt = 0
    """Steps between two comparisons of all gradients with those of dense attention; 0: never."""
    gradient_tokens: PositiveInt | None = None
    """First tokens of the sequences that these are computed on; none is 8192, or all if fewer."""
    masks: TextList = ()
    """Heads, as LAYER.HEAD from 0.0 on, whose masks each audit draws into RUN_FOLDER/masks."""
    alarm_recall: Fraction = 0.3
    """Share of attention's mass: a head that keeps less, twice in a row, is told; 0: none is."""
    alarm_gradient: Fraction = 0.5
    """Cosine of gradients with those of dense attention below which that is told; 0: it is not."""
    alarm_gap: Fraction = 0.2
    """Recall of the last queries over that of others, above which that is told; 1: it is not."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ProfileConfig:
    """A trace of some steps, in the folder `profile` of the run."""

    start: PositiveInt | None = None
    """First step that is traced, from 1; none traces nothing."""
    steps: PositiveInt = 2
    """Steps that are traced."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DistributedConfig:
    """How the processes of a run on several machines find each other."""

    initialize: Literal["auto", "never"] = "auto"
    """auto joins the processes that SLURM, Kubernetes or these fields name; never runs alone."""
    coordinator: Text | None = None
    """HOST:PORT of process 0, if no scheduler gives it."""
    num_processes: PositiveInt | None = None
    """Processes of the run; goes with coordinator."""
    process_id: NonNegativeInt | None = None
    """Number of this process, from 0; goes with coordinator."""
    timeout_seconds: PositiveInt = 300
    """How long to wait for the other processes at the start."""
    heartbeat_timeout_seconds: PositiveInt = 100
    """When a process is not heard of for so long, the others stop instead of waiting for it."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config(Sizes):
    """A whole run; sizes that follow from its fields are properties of `Sizes`."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    sparsity: SparsityConfig = Field(default_factory=lambda: assembled(SparsityConfig)())
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = Field(default_factory=lambda: assembled(DataConfig)())
    eval: EvalConfig = EvalConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    audit: AuditConfig = AuditConfig()
    profile: ProfileConfig = ProfileConfig()
    distributed: DistributedConfig = DistributedConfig()
