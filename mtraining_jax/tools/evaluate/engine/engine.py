"""A model for inference: losses of given tokens, and generation."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self, overload

import jax
import numpy as np

from mtraining_jax.config.load import NO_OVERRIDES, Overrides, check_overrides
from mtraining_jax.data.chat.conversation import Conversation
from mtraining_jax.data.chat.template import ChatTemplate
from mtraining_jax.data.files import errors_as
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.tools.evaluate.engine.options import AnswerKind, GenerateOptions
from mtraining_jax.tools.evaluate.engine.passes import joined
from mtraining_jax.tools.evaluate.engine.programs import Programs, first_token
from mtraining_jax.tools.evaluate.engine.sampling import NO_TOKEN, judge
from mtraining_jax.tools.evaluate.engine.text import GrowingText
from mtraining_jax.tools.evaluate.load import AttentionKind, Loaded, load
from mtraining_jax.tools.evaluate.model import Forced, Generated
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.text import counted


class Engine:
    """A model on its devices, with an attention pattern; see `Engine.load`.

    Prompts are right-padded to one of few lengths. No real token attends to the padding, and
    sparse patterns estimate from the last real tokens. In patterns that select per row of blocks,
    the last 128 tokens of a prompt attend to all of it unless `dense_suffix_tokens` says otherwise.

    Args:
        loaded: the model, its parameters and its tokenizer.
        like: an engine with the same parameters and another pattern, to share programs with.
    """

    def __init__(self, loaded: Loaded, like: Self | None = None) -> None:
        self.loaded = loaded
        self.programs = Programs(loaded, like and like.programs)
        self.tokenizer = loaded.tokenizer
        self.vocab_size = loaded.network.spec.vocab_size
        self.max_positions = loaded.network.spec.max_position_embeddings

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        attention: AttentionKind = "dense",
        overrides: Overrides = NO_OVERRIDES,
        dtype: str | None = None,
        tokenizer: str | None = None,
        answers: AnswerKind | None = None,
    ) -> Self:
        """Loads the newest checkpoint of a run, or a Hugging Face checkpoint.

        It uses the mesh of the run if it has all devices, otherwise all devices as one node.

        Args:
            path: run folder, folder of config.json and safetensors, or hf://OWNER/NAME[@REVISION].
            attention: attention of prompts and scored tokens: "dense" or "sparse", which is the
                run's pattern, or for a Hugging Face checkpoint the default of section `sparsity`.
            overrides: values of the sections `sparsity`, `parallel`, `model` and `loss`, by dotted
                field, in place of those of the run; text is parsed as on the command line.
            dtype: compute dtype, "bfloat16" or "float32". None uses that of the run; for a Hugging
                Face checkpoint bfloat16, or float32 on a CPU.
            tokenizer: "bytes" or a tokenizer.json, instead of that of the run or the folder.
            answers: what tokens of an answer attend to after a sparse prompt. "sparse": blocks that
                each selects (`Pattern.for_new_tokens`). "dense": all earlier tokens. "one-pass":
                the same, but given answers are read as in training, see `forced`. None is "sparse"
                for patterns that say how, otherwise "dense".

        Raises UserError if the folder has no readable model, or an argument does not fit it.
        """
        check_overrides(overrides)
        return cls(load(path, attention, overrides, dtype, tokenizer, answers))

    def with_pattern(self, settings: Pattern) -> Self:
        network = dataclasses.replace(self.loaded.network, settings=settings)
        return type(self)(dataclasses.replace(self.loaded, network=network), like=self)

    def dense(self) -> Self:
        return self.with_pattern(Dense(self.loaded.network.settings.block_size))

    def token_losses(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Computes -log p of each token of ids [S] except the first: fp32 [S - 1], in nats.

        Raises UserError for too few or too many tokens, or an id outside the vocabulary.
        """
        return self.losses_and_density(tokens)[0]

    def losses_and_density(
        self, tokens: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, float | None]:
        """Returns what `token_losses` does, and the density of that pass, mean over layers."""
        ids = self._checked(tokens, least=2)
        self._check_length(len(ids) - 1, 0)
        scores, density = self.programs.score(ids[:-1], ids[1:])
        return self._finite(np.asarray(scores.loss), len(ids)), density

    def forced(
        self, prompt_ids: Sequence[int] | np.ndarray, answer_ids: Sequence[int] | np.ndarray
    ) -> Forced:
        """Scores each token of an answer, ids [m], given those before it and the prompt, ids [n].

        Dense attention takes one forward pass over prompt and answer. A sparse pattern works as
        in `generate`: the prompt is read sparsely, then the answer step by step, so that it does
        not influence the selection for the prompt. With answers="one-pass" there is one sparse pass
        over both. Errors as in `token_losses`.
        """
        prompt, answer = self._checked(prompt_ids, least=1), self._checked(answer_ids, least=1)
        ids = np.concatenate([prompt, answer])
        self._check_length(len(ids) - 1, 0)
        network = self.loaded.network
        if network.settings.sparse and network.answers != "one-pass":
            return self._forced_by_steps(prompt, answer)
        scores, density = self.programs.score(ids[:-1], ids[1:])
        loss, is_argmax = (np.asarray(x[len(prompt) - 1 :]) for x in scores)
        return Forced(-self._finite(loss, len(ids)), is_argmax, density)

    def _forced_by_steps(self, prompt: np.ndarray, answer: np.ndarray) -> Forced:
        greedy, length = GenerateOptions(), len(prompt) + len(answer) - 1
        read, labels = self.programs.prefill(prompt, length)(), answer[:, None]
        first = jax.device_put(labels[0], self.loaded.network.replicated)
        judged = [judge(read.logits, first)]
        if len(labels) > 1:
            how = labels[1:], len(prompt), len(answer), greedy, length
            for found in self.programs.decoder(read, first, *how):
                judged.append((found.log_probs, found.is_argmax))
        flat = (np.concatenate([np.ravel(x) for x in part]) for part in zip(*judged, strict=True))
        log_probs, is_argmax = (x[: len(answer)] for x in flat)
        return Forced(self._finite(log_probs, length), is_argmax, float(read.density))

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the tokenizer's folder; UserError if there is none."""
        return ChatTemplate(self.loaded.needed_tokenizer(), datetime.now())

    def stop_ids(self, prompt: str | Conversation) -> frozenset[int]:
        """Ids that end the continuation of a text, or the answer to a conversation."""
        end = None if isinstance(prompt, str) else self.chat_template.end_token(prompt)
        return self.loaded.stop_ids | ({end} if end is not None else set())

    def encode(
        self, prompts: Sequence[str | Conversation], max_new_tokens: int
    ) -> list[np.ndarray]:
        """Encodes prompts, ids [n] each, and checks that each has room for new tokens.

        Conversations are rendered by the chat template, up to where the assistant answers.

        Raises UserError without a tokenizer, and for prompts that are empty or too long.
        """
        tokenizer, found = self.loaded.needed_tokenizer(), []
        for number, prompt in enumerate(prompts, 1):
            try:
                if not isinstance(prompt, str | Conversation):
                    kind = type(prompt).__name__
                    raise UserError(f"a {kind} is not a text; for token ids use Engine.generate")
                is_text = isinstance(prompt, str)  # templates state bos
                text = prompt if is_text else self.chat_template.prompt(prompt)
                with errors_as(UserError, "the text is not Unicode", UnicodeEncodeError, TypeError):
                    ids = tokenizer.encode(text, bos=is_text)
                found.append(self._checked(ids, least=1))
                self._check_length(len(found[-1]), max_new_tokens)
            except UserError as error:
                if len(prompts) == 1:
                    raise
                raise UserError(f"prompt {number}: {error}") from None
        return found

    def generate(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        options: GenerateOptions | None = None,
        on_text: Callable[[str], None] | None = None,
        stop_ids: frozenset[int] | None = None,
    ) -> Generated:
        """Continues a prompt, ids [n].

        `on_text` is called with each new piece of text as soon as it is final. `stop_ids` are ids
        that end the text instead of those of the model, see `Engine.stop_ids`. Errors as in
        `token_losses`; also UserError for a stop text without a tokenizer.
        """
        return self._generate([prompt_ids], options, [stop_ids], on_text)[0]

    def generate_many(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        options: GenerateOptions | None = None,
        stop_ids: Sequence[frozenset[int] | None] | None = None,
        batch_size: int = 8,
        on_result: Callable[[int, Generated], None] | None = None,
    ) -> list[Generated]:
        """Continues prompts, ids [n] each, up to `batch_size` at a time; see `generate`.

        Prompts of one padded length are decoded together, and give the tokens that each would give
        alone, up to rounding. They share their seconds equally. `on_result` is called with the
        number of each prompt, from 0, and its result.
        """
        ids = [self._checked(prompt, least=1) for prompt in prompts]
        options = GenerateOptions() if options is None else options
        results: dict[int, Generated] = {}
        for group in self.programs.together(ids, options.max_new_tokens):
            for begin in range(0, len(group), batch_size):
                numbers = group[begin : begin + batch_size]
                stops = [None if stop_ids is None else stop_ids[number] for number in numbers]
                found = self._generate([ids[number] for number in numbers], options, stops)
                for number, result in zip(numbers, found, strict=True):
                    results[number] = result
                    if on_result is not None:
                        on_result(number, result)
        return [results[number] for number in range(len(ids))]

    def _generate(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        options: GenerateOptions | None,
        stop_ids: Sequence[frozenset[int] | None],
        on_text: Callable[[str], None] | None = None,
    ) -> list[Generated]:
        """Continues prompts that are decoded together; see `Programs.together`."""
        options = GenerateOptions() if options is None else options
        if options.stop and self.tokenizer is None:
            raise UserError(f"stop = {list(options.stop)} needs a tokenizer; this model has none")
        ids, programs = [self._checked(x, least=1) for x in prompts], self.programs
        for each in ids:
            self._check_length(len(each), options.max_new_tokens)
        reads = [programs.prefill(each, len(each)) for each in ids]
        begin = time.perf_counter()
        read = [run() for run in reads]
        densities = [x.density for x in read]
        prompt = joined(read)
        token = jax.block_until_ready(first_token(prompt.logits, options))
        prefill_seconds = time.perf_counter() - begin
        begin = time.perf_counter() - programs.setup_seconds
        later = programs.next_tokens(prompt, token, ids, options)
        answers = [
            _Answer(self, options, self.loaded.stop_ids if stops is None else stops, on_text)
            for stops in stop_ids
        ]
        number = 0
        for rows in itertools.chain([np.asarray(token)[None]], later):
            for new in rows.tolist():
                for each, answer, value in zip(ids, answers, new, strict=True):
                    if not answer.stopped:
                        if value == NO_TOKEN:
                            raise self._not_finite(len(each) + number)
                        answer.add(value)
                number += 1
            if all(answer.stopped for answer in answers):
                break
        decode_seconds = time.perf_counter() - programs.setup_seconds - begin
        shares = prefill_seconds / len(ids), decode_seconds / len(ids)
        return [
            answer.result(*shares, float(density))
            for answer, density in zip(answers, densities, strict=True)
        ]

    def _finite(self, scores: np.ndarray, tokens: int) -> np.ndarray:
        if not np.isfinite(scores).all():
            raise self._not_finite(tokens)
        return scores

    def _not_finite(self, tokens: int) -> UserError:
        return UserError(
            f"{self.loaded.source}: logits are NaN or infinite within the first "
            f"{counted(tokens, 'token')}; the parameters are damaged, or numbers overflow"
        )

    def _checked(self, ids: Sequence[int] | np.ndarray, least: int) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.ndim != 1 or len(ids) < least:
            raise UserError(
                f"the tokens have shape {list(ids.shape)}; expected a list of at least "
                f"{counted(least, 'token id')}"
            )
        size = self.vocab_size
        if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= size:
            raise UserError(
                f"the tokens range from {ids.min()} to {ids.max()}; they must be integers from 0 "
                f"to {size - 1} (model.vocab_size = {size})"
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


class _Answer:
    """New tokens of one prompt, and why they ended."""

    def __init__(
        self,
        engine: Engine,
        options: GenerateOptions,
        stop_ids: frozenset[int],
        on_text: Callable[[str], None] | None,
    ) -> None:
        self._text = GrowingText(engine.tokenizer, options.stop, on_text)
        self._most, self._stop_ids = options.max_new_tokens, stop_ids
        self._tokens: list[int] = []
        self.stopped = ""

    def add(self, token: int) -> None:
        if token in self._stop_ids:
            self.stopped = "end"
            return
        self._tokens.append(token)
        self._text.add(token)
        full = len(self._tokens) == self._most
        self.stopped = "stop" if self._text.stopped else "length" if full else ""

    def result(self, prefill_seconds: float, decode_seconds: float, density: float) -> Generated:
        text = self._text.end()
        return Generated(
            tuple(self._tokens), text, self.stopped, prefill_seconds, decode_seconds, density
        )


@overload
def generate(
    model: Engine | str | Path, prompt: str, options: GenerateOptions | None = None, **how: Any
) -> Generated: ...


@overload
def generate(
    model: Engine | str | Path,
    prompt: Sequence[str],
    options: GenerateOptions | None = None,
    **how: Any,
) -> list[Generated]: ...


def generate(
    model: Engine | str | Path,
    prompt: str | Sequence[str],
    options: GenerateOptions | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    **how: Any,
) -> Generated | list[Generated]:
    """Continues a text, or several texts; without `on_text` these may be decoded together.

    Args:
        model: an `Engine`, which keeps its programs for the next call, or the folder of a model.
        prompt: text, or a list of texts. They begin with the token that the model's documents begin
            with (data.bos), if any; no chat template is applied.
        options, on_text: see `Engine.generate`.
        **how: arguments of `Engine.load`, if `model` is a folder.

    Returns:
        The result, or for a list of prompts the list of their results.

    Raises UserError if the model has no tokenizer; see also `Engine.load` and `Engine.generate`.
    """
    if not isinstance(model, Engine):
        model = Engine.load(model, **how)
    elif how:
        raise UserError(
            f"{', '.join(how)}: not allowed with a loaded engine; give arguments of Engine.load "
            "with the folder of a model, and options of generation as options=GenerateOptions(...)"
        )
    options = GenerateOptions() if options is None else options
    if not isinstance(options, GenerateOptions):
        raise UserError(f"options is a {type(options).__name__}; pass GenerateOptions(...)")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    ids = model.encode(prompts, options.max_new_tokens)
    if isinstance(prompt, str) or on_text is not None:
        results = [model.generate(each, options, on_text) for each in ids]
    else:
        results = model.generate_many(ids, options)
    return results[0] if isinstance(prompt, str) else results
