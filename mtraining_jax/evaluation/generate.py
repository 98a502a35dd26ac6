"""Text generation in one call."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtraining_jax.evaluation.engine.engine import Engine, Generated
from mtraining_jax.evaluation.engine.options import GenerateOptions
from mtraining_jax.utils.errors import UserError


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
        prompt: text. The tokenizer may prepend a start token; no chat template is applied.
        options: None uses the defaults: greedy decoding of at most 256 tokens.
        on_text: called with each new piece of text as soon as it is final.
        **how: arguments of `Engine.load`, if `model` is a folder.

    Raises:
        UserError: if the model has no tokenizer; see also `Engine.load` and `Engine.generate`.
    """
    if not isinstance(model, Engine):
        model = Engine.load(model, **how)
    elif how:
        raise UserError(f"{', '.join(how)}: not allowed with a loaded engine; give its folder")
    prompt_ids = model.loaded.needed_tokenizer().encode_prompt(prompt)
    return model.generate(prompt_ids, options, on_text)
