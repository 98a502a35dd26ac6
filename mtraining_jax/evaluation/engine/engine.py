"""A model for inference: losses of given tokens, and generation."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import jax
import numpy as np
from jax import Array

from mtraining_jax.data.tokenizer import Tokenizer
from mtraining_jax.evaluation.decode.cache import Cache
from mtraining_jax.evaluation.decode.options import GenerateOptions
from mtraining_jax.evaluation.decode.sampling import judge
from mtraining_jax.evaluation.decode.step import Stepped
from mtraining_jax.evaluation.decode.text import GrowingText
from mtraining_jax.evaluation.engine.programs import Programs
from mtraining_jax.evaluation.load import AttentionKind, Loaded, Overrides, load
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.patterns import Dense, Settings
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted


class Forced(NamedTuple):
    """Scores of a given answer of n tokens after a prompt; see `Engine.forced`.

    Attributes:
        log_probs: fp32 [n], natural log probability of each token after those before it.
        is_argmax: bool [n], whether it is the most likely one.
        density: computed over causal pairs of the padded sequence, mean over layers; of the
            prompt's pass if the answer is scored in steps.
    """

    log_probs: np.ndarray
    is_argmax: np.ndarray
    density: float


@dataclasses.dataclass(frozen=True)
class Generated:
    """A generated continuation of a prompt.

    Attributes:
        tokens: new ids, without the end token.
        text: their text up to a stop text; "" without a tokenizer.
        stopped: "end" (end token), "stop" (stop text) or "length" (token limit).
        prefill_seconds: time to the first new token, without compilation.
        density: of the prompt's pass, as in `Forced`.
    """

    tokens: tuple[int, ...]
    text: str
    stopped: str
    prefill_seconds: float
    decode_seconds: float
    density: float


class Engine:
    """A model on its devices, with an attention pattern; see `Engine.load`.

    Prompts are right-padded to one of few lengths. No real token attends to the padding, and
    sparse patterns estimate from the last real tokens. In patterns that select per row of blocks,
    the last 128 tokens of a prompt attend to all of it unless `dense_suffix_tokens` says otherwise
    (docs/quality.md).

    Args:
        loaded: the model, its parameters and its tokenizer.
        like: an engine with the same parameters and another pattern, to share programs with.
    """

    def __init__(self, loaded: Loaded, like: Self | None = None) -> None:
        self.loaded = loaded
        self._network = loaded.network
        self.programs = Programs(loaded, like and like.programs)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        attention: AttentionKind = "dense",
        overrides: Overrides = (),
        dtype: str | None = None,
        tokenizer: str | None = None,
        sparse_answers: bool = False,
    ) -> Self:
        """Loads the newest checkpoint of a run, or a Hugging Face checkpoint.

        It uses the mesh of the run if that many devices are available, otherwise all devices as one
        node.

        Args:
            path: run folder, or folder of config.json and safetensors.
            attention: attention of prompts and scored tokens: "dense" or "sparse". "sparse" uses
                the run's pattern, or the default of the section `sparsity` for a Hugging Face
                checkpoint.
            overrides: dotted fields of the sections `sparsity`, `parallel`, `model` and `loss`,
                with values as text; they override those of the run.
            dtype: compute dtype, "bfloat16" or "float32". None uses that of the run; for a Hugging
                Face checkpoint bfloat16, or float32 on a CPU.
            tokenizer: "bytes" or a tokenizer.json, instead of that of the run or the folder.
            sparse_answers: whether given answers use sparse attention too; see `forced`.

        Raises:
            UserError: if the folder has no readable model of a supported family, or an argument
                does not fit it.
        """
        return cls(
            load(
                path,
                attention=attention,
                overrides=overrides,
                dtype=dtype,
                tokenizer=tokenizer,
                sparse_answers=sparse_answers,
            )
        )

    def with_pattern(self, settings: Settings) -> Self:
        attending = dataclasses.replace(self._network.attending, settings=settings)
        network = dataclasses.replace(self._network, attending=attending)
        return type(self)(dataclasses.replace(self.loaded, network=network), like=self)

    def dense(self) -> Self:
        return self.with_pattern(Dense(self._network.attending.settings.block_size))

    @property
    def spec(self) -> ModelSpec:
        return self._network.spec

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if neither the folder nor the caller provides one."""
        return self.loaded.tokenizer

    @property
    def max_positions(self) -> int:
        return self.spec.max_position_embeddings

    def token_losses(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Computes -log p of each token except the first, given those before it.

        Args:
            tokens: ids [S], S >= 2, of which all but the last fit into `max_positions`.

        Returns:
            fp32 [S - 1], in nats.

        Raises:
            UserError: for too few or too many tokens, or an id outside the vocabulary.
        """
        ids = self._checked(tokens, least=2)
        self._check_length(len(ids) - 1, 0)
        return np.asarray(self.programs.score(ids[:-1], ids[1:], len(ids) - 1)[0].loss)

    def forced(
        self, prompt_ids: Sequence[int] | np.ndarray, answer_ids: Sequence[int] | np.ndarray
    ) -> Forced:
        """Scores an answer, ids [m], each token given those before it and the prompt, ids [n].

        Dense attention takes one forward pass over prompt and answer. A sparse pattern works as
        in `generate`: the prompt is read sparsely, then each token of the answer attends to all
        earlier ones, step by step, so the answer does not influence the selection for the prompt.
        With `sparse_answers` there is one sparse pass over both, as in training.

        Raises:
            UserError: see `token_losses`, for both together.
        """
        prompt, answer = self._checked(prompt_ids, least=1), self._checked(answer_ids, least=1)
        ids = np.concatenate([prompt, answer])
        self._check_length(len(ids) - 1, 0)
        attending = self._network.attending
        if attending.settings.sparse and not attending.sparse_answers:
            return self._forced_by_steps(prompt, answer)
        first = len(prompt) - 1
        scores, density = self.programs.score(ids[:-1], ids[1:], len(ids) - 1)
        return Forced(
            -np.asarray(scores.loss[first:]), np.asarray(scores.is_argmax[first:]), density
        )

    def _forced_by_steps(self, prompt: np.ndarray, answer: np.ndarray) -> Forced:
        total = len(prompt) + len(answer)
        read = self.programs.prefill(prompt, total)()
        logits, labels = read.logits, [np.array([label], np.int32) for label in answer]
        judged = [judge(logits, labels[0])]
        if len(labels) > 1:
            drawing = np.float32(0), np.float32(1), np.uint32(0)
            token = self.programs.draw(logits, "greedy", drawing)
            cache = self.programs.cache(read, len(prompt), len(answer))
            step = self.programs.step(cache, token, len(prompt), total, "greedy", drawing)
            for given, label in itertools.pairwise(labels):
                cache, _, logits = step(cache, jax.device_put(given, token.sharding))
                judged.append(judge(logits, label))
        found = zip(*jax.device_get(judged), strict=True)
        log_probs, is_argmax = (np.concatenate(x) for x in found)
        return Forced(log_probs, is_argmax, float(read.density))

    def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        options: GenerateOptions | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generated:
        """Continues a prompt.

        The prompt uses this engine's attention; new tokens attend to all earlier tokens.

        Args:
            prompt_ids: ids [n], n >= 1.
            options: None uses the defaults.
            on_text: called with each new piece of text as soon as it is final.

        Raises:
            UserError: if prompt and new tokens exceed `max_positions`, an id is outside the
                vocabulary, or a stop text is given without a tokenizer.
        """
        options = GenerateOptions() if options is None else options
        if options.stop and self.tokenizer is None:
            raise UserError(f"stop = {list(options.stop)} needs a tokenizer; this model has none")
        ids = self._checked(prompt_ids, least=1)
        self._check_length(len(ids), options.max_new_tokens)
        total = len(ids) + options.max_new_tokens
        drawing = (
            np.float32(options.temperature),
            np.float32(options.top_p),
            np.uint32(options.seed),
        )
        read = self.programs.prefill(ids, total)
        begin = time.perf_counter()
        prompt = read()
        token = jax.block_until_ready(self.programs.draw(prompt.logits, options.kind, drawing))
        prefill_seconds = time.perf_counter() - begin
        density = float(prompt.density)
        cache = self.programs.cache(prompt, len(ids), options.max_new_tokens)
        step = self.programs.step(cache, token, len(ids), total, options.kind, drawing)
        begin = time.perf_counter()
        text = GrowingText(self.tokenizer, options.stop, on_text)
        tokens: list[int] = []
        stopped = "length"
        for new in _new_tokens(step, cache, token, options.max_new_tokens):
            if new in self.loaded.stop_ids:
                stopped = "end"
                break
            tokens.append(new)
            text.add(new)
            if text.stopped:
                stopped = "stop"
                break
        decode_seconds = time.perf_counter() - begin
        return Generated(
            tuple(tokens), text.end(), stopped, prefill_seconds, decode_seconds, density
        )

    def _checked(self, ids: Sequence[int] | np.ndarray, least: int) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.ndim != 1 or len(ids) < least:
            what = "one token" if least == 1 else f"{least} tokens"
            raise UserError(f"the tokens have shape {list(ids.shape)}; at least {what} is needed")
        vocab_size = self.spec.vocab_size
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
            raise UserError(
                f"the tokens range from {ids.min()} to {ids.max()}; they must be ids from 0 to "
                f"{vocab_size - 1} (model.vocab_size = {vocab_size})"
            )
        return ids.astype(np.int32)

    def _check_length(self, tokens: int, new_tokens: int) -> None:
        if tokens + new_tokens > self.max_positions:
            more = f" and {new_tokens} new ones" if new_tokens else ""
            raise UserError(
                f"{counted(tokens, 'token')}{more} are more than the {self.max_positions} "
                "positions of the model (model.max_position_embeddings); shorten the prompt or ask "
                "for fewer tokens"
            )


def _new_tokens(
    step: Callable[[Cache, Array], Stepped], cache: Cache, token: Array, count: int
) -> Iterator[int]:
    """Yields new tokens as they are computed.

    The devices compute the next step while the caller handles a token. The last step is discarded.
    """
    for number in range(count):
        following = None
        if number + 1 < count:
            stepped = step(cache, token)
            cache, following = stepped.cache, stepped.token
        yield int(np.asarray(token)[0])
        if following is not None:
            token = following
