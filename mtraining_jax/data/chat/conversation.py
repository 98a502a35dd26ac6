"""Conversations in OpenAI's and ShareGPT's form."""

import json
from dataclasses import dataclass
from typing import Any

from mtraining_jax.data.files import errors_as
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import shortened

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form that chat templates read; see `read_conversation`.

    Attributes:
        messages: Messages with `role`, `content`, `tool_calls` and so on.
        tools: JSON schemas of tools.
        where: The location for messages.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    where: str

    @property
    def content(self) -> bytes:
        """Equal only for equal conversations."""
        return json.dumps([self.messages, self.tools]).encode()


def read_conversation(messages: Any, tools: Any, where: str) -> Conversation:
    """Checks a conversation, and brings it into the form that chat templates read.

    Args:
        messages: A list of OpenAI messages (`role`, `content`) or ShareGPT messages (`from`,
            `value`), or its JSON. Arguments of tool calls may be JSON text, as in OpenAI's API.
        tools: A list of JSON schemas, its JSON, or None.
        where: The location for messages.

    Raises:
        UserError: If the messages or the tools are invalid.
    """
    messages, tools = _parsed(messages, f"{where}: messages"), _parsed(tools, f"{where}: tools")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: a conversation must be a list with at least one message")
    if not isinstance(tools, list | None):
        raise UserError(f"{where}: tools must be a list of JSON schemas")
    read = [_message(each, f"{where}: message {i}") for i, each in enumerate(messages, 1)]
    return Conversation(read, tools, where)


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UserError(f"{where} must be an object with role and content")
    # An absent field may be null; templates would print it.
    read = {name: value for name, value in message.items() if value is not None}
    if "from" in read and "role" not in read:
        read["role"] = read.pop("from")
        read["content"] = read.pop("value", None)
        read["role"] = _SHAREGPT_ROLES.get(str(read["role"]), read["role"])
    if (role := read.get("role")) not in ROLES:
        allowed = ", ".join([*ROLES, *_SHAREGPT_ROLES])
        raise UserError(f'{where} has the role "{shortened(str(role), 40)}"; allowed are {allowed}')
    content, calls = read.get("content"), read.get("tool_calls", [])
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        read["content"] = content = "".join(text for text in texts if isinstance(text, str))
        if not all(isinstance(text, str) for text in texts):
            raise UserError(f"{where} has a part that is not text; only text is supported")
    if not isinstance(content, str) and not (content is None and role == "assistant" and calls):
        raise UserError(f"{where} has no content; it must be text")
    for name in ("weight", "train"):
        if read.get(name, 1) not in (0, 1):
            value = shortened(str(read[name]), 40)
            raise UserError(f"{where} has {name} = {value}; it must be 0 (not trained) or 1")
    if not read.get("train", 1):
        read["weight"] = 0
    if not isinstance(calls, list):
        raise UserError(f"{where} has tool_calls that are not a list")
    if calls:
        read["tool_calls"] = [_call(call, where) for call in calls]
    if names := [name for name in REASONING if name in read]:
        # As in transformers: the names that templates read.
        read = {"thinking": read[names[0]], **read, "reasoning_content": read[names[0]]}
    return read


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where} has a tool call without a function name")
    arguments = _parsed(function.get("arguments"), f"{where}: arguments of a tool call")
    function = function | {"arguments": arguments or {}}
    return call | {"function": function} if "function" in call else function


def _parsed(value: Any, what: str) -> Any:
    """A value, or what it is as JSON if it is text; None for empty text."""
    if not isinstance(value, str) or not value:
        return value or None
    with errors_as(UserError, f"{what} are text that is not JSON", ValueError, RecursionError):
        return json.loads(value)
