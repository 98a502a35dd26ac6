"""Conversations as token ids with a label mask, by the chat template of a tokenizer's folder."""

import dataclasses
import functools
import itertools
import json
import re
import uuid
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mtraining_jax.data.chat.conversation import REASONING, Conversation
from mtraining_jax.data.files import errors_as
from mtraining_jax.data.masked import MaskedTokens
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.file_limits import read_text

_TEMPLATE_FILE = "chat_template.jinja"
# `strftime_now` of templates, fixed so that all processes and resumed runs render the same text.
TRAINING_DATE = datetime(2024, 7, 26)
# Before and after the text that a template marks; random, so that no message contains it.
_MARK = f"\ufdd0{uuid.uuid4().hex}"
# A note of `MaskedTokens`.
_CHANGED = "conversations with a turn that is not trained because the template changes it later"
_GENERATION = re.compile(r"{%[-+]?\s*generation\b")


class ChatTemplate:
    """Turns conversations into text and tokens by the template that a tokenizer's folder has.

    Templates are rendered as in transformers: in Jinja's sandbox, with the same functions.

    Args:
        tokenizer: A tokenizer.json with the template in the tokenizer_config.json or the
            chat_template.jinja next to it.
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
        environment = _environment(now)
        # A template is code, so this may raise anything.
        with errors_as(UserError, f"{self._name}: the chat template is not valid", Exception):
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        self._variables = tokenizer.special_tokens | {"documents": None}
        added = tokenizer.added_tokens
        self._special = {token.content: id for id, token in added.items() if token.special}
        longest_first = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first)))

    def prompt(self, conversation: Conversation) -> str:
        """The text after which the model answers a conversation."""
        return _marked_spans(self._render(conversation, prompt=True))[0]

    def end_token(self, conversation: Conversation) -> int | None:
        """The id of the token that ends an answer to a conversation; None if there is none."""
        messages = [*conversation.messages, {"role": "assistant", "content": "Yes."}]
        text = self._render(dataclasses.replace(conversation, messages=messages))
        _, answer, after = _marked_spans(text)[0].rpartition("Yes.")
        ends = [end for end in self._special if answer and after.lstrip().startswith(end)]
        return self._special[max(ends, key=len)] if ends else None

    def encode(self, conversation: Conversation) -> MaskedTokens:
        """The tokens of a conversation; trained are those that the model itself generates.

        These are the tokens in `{% generation %}` blocks of the template. If it has none, they are
        for each message of the assistant the tokens from the end of its prompt up to the token that
        ends its turn. Not trained are messages with `weight = 0` (as in OpenAI's API), and those
        that the template changes once later messages follow, for example without their reasoning.

        Raises:
            UserError: If the template cannot render the conversation, ignores a part of it, or does
                not show what the model generates; also without a message of the assistant.
        """
        messages, where, note = conversation.messages, conversation.where, ""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise UserError(f"{where}: no message has the role assistant, so nothing is trained")
        weights = [messages[turn].get("weight", 1) for turn in turns]
        text = self._render(conversation)
        self._check_complete(conversation, text)
        if self._kind(conversation) in self._marked:
            text, spans = _marked_spans(text)
            if 0 in weights and len(spans) != len(turns):
                raise UserError(
                    f"{where}: the chat template marks {len(spans)} parts of {len(turns)} messages "
                    "of the assistant, so weight = 0 has no clear meaning"
                )
            weights = weights if 0 in weights else [1] * len(spans)
            spans = [span for span, weight in zip(spans, weights, strict=True) if weight]
        else:
            asked = [turn for turn, weight in zip(turns, weights, strict=True) if weight]
            found = [self._answer(conversation, turn, text) for turn in asked]
            spans = [span for span in found if span is not None]
            if len(spans) < len(asked):
                note = _CHANGED
        ids, begins, ends = self._tokenizer.encode_with_offsets(text)
        trained = np.zeros(ids.shape, bool)
        for begin, end in spans:
            trained |= (begins < end) & (ends > begin)
        return MaskedTokens(ids, trained, note)

    def _answer(self, conversation: Conversation, turn: int, text: str) -> tuple[int, int] | None:
        """Begin and end of what the model generates in a turn; None if it is not in the text."""
        where = f"{conversation.where}: message {turn + 1}"
        hint = "mark what is trained with {% generation %} in the template"
        prompt = self._render(conversation, turn, prompt=True)
        upto = self._render(conversation, turn + 1).rstrip()
        if not upto.startswith(prompt):
            raise UserError(
                f"{where}: the chat template does not continue its own prompt, which ends with "
                f"{json.dumps(prompt[-40:])}, so it is unknown what the model generates; {hint}"
            )
        end = self._end_of_turn(upto)
        if end is None:
            raise UserError(
                f"{where}: the chat template ends this turn without a special token, so the model "
                f"would not learn to stop; {hint}"
            )
        content, answer = conversation.messages[turn].get("content") or "", upto[len(prompt) :]
        if "".join(content.split()) not in "".join(answer.split()):  # they may trim spaces
            raise UserError(f"{where}: the chat template drops a part of its content; {hint}")
        if text.startswith(upto):
            return len(prompt), len(upto)
        # Later messages change the turn: harmless if it only loses tags, such as empty reasoning
        # before the answer, or another special token after the one that ends the turn.
        begin = len(prompt)
        while end is not None and text.startswith(prompt):
            kept = text[begin : text.find(end, begin) + len(end)]
            lost = self._added.sub("", answer.removesuffix(kept)).strip()
            if kept.endswith(end) and answer.endswith(kept) and not lost:
                return begin, begin + len(kept)
            answer = answer.removesuffix(end).rstrip()
            end = self._end_of_turn(answer)
        return None

    def _check_complete(self, conversation: Conversation, text: str) -> None:
        """Raises UserError if the template ignores a part that many templates ignore."""
        messages, tools = conversation.messages, conversation.tools
        less: dict[str, tuple[list[dict[str, Any]], Any]] = {"tools": (messages, None)}
        for role in ("developer", "tool"):
            kept = [message for message in messages if message["role"] != role]
            less[f"messages of the role {role}"] = kept, tools
        for names in (("tool_calls",), REASONING):
            kept = [{n: x for n, x in message.items() if n not in names} for message in messages]
            less[names[0]] = kept, tools
        for part, (messages, tools) in less.items():
            other = Conversation(messages, tools, conversation.where)
            if other == conversation:
                continue
            try:
                ignored = self._render(other) == text
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
        return "tool_use" if has_tools else "default"

    def _render(
        self, conversation: Conversation, count: int | None = None, prompt: bool = False
    ) -> str:
        """The text of the first `count` messages, with that before an answer if `prompt`."""
        template = self._templates[self._kind(conversation)]
        what = f"{conversation.where}: the chat template of {self._name} fails"
        with errors_as(UserError, what, Exception):
            return template.render(
                messages=conversation.messages[:count],
                tools=conversation.tools,
                add_generation_prompt=prompt,
                **self._variables,
            )

    def _end_of_turn(self, text: str) -> str | None:
        """The special token at the end of a text."""
        found = filter(text.rstrip().endswith, self._special)
        return max(found, key=len, default=None)


def _sources(tokenizer: HuggingFaceTokenizer) -> tuple[Path, dict[str, str]]:
    """The file with the templates, and their texts by name."""
    file = Path(tokenizer.name).with_name(_TEMPLATE_FILE)
    if file.exists():
        with errors_as(UserError, f"{file} cannot be read", OSError, UnicodeDecodeError):
            return file, {"default": read_text(file)}
    file, found = tokenizer.settings_file, tokenizer.settings.get("chat_template")
    if isinstance(found, str):
        return file, {"default": found}
    if found is None:
        raise UserError(
            f'data.tokenizer = "{tokenizer.name}" has no chat template: neither chat_template in '
            f"{file.name} nor {_TEMPLATE_FILE} next to it"
        )
    with errors_as(UserError, f"{file}: chat_template is not valid", Exception):
        named = {str(each["name"]): str(each["template"]) for each in found}
    if "default" not in named:
        raise UserError(f'{file}: chat_template has no template with the name "default"')
    return file, named


def _environment(now: datetime) -> Any:
    """A Jinja environment with what transformers documents for chat templates."""
    problem = 'chat templates need Jinja2: pip install "jinja2>=3.1.6", or uv run --extra chat'
    with errors_as(UserError, problem, ImportError):
        import jinja2
        from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """Puts marks around the text of `{% generation %}` blocks."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            mark = nodes.Output([nodes.TemplateData(_MARK)])
            return nodes.Scope([mark, *body, mark]).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    return environment


def _marked_spans(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the spans that they enclosed."""
    pieces = text.split(_MARK)
    edges = [0, *itertools.accumulate(map(len, pieces))]
    return "".join(pieces), list(zip(edges[1:-1:2], edges[2::2], strict=True))


@functools.cache
def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a tokenizer, with a fixed date."""
    return ChatTemplate(tokenizer)
