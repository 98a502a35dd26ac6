"""Types of fields with limits, of configuration sections and plug-ins alike.

Other limits are written in place: `Annotated[float, Ge(0), Lt(1)]`.
"""

import os.path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BeforeValidator

# Beyond any token count, and far from overflowing 64 bits.
LARGEST_INT = 2**53 - 1
# Longest sequences: rotary embeddings are exact below 2^23 positions (models/rope/rotary.py), and
# selections sum fixed-point masses of at most 2^16 blocks in 32 bits (selection/scores).
MAX_POSITIONS = 2**23
MAX_BLOCKS = 2**16
# Sizes of models. Programs and messages are made of layers, heads and experts one by one.
MAX_LAYERS = 2**12
MAX_HEADS = 2**16  # of a layer, and components of a head; also experts
MAX_WIDTH = 2**24  # of vectors and vocabularies

PositiveInt = Annotated[int, Ge(1), Le(LARGEST_INT)]
NonNegativeInt = Annotated[int, Ge(0), Le(LARGEST_INT)]
Layers = Annotated[int, Ge(1), Le(MAX_LAYERS)]
Heads = Annotated[int, Ge(1), Le(MAX_HEADS)]
Experts = Annotated[int, Ge(0), Le(MAX_HEADS)]
Width = Annotated[int, Ge(1), Le(MAX_WIDTH)]
Window = Annotated[int, Ge(2), Le(MAX_POSITIONS)]  # with one key, softmax is constant
Seed = Annotated[int, Ge(0), Lt(2**32)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
UnitFraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
Decay = Annotated[float, Ge(0), Lt(1)]
Text = Annotated[str, MinLen(1)]
# Shells do not expand ~ in --field=~/folder.
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
# TOML and JSON have lists; tuples keep the configuration hashable.
_AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
TextList = Annotated[tuple[Text, ...], _AS_TUPLE]
FloatList = Annotated[tuple[float, ...], _AS_TUPLE]


def check_at_most(options: Any, name: str, cap: str) -> None:
    """Checks that one field does not exceed another."""
    value, limit = getattr(options, name), getattr(options, cap)
    if value > limit:
        raise ValueError(f"{name}={value} must not exceed {cap}={limit}")
