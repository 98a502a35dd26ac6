"""Field types shared by configuration sections and plug-ins."""

import os.path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

# Beyond any token count, and far from overflowing 64 bits.
LARGEST_INT = 2**53 - 1

PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
# Shells do not expand ~ in --field=~/folder.
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
# Tuples instead of TOML's lists keep the configuration hashable.
TextList = Annotated[
    tuple[Text, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]
