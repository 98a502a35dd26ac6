"""What selects the kind of a plug-in: `sparsity.kind`, `data.source`, `model.rope_scaling.type`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from mtraining_jax.data.sources import SOURCES
from mtraining_jax.models.rope import ROPE_KINDS
from mtraining_jax.patterns.registry import PATTERNS
from mtraining_jax.utils.fields import Field, joined, toml_value
from mtraining_jax.utils.plugins import Registry


@dataclasses.dataclass(frozen=True, eq=False)
class OptionsOf:
    """Marks a field that holds the options of one of several classes.

    In files and on the command line they are fields of the table itself, next to the selector.
    """

    selector: str  # name of the field that selects the class
    classes: Registry | Mapping[str, Any]  # by name
    default: str  # name of the class that is selected by default
    doc: str  # help text of the selector

    @functools.cached_property
    def field(self) -> Field:
        """The selector."""
        classes = self.classes
        names = joined([toml_value(name) for name in classes])
        words = classes.words if isinstance(classes, Registry) else names
        annotation = Annotated[str, AfterValidator(self._known)]
        return Field(self.selector, annotation, self.default, self.doc, words)

    def _known(self, name: str) -> str:
        if self.classes.get(name) is None:
            raise ValueError(name)
        return name

    def default_options(self) -> Any:
        """The options of the default class, with their defaults."""
        cls: Any = self.classes.get(self.default)
        return cls()


PATTERN_KIND = OptionsOf(
    "kind",
    PATTERNS,
    "sampled_rows",
    "Sparse attention pattern; docs/patterns.md describes all of them. sampled_rows and xattention "
    "select key blocks for each query block in every forward pass. vertical_slash selects "
    "verticals and slashes for each head in every forward pass; fixed does the same with budgets "
    "from a file. dense computes all pairs. replay is for speed measurements with random weights, "
    "which attend almost uniformly: every head computes random block diagonals and columns, or "
    "random lists, of a given density, and nothing is selected. Pass your own pattern as "
    "package.module:Class; its fields then belong to this section.",
)
SOURCE_KIND = OptionsOf(
    "source",
    SOURCES,
    "python_stdlib",
    "python_stdlib: Python's standard library; tokens: token ids in .npy or .bin files. synthetic "
    "is for speed measurements: random token ids over the vocabulary, with word-like frequencies, "
    "in documents of very different lengths that repeat passages. Pass your own source as "
    "package.module:Class; its fields then belong to this section.",
)
ROPE_KIND = OptionsOf(
    "type", ROPE_KINDS, "yarn", "Scaling method; yarn is https://arxiv.org/abs/2309.00071."
)
