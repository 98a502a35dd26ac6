"""Registries of plug-ins, and the fields that plug-ins add to sections."""

import dataclasses
import re
import sys

import pytest

from mtraining_jax.cli.train import main
from mtraining_jax.config.sections import STRICT, assemble
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.fields import attribute_docs
from mtraining_jax.utils.limits import PositiveFraction, check_limits
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
    yield Registry("thing", "own_plugins_for_tests:Base", {"first": "own_plugins_for_tests:Mine"})
    sys.modules.pop("own_plugins_for_tests", None)


def test_lookup_by_name_and_by_module(registry):
    first = registry.get("first")
    assert first.__name__ == "Mine" and registry.get("first") is first
    assert tuple(registry) == ("first",)
    assert registry.get("own_plugins_for_tests:Mine") is first
    assert tuple(registry) == ("first", "own_plugins_for_tests:Mine")
    assert registry.names == ("first",)
    assert set(registry.classes().values()) == {first}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("second", 'unknown thing "second"; choose one of first or pass package.module:Class'),
        ("nowhere_at_all:X", "cannot be loaded as a thing: No module named 'nowhere_at_all'"),
        ("own_plugins_for_tests:Gone", "own_plugins_for_tests has no 'Gone'"),
        ("own_plugins_for_tests:Other", "is not a thing: it must be a subclass of own_plugins_for"),
    ],
)
def test_lookup_errors(registry, name, sentence):
    with pytest.raises(UserError, match=sentence):
        registry.get(name)
    assert tuple(registry) == ("first",)


@dataclasses.dataclass(frozen=True)
class Left:
    """One plug-in.

    Attributes:
        share: of the whole, in words that
            take two lines.
        size: how large.
    """

    share: PositiveFraction = 0.5
    size: int = 3

    def __post_init__(self):
        check_limits(self)


@dataclasses.dataclass(frozen=True)
class Right:
    """Another."""

    size: int = 3
    name: str = "x"


def section_of(**plugins):
    from pydantic.dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True, config=STRICT)
    class Base:
        kind: str = "left"

    return assemble("Section", Base, plugins, "kind")


def test_a_section_has_the_fields_of_all_plugins():
    section = section_of(left=Left, right=Right)
    fields = section.__pydantic_fields__
    assert list(fields) == ["kind", "share", "size", "name"]
    assert fields["share"].description == "of the whole, in words that take two lines. (kind left)"
    assert section.owners["size"] == ["left", "right"]
    assert dataclasses.replace(section(share=0.25), kind="right").share == 0.25
    with pytest.raises(ValueError, match="less than or equal to 1"):
        section(share=2.0)
    with pytest.raises(ValueError, match="shape"):
        section(shape=2.0)


def test_conflicting_fields_of_plugins_are_an_error():
    @dataclasses.dataclass
    class Wrong:
        size: int = 4

    sentence = (
        '"wrong" cannot declare the field size: int = 4, because left declares it as int = 3; '
        "rename it, or use the same type and default"
    )
    with pytest.raises(UserError, match=re.escape(sentence)):
        section_of(left=Left, wrong=Wrong)


def test_a_conflicting_plugin_is_reported_and_forgotten(tmp_path, monkeypatch, capsys):
    (tmp_path / "conflicting_pattern.py").write_text(
        "import dataclasses\n"
        "from mtraining_jax.patterns.options.base import PatternOptions\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Strided(PatternOptions):\n"
        "    tau: int = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "conflicting_pattern:Strided"
    assert main(["--config", "tiny", f"--sparsity.kind={name}", "--print-config"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f'error: "{name}" cannot declare the field tau: int = 3, because ')
    assert main(["--config", "tiny", "--print-config"]) == 0


def test_only_own_plugins_search_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    registry = Registry("thing", "collections:OrderedDict", {"first": "collections:OrderedDict"})
    registry.get("first")
    assert str(tmp_path) not in sys.path


def test_classes_check_their_limits():
    with pytest.raises(ValueError, match="share=0.0 must be a finite number"):
        Left(share=0.0)
    assert attribute_docs(Right) == {}


