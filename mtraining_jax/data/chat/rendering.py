"""Renders chat templates in Jinja's sandbox, with limits, and finds the text of each message."""

import itertools
import json
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mtraining_jax.data.files import errors_as
from mtraining_jax.utils.errors import UserError

# Limits of one text: iterations of loops (half a minute), and characters.
MOST_ITERATIONS, LONGEST_TEXT = 10**8, 2**28
# Before "(" and ")" around generated text, or the number of a message; random, so that no message
# contains it.
_MARK = f"\ufdd0{uuid.uuid4().hex}"
_MARKS = re.compile(rf"{_MARK}([()]|-?\d+;)")
_FUNCTION = "mtraining_mark"  # of templates: `_Marks.__call__`


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: The text.
        generated: Begin and end of the text in each `{% generation %}` block.
        messages: Begin and end of the text of each message, by number; of those in one place.
    """

    text: str
    generated: list[tuple[int, int]]
    messages: dict[int, tuple[int, int]]


class Template:
    """A chat template, rendered as transformers does.

    Args:
        source: The text of the template.
        now: The time for templates that print the date.

    Raises:
        UserError: If Jinja2 is missing.
        Exception: If the template is invalid.
    """

    def __init__(self, source: str, now: datetime) -> None:
        environment = _environment(now)
        tree = environment.parse(source)
        _mark_loops(tree, None, itertools.count())
        code, variables = environment.compile(tree), environment.make_globals(None)
        self._template = environment.template_class.from_code(environment, code, variables)

    def render(self, messages: Sequence[Any], **variables: Any) -> str:
        """The text of messages; raises any exception, because templates are code."""
        return self._render(_Marks(None), messages, variables)

    def render_marked(self, messages: Sequence[Any], **variables: Any) -> Rendered:
        """The text of messages with its spans; raises any exception."""
        first, *rest = _MARKS.split(self._render(_Marks(messages), messages, variables))
        pieces, generated, opened, number = [first], [], [], -1
        length, begins = len(first), list[tuple[int, int]]()
        for mark, piece in zip(rest[::2], rest[1::2], strict=True):
            if mark == "(":
                opened.append(length)
            elif mark == ")":
                generated.append((opened.pop(), length))
            else:
                number = int(mark[:-1])
            if number >= 0 and piece.strip() and (not begins or begins[-1][0] != number):
                begins.append((number, length))
            pieces.append(piece)
            length += len(piece)
        if opened:
            raise ValueError("a loop leaves a generation block before its end")
        times = Counter(number for number, _ in begins)
        following = itertools.pairwise([*begins, (-1, length)])
        spans = {n: (begin, end) for (n, begin), (_, end) in following if times[n] == 1}
        return Rendered("".join(pieces), generated, spans)

    def _render(self, marks: "_Marks", messages: Sequence[Any], variables: dict[str, Any]) -> str:
        pieces, length = [], 0
        for piece in self._template.generate({_FUNCTION: marks}, messages=messages, **variables):
            length += len(piece)
            if length > LONGEST_TEXT:
                raise ValueError(f"it prints more than {LONGEST_TEXT:,} characters")
            pieces.append(piece)
        return "".join(pieces)


class _Marks:
    """Counts the iterations of one rendering, and returns the marks of these messages, if any."""

    def __init__(self, messages: Sequence[Any] | None) -> None:
        self._marked = messages is not None
        self._numbers = {id(message): number for number, message in enumerate(messages or ())}
        self._iterations, self._loops = 0, set[int]()

    def __call__(self, what: str, loop: int = 0, item: Any = None) -> str:
        """The mark for the begin of an iteration, the end of a loop, or a generation block."""
        number = self._numbers.get(id(item))
        if what == "iteration":
            self._iterations += 1
            if self._iterations > MOST_ITERATIONS:
                raise ValueError(f"its loops take more than {MOST_ITERATIONS:,} iterations")
            if number is None:
                return ""
            self._loops.add(loop)
        elif what == "end":
            if loop not in self._loops:  # it is not over messages
                return ""
            number = -1 if number is None else number
        elif self._marked:
            return _MARK + what
        return "" if number is None else f"{_MARK}{number};"


def _mark_loops(node: Any, target: Any, numbers: "itertools.count[int]") -> None:
    """Calls the marking function in the loops of a template; `target` is that of the outer loop."""
    from jinja2 import nodes

    def called(what: str, number: int, item: Any) -> Any:
        name = item.name if isinstance(item, nodes.Name) else None
        value = nodes.Const(None) if name is None else nodes.Name(name, "load")
        return _mark_call([nodes.Const(what), nodes.Const(number), value])

    for _, field in node.iter_fields():
        children = field if isinstance(field, list) else [field]
        for child in [child for child in children if isinstance(child, nodes.Node)]:
            if not isinstance(child, nodes.For):
                _mark_loops(child, target, numbers)
                continue
            number = next(numbers)
            _mark_loops(child, child.target, numbers)
            child.body.insert(0, called("iteration", number, child.target))
            place = next(i for i, other in enumerate(children) if other is child)
            children.insert(place + 1, called("end", number, target))


def _mark_call(arguments: list[Any]) -> Any:
    from jinja2 import nodes

    function = nodes.Name(_FUNCTION, "load")
    return nodes.Output([nodes.Call(function, arguments, [], None, None)])


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
            begin, end = (_mark_call([nodes.Const(what)]) for what in "()")
            return nodes.Scope([begin, *body, end]).set_lineno(line)

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
