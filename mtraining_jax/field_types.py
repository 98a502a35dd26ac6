"""Types of configuration fields that sections and plug-ins share."""

from typing import Annotated

from pydantic import BeforeValidator, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
# TOML has lists; tuples keep the configuration hashable.
TextList = Annotated[
    tuple[Text, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]
