"""Sizes that follow from a configuration, each defined once."""

from typing import TYPE_CHECKING

from mtraining_jax.config.dense_steps import DenseSteps

if TYPE_CHECKING:
    from mtraining_jax.config.schema import (
        AuditConfig,
        DataConfig,
        OptimizerConfig,
        ParallelConfig,
        RunConfig,
        SparsityConfig,
    )
    from mtraining_jax.sparsity.pattern import Settings


class Sizes:
    """Properties of `Config`; `validate` has checked that the divisions are exact."""

    if TYPE_CHECKING:  # the fields of `Config` that are read here
        run: RunConfig
        parallel: ParallelConfig
        data: DataConfig
        optimizer: OptimizerConfig
        sparsity: SparsityConfig
        audit: AuditConfig

    @property
    def choosing(self) -> "Settings":
        """The settings of what chooses pairs: those of `sparsity`, made for documents if data has.

        Raises:
            UserError: if they cannot be.
        """
        settings = self.sparsity.settings
        return settings.for_documents() if self.data.has_documents else settings

    @property
    def dense_steps(self) -> DenseSteps:
        """Which steps compute all pairs though others do not; none where every step does."""
        steps, sparsity = self.run.steps, self.sparsity
        if not sparsity.settings.sparse:
            return DenseSteps(steps)
        return DenseSteps(
            steps, sparsity.dense_first, sparsity.dense_last, sparsity.dense_every
        )

    @property
    def mesh_shape(self) -> tuple[int, int, int]:
        """Data groups, nodes of a group, devices of a node."""
        parallel = self.parallel
        return parallel.data, parallel.nodes, parallel.devices_per_node

    @property
    def ranks(self) -> int:
        """Devices that share one sequence."""
        return self.parallel.nodes * self.parallel.devices_per_node

    @property
    def devices(self) -> int:
        """Devices of the whole run."""
        return self.parallel.data * self.ranks

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Sequences of one optimizer step and tokens of each."""
        return self.data.batch_size, self.data.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all devices and micro-batches."""
        return self.data.batch_size * self.data.seq_len

    @property
    def row_parts(self) -> int:
        """Parts that the rows of a batch are cut into: data groups times micro-batches."""
        return self.parallel.data * self.optimizer.accumulation_steps

    @property
    def local_rows(self) -> int:
        """Sequences of one micro-batch of which a device holds a part."""
        return self.data.batch_size // self.row_parts

    @property
    def local_seq_len(self) -> int:
        """Tokens of one sequence on one device."""
        return self.data.seq_len // self.ranks

    @property
    def local_tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.local_rows * self.local_seq_len

    @property
    def gradient_tokens(self) -> int:
        """Tokens of the shortened sequences on which gradients are compared with dense ones."""
        if self.audit.gradient_tokens is not None:
            return self.audit.gradient_tokens
        unit = self.sequence_unit
        return min(self.data.seq_len, max(8192 // unit, 1) * unit)

    @property
    def audited_masks(self) -> list[tuple[int, int]]:
        """Layer and head of each mask that is drawn."""
        return [tuple(map(int, text.split("."))) for text in self.audit.masks]

    @property
    def sequence_unit(self) -> int:
        """What data.seq_len must be a multiple of, so that all ranks have as many whole blocks."""
        chunks = 2 if self.parallel.layout == "zigzag" else 1  # of a rank
        return chunks * self.ranks * self.sparsity.block_size
