"""The compiled programs of a model for inference, one per padded length."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.documents import Documents
from mtraining_jax.models.label_scores import LabelScores
from mtraining_jax.models.labels import IGNORE_LABEL
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import TOKENS
from mtraining_jax.patterns.base import ModelSizes, Pattern
from mtraining_jax.tools.evaluate.engine.decode import (
    ScoredTokens,
    make_decoding,
    make_step,
    renew_codes,
    renewals,
    run_steps,
    steps_at_once,
)
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.engine.passes import Prompt, make_prefill, make_score
from mtraining_jax.tools.evaluate.engine.sampling import next_token
from mtraining_jax.tools.evaluate.load import Loaded


class Programs:
    """Compiles programs on first use, and runs them; for `like` see `Engine`."""

    def __init__(self, loaded: Loaded, like: Self | None = None) -> None:
        self._state, self._network = loaded.state, loaded.network
        self._compiled: dict[Hashable, Any] = {}
        # Many patterns have the same steps, which take longest to compile.
        self._steps: dict[Hashable, Any] = {} if like is None else like._steps
        self._patterns: dict[tuple[int, bool], Pattern] = {}
        self.setup_seconds = 0.0  # mostly of compilation

    def score(self, ids: np.ndarray, labels: np.ndarray) -> tuple[LabelScores, float]:
        """Scores the label of each token, int32 [n] both: NumPy arrays [n], and the density."""
        layout, inputs = self.inputs(ids, is_prompt=False)
        arguments = self._place(labels, layout, IGNORE_LABEL), *inputs
        scores, density = self._program(make_score, layout, len(ids), arguments)(*arguments)
        order = layout.inverse()[: len(ids)]
        return jax.tree.map(lambda x: np.asarray(x)[0, order], scores), float(density)

    def prefill(self, ids: np.ndarray, length: int) -> Callable[[], Prompt]:
        """Compiles the prefill of a prompt, int32 [n], and returns a function that runs it.

        `length` is that of the sequence, for RoPE scalings that depend on it.
        """
        layout, inputs = self.inputs(ids, is_prompt=True)
        run = self._program(make_prefill, layout, length, inputs)
        return functools.partial(run, *inputs)

    def decoder(
        self,
        prompt: Prompt,
        token: Array,
        given: np.ndarray,
        prompt_len: int | Sequence[int],
        new_tokens: int,
        options: GenerateOptions,
        length: int,
    ) -> Iterator[ScoredTokens]:
        """Compiles decoding, and yields what follows a prompt and its first new token, int32 [B].

        The next tokens are `given`, int32 [n, B]; then they are sampled. There may be several
        prompts of one padded length (`joined`); they are deleted. Items are NumPy arrays of
        some steps; the last item may exceed `new_tokens`. `length` as in `prefill`.
        """
        network = self._network
        with self._setup():
            layout = network.sequence_layout(prompt.keys.shape[2])
            lengths = np.reshape(prompt_len, -1).tolist()
            now = make_decoding(network, prompt, lengths, token, given, new_tokens)
            how = jax.device_put(_sampling(options), network.replicated)
            length, room = network.rope_length(length), now.cache.keys[0].shape[:3]
            key = layout, length, room, options.kind, network.new_tokens
            if key not in self._steps:
                step = make_step(network, layout, length, options.kind)
                self._steps[key] = step.lower(self._state, now, *how).compile()
        run, at_once = self._steps[key], steps_at_once(network)
        renew = {}
        if network.new_tokens is not None:
            renew = {
                number: functools.partial(renew_codes, network, layout, renewed_B)
                for number, renewed_B in renewals(
                    lengths, new_tokens - 1, network.new_tokens.dense_below
                ).items()
            }
        steps = new_tokens - 1, at_once, renew
        return run_steps(lambda now: run(self._state, now, *how), now, *steps)

    def next_tokens(
        self, prompt: Prompt, token: Array, ids: Sequence[np.ndarray], options: GenerateOptions
    ) -> Iterator[np.ndarray]:
        """Yields the tokens, int32 [n, B], after prompts of ids, int32 [n], and first new tokens.

        Each follows from one pass over all tokens before it. Where the RoPE scaling changes with
        their number, a prompt is read again, and there is only one; the prompt is deleted.
        """
        scaling, count = self._network.rope_length, options.max_new_tokens
        lengths, known = [len(x) for x in ids], np.asarray(token)[None]
        while (done := len(known)) < count:
            length = lengths[0] + done
            if scaling(length) != scaling(length - 1):
                prompt = self.prefill(ids[0], length)()
            same = (scaling(lengths[0] + n) == scaling(length) for n in range(done, count))
            end = done + sum(itertools.takewhile(bool, same))
            steps = self.decoder(prompt, token, known[1:], lengths, end, options, length)
            begin = 1
            for found in steps:
                new = found.tokens[max(len(known) - begin, 0) : end - begin]
                known, begin = np.concatenate([known, new]), begin + len(found.tokens)
                yield new

    def together(self, prompts: Sequence[np.ndarray], new_tokens: int) -> list[list[int]]:
        """Groups the numbers of prompts, ids [n], that can be decoded at once.

        They have one padded length, so that each is read as if it were alone, and one RoPE scaling.
        """
        groups: dict[Hashable, list[int]] = {}
        for number, ids in enumerate(prompts):
            # The last new token is not read.
            scalings = {self._network.rope_length(len(ids) + n) for n in range(new_tokens)}
            one = scalings.pop() if len(scalings) == 1 else (number,)
            groups.setdefault((self._network.padded_length(len(ids)), one), []).append(number)
        return list(groups.values())

    def inputs(self, ids: np.ndarray, is_prompt: bool) -> tuple[Layout, tuple[Any, ...]]:
        """Returns the layout of ids, int32 [n], and the last arguments of `Network.forward`."""
        padded = self._network.padded_length(len(ids))
        layout = self._network.sequence_layout(padded)
        tokens, positions = self._place(ids, layout, 0), self._place(np.arange(padded), layout, 0)
        documents = Documents.padded(len(ids), padded, self._network.settings.block_size)
        inputs = AttentionInputs(self._pattern(padded, is_prompt), documents=documents)
        return layout, (self._state, tokens, positions, inputs)

    def _pattern(self, padded: int, is_prompt: bool) -> Pattern:
        own, spec = self._network.settings, self._network.spec
        settings = own.for_prompts() if is_prompt else own
        key = padded, settings is own  # with most patterns prompts share the arrays
        if key not in self._patterns:
            sizes = ModelSizes(spec.num_layers, spec.num_heads, padded)
            self._patterns[key] = settings.bind(sizes)
        return self._patterns[key]

    def _place(self, ids: np.ndarray, layout: Layout, fill: int) -> Array:
        """Pads int32 [n] to [1, S] on the mesh, in layout order."""
        padded = np.full(layout.seq_len, fill, np.int32)
        padded[: len(ids)] = ids
        ordered = padded[layout.permutation()][None]
        sharding = NamedSharding(self._network.mesh, TOKENS)
        return jax.make_array_from_callback(ordered.shape, sharding, lambda index: ordered[index])

    def _program(
        self, make: Callable[..., Any], layout: Layout, length: int, arguments: tuple[Any, ...]
    ) -> Callable[..., Any]:
        length = self._network.rope_length(length)
        key = make, layout, length
        with self._setup():
            if key not in self._compiled:
                program = make(self._network, layout, length)
                self._compiled[key] = program.lower(*arguments).compile()
        return self._compiled[key]

    @contextlib.contextmanager
    def _setup(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.setup_seconds += time.perf_counter() - begin


def first_token(logits: Array, options: GenerateOptions) -> Array:
    """Samples the token after a prompt, int32 [B]."""
    return _next_token(logits, options.kind, *_sampling(options), np.int32(0))


_next_token = jax.jit(next_token, static_argnums=1)


def _sampling(options: GenerateOptions) -> tuple[np.float32, np.float32, np.uint32]:
    # The smallest and the largest normal number are greedy and uniform.
    limits = np.finfo(np.float32)
    temperature = np.clip(options.temperature, limits.tiny, limits.max)
    return np.float32(temperature), np.float32(options.top_p), np.uint32(options.seed)
