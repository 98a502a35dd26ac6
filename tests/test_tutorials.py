"""The tutorials, from beginning to end: their files and commands, at a small size."""

import importlib
import json
import random
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from mtraining_jax.__main__ import COMMANDS
from mtraining_jax.tools.export.write import save_hf
from tests.data.chat.chat_folders import template_of, write_folder
from tests.models.common import drawn, tiny_spec

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/tutorials.md").read_text()
_FILE = re.compile(r"\*(\w+\.(?:py|toml))\*")  # in italics before its text
UNGUARDED = ["--guard.enabled=false"]  # takes a quarter of the time
WORDS = "the assistant or this that is as an answer in a long text of many words".split()


def write_checkpoint(folder, **spec):
    """A model with random parameters, and a tokenizer of bytes with a chat template."""
    spec = tiny_spec(vocab_size=276, num_layers=1, num_heads=2, num_kv_heads=1, **spec)
    save_hf(folder, spec, drawn(spec)[1], dtype="float32", eos=[266])
    write_folder(folder / "tokenizer", template_of("smollm2", False))
    shutil.copytree(folder / "tokenizer", folder, dirs_exist_ok=True)


@pytest.fixture
def follow(tmp_path, monkeypatch, capsys):
    """Follows a section of the page in an empty folder; returns what each command printed.

    `changes` replaces texts of the page; `options` adds options to commands, by their first word.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shown = []

    def run(command, options):
        words = shlex.split(command)
        assert words.pop(0) == "python"
        name = words.pop(0) if words[0] != "-m" else words.pop(1)
        if words[:1] == ["-m"]:
            words.pop(0)
        added = options.get(name, [])
        if name.startswith("examples."):  # downloads a checkpoint, which the test has written
            assert (tmp_path / words[0] / "config.json").exists()
            assert (ROOT / f"{name.replace('.', '/')}.py").exists()
            return
        if (tmp_path / name).exists():
            monkeypatch.setattr(sys, "argv", [name])
            runpy.run_path(name, run_name="__main__")
        else:
            module = f"mtraining_jax.cli.{name.removesuffix('.py').rpartition('.')[2]}"
            assert module.removeprefix("mtraining_jax.") in {x for x, _ in COMMANDS.values()}
            assert importlib.import_module(module).main([*words, *added]) == 0, command
        shown.append(capsys.readouterr().out)

    def followed(title, changes, options):
        section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for old, new in changes.items():
            assert old in section, old
            section = section.replace(old, new)
        before, commands = "", []
        for part in re.split(r"^(```\w+\n.*?^```)", section, flags=re.MULTILINE | re.DOTALL):
            if part.startswith("```"):
                name = _FILE.findall(before)[-1]
                Path(name).write_text(part.partition("\n")[2].removesuffix("```"))
            commands += re.findall(r"^    (python .*)$", part.removeprefix("```"), re.MULTILINE)
            before = part
        for command in commands:
            run(command, options)
        return shown

    return followed


def test_extend_a_checkpoint(follow, tmp_path):
    write_checkpoint(tmp_path / "runs/coder", max_position_embeddings=512)
    rng = random.Random(0)
    for folder, length in (("books", 4000), ("validation", 2000), ("web", 60)):
        (tmp_path / folder).mkdir()
        texts = [" ".join(rng.choices(WORDS, k=length // 5)) for _ in range(4)]
        for number, text in enumerate(texts):
            (tmp_path / folder / f"{number}.txt").write_text(text)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / folder / "all.jsonl").write_text(lines)
    changes = {
        "131072": "1024", "32768": "512", "steps = 60": "steps = 2", "num_batches = 4":
        "num_batches = 1", "warmup_steps = 6": "warmup_steps = 1", "8K,32K": "512",
        "64K,128K --attention both": "1K --attention sparse", "needle,passkey": "passkey",
    }  # fmt: skip
    tokenize = "mtraining_jax.cli.tokenize_corpus"
    options = {
        "evaluate.py": ["--samples=1"], "train.py": UNGUARDED, tokenize: ["--processes=1"],
        "generate.py": ["--max-new-tokens=2"],
    }  # fmt: skip
    shown = follow("Extend your checkpoint to 128K tokens", changes, options)
    assert "tokens/books" in shown[0] and "packs.png" in shown[3]
    assert "not included" in shown[4] and "step 2/2" in shown[5]
    for text in shown[6:8]:
        assert "passkey" in text
    assert len(shown) == 9  # generated text may have no visible character
    exported = json.loads((tmp_path / "runs/longer/hf/config.json").read_text())
    assert exported["max_position_embeddings"] == 1024


def test_own_pattern_in_own_model(follow):
    changes = {"= 4096, 256, 4, 100": "= 512, 32, 2, 8"}
    small = "run.steps=1 optimizer.warmup_steps=0 model.num_layers=1 data.seq_len=256 "
    small += "parallel.nodes=1 parallel.devices_per_node=2 audit.interval=0"
    options = {"train.py": [*UNGUARDED, *(f"--{field}" for field in small.split())]}
    alone, run = follow("Your own pattern in your own model", changes, options)
    first, last = (float(x) for x in re.findall(r"loss ([\d.]+)", alone))
    assert last < first
    assert "recall" in alone and "step 1/1" in run


def test_fine_tune_on_chats(follow, tmp_path):
    of_smollm2 = {"family": "llama", "rope_theta": 1e5, "rms_norm_eps": 1e-5}
    write_checkpoint(tmp_path / "runs/smollm2", max_position_embeddings=8192, **of_smollm2)
    sizes = (
        "vocab_size = 276\nhidden_size = 32\nnum_layers = 1\nnum_heads = 2\nnum_kv_heads = 1\n"
        "head_dim = 8\nintermediate_size = 48"
    )
    base = 'init_from = "runs/smollm2"'
    changes = {"steps = 12": "steps = 2\nlog_interval = 1", base: f"{base}\n{sizes}"}
    options = {"generate.py": ["--max-new-tokens=3"], "train.py": UNGUARDED}
    shown = follow("Fine-tune on your chats", changes, options)
    assert "+ " in shown[1] and "lighthouse" in shown[1]
    assert "step 2/2" in shown[2]
