"""All sections of a run, and sizes and dense steps derived from them."""

import dataclasses

from mtraining_jax.config import sections
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.text import counted


@dataclasses.dataclass(frozen=True)
class DenseSteps:
    """The dense steps of a run: `step in dense_steps`, with steps counted from 1.

    Attributes:
        every: multiples of this are dense too; 0 disables.
    """

    total: int
    first: int = 0
    last: int = 0
    every: int = 0

    def __contains__(self, step: int) -> bool:
        at_an_end = step <= self.first or self.total - self.last < step <= self.total
        return at_an_end or (self.every > 0 and step % self.every == 0)

    def count(self, after: int = 0) -> int:
        """Number of dense steps in `after + 1` to `total`."""
        begin, end = max(after, self.first), self.total - self.last
        sparse = max(0, end - begin)
        if sparse and self.every:
            sparse -= end // self.every - begin // self.every
        return self.total - after - sparse

    def describe(self) -> str:
        """For example `the first 5, the last 10 and one in 20: 19 of 100 steps`."""
        ends = {"the first": self.first, "the last": self.last}
        parts = [name if n == 1 else f"{name} {n}" for name, n in ends.items() if n]
        *before, end = [*parts, *([f"one in {self.every}"] if self.every else [])] or ["none"]
        words = f"{', '.join(before)} and {end}" if before else end
        return f"{words}: {self.count()} of {counted(self.total, 'step')}"


@options(kw_only=True)
class Sections:
    """The sections of a run. `validate` checks that all divisions of derived sizes are exact."""

    run: sections.RunConfig = sections.RunConfig()
    model: sections.ModelConfig
    sparsity: sections.SparsityConfig = sections.SparsityConfig()
    parallel: sections.ParallelConfig = sections.ParallelConfig()
    data: sections.DataConfig = sections.DataConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    lora: sections.LoraConfig = sections.LoraConfig()
    loss: sections.LossConfig = sections.LossConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    metrics: sections.MetricsConfig = sections.MetricsConfig()
    audit: sections.AuditConfig = sections.AuditConfig()
    guard: sections.GuardConfig = sections.GuardConfig()
    profile: sections.ProfileConfig = sections.ProfileConfig()
    distributed: sections.DistributedConfig = sections.DistributedConfig()

    @property
    def dense_steps(self) -> DenseSteps:
        """Dense steps of a sparse run; none if the run is dense."""
        if not self.sparsity.pattern.sparse:
            return DenseSteps(self.run.steps)
        ends = self.sparsity.dense_warmup_steps, self.sparsity.dense_cooldown_steps
        return DenseSteps(self.run.steps, *ends, self.sparsity.dense_interval)

    @property
    def mesh_shape(self) -> tuple[int, int, int]:
        """Data-parallel replicas, nodes, devices per node."""
        parallel = self.parallel
        return parallel.replicas, parallel.nodes, parallel.devices_per_node

    @property
    def ranks(self) -> int:
        """Context-parallel size: devices that a sequence is sharded over."""
        return self.parallel.nodes * self.parallel.devices_per_node

    @property
    def devices(self) -> int:
        """Devices of the run."""
        return self.parallel.replicas * self.ranks

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Global batch shape: sequences, tokens per sequence."""
        return self.data.batch_size, self.data.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all devices and micro-batches."""
        return self.data.batch_size * self.data.seq_len

    @property
    def row_parts(self) -> int:
        """Parts of the batch dimension: data-parallel replicas times micro-batches."""
        return self.parallel.replicas * self.optimizer.accumulation_steps

    @property
    def local_rows(self) -> int:
        """Sequences per micro-batch and data-parallel replica."""
        return self.data.batch_size // self.row_parts

    @property
    def local_tokens(self) -> int:
        """Tokens per micro-batch and device."""
        return self.local_rows * (self.data.seq_len // self.ranks)

    @property
    def audited_masks(self) -> list[tuple[int, int]]:
        """Layer and head of each mask that audits draw."""
        pairs = (text.split(".") for text in self.audit.masks)
        return [(int(layer), int(head)) for layer, head in pairs]

    @property
    def sequence_unit(self) -> int:
        """Divisor of data.seq_len: gives all context-parallel ranks equally many entire blocks."""
        chunks = 2 if self.parallel.layout == "zigzag" else 1  # of a rank
        return chunks * self.ranks * self.sparsity.block_size
