"""Evaluates the validation loss during training."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.callbacks import Callback, Record, Run, State
from mtraining_jax.config import Config
from mtraining_jax.config.validate import about_held_out, evaluation_of
from mtraining_jax.data.loader import Loader
from mtraining_jax.models.label_scores import label_scores, num_buckets, sums_by_bucket
from mtraining_jax.models.transformer import Attention
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.reporting.record import validation_record
from mtraining_jax.training.build import build_attention, build_layout, build_pattern
from mtraining_jax.training.device_batches import DeviceBatches
from mtraining_jax.training.memory_check import check_memory
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import Batch, positions_and_lengths, run_layers
from mtraining_jax.utils.errors import UserError


class Evaluator(Callback):
    """Evaluates states of a run, always on the same validation batches; all processes call it.

    It has its own loader, so the position in the training data never moves. Raises a
    UserError if the data cannot be used.
    """

    task = "the evaluation"

    def __init__(self, config: Config, builder: StateBuilder, mesh: Mesh) -> None:
        self._config = config
        evaluation = evaluation_of(config)
        layout = build_layout(evaluation)
        try:
            self._batches = DeviceBatches(evaluation, mesh, layout)
        except UserError as error:
            raise UserError(about_held_out(str(error))) from error
        assert isinstance(self._batches.loader, Loader)
        self.loader = loader = self._batches.loader
        batch_size, asked = evaluation.data.batch_size, config.eval.num_batches
        self._num_batches, self._rows = asked, asked * batch_size
        if loader.parts is not None:  # read by weight, each in epochs of its own
            self.description = loader.description_for(asked, "batch")
        else:
            # Rows of the last batch beyond these are of a second epoch, and do not count.
            self._rows = min(self._rows, loader.num_sequences)
            self._num_batches = -(-self._rows // batch_size)
            self.description = loader.description
            if self._num_batches < asked:
                self.description += f"; {self._num_batches} of eval.num_batches = {asked} batches"
            if self._rows < loader.num_sequences:
                self.description += f"; eval.num_batches = {asked} reads {self._rows:,} of them"
        self._begin = loader.get_state()
        self._programs: dict[str, Any] = {}  # jitted, until `compile`
        for name, pattern in _patterns(config, evaluation).items():
            attention = build_attention(evaluation, mesh, layout, pattern)
            self._programs[name] = _make_sums(
                evaluation, builder, attention, AttentionInputs(pattern)
            )

    def wants_state(self, step: int) -> bool:
        return step % self._config.eval.interval == 0 or step == self._config.run.steps

    def start(self, run: Run, state: State) -> None:
        """Compiles the programs for states like `state`; checks their memory."""
        self._run = run
        run.say("compiling the evaluation ...")
        self._batches.loader.set_state(self._begin)
        batch = next(self._batches)
        for name, function in self._programs.items():
            self._programs[name] = function.lower(state.model, batch).compile()
            what = "the evaluation on validation data"
            check_memory(self._programs[name], run.mesh.local_devices, what, is_step=False)

    def with_state(self, step: int, state: State) -> Record:
        del step
        begin = time.perf_counter()
        self._batches.loader.set_state(self._begin)
        found: dict[str, list[Any]] = {name: [] for name in self._programs}
        sequences = []  # of each row
        try:
            for _ in range(self._num_batches):
                batch = next(self._batches)
                sequences.append(self.loader.sequences)
                before = [sums[-1] for sums in found.values() if sums]
                for name, program in self._programs.items():
                    found[name].append(program(state.model, batch))
                jax.block_until_ready(before)  # one batch ahead of the devices
                self._run.alive()
        except UserError as error:
            raise UserError(about_held_out(str(error))) from error
        sums = {}
        for name, batches in jax.device_get(found).items():
            # In fp64, so that the order of batches does not matter.
            losses, counts = (
                np.concatenate(x)[: self._rows].astype(np.float64)
                for x in zip(*batches, strict=True)
            )
            sums[name] = losses.sum(0), counts.sum(0)
            if (parts := self.loader.parts) is not None:
                numbers = np.concatenate(sequences)[: self._rows]
                once = np.unique(numbers, return_index=True)[1]  # rows with each sequence
                part_of = parts.of(numbers[once])
                for number, part in enumerate(parts.given):
                    rows = once[part_of == number]
                    sums[f"{name}/{part}"] = losses[rows].sum(0), counts[rows].sum(0)
        return validation_record(sums, time.perf_counter() - begin)

    def close(self) -> None:
        self._batches.close()


def _patterns(config: Config, evaluation: Config) -> dict[str, Pattern]:
    """Returns the patterns to evaluate, by the name of their loss in a record."""
    dense = Dense(config.sparsity.block_size)
    asked = config.eval.attention if config.sparsity.pattern.sparse else "same"
    own = {} if asked == "dense" else {"eval_loss": build_pattern(evaluation)}
    return own if asked == "same" else {**own, "eval_loss_dense": dense}


def _make_sums(
    config: Config, builder: StateBuilder, attention: Attention, inputs: AttentionInputs
) -> Callable[[dict[str, Array], Batch], tuple[Array, Array]]:
    """Jits a function (parameters, batch) -> fp32 loss sums and int32 counts by row and bucket."""
    buckets, layout = num_buckets(config.data.seq_len), build_layout(config)

    def sums(parameters: dict[str, Array], batch: Batch) -> tuple[Array, Array]:
        hidden, lm_head, _ = run_layers(builder, layout, attention, inputs, parameters, batch)
        scores = label_scores(
            hidden,
            lm_head,
            batch["labels"],
            chunk_size=config.loss.chunk_size,
            mesh=builder.mesh,
            weight_spec=builder.lm_head_spec,
        )
        positions, _ = positions_and_lengths(batch, layout, builder.mesh)
        return sums_by_bucket(scores.loss, batch["labels"], positions, buckets)

    return jax.jit(sums, out_shardings=NamedSharding(builder.mesh, P()))
