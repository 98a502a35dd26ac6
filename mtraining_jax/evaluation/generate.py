"""Text after a prompt, in one call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtraining_jax.errors import UserError
from mtraining_jax.evaluation.decode.sampling import GenerateOptions
from mtraining_jax.evaluation.engine import Engine, Generated


def generate(
    model: Engine | str | Path,
    prompt: str,
    options: GenerateOptions | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    **how: Any,
) -> Generated:
    """Continues a text.

    Args:
        model: an `Engine`, or the folder of a run or of a Hugging Face checkpoint. An engine keeps
            its parameters and programs for the next call.
        prompt: text. The tokenizer may put a token for the start before it; no template of a chat
            is added.
        options: how many tokens, and how they are drawn; None is 256 at most, the most likely.
        on_text: called with each new piece of text as soon as it is final.
        **how: a folder is loaded; as of `Engine.load`.

    Raises:
        UserError: if there is no tokenizer, and as `Engine.load` and `Engine.generate`.
    """
    if not isinstance(model, Engine):
        model = Engine.load(model, **how)
    elif how:
        raise UserError(f"{', '.join(how)}: an engine is loaded already; give its folder instead")
    if model.tokenizer is None:
        raise UserError(
            f'{model.loaded.source} has no tokenizer; name one, as tokenizer="PATH/tokenizer.json"'
            ' or tokenizer="bytes"'
        )
    return model.generate(model.tokenizer.encode_prompt(prompt), options, on_text)
