"""The tokens that end what a trained model generates."""

from collections.abc import Iterator, Sequence

from mtraining_jax.config import Config
from mtraining_jax.config.sections import DataConfig
from mtraining_jax.data.chat.conversation import Conversation
from mtraining_jax.data.chat.template import chat_template
from mtraining_jax.data.source import Source
from mtraining_jax.data.sources.token_parts import ends_of
from mtraining_jax.data.sources.tokens import TokenFiles
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer, make_tokenizer
from mtraining_jax.models.huggingface.config import read_end_tokens
from mtraining_jax.utils.errors import UserError

END_TOKENS = "end_tokens"  # in a checkpoint, next to the position in the data


def end_tokens(config: Config, saved: Sequence[int] = ()) -> list[int]:
    """Returns the ids at which the model stops: those of its start, then those that it is taught.

    `saved` has those of the checkpoint that a run resumes from: `model.init_from` may be gone.

    Raises:
        UserError: a file that names them is invalid.
    """
    start = config.model.start
    found = [*saved, *([] if start is None else read_end_tokens(start))]
    return list(dict.fromkeys([*found, *_taught(config.data, found)]))


def end_of_turn(data: DataConfig) -> tuple[int, str] | None:
    """Returns the token, id and text, that ends a turn of the conversations in `data`, if any."""
    if not any(_is_chat(source) for source in data.source_options.sources):
        return None
    question = Conversation([{"role": "user", "content": "Hi"}], None, "a question")
    try:
        # Only the end of documents needs the right one, and token files may not know it.
        tokenizer = make_tokenizer(data.tokenizer, 0 if data.eos is None else data.eos)
        end = chat_template(tokenizer).end_token(question)
    except UserError:  # token files without their tokenizer, or a template for other conversations
        return None
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return None if end is None else (end, tokenizer.added_tokens[end].content)


def _taught(data: DataConfig, known: Sequence[int]) -> Iterator[int]:
    if (turn := end_of_turn(data)) is not None:
        yield turn[0]
    for source in data.source_options.sources:
        if isinstance(source, TokenFiles):
            ends = (ends_of(folder)[1] for folder in {path.parent for path in source.files()})
            yield from (end for end in ends if end is not None)
        if source.holds_ids and isinstance(data.eos, int):
            yield data.eos
        elif not source.holds_ids and (not _is_chat(source) or not (turn or known)):
            yield make_tokenizer(data.tokenizer, data.eos).eos


def _is_chat(source: Source) -> bool:
    if isinstance(source, TokenFiles):
        return any(ends_of(path.parent)[0] for path in source.files())
    return getattr(source, "messages_field", None) is not None
