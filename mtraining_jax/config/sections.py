"""The sections of a configuration: types, ranges, defaults and help texts of their fields."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, InstanceOf

from mtraining_jax.config.tables import OptionsOf
from mtraining_jax.data.source import Source
from mtraining_jax.data.sources import SOURCES
from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.lora.adapters import LoraSpec
from mtraining_jax.models.rope import ROPE_KINDS, RopeScaling
from mtraining_jax.models.spec import ComputeDtype, RematPolicy
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.hub import local_folder
from mtraining_jax.utils.limits import (
    Decay,
    Experts,
    Ge,
    Heads,
    Layers,
    Le,
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
    Width,
    Window,
)

GCS = "gs://"  # Google Cloud Storage
PATTERN_KIND = OptionsOf(
    "kind",
    PATTERNS,
    "sampled_rows",
    "Sparse attention pattern; docs/patterns.md describes all of them. sampled_rows and xattention "
    "select key blocks for each query block in every forward pass. vertical_slash selects "
    "verticals and slashes for each head in every forward pass; fixed does the same with budgets "
    "from a file. dense computes all pairs. Pass your own pattern as package.module:Class; its "
    "fields then belong to this section. In a checkout, benchmarks.replay:Replay computes random "
    "pairs of a given density, to measure speed with random weights, which attend almost "
    "uniformly.",
)
SOURCE_KIND = OptionsOf(
    "source",
    SOURCES,
    "python_stdlib",
    "python_stdlib: Python's standard library; tokens: token ids in .npy or .bin files. synthetic "
    "is for speed measurements: random token ids over the vocabulary, with word-like frequencies, "
    "in documents of very different lengths that repeat passages. Pass your own source as "
    "package.module:Class; its fields then belong to this section.",
)
ROPE_KIND = OptionsOf(
    "type", ROPE_KINDS, "yarn", "Scaling method; yarn is https://arxiv.org/abs/2309.00071."
)


def _registered(family: str) -> str:
    FAMILIES.get(family)
    return family


@options(kw_only=True)
class RunConfig:
    """General settings of the run."""

    name: Text = "run"
    """Name of the run; defaults to the name of the configuration file."""
    output_dir: PathText = "runs"
    """Parent folder of all runs; this run writes to OUTPUT_DIR/NAME. gs://BUCKET/FOLDER keeps
    checkpoints in a bucket, and other files in the local folder runs/BUCKET/FOLDER/NAME, from where
    they are copied to the bucket with each checkpoint."""
    seed: Seed = 0
    """Seed of the parameter initialization."""
    steps: PositiveInt = 1000
    """Total number of optimizer steps."""
    epochs: PositiveFloat | None = None
    """Passes over the training data, instead of run.steps."""
    log_interval: PositiveInt = 1
    """Print the metrics of every N-th step; metrics.jsonl has those of all."""
    step_timeout_seconds: PositiveInt = 1800
    """Stop the run if a step takes longer; most likely a device hangs."""
    compile_cache_dir: PathText = "auto"
    """Folder of JAX's persistent compilation cache; never disables it. auto uses
    OUTPUT_DIR/compiled on GPUs and no cache on the CPU."""

    @property
    def local_output_dir(self) -> Path:
        """The parent folder of the runs, or of their local files if they are in a bucket."""
        if self.output_dir.startswith(GCS):
            return Path("runs") / self.output_dir.removeprefix(GCS)
        return Path(self.output_dir)

    @property
    def folder(self) -> Path:
        """The local folder that this run writes to."""
        return self.local_output_dir / self.name

    @property
    def bucket(self) -> str | None:
        """The URL of the run's folder if it is in a bucket."""
        in_bucket = self.output_dir.startswith(GCS)
        return f"{self.output_dir.rstrip('/')}/{self.name}" if in_bucket else None


@options(kw_only=True)
class ModelConfig:
    """The transformer.

    With init_from, fields that the checkpoint's config.json sets may be omitted; see override.
    """

    family: Annotated[str, AfterValidator(_registered), FAMILIES] = "qwen2"
    """Model family, as model_type in config.json, or your own as package.module:Class."""
    vocab_size: Width
    """Vocabulary size."""
    hidden_size: Width
    """Width of the residual stream."""
    num_layers: Layers
    """Number of decoder layers."""
    num_heads: Heads
    """Number of query heads."""
    num_kv_heads: Heads
    """Number of key/value heads; must divide num_heads."""
    head_dim: Heads
    """Head dimension; even, and at most 128 (Hopper GPUs: 256) for the GPU kernels."""
    intermediate_size: Width
    """Width of the feed-forward layer (MLP), or of each expert."""
    num_experts: Experts = 0
    """Number of experts per layer, in a family with experts."""
    num_experts_per_tok: NonNegativeInt = 0
    """Number of experts that compute a token."""
    norm_topk_prob: bool = True
    """Normalize the weights of a token's experts to a sum of 1."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Factor on the auxiliary loss, which makes the router use all experts; 0 disables it."""
    max_position_embeddings: PositiveInt = 32768
    """Maximum sequence length of the model, in tokens."""
    rope_theta: PositiveFloat = 1e6
    """Base of the rotary position embedding (RoPE)."""
    rope_scaling: Annotated[InstanceOf[RopeScaling], ROPE_KIND] | None = None
    """RoPE scaling for longer contexts; none disables it."""
    sliding_window: Window | None = None
    """Number of keys that a query sees in layers with a sliding window, which have no sparse
    pattern; for families with one. none: every layer has the pattern."""
    full_attention_interval: PositiveInt | None = None
    """With sliding_window: every N-th layer has the pattern instead; none: no layer has."""
    window_rope_theta: PositiveFloat | None = None
    """Base of RoPE in layers with a sliding window, without scaling; none is that of the others."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Logits are divided by the square root of this number; none is head_dim."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Epsilon of RMSNorm, added to the mean square."""
    tie_word_embeddings: bool = False
    """Share the token embedding with the output layer."""
    dtype: ComputeDtype = "bfloat16"
    """Type of activations and frozen matrices; trained parameters are always float32."""
    init_from: PathText | None = None
    """Hugging Face checkpoint to start from: a folder, or hf://OWNER/NAME[@REVISION], which is
    downloaded (extra hub); none initializes randomly."""
    override: TextList = ()
    """Fields for which this configuration wins over the checkpoint of init_from. Allowed:
    rope_theta, rope_scaling, max_position_embeddings, rms_norm_eps, initializer_range and
    router_aux_loss_coef. Any other field that differs from config.json is an error."""
    remat: RematPolicy = "attention"
    """What the backward pass recomputes, from most memory to least. none: nothing; mlp: half of the
    MLP; attention: each layer except its attention; attention_offload: the same, with layer inputs
    offloaded to host memory; full_offload: with attention outputs and indices offloaded as well;
    full: entire layers."""
    mlp_chunk_size: PositiveInt = 16384
    """Tokens per device with MLP activations in memory at a time."""
    mlp_kept_chunks: NonNegativeInt = 0
    """With remat = "mlp": MLP chunks that are kept, not recomputed; costs memory."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of randomly initialized matrices."""

    @property
    def start(self) -> Path | None:
        """The local folder of init_from, which may lack the weights if it was downloaded."""
        return None if self.init_from is None else local_folder(self.init_from)


@options(kw_only=True)
class SparsityConfig:
    """Which query-key pairs attention computes."""

    pattern: Annotated[InstanceOf[Pattern], PATTERN_KIND] = PATTERN_KIND.default_options()
    """The pattern that `kind` selects, with its options."""
    tune: Literal["none", "mean", "min", "max"] = "none"
    """Tune the mass fraction per data-parallel replica so that all replicas finish together. Each
    replica uses the fraction (tau, or top_p of vertical_slash) at which its predicted time is the
    mean, minimum or maximum over all replicas at the configured fraction. Has an effect only with
    documents: without them all replicas have the same work."""
    tune_min: PositiveFraction = 0.85
    """Lower limit of the tuned mass fraction."""
    tune_max: PositiveFraction = 0.97
    """Upper limit of the tuned mass fraction."""
    dense_warmup_steps: NonNegativeInt = 0
    """Dense warm-up: compute all pairs in the first N steps of the run."""
    dense_cooldown_steps: NonNegativeInt = 0
    """Dense cooldown: compute all pairs in the last N of run.steps."""
    dense_interval: NonNegativeInt = 0
    """Compute all pairs in every Nth step; 0 disables."""

    @property
    def kind(self) -> str:
        """Name of the pattern."""
        return PATTERNS.name_of(type(self.pattern))

    @property
    def block_size(self) -> int:
        """Block size in tokens, of the pattern and of the stripes assigned to devices."""
        return self.pattern.block_size


@options(kw_only=True)
class ParallelConfig:
    """The device mesh, replicas x nodes x devices_per_node, and how sequences are sharded."""

    replicas: PositiveInt = 1
    """Number of data-parallel replicas; each processes different sequences of the batch."""
    nodes: PositiveInt = 1
    """Number of nodes that a sequence is sharded over (outer ring)."""
    devices_per_node: PositiveInt = 1
    """Number of devices per node that a sequence is sharded over (inner ring)."""
    layout: Literal["striped", "zigzag"] = "striped"
    """striped assigns blocks round-robin, best for sparse attention; zigzag two chunks."""
    ring: Literal["gather", "hierarchical", "flat"] = "gather"
    """How keys and values are exchanged; the results are the same. gather: all-gather the keys
    within a node while those of the next node arrive (fastest as far as measured); hierarchical: a
    ring within each node instead, with less memory; flat: one ring over all devices."""
    backend: Literal["auto", "xla", "mosaic_gpu", "triton"] = "auto"
    """Attention kernels. auto selects mosaic_gpu on Hopper GPUs, triton on other NVIDIA GPUs of
    compute capability 8.0 or later (with the extra triton), and xla elsewhere."""
    fsdp: bool = False
    """Shard parameters over the devices of a replica, and optimizer state over all devices,
    instead of replicating them."""
    cpu_devices: Annotated[int, Ge(1), Le(1024)] | None = None
    """Number of virtual CPU devices per process. A number forces the CPU even if there is a GPU;
    none uses the devices that JAX finds, GPUs before the CPU."""


@options(kw_only=True)
class DataConfig:
    """Training data; every source adds fields of its own."""

    source_options: Annotated[InstanceOf[Source], SOURCE_KIND] = SOURCE_KIND.default_options()
    """The source that `source` selects, with its options."""
    tokenizer: PathText = "bytes"
    """bytes (ids 0-255 are bytes, 256 ends a document) or the path of a tokenizer.json; with
    model.init_from it defaults to the tokenizer.json in that folder, if there is one."""
    eos: NonNegativeInt | Text | None = None
    """Token that ends a document, as id or string; none: the tokenizer's (bytes: 256)."""
    bos: Literal[False] | NonNegativeInt | Text | None = None
    """Token that begins a document and a prompt, as id or string; false: no token; none: as the
    tokenizer does. For token ids it only says what they have."""
    seq_len: Annotated[int, Ge(2)] = 4096
    """Sequence length in tokens."""
    batch_size: Annotated[int, Ge(1), Le(2**20)] = 1
    """Sequences per optimizer step, over all devices and accumulation steps."""
    mode: Literal["concat", "exact", "pack"] = "concat"
    """How documents become sequences. concat joins documents and splits them every seq_len tokens;
    exact keeps only documents of exactly seq_len tokens; pack puts entire documents together with
    little padding and masks attention between them."""
    mask_documents: bool = False
    """Mask attention between documents; mode = "pack" always does."""
    shuffle: bool = True
    """Shuffle the sequences, in a new order every epoch."""
    seed: Seed = 0
    """Seed of the shuffle."""
    balance: Literal["none", "length", "density"] = "none"
    """Assign the sequences of a batch to data-parallel replicas so that their work is even. length
    estimates the work from document lengths; density also uses the density that earlier steps
    measured for documents of that length. Without documents all sequences count the same."""

    @property
    def source(self) -> str:
        """Name of the source."""
        return SOURCES.name_of(type(self.source_options))

    @property
    def has_documents(self) -> bool:
        """Whether attention is masked between documents."""
        return self.mask_documents or self.mode == "pack"


@options(kw_only=True)
class EvalConfig:
    """Validation: the loss on data that is not trained on."""

    interval: NonNegativeInt = 0
    """Evaluate before the first step, every N steps and after the last step; 0 disables."""
    num_batches: PositiveInt = 8
    """Batches per evaluation, the same every time; fewer if the data has fewer."""
    attention: Literal["same", "dense", "both"] = "same"
    """same: with the sparse pattern of training; dense: with all pairs; both: report both losses. A
    run with dense attention is evaluated once in any case."""
    data: DataConfig | None = None
    """Validation data: the fields of [data], with its values as defaults. If eval.data.source is
    set, source-specific fields do not default to those of [data]."""


@options(kw_only=True)
class OptimizerConfig:
    """AdamW or Muon, the learning rate schedule, gradient clipping and skipped steps."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon (Jordan 2024; of optax.contrib) moves the matrices of layers along orthogonalized
    momentum, of the size of AdamW's updates (Moonlight), so lr and weight_decay keep their meaning;
    all other parameters have AdamW. It keeps one moment of matrices instead of two."""
    lr: PositiveFloat = 2e-5
    """Peak learning rate."""
    b1: Decay = 0.9
    """Decay of the first moment."""
    b2: Decay = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Epsilon, added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    clip_norm: NonNegativeFloat = 1.0
    """Clip the global norm of the gradient to this; 0 disables."""
    skip_norm: NonNegativeFloat = 0.0
    """Skip a step with a larger gradient norm before clipping; 0 disables."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from lr, after warm-up, to final_lr_ratio * lr."""
    warmup_steps: NonNegativeInt = 0
    """Steps of learning rate warm-up from 0 to lr."""
    decay_steps: PositiveInt | None = None
    """Step of the run at which the schedule ends; none: run.steps."""
    final_lr_ratio: UnitFraction = 0.0
    """Final learning rate as a fraction of lr."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the first moment. bfloat16, rounded to nearest, saves 2 of the 16 bytes per trained
    parameter and changes results slightly; the second moment is always float32."""
    offload: bool | Literal["all"] = False
    """Keep both moments in pinned host memory and update one layer at a time: saves 8 of the 16
    bytes per trained parameter and device for the time of the copies. all: parameters of layers and
    their gradients as well, which saves the other 8. Results are the same, but for last bits with
    all on a GPU."""
    accumulation_steps: PositiveInt = 1
    """Gradient accumulation: micro-batches per optimizer step, to save memory."""
    trainable: TextList = ()
    """Train only parameters with a name that contains one of these; empty trains all. Frozen
    matrices are stored in model.dtype."""
    max_skipped_steps: NonNegativeInt = 10
    """Steps with a non-finite loss or gradient, or a norm above skip_norm, are skipped; stop after
    more than N in a row."""


@options(kw_only=True)
class LoraConfig:
    """LoRA: train low-rank adapters of frozen matrices instead of all parameters."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 trains the model without adapters."""
    alpha: PositiveFloat | None = None
    """Adapters are multiplied by alpha / rank; none: 2 * rank."""
    targets: TextList = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    """Projections with an adapter; by default all of attention and MLP, because adapters of
    attention only learn less, also at a higher rank (QLoRA)."""
    dropout: Decay = 0.0
    """Fraction of the inputs of adapters that are dropped in training."""
    init_from: PathText | None = None
    """Folder of a PEFT adapter to start from; none starts without effect (B = 0)."""

    @property
    def spec(self) -> LoraSpec | None:
        """The adapters of the model; None without."""
        if not self.rank:
            return None
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return LoraSpec(self.rank, alpha, self.targets, self.dropout)


@options(kw_only=True)
class LossConfig:
    """Next-token cross entropy."""

    chunk_size: PositiveInt = 1024
    """Logits are in memory for at most this many tokens per device at a time."""
    weighting: Literal["token", "document"] = "token"
    """token: mean over all tokens; document: mean over documents of their mean (LongAlign).
    document needs data.mode = "pack" or data.mask_documents; the pieces of a split document count
    as documents."""


@options(kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    interval: NonNegativeInt = 0
    """Save a checkpoint every N steps; 0 saves only at the end."""
    last_step: bool = True
    """Save a checkpoint after the last step; false saves time in speed measurements."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are deleted."""
    resume: bool | Literal["auto"] = "auto"
    """Whether to resume from the newest checkpoint. auto: if there is one; true: fail if there is
    none; false: start from scratch."""
    skip_damaged: bool = False
    """If the newest checkpoint is damaged, move it to RUN_FOLDER/damaged and resume from the one
    before it. Reads the checkpoint twice, also into host memory."""
    local_dir: PathText | None = None
    """Folder on a disk of each host for more frequent checkpoints, e.g. on NVMe. A start resumes
    from them if all processes hold a step that is newer than the checkpoint in the run folder."""
    local_interval: PositiveInt = 100
    """Save into local_dir every N steps; the newest two are kept."""
    async_save: bool = True
    """Continue training while a checkpoint is written."""
    export_hf: bool = False
    """Export the trained model for Hugging Face transformers, in bfloat16, to RUN_FOLDER/hf, and
    LoRA adapters for PEFT to RUN_FOLDER/adapter."""


@options(kw_only=True)
class MetricsConfig:
    """Where metrics are written."""

    jsonl: bool = True
    """Write metrics.jsonl, one line per step."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: bool = False
    """Send metrics to Weights & Biases (needs the extra wandb)."""
    report: bool = True
    """Write report.html, a page about the run, at its end (needs jsonl and matplotlib)."""


@options(kw_only=True)
class AuditConfig:
    """Audits: the accuracy of sparse attention, measured during training; ignored in dense runs."""

    interval: NonNegativeInt = 0
    """Compare attention with dense attention every N steps, from step 1; 0 disables."""
    num_queries: Annotated[int, Ge(4)] = 64
    """Queries per audit: a quarter from the last 64, the others from everywhere."""
    masks: TextList = ()
    """Heads, as LAYER.HEAD from 0.0; audits draw their masks into RUN_FOLDER/masks."""
    alarm_recall: UnitFraction = 0.3
    """Warn if a head's recall is below this in two audits in a row; 0 disables."""
    alarm_gradient: UnitFraction = 0.5
    """Warn if the cosine with dense gradients is below this twice; 0 disables."""


@options(kw_only=True)
class GuardConfig:
    """Repeated steps: their bits differ only if a device is faulty."""

    enabled: bool = True
    """Repeat steps with an unusual loss or gradient norm; check the state's bits in each step."""
    interval: NonNegativeInt = 500
    """Also repeat every N-th step; 0 disables."""
    max_faults: NonNegativeInt = 3
    """Stop the run after more faults than this."""
    verify: bool = False
    """Test all devices and links for a minute before training."""


@options(kw_only=True)
class ProfileConfig:
    """Profiler trace of a few steps, written to RUN_FOLDER/profile."""

    start: PositiveInt | None = None
    """First traced step, counted from 1; none disables tracing."""
    steps: PositiveInt = 2
    """Number of traced steps."""


@options(kw_only=True)
class DistributedConfig:
    """How the processes of a run on several machines connect."""

    initialize: Literal["auto", "never"] = "auto"
    """auto joins the processes of SLURM, Kubernetes or these fields; never joins none."""
    coordinator: Text | None = None
    """HOST:PORT of process 0, if no scheduler provides it."""
    num_processes: PositiveInt | None = None
    """Number of processes; requires coordinator."""
    process_id: NonNegativeInt | None = None
    """Index of this process, from 0; requires coordinator."""
    timeout_seconds: PositiveInt = 300
    """How long to wait for the other processes at startup."""
    heartbeat_timeout_seconds: PositiveInt = 50
    """Stop if another process is silent for this long."""
