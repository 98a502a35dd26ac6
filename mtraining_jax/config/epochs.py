"""Turns `run.epochs` into `run.steps`, which needs the data."""

import dataclasses
import math

from mtraining_jax.config.schema import Config
from mtraining_jax.config.validate import validate
from mtraining_jax.data.corpus import packs_of, starts_of
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted


def with_steps(config: Config) -> Config:
    """Sets `run.steps` to `run.epochs`, if any, rounded up; opens the data to count sequences.

    Raises:
        UserError: the data is endless or unreadable, or other fields contradict the steps.
    """
    epochs, data = config.run.epochs, config.data
    if epochs is None:
        return config
    corpus = data.source_options.open(data, config.model.vocab_size)
    if corpus.endless:
        raise UserError(
            f'run.epochs = {epochs:g} is not possible with data.source = "{data.source}", which '
            "has no end; set run.steps instead"
        )
    if data.has_documents:
        sequences = len(packs_of(corpus, data, config.sparsity.block_size))
    else:
        sequences = len(starts_of(corpus, data))
    steps = math.ceil(round(epochs * sequences / data.batch_size, 6)) or 1
    run = dataclasses.replace(config.run, steps=steps, epochs=None)
    config = dataclasses.replace(config, run=run)
    try:
        validate(config)
    except UserError as error:
        what = f"run.epochs = {epochs:g} is {counted(steps, 'step')}"
        raise UserError(f"{what} of {counted(sequences, 'sequence')}: {error}") from None
    return config
