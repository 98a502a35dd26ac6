"""Conversations as token ids with a label mask, by the chat template of a tokenizer's folder."""

import dataclasses
import functools
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mtraining_jax.data.chat.conversation import REASONING, Conversation
from mtraining_jax.data.chat.rendering import Rendered, Template
from mtraining_jax.data.files import errors_as, shown_names
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import read_json, read_text

# Where transformers saves templates, in order of preference; the last one is of processors.
_FILE, _FOLDER, _PROCESSOR_FILE = (
    "chat_template.jinja",
    "additional_chat_templates",
    "chat_template.json",
)
# `strftime_now` of templates, fixed so that all processes and resumed runs render the same text.
TRAINING_DATE = datetime(2024, 7, 26)
# A note of `MaskedTokens`.
_CHANGED = (
    "conversations with a turn that is not trained because the chat template does not print it as "
    "the model would generate it"
)
_GENERATION = re.compile(r"{%[-+]?\s*generation\b")
_R = TypeVar("_R")
_HINT = "mark what is trained with {% generation %} in the template"


class ChatTemplate:
    """Turns conversations into text and tokens by the template that a tokenizer's folder has.

    Templates are rendered as in transformers: in Jinja's sandbox, with the same functions.

    Args:
        tokenizer: A tokenizer.json with templates next to it, in files or tokenizer_config.json.
        now: The time for templates that print the date.

    Raises:
        UserError: If the template or Jinja2 is missing, or the template is invalid.
    """

    def __init__(self, tokenizer: Tokenizer, now: datetime = TRAINING_DATE) -> None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f'data.tokenizer = "{tokenizer.name}" has no chat template; use the tokenizer.json '
                "of a folder with one"
            )
        self._tokenizer = tokenizer
        self._name, sources = _sources(tokenizer)
        self._marked = {name for name, source in sources.items() if _GENERATION.search(source)}
        self.checksum = zlib.crc32(json.dumps([sources, tokenizer.special_tokens]).encode())
        # A template is code, so this may raise anything.
        with errors_as(UserError, f"{self._name}: the chat template is not valid", Exception):
            self._templates = {name: Template(source, now) for name, source in sources.items()}
        self._variables = tokenizer.special_tokens | {"documents": None}
        added = tokenizer.added_tokens
        self._special = {token.content: id for id, token in added.items() if token.special}

    def prompt(self, conversation: Conversation) -> str:
        """The text after which the model answers a conversation."""
        return self._render(conversation, prompt=True)

    def end_token(self, conversation: Conversation) -> int | None:
        """The id of the token that ends an answer to a conversation; None if there is none."""
        messages = [*conversation.messages, {"role": "assistant", "content": "Yes."}]
        text = self._render(dataclasses.replace(conversation, messages=messages))
        _, answer, after = text.rpartition("Yes.")
        ends = [end for end in self._special if answer and after.lstrip().startswith(end)]
        return self._special[max(ends, key=len)] if ends else None

    def encode(self, conversation: Conversation) -> MaskedTokens:
        """The tokens of a conversation; trained are those that the model itself generates.

        These are the tokens in `{% generation %}` blocks of the template. If it has none, they are
        for each message of the assistant the tokens from the end of its prompt up to the token that
        ends its turn. Not trained are messages with `weight = 0` (as in OpenAI's API), those that
        the template changes once later messages follow, for example without their reasoning, and
        other end tokens than those of a last message.

        The number of renderings does not depend on that of messages, unless the prompts of a
        conversation differ, or turns lack their end token and do not end with their content.

        Raises:
            UserError: If the template cannot render the conversation, ignores a part of it, or does
                not show what the model generates in any turn; also without a message of the
                assistant.
        """
        messages, where, note = conversation.messages, conversation.where, ""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError(f"{where}: no message has the role assistant, so nothing is trained")
        asked = [turn for turn in turns if messages[turn].get("weight", 1)]
        text = self._render(conversation)
        self._check_complete(conversation, text)
        rendered = self._render_marked(conversation)
        if rendered.text != text:
            raise UserError(
                f"{where}: the chat template processes its own output, so it is unknown which part "
                "the model generates"
            )
        if self._kind(conversation) in self._marked:
            spans = rendered.generated
            if len(asked) < len(turns):
                if len(spans) != len(turns):
                    raise UserError(
                        f"{where}: the chat template marks {len(spans)} parts of {len(turns)} "
                        "messages of the assistant, so weight = 0 has no clear meaning"
                    )
                spans = [spans[turns.index(turn)] for turn in asked]
        else:
            spans = self._answers(conversation, asked, rendered)
            if len(spans) < len(asked):
                note = _CHANGED
        ids, begins, ends = self._tokenizer.encode_with_offsets(text)
        trained = np.zeros(ids.shape, bool)
        for begin, end in spans:
            # Some tokenizers trim offsets: those of a space that ends a text are empty, at its end.
            stop = max(np.searchsorted(begins, end), np.searchsorted(ends, end, "right"))
            if begin < end:
                trained[np.searchsorted(ends, begin, "right") : stop] = True
        return MaskedTokens(ids, trained, note)

    def _answers(
        self, conversation: Conversation, asked: list[int], rendered: Rendered
    ) -> list[tuple[int, int]]:
        """Begins and ends of what the model generates in these turns, as far as the text has it."""
        alike: dict[Any, list[int]] = defaultdict(list)
        lost = self._lost_thoughts(conversation, rendered)
        for turn in asked:
            before = conversation.messages[turn - 1]["role"] if turn else None
            alike[before, bool(conversation.messages[turn].get("tool_calls"))].append(turn)
        spans, problems = [], []
        for turns in alike.values():
            shapes = {turn: self._shape(conversation, turn) for turn in (turns[0], turns[-1])}
            same = len(set(shapes.values())) == 1
            for turn in turns:
                known = shapes[turns[0]] if same else shapes.get(turn)
                shape = known or self._shape(conversation, turn)
                if isinstance(shape, UserError):
                    problems.append(shape)
                elif turn not in lost:
                    spans += self._span(conversation, turn, rendered, *shape)
        if problems and not spans:
            raise problems[0]
        return spans

    def _shape(
        self, conversation: Conversation, turn: int
    ) -> tuple[str, tuple[str, ...]] | UserError:
        """The begin of a turn in its prompt, and the tokens that end it if it is the last one."""
        messages, where = conversation.messages, f"{conversation.where}: message {turn + 1}"
        last = dataclasses.replace(conversation, messages=messages[: turn + 1])
        before = dataclasses.replace(conversation, messages=messages[:turn])
        try:
            prompt, rendered = self._render(before, prompt=True), self._render_marked(last)
        except UserError as error:
            return error
        if turn not in rendered.messages:
            return UserError(
                f"{where}: the chat template does not print each message once in a loop, so it is "
                f"unknown what the model generates; {_HINT}"
            )
        text, (begin, _) = rendered.text, rendered.messages[turn]
        if begin > len(prompt) or not text.startswith(prompt):
            return UserError(
                f"{where}: the chat template does not continue its own prompt, which ends with "
                f"{json.dumps(prompt[-40:])}, so it is unknown what the model generates; {_HINT}"
            )
        ends = self._end_tokens(text[len(prompt) :])
        if not ends:
            return UserError(
                f"{where}: the chat template ends this turn without a special token, so the model "
                f"would not learn to stop; {_HINT}"
            )
        if not _holds(text[begin:], len(prompt) - begin, messages[turn]):
            return UserError(
                f"{where}: the chat template drops a part of its content, also from the last "
                "message; use a template that renders all of it"
            )
        return prompt[begin:], ends

    def _span(
        self, conversation: Conversation, turn: int, rendered: Rendered, begin: str, ends: Any
    ) -> list[tuple[int, int]]:
        """Begin and end of what the model generates in a turn, if the text has it."""
        first, stop = rendered.messages.get(turn, (0, 0))
        text = rendered.text[first:stop]
        message = conversation.messages[turn]
        if not text.startswith(begin) or not _holds(text, len(begin), message):
            return []
        text, found = text.rstrip(), self._end_tokens(text[len(begin) :])
        if not any(found[-n:] == ends[:n] for n in range(1, len(found) + 1)):
            before, end, _ = text.rpartition(ends[0])
            if end and len(before) >= len(begin) and _holds(before, len(begin), message):
                text = before + end  # other text follows the end, such as a separator
            else:
                text = text.removesuffix(found[-1] if found else "")  # not that of a last message
                if (size := self._size_as_last(conversation, turn, text)) is None:
                    return []
                text = text[:size]
        return [(first + len(begin), first + len(text))]

    def _size_as_last(self, conversation: Conversation, turn: int, text: str) -> int | None:
        """The size of the text of a turn without what follows only if it is not the last message.

        None if it does not begin as the last message would.
        """
        content = (conversation.messages[turn].get("content") or "").strip()
        if content and text.endswith(content):
            return len(text)
        upto = dataclasses.replace(conversation, messages=conversation.messages[: turn + 1])
        rendered = self._render_marked(upto)
        last = rendered.text[slice(*rendered.messages.get(turn, (0, 0)))].rstrip()
        for end in reversed(self._end_tokens(last)):
            last = last.removesuffix(end).rstrip()
        return len(last) if text.startswith(last) else None

    def _lost_thoughts(self, conversation: Conversation, rendered: Rendered) -> set[int]:
        """The messages with reasoning that is not in the text."""
        messages = conversation.messages
        thoughts = {i for i, message in enumerate(messages) if REASONING[0] in message}
        if not thoughts:
            return set()
        other = self._render_marked(
            dataclasses.replace(conversation, messages=_unthought(messages))
        )
        with_thoughts, without = (
            {i: each.text[slice(*each.messages.get(i, (0, 0)))] for i in thoughts}
            for each in (rendered, other)
        )
        return {i for i in thoughts if with_thoughts[i] == without[i]}

    def _end_tokens(self, text: str) -> tuple[str, ...]:
        """The last special tokens of a text, if it ends with one; at most 4."""
        found: list[str] = []
        while len(found) < 4:
            text = text.rstrip()
            ends = list(filter(text.endswith, self._special))
            if not ends:
                break
            found.insert(0, max(ends, key=len))
            text = text.removesuffix(found[0])
        return tuple(found)

    def _check_complete(self, conversation: Conversation, text: str) -> None:
        """Raises UserError if the template ignores a part that many templates ignore."""
        messages, tools = conversation.messages, conversation.tools
        cases: list[tuple[str, list[Any], list[Any], Any]] = [("tools", messages, messages, None)]
        for role in ("developer", "tool"):
            others = [message for message in messages if message["role"] != role]
            cases.append((f"messages of the role {role}", messages, others, tools))
        for most, part in ((0, "tool_calls"), (1, "several tool_calls in a message")):
            fewer = [_with_calls(message, most) for message in messages]
            cases.append((part, messages, fewer, tools))
        # Many templates drop the reasoning of earlier messages.
        if thoughts := [i for i, message in enumerate(messages) if REASONING[0] in message]:
            upto = messages[: thoughts[-1] + 1]
            cases.append((REASONING[0], upto, _unthought(upto), tools))
        for part, whole, rest, other_tools in cases:
            if (rest, other_tools) == (whole, tools):
                continue
            of = dataclasses.replace(conversation, messages=whole)
            try:
                other = self._render(Conversation(rest, other_tools, conversation.where))
                ignored = other == (text if whole is messages else self._render(of))
            except UserError:
                continue
            if ignored:
                raise UserError(
                    f"{conversation.where} has {part}, which the chat template ignores; remove it "
                    "from the conversation, or use a template that renders it"
                )

    def _kind(self, conversation: Conversation) -> str:
        """The name of the template, which some folders have several of."""
        has_tools = conversation.tools is not None and "tool_use" in self._templates
        kind = "tool_use" if has_tools else "default"
        if kind not in self._templates:
            raise UserError(
                f"{conversation.where}: {self._name} has no chat template with the name "
                f'"{kind}"; it has {shown_names(self._templates)}'
            )
        return kind

    def _render(self, conversation: Conversation, prompt: bool = False) -> str:
        """The text of a conversation, with that before an answer if `prompt`."""
        return self._called(Template.render, conversation, prompt)

    def _render_marked(self, conversation: Conversation) -> Rendered:
        return self._called(Template.render_marked, conversation, False)

    def _called(self, render: Callable[..., _R], conversation: Conversation, prompt: bool) -> _R:
        template = self._templates[self._kind(conversation)]
        what = f"{conversation.where}: the chat template of {self._name} fails"
        with errors_as(UserError, what, Exception):
            return render(
                template,
                conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=prompt,
                **self._variables,
            )


def _with_calls(message: dict[str, Any], most: int) -> dict[str, Any]:
    """A message with at most so many tool calls."""
    calls = message.get("tool_calls", [])[:most]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | ({"tool_calls": calls} if calls else {})


def _unthought(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without their reasoning."""
    return [{n: x for n, x in message.items() if n not in REASONING} for message in messages]


def _holds(text: str, begin: int, message: dict[str, Any]) -> bool:
    """Whether a text has the content of a message, which ends after `begin`, apart from spaces."""
    # Prompts may end with the first tag of the reasoning.
    begin, text = len("".join(text[:begin].split())), "".join(text.split())
    content = "".join((message.get("content") or "").split())
    return not content or text.find(content, max(begin - len(content) + 1, 0)) >= 0


def _sources(tokenizer: HuggingFaceTokenizer) -> tuple[Path, dict[str, str]]:
    """The file or folder with the templates, and their texts by name, as in transformers."""
    config, folder = tokenizer.settings_file, tokenizer.settings_file.parent
    files = {"default": folder / _FILE} if (folder / _FILE).exists() else {}
    files |= {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja"))}
    if files:
        with errors_as(UserError, f"{folder}: a chat template cannot be read", OSError, ValueError):
            found = {name: read_text(path) for name, path in files.items()}
        return files.get("default", folder / _FOLDER), found
    found, file = tokenizer.settings.get("chat_template"), config
    if found is None and (folder / _PROCESSOR_FILE).exists():
        file = folder / _PROCESSOR_FILE
        with errors_as(UserError, f"{file} cannot be read", Exception):
            found = read_json(file)["chat_template"]
    if found is None:
        raise UserError(
            f'data.tokenizer = "{tokenizer.name}" has no chat template: neither chat_template in '
            f"{config.name} nor {_FILE} next to it"
        )
    if isinstance(found, str):
        return file, {"default": found}
    with errors_as(UserError, f"{file}: chat_template is not valid", Exception):
        named = (
            found.items()
            if isinstance(found, dict)
            else ((each["name"], each["template"]) for each in found)
        )
        return file, {str(name): str(source) for name, source in named}


@functools.cache
def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a tokenizer, with a fixed date."""
    return ChatTemplate(tokenizer)
