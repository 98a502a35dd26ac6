"""Token ids of a document of which only some are trained."""

from dataclasses import dataclass

import numpy as np

from mtraining_jax.utils.errors import UserError


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """A document with a label mask; a document without one is trained everywhere.

    Attributes:
        ids: Token ids, integers [n].
        trained: Whether the loss counts each token as a label, bool [n].
    """

    ids: np.ndarray
    trained: np.ndarray

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.shape != self.trained.shape:
            raise UserError(
                f"token ids of shape {list(self.ids.shape)} have a label mask of shape "
                f"{list(self.trained.shape)}; it must have one value per token"
            )
        if self.trained.dtype != bool:
            raise UserError(f"a label mask is {self.trained.dtype}, not bool")
