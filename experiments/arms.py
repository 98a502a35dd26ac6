"""The arms of each tier, their configuration files, and the lines that runs leave."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mtraining_jax.config import Config
from mtraining_jax.config.load import load_config
from mtraining_jax.errors import UserError

CONFIGS = Path(__file__).resolve().parent / "configs"
# The most telling ones first: a lease may end before the last.
ARMS = ("dense", "sampled_rows", "vertical_slash", "window", "xattention", "paper")
# Arms with some dense steps, and the pattern of their other steps, with which they are used too.
MIXED = {
    "sampled_rows_dense_last": "sampled_rows", "sampled_rows_dense_every": "sampled_rows",
    "sampled_rows_random_last": "sampled_rows_random",
}  # fmt: skip
# Arms that keep some blocks at random.
RANDOM = ("sampled_rows_random",)
# All that are compared with the dense arm.
SPARSE = (*ARMS[1:], *MIXED, *RANDOM)
TIERS = {
    "a": ARMS, "b": ARMS, "c": (*ARMS, *MIXED, *RANDOM),
    "c64k": (*ARMS[:2], "sampled_rows_random_last", *RANDOM),
}  # fmt: skip
# What models are used with beside dense attention and their own pattern: other arms, or patterns
# that no arm is trained with. By tier and arm.
BESIDE = {
    ("a", "sampled_rows"): ("sampled_rows_end", "sampled_rows_64", "sampled_rows_95"),
    ("c", "sampled_rows_random"): ("sampled_rows",),
    ("c64k", "sampled_rows"): ("sampled_rows_end", "sampled_rows_random"),
    ("c64k", "sampled_rows_random"): ("sampled_rows",),
}
# Needles in text take long: the dense arm is asked for them with these patterns alone.
NEEDLES_OF_DENSE = ("dense", "sampled_rows", "vertical_slash")

Line = dict[str, Any]
Overrides = list[tuple[str, str]]


def config_path(tier: str, arm: str) -> Path:
    """The configuration file of an arm, or of a pattern that models of the tier are used with.

    Raises:
        UserError: if the tier has no such arm.
    """
    used = {name for (of, _), names in BESIDE.items() if of == tier for name in names}
    if arm not in {*TIERS[tier], *used}:
        raise UserError(f'arm "{arm}" is none of tier {tier}: {", ".join(TIERS[tier])}')
    return CONFIGS / f"{tier}_{arm}.toml"


def arm_config(tier: str, arm: str, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """The checked configuration of an arm; errors as of `load_config`."""
    return load_config(str(config_path(tier, arm)), list(overrides))


def own_pattern(arm: str) -> str:
    """What an arm is used with if it is used as trained: the pattern of its sparse steps."""
    return MIXED.get(arm, arm)


def inferred_with(tier: str, trained: str, among: Iterable[str] | None = None) -> list[str]:
    """The patterns that a trained model is used with: dense and its own, the dense arm with all.

    Some are used with others too (`BESIDE`).

    Args:
        tier, trained: which model.
        among: the dense arm is used with the patterns of these alone; default all of the tier.
    """
    if trained != "dense":
        return ["dense", own_pattern(trained), *BESIDE.get((tier, trained), ())]
    wanted = {own_pattern(arm) for arm in (TIERS[tier] if among is None else among)} | {"dense"}
    return [arm for arm in TIERS[tier] if arm in wanted]


def run_name(tier: str, arm: str, seed: int) -> str:
    """Name of a run, and of its folder."""
    return f"{tier}_{arm}_s{seed}"


def read_lines(path: Path) -> list[Line]:
    """The lines of a JSONL file; none if it does not exist. A line cut off at the end is dropped.

    Raises:
        UserError: if another line is not JSON.
    """
    if not path.is_file():
        return []
    found, texts = [], path.read_text().split("\n")
    for number, text in enumerate(texts, 1):
        if not text:
            continue
        try:
            found.append(json.loads(text))
        except ValueError:
            if number < len(texts):
                raise UserError(f"{path}, line {number} is not JSON") from None
    return found


def append_lines(path: Path, lines: Iterable[Line]) -> None:
    """Adds lines to a JSONL file; what was cut off at its end is taken away before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        for line in lines:
            file.write((json.dumps(line) + "\n").encode())


def split_overrides(texts: Iterable[str]) -> Overrides:
    """Fields such as "sparsity.tau=0.9" as pairs.

    Raises:
        UserError: one without a value.
    """
    pairs = [text.removeprefix("--").partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals:
            raise UserError(f"{name} needs a value, as {name}=VALUE")
    return [(name, value) for name, _, value in pairs]
