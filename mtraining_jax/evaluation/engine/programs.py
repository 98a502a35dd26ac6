"""The compiled programs of a model for inference, one per padded length."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.evaluation.decode.cache import Cache, of_prompt, room_for, with_room
from mtraining_jax.evaluation.decode.prefill import Prompt, make_prefill
from mtraining_jax.evaluation.decode.sampling import next_token
from mtraining_jax.evaluation.decode.step import Stepped, make_step
from mtraining_jax.evaluation.engine.score import make_score
from mtraining_jax.evaluation.load import Loaded
from mtraining_jax.models.label_scores import LabelScores
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.patterns import Pattern
from mtraining_jax.training.build import layer_inputs

# Sampling parameters temperature, top_p and seed, as in `GenerateOptions`.
Drawing = tuple[np.float32, np.float32, np.uint32]


class Programs:
    """Compiles programs on first use, and runs them.

    `like` has programs of the same parameters with another pattern, to share decoding steps with.
    """

    def __init__(self, loaded: Loaded, like: Self | None = None) -> None:
        self._loaded, self._network = loaded, loaded.network
        self._compiled: dict[Hashable, Any] = {}
        # Decoding is dense with every pattern, and takes longest to compile.
        self._steps: dict[Hashable, Any] = {} if like is None else like._steps
        self._layouts: dict[int, tuple[Layout, Array]] = {}
        self._patterns: dict[tuple[int, bool], Pattern] = {}

    def score(
        self, ids: np.ndarray, labels: np.ndarray, valid_len: int
    ) -> tuple[LabelScores, float]:
        """Scores the label of each token, int32 [n] both; see `make_score`.

        A sparse pattern estimates from the first `valid_len` tokens. The scores are NumPy arrays
        [n], next to the density of the pass.
        """
        padded, length = self._network.padded_length(len(ids)), len(ids)
        layout, positions = self.deal(padded)
        pattern = self.pattern(padded)
        like = self._network.length_like(length)
        arguments = (
            self._loaded.state,
            self.place(ids, layout, 0),
            self.place(labels, layout, IGNORE_LABEL),
            positions,
            np.int32(valid_len),
            layer_inputs(pattern),
        )
        run = self._program(
            ("score", padded, like),
            arguments,
            make_score,
            self._network,
            layout,
            pattern,
            like,
            self._loaded.loss_chunk_size,
        )
        order = layout.inverse()[:length]
        scores, density = run(*arguments)
        return jax.tree.map(lambda x: np.asarray(x)[0, order], scores), float(density)

    def prefill(self, ids: np.ndarray, total: int) -> Callable[[], Prompt]:
        """Compiles the prefill of a prompt, int32 [n], and returns a function that runs it.

        `total` is the number of tokens of prompt and answer together.
        """
        padded = self._network.padded_length(len(ids))
        layout, positions = self.deal(padded)
        pattern = self.pattern(padded, of_prompt=True)
        like = self._network.length_like(total)
        arguments = (
            self._loaded.state,
            self.place(ids, layout, 0),
            positions,
            np.int32(len(ids)),
            layer_inputs(pattern),
        )
        run = self._program(
            ("prefill", padded, like), arguments, make_prefill, self._network, layout, pattern, like
        )
        return functools.partial(run, *arguments)

    def draw(self, logits: Array, kind: str, drawing: Drawing) -> Array:
        return _draw(kind, logits, *drawing)

    def cache(self, prompt: Prompt, prompt_len: int, new_tokens: int) -> Cache:
        room = room_for(new_tokens, prompt.keys.shape[2] // self._network.ranks)
        count = jax.device_put(np.int32(prompt_len), NamedSharding(self._network.mesh, P()))
        keys, values = (
            with_room(self._network, stacked, room) for stacked in (prompt.keys, prompt.values)
        )
        return of_prompt(self._network, keys, values, count)

    def step(
        self, cache: Cache, token: Array, prompt_len: int, total: int, kind: str, drawing: Drawing
    ) -> Callable[[Cache, Array], Stepped]:
        """Compiles the decoding step: a function of cache and token that donates the cache.

        `total` is the number of tokens of prompt and answer together.
        """
        padded = self._network.padded_length(prompt_len)
        like, room = self._network.length_like(total), cache.keys[0].shape[2]
        layout, _ = self.deal(padded)
        state = self._loaded.state
        key = layout, like, room, kind
        if key not in self._steps:
            step = make_step(self._network, layout, like, kind)
            self._steps[key] = step.lower(state, cache, token, *drawing).compile()
        run = self._steps[key]
        return lambda cache, token: run(state, cache, token, *drawing)

    def _program(
        self, key: Hashable, arguments: tuple, make: Callable[..., Any], *how: Any
    ) -> Callable[..., Any]:
        if key not in self._compiled:
            self._compiled[key] = make(*how).lower(*arguments).compile()
        return self._compiled[key]

    def pattern(self, padded: int, of_prompt: bool = False) -> Pattern:
        own = self._network.attending.settings
        settings = own.for_prompts() if of_prompt else own
        key = padded, settings is own  # with most patterns prompts share the arrays
        if key not in self._patterns:
            self._patterns[key] = self._network.pattern(padded, settings)
        return self._patterns[key]

    def deal(self, padded: int) -> tuple[Layout, Array]:
        """Returns the layout of a padded length, and positions [1, S]."""
        if padded not in self._layouts:
            layout = self._network.sequence_layout(padded)
            positions = self.place(np.arange(padded, dtype=np.int32), layout, 0)
            self._layouts[padded] = layout, positions
        return self._layouts[padded]

    def place(self, ids: np.ndarray, layout: Layout, fill: int) -> Array:
        """Pads int32 [n] to [1, S] on the mesh, in layout order."""
        padded = np.full(layout.seq_len, fill, np.int32)
        padded[: len(ids)] = ids
        ordered = padded[layout.permutation()][None]
        sharding = NamedSharding(self._network.mesh, TOKENS)
        return jax.make_array_from_callback(ordered.shape, sharding, lambda index: ordered[index])


@functools.partial(jax.jit, static_argnums=0)
def _draw(kind: str, logits: Array, temperature: Array, top_p: Array, seed: Array) -> Array:
    return next_token(logits, kind, temperature, top_p, seed, jnp.int32(0))
