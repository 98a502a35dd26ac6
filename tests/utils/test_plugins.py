"""Registries of plug-ins, and reflection on their fields."""

import sys
from typing import Annotated, Literal

import pytest

from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import construct, fields_of, options
from mtraining_jax.utils.limits import Ge, PositiveFraction, TextList
from mtraining_jax.utils.plugins import Registry

OWN = """
class Base: pass
class Mine(Base): pass
class Other: pass
"""


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with a plug-in module in the current folder."""
    (tmp_path / "own_plugins_for_tests.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    built_in = {"first": "own_plugins_for_tests:Mine"}
    yield Registry("thing", "own_plugins_for_tests:Base", built_in, groups=("all",))
    sys.modules.pop("own_plugins_for_tests", None)


def test_lookup_by_name_and_by_module(registry):
    first = registry.get("first")
    assert first.__name__ == "Mine" and registry.get("first") is first
    assert registry.get("own_plugins_for_tests:Mine") is first
    assert tuple(registry) == ("first", "own_plugins_for_tests:Mine")
    assert registry.names == ("first",) and registry.name_of(first) == "first"
    assert registry.name_of(dict) == "builtins:dict"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("second", 'unknown thing "second"; choose one of first or pass package.module:Class'),
        ("frist", 'unknown thing "frist"; did you mean "first"\\? Choose one of first or pass '),
        ("alll", 'unknown thing "alll"; did you mean "all"\\? Choose one of first or pass pack'),
        ("nowhere_at_all:X", "cannot be loaded as a thing: No module named 'nowhere_at_all'"),
        ("own_plugins_for_tests:Gone", "own_plugins_for_tests has no 'Gone'"),
        ("./own_plugins_for_tests:Mine", "must be package.module:Class, as Python imports it"),
        (":Mine", "must be package.module:Class"),
        ("own_plugins_for_tests:Other", "is not a thing: it must be a subclass of own_plugins_for"),
    ],
)
def test_lookup_errors(registry, name, sentence):
    with pytest.raises(UserError, match=sentence):
        registry.get(name)
    assert tuple(registry) == ("first",)


def test_only_own_plugins_search_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    registry = Registry("thing", "collections:OrderedDict", {"first": "collections:OrderedDict"})
    registry.get("first")
    assert str(tmp_path) not in sys.path


@options
class Options:
    """One plug-in."""

    share: PositiveFraction = 0.5
    """Of the whole, in words that
    take two lines."""
    size: Annotated[int, Ge(2)] | None = None
    kind: Literal["a", "b"] = "a"
    names: TextList = ()

    def __post_init__(self):
        if self.kind == "b" and not self.names:
            raise ValueError("kind = b needs names")


@options(kw_only=True)
class Derived(Options):
    """Adds to the fields of another class, and changes a default."""

    count: int
    share: PositiveFraction = 0.25


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("share", 0.0, "a finite number (greater than 0 and at most 1)"),
        ("share", "x", "a finite number (greater than 0 and at most 1)"),
        ("share", float("nan"), "a finite number (greater than 0 and at most 1)"),
        ("size", 1, "an integer (at least 2) or none"),
        ("size", 3.0, "an integer (at least 2) or none"),
        ("size", True, "an integer (at least 2) or none"),
        ("kind", "c", '"a" or "b"'),
        ("names", ("",), "a list of non-empty strings"),
    ],
)
def test_classes_check_their_limits(field, value, allowed):
    with pytest.raises(UserError) as error:
        Options(**{field: value})
    assert str(error.value) == f"{field}={value!r} must be {allowed}"


def test_every_wrong_field_has_a_line():
    with pytest.raises(UserError) as error:
        Options(size=0, sise=3, kind="c")
    assert str(error.value).splitlines() == [
        "size=0 must be an integer (at least 2) or none",
        'kind=\'c\' must be "a" or "b"',
        "Options has no field sise; it has share, size, kind, names",
    ]
    with pytest.raises(UserError, match="^kind = b needs names$"):
        Options(kind="b")
    with pytest.raises(TypeError, match="Options takes at most 4 positional arguments"):
        Options(0.5, 2, "a", (), 3)
    assert Options(0.5, 2) == Options(share=0.5, size=2)


def test_construction_from_a_table():
    made, wrong = construct([Options, Derived], {"share": 1, "size": 4.0, "names": ["a"], "x": 1})
    assert made == [Options(share=1.0, size=4, names=("a",))]
    assert [(name, problem["type"]) for name, problem in wrong] == [("count", "missing")]
    made, wrong = construct([Derived], {"count": 3, "share": 2})
    assert made == [] and [name for name, _ in wrong] == ["share"]
    assert construct([Derived], {"count": 3})[0] == [Derived(count=3)]
    assert construct([Options], {"kind": "b"}) == ([], [("", "kind = b needs names")])


def test_fields_and_their_docs():
    share, size, kind, names = fields_of(Options).values()
    assert share.doc.split() == "Of the whole, in words that take two lines.".split()
    assert size.doc == kind.doc == "" and fields_of(Derived)["share"].doc == share.doc
    assert share.default == 0.5 and not share.required and fields_of(Derived)["count"].required
    assert size.kinds == {int, type(None)} and names.kinds == {list}
    with pytest.raises(UserError, match="^builtins:dict declares no options: decorate the class"):
        fields_of(dict)
