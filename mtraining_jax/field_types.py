"""Types of configuration fields that sections and plug-ins share."""

import os.path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

# Far beyond any count of tokens, and far from where 64 bits end.
LARGEST_INT = 2**53 - 1

PositiveInt = Annotated[int, Field(ge=1, le=LARGEST_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
# Shells leave the ~ of --field=~/folder as it is.
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]
# TOML has lists; tuples keep the configuration hashable.
TextList = Annotated[
    tuple[Text, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]
