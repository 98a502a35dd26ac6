"""A model in use: losses of given tokens, and new tokens."""

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
from mtraining_jax.errors import UserError
from mtraining_jax.evaluation.decode.cache import Cache
from mtraining_jax.evaluation.decode.sampling import GenerateOptions, judge
from mtraining_jax.evaluation.decode.step import Stepped
from mtraining_jax.evaluation.decode.text import GrowingText
from mtraining_jax.evaluation.load import AttentionKind, Loaded, Overrides, load
from mtraining_jax.evaluation.programs import Programs
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.sparsity import Dense, Settings


class Forced(NamedTuple):
    """How well a given answer follows a prompt.

    Attributes:
        log_probs: fp32 [n], log probability of each token of the answer after those before it.
        is_argmax: bool [n], whether it is the most likely one.
        density: share of the padded sequence's causal pairs that was computed, mean over layers;
            where an answer takes steps, of the prompt's pass.
    """

    log_probs: np.ndarray
    is_argmax: np.ndarray
    density: float


@dataclasses.dataclass(frozen=True)
class Generated:
    """What came after a prompt.

    Attributes:
        tokens: new ids, without the one that ended the text.
        text: of these, without what comes from a stop text on; "" without a tokenizer.
        stopped: "end" for a token that ends a text, "stop" for a stop text, "length" if neither
            came within the tokens allowed.
        prefill_seconds: from the prompt to the first new token, compilation excluded.
        decode_seconds: of all further tokens.
        density: of the pass over the prompt, as in `Forced`.
    """

    tokens: tuple[int, ...]
    text: str
    stopped: str
    prefill_seconds: float
    decode_seconds: float
    density: float


class Engine:
    """A model on its devices, and how it attends.

    Prompts are padded at their end to one of few lengths. The padding is behind every token that
    counts, so no token sees it, and a sparse pattern estimates from the last tokens that count.
    Patterns that choose for rows of blocks let the last 128 tokens of a prompt see all of it,
    unless their `dense_end` says otherwise (docs/quality.md).

    Attributes:
        loaded: the model, its parameters and its tokenizer.
        programs: what it has compiled.

    Args:
        loaded: from `mtraining_jax.evaluation.load`, or made from parts.
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
        """Loads the newest checkpoint of a run, or a Hugging Face checkpoint of a known family.

        It takes the mesh of the run, if there are as many devices, else all devices as one node.

        Args:
            path: folder of the run, or of config.json and safetensors.
            attention: of prompts and scored tokens: "dense", or "sparse" for the run's own pattern
                or, in a Hugging Face folder, the default of the section `sparsity`.
            overrides: dotted fields of sections `sparsity`, `parallel`, `model` and `loss` with
                their values as text, which count more than those of the run.
            dtype: "bfloat16" or "float32" to compute in. None: as the run did; for a Hugging Face
                folder bfloat16, and float32 on a CPU.
            tokenizer: "bytes" or a tokenizer.json, instead of that of the run or the folder.
            sparse_answers: whether given answers attend sparsely too; see `forced`.

        Raises:
            UserError: if there is no model, it cannot be read or is of an unknown family, or what
                is asked for does not fit it.
        """
        return cls(
            load(
                path, attention=attention, overrides=overrides, dtype=dtype, tokenizer=tokenizer,
                sparse_answers=sparse_answers,
            )  # fmt: skip
        )

    def with_pattern(self, settings: Settings) -> Self:
        """The same parameters, attending in another way.

        Args:
            settings: of the pattern; `Dense()` with this engine's block size for all pairs.
        """
        attending = dataclasses.replace(self._network.attending, settings=settings)
        network = dataclasses.replace(self._network, attending=attending)
        return type(self)(dataclasses.replace(self.loaded, network=network), like=self)

    def dense(self) -> Self:
        """The same parameters with dense attention."""
        return self.with_pattern(Dense(self._network.attending.settings.block_size))

    @property
    def spec(self) -> ModelSpec:
        """The numbers of the model."""
        return self._network.spec

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if neither the folder nor the caller has given one."""
        return self.loaded.tokenizer

    @property
    def max_positions(self) -> int:
        """The longest context that the model is meant for, in tokens."""
        return self.spec.max_position_embeddings

    def token_losses(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """-log p of each token but the first, given those before it.

        Args:
            tokens: ids [S], S from 2.

        Returns:
            fp32 [S - 1], in nats.

        Raises:
            UserError: if there are fewer than 2 tokens, those that are read (all but the last) are
                more than `max_positions`, or an id is outside the vocabulary.
        """
        ids = self._checked(tokens, least=2)
        self._check_length(len(ids) - 1, 0)
        return self.programs.score(ids[:-1], ids[1:], len(ids) - 1)[0].loss

    def forced(
        self, prompt_ids: Sequence[int] | np.ndarray, answer_ids: Sequence[int] | np.ndarray
    ) -> Forced:
        """Scores an answer, each token given those before it.

        With dense attention in one forward pass over prompt and answer. With a sparse pattern as
        `generate` computes: the prompt is read sparsely, and each token of the answer attends to
        all before it, step by step. So the answer has no part in what is chosen for the prompt.
        With `sparse_answers` in one sparse pass over both, as in training.

        Args:
            prompt_ids: ids [n], n from 1.
            answer_ids: ids [m], m from 1.

        Raises:
            UserError: as `token_losses`, for both together.
        """
        prompt, answer = self._checked(prompt_ids, least=1), self._checked(answer_ids, least=1)
        ids = np.concatenate([prompt, answer])
        self._check_length(len(ids) - 1, 0)
        attending = self._network.attending
        if attending.settings.sparse and not attending.sparse_answers:
            return self._forced_by_steps(prompt, answer)
        first = len(prompt) - 1
        scores, density = self.programs.score(ids[:-1], ids[1:], len(ids) - 1)
        return Forced(-scores.loss[first:], scores.is_argmax[first:], density)

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

        The prompt is read with this engine's attention; new tokens attend to all before them.

        Args:
            prompt_ids: ids [n], n from 1.
            options: None for the defaults.
            on_text: called with each new piece of text as soon as it is final.

        Raises:
            UserError: if prompt and new tokens exceed `max_positions`, an id is outside the
                vocabulary, or a stop text is given without a tokenizer.
        """
        options = GenerateOptions() if options is None else options
        if options.stop and self.tokenizer is None:
            raise UserError(f"stop = {list(options.stop)} needs a tokenizer, and there is none")
        ids = self._checked(prompt_ids, least=1)
        self._check_length(len(ids), options.max_new_tokens)
        total = len(ids) + options.max_new_tokens
        drawing = (
            np.float32(options.temperature), np.float32(options.top_p), np.uint32(options.seed),
        )  # fmt: skip
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
        """int32 [n]; raises UserError for what the model cannot read."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or len(ids) < least:
            what = "one token" if least == 1 else f"{least} tokens"
            raise UserError(f"the tokens have shape {list(ids.shape)}: at least {what} is needed")
        vocab_size = self.spec.vocab_size
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= vocab_size:
            raise UserError(
                f"the tokens go from {ids.min()} to {ids.max()}: they must be ids from 0 to "
                f"{vocab_size - 1} (model.vocab_size = {vocab_size})"
            )
        return ids.astype(np.int32)

    def _check_length(self, tokens: int, new_tokens: int) -> None:
        if tokens + new_tokens > self.max_positions:
            more = f" and {new_tokens} new ones" if new_tokens else ""
            raise UserError(
                f"{tokens} tokens{more} are more than the {self.max_positions} positions of the "
                "model (model.max_position_embeddings)"
            )


def _new_tokens(
    step: Callable[[Cache, Array], Stepped], cache: Cache, token: Array, count: int
) -> Iterator[int]:
    """New tokens, as they are known.

    The devices take the next step while the caller looks at a token, so they need not wait for
    it. The step behind the last token that the caller takes is for nothing.
    """
    for number in range(count):
        following = None
        if number + 1 < count:
            stepped = step(cache, token)
            cache, following = stepped.cache, stepped.token
        yield int(np.asarray(token)[0])
        token = following
