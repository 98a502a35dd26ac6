"""The tested versions in pyproject.toml cover everything that a set-up installs."""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def test_each_package_of_a_set_up_has_one_tested_version():
    """Dependencies and what they depend on, on this machine; uv installs no other version."""
    pins = [Requirement(line) for line in PROJECT["tool"]["uv"]["constraint-dependencies"]]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    assert len(versions) == len(pins) and all(x.startswith("==") for x in versions.values())
    direct = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"]
    waiting, seen = [(line, "") for line in direct], set()
    while waiting:
        line, extra = waiting.pop()
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(needed.name)
        assert name in versions, f"{name} has no tested version"
        for asked in ("", *needed.extras):
            if (name, asked) not in seen:
                seen.add((name, asked))
                waiting += [(text, asked) for text in metadata.requires(name) or ()]
    assert len(seen) > len(direct)
