"""The arms of each tier: runs that differ only in their sparsity settings."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from mtraining_jax.config import Config
from mtraining_jax.utils.errors import UserError

CONFIGS = Path(__file__).resolve().parent / "configs"
# Most informative first, in case the time limit ends a call before the last one.
ARMS = ("dense", "sampled_rows", "vertical_slash", "window", "xattention", "paper")
# Arms with some dense steps, and the pattern of their sparse steps.
MIXED = {
    "sampled_rows_dense_last": "sampled_rows", "sampled_rows_dense_every": "sampled_rows",
    "sampled_rows_random_last": "sampled_rows_random",
}  # fmt: skip
# Arms that also keep some random blocks.
RANDOM = ("sampled_rows_random",)
# All arms that are compared with the dense arm.
SPARSE = (*ARMS[1:], *MIXED, *RANDOM)
TIERS = {
    "a": ARMS, "b": ARMS, "c": (*ARMS, *MIXED, *RANDOM),
    "c64k": (*ARMS[:2], "sampled_rows_random_last", *RANDOM),
    "q": (*ARMS[:2], "sampled_rows_random_last", *RANDOM, "paper"), "g": ARMS[:2],
}  # fmt: skip
# By tier and arm: further patterns to evaluate the model with, in addition to dense attention and
# the pattern of its training. Some of these are patterns that no arm is trained with.
EXTRA_PATTERNS = {
    ("a", "sampled_rows"): ("sampled_rows_end", "sampled_rows_64", "sampled_rows_95"),
    ("c", "sampled_rows_random"): ("sampled_rows",),
    ("c64k", "sampled_rows"): ("sampled_rows_end", "sampled_rows_random"),
    ("c64k", "sampled_rows_random"): ("sampled_rows",),
    ("q", "sampled_rows"): ("sampled_rows_end",),
}
# Needle tasks are slow, so the dense arm runs them with these patterns only.
NEEDLES_OF_DENSE = ("dense", "sampled_rows", "vertical_slash")

Overrides = dict[str, str]


def config_path(tier: str, arm: str) -> Path:
    """The config file of an arm, or of a pattern that models of the tier are evaluated with.

    Raises:
        UserError: if the tier has no such arm.
    """
    extra = {name for (of, _), names in EXTRA_PATTERNS.items() if of == tier for name in names}
    if arm not in {*TIERS[tier], *extra}:
        raise UserError(f'tier {tier} has no arm "{arm}"; choose one of {", ".join(TIERS[tier])}')
    return CONFIGS / f"{tier}_{arm}.toml"


def arm_config(tier: str, arm: str, overrides: Mapping[str, str] | None = None) -> Config:
    """The validated configuration of an arm; raises what `Config.load` raises."""
    return Config.load(str(config_path(tier, arm)), overrides or {})


def own_pattern(arm: str) -> str:
    """The pattern of an arm's sparse steps, with which it is evaluated "as trained"."""
    return MIXED.get(arm, arm)


def inferred_with(tier: str, trained: str, among: Iterable[str] | None = None) -> list[str]:
    """The patterns that a trained model is evaluated with.

    These are dense attention, the pattern of its training and `EXTRA_PATTERNS`. The dense arm is
    evaluated with the patterns of all arms, or of those in `among`.
    """
    if trained != "dense":
        return ["dense", own_pattern(trained), *EXTRA_PATTERNS.get((tier, trained), ())]
    wanted = {own_pattern(arm) for arm in (TIERS[tier] if among is None else among)} | {"dense"}
    return [arm for arm in TIERS[tier] if arm in wanted]


def run_name(tier: str, arm: str, seed: int) -> str:
    """Name of a run and of its folder."""
    return f"{tier}_{arm}_s{seed}"


def split_overrides(texts: Iterable[str]) -> Overrides:
    """Splits texts such as "sparsity.tau=0.9" into values by field.

    Raises:
        UserError: if a text has no value.
    """
    pairs = [text.removeprefix("--").partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals:
            raise UserError(f"{name} needs a value, as in {name}=VALUE")
    return {name: value for name, _, value in pairs}
