"""Wrong configurations and the sentences that answer them: the table sentences.txt."""

import re
import shlex
from pathlib import Path

import pytest

from mtraining_jax.cli.argument_parser import config_parser, parse_with_overrides, selected_config
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.utils.errors import UserError
from tests.config.common import MODEL

BLOCKS = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").split("\n\n")
CASES = [block for block in BLOCKS if "\n> " in block]
OTHER_FILES = {
    "model.toml": MODEL,
    "cycle.toml": "base = 'mine.toml'",
    "wrong.toml": f"{MODEL}[run]\nsteps = 'x'\nlog_interval = 0\n[sparcity]\nkind = 'dense'",
}


def test_every_block_is_a_case():
    assert len(CASES) > 140
    assert all(line.startswith("#") for x in BLOCKS if x not in CASES for line in x.splitlines())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.partition("\n> ")[0][-60:])
def test_sentences(case, tmp_path, monkeypatch):
    monkeypatch.setattr(PATTERNS, "_loaded", {})  # without plug-ins of other tests
    lines = case.replace("{folder}", str(tmp_path)).splitlines()
    expected = [line[2:] for line in lines if line.startswith("> ")]
    options = [line for line in lines if line.startswith("--")]
    text = "\n".join(line for line in lines if not line.startswith((">", "--")))
    if not text.startswith("# no base") and "base = '" not in text:
        text = f"base = 'model.toml'\n{text}"
    for name, content in (OTHER_FILES | {"mine.toml": text}).items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    arguments = shlex.split(" ".join(options))
    if not arguments or not arguments[0].startswith("--config="):
        arguments.append(f"--config={tmp_path}/mine.toml")
    with pytest.raises(UserError) as caught:
        selected_config(parse_with_overrides(config_parser(), arguments))
    found = str(caught.value).splitlines()
    assert len(found) == len(expected), found
    for line, sentence in zip(found, expected, strict=True):
        pattern = ".*".join(map(re.escape, sentence.split("...")))
        assert re.fullmatch(pattern, line), line
