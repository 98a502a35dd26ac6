"""Text of tokens that come one by one, for each kind of decoder."""

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from mtraining_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from mtraining_jax.tools.evaluate.engine.text import GrowingText, possible_start
from tests.pallas_kernels.helpers.properties import repeatable

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁a", "b", "cd", "\n", "世", "é", "�"]
OF_LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
# Characters split into bytes, tokens that end in a character, and several characters.
PARTS = ["ä¸", "ĸ", "ä¸ĸ", "ĸä¸", "ab", "Ġa", "ðŁ", "ĺĢ"]
KINDS = {
    "byte-level": (ALPHABET + PARTS, decoders.ByteLevel()),
    "llama": (WORDS + FALLBACK, decoders.Sequence(OF_LLAMA)),
    "gemma": (WORDS + FALLBACK, decoders.Sequence(OF_LLAMA[:3])),
    "metaspace": (WORDS, decoders.Metaspace()),
    "wordpiece": (["a", "##b", "##c", ".", ",", "n't", "'s", "é"], decoders.WordPiece()),
    "suffix": (["a</w>", "b", "cd</w>", "é</w>", "."], decoders.BPEDecoder()),
    "none": (["a", "b", " ", "é"], None),
}
SPECIAL, SHOWN = "</s>", "<tool>"


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """The ids of the vocabulary, a special token, another added one, and one without a token."""
    if kind == "bytes":
        return ByteTokenizer()
    words, decoder = KINDS[kind]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(SPECIAL, special=True)])
    backend.add_tokens([AddedToken(SHOWN, special=False)])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        backend.save(str(path))
        return HuggingFaceTokenizer(path)


def ids_of(kind: str, *tokens: str) -> list[int]:
    found = [tokenizer(kind)._backend.token_to_id(token) for token in tokens]
    assert None not in found
    return found


def grown(ids, of: Tokenizer, stop=()) -> tuple[GrowingText, list[str], int]:
    """The text, the reported pieces, and how many tokens were read."""
    reported, count = [], 0
    text = GrowingText(of, stop, reported.append)
    while count < len(ids) and not text.stopped:
        text.add(ids[count])
        count += 1
    return text, reported, count


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
@repeatable
@given(data=st.data())
def test_pieces_are_the_text_of_all_tokens_at_once(kind, data):
    of = tokenizer(kind)
    token = st.integers(0, of.vocab_size)  # the last one is not in the vocabulary
    if kind in ("llama", "gemma"):  # mostly bytes of valid characters
        token = token | st.sampled_from([len(WORDS) + x for x in "世 \n".encode()])
    ids = data.draw(st.lists(token, max_size=12))
    text, reported, _ = grown(ids, of)
    before_end = "".join(reported)
    assert text.end() == of.decode(np.array(ids, int)) == "".join(reported)
    # At most one character is held back, or a run of single bytes.
    if of.byte_level:
        assert len(text.end()) - len(before_end) <= 1


@repeatable
@given(st.lists(st.sampled_from("abc"), max_size=9), st.lists(st.sampled_from(["ab", "bca", "c"])))
@example(["a", "b", "a", "b", "c"], ["babc"])
def test_a_stop_text_ends_at_its_last_token(characters, stop):
    whole = "".join(characters)
    text, reported, count = grown(list(whole.encode()), ByteTokenizer(), stop)
    ends = [whole.find(x) + len(x) for x in stop if x in whole]
    assert text.stopped == bool(ends)
    read = whole[: min(ends, default=len(whole))]
    starts = [start for x in stop if (start := read.find(x)) >= 0]
    assert count == len(read) and text.end() == read[: min(starts, default=None)]
    assert "".join(reported) == text.end()


@pytest.mark.parametrize(
    ("kind", "tokens", "stop", "count", "expected"),
    [
        # Where transformers 5.24.0 stops by `stop_strings`.
        ("byte-level", ["a", "b", SPECIAL, "c"], SPECIAL, 3, "ab"),
        ("byte-level", ["a", "b", SPECIAL, "Ċ", "c"], "</s>\n", 4, "ab"),
        ("byte-level", ["a", "b", SPECIAL, "c"], "b</s>", 3, "a"),
        ("byte-level", ["a", SPECIAL, "b"], "/s", 2, "a"),
        ("byte-level", ["a", SPECIAL, "b", "c"], "bc", 4, "a"),
        ("byte-level", ["a", "ä¸", "ĸ", "b"], "世", 3, "a"),
        ("byte-level", ["a", "ĸä¸", "ĸ", "b"], "世", 3, "a�"),
        ("byte-level", ["ab", "Ġa", "b"], "b ", 2, "a"),
        ("byte-level", ["a", SHOWN, "b"], SHOWN, 2, "a"),
        ("llama", ["▁a", "b", SPECIAL, "cd"], SPECIAL, 3, "ab"),
        ("llama", ["▁a", "<0x0A>", "<0x0A>", "b"], "\n\n", 3, "a"),
        ("llama", ["▁a", "cd", "▁a", "b"], "d a", 3, "ac"),
        # A token that completes a stop text and begins a character.
        ("byte-level", ["a", "ä¸", "ĸä¸", "a"], "世", 3, "a"),
        # An incomplete character before the stop text.
        ("byte-level", ["a", "ä¸", SPECIAL], SPECIAL, 3, "a�"),
        ("byte-level", ["a", "ä¸", SPECIAL, "b"], "a</s>", None, "a�b"),
        ("llama", ["▁a", "<0x0A>", "<0xE4>", SPECIAL], SPECIAL, 4, "a��"),
        ("llama", ["▁a", "<0x0A>", "<0xE4>", "b"], "b", 4, "a��"),
        ("wordpiece", ["a", "##b", SPECIAL, "a"], "b </s>", 3, "a"),
    ],
)
def test_stop_texts_are_found_across_tokens_and_in_special_ones(
    kind, tokens, stop, count, expected
):
    text, reported, read = grown(ids_of(kind, *tokens), tokenizer(kind), [stop])
    assert text.stopped == (count is not None) and read == (count or len(tokens))
    assert text.end() == expected == "".join(reported)


@pytest.mark.parametrize("kind", ["bytes", *KINDS])
def test_the_number_of_decoded_ids_is_proportional_to_the_tokens(kind, monkeypatch):
    of, decoded = tokenizer(kind), 0
    decode = of.decode

    def counting(ids, special=False):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, special)

    monkeypatch.setattr(of, "decode", counting)
    newline = len(WORDS) + 10 if kind in ("llama", "gemma") else 1
    for ids in (range(of.vocab_size), [newline] * 400, [of.vocab_size - 2] * 400):
        decoded = 0
        text = GrowingText(of, ("not there",), lambda piece: None)
        for token in ids:
            text.add(token)
        text.end()
        assert decoded <= 9 * len(ids) + 2


def test_text_is_reported_when_it_is_final():
    reported = []
    text = GrowingText(ByteTokenizer(), ("END",), reported.append)
    for token in "é, E so EN".encode():
        text.add(token)
    # Half of é is not a character, and EN may become END.
    assert reported[0] == "é" and "".join(reported) == "é, E so "
    text.add(ord("D"))
    assert text.stopped and text.end() == "é, E so " == "".join(reported)
    # A run of bytes is final when it ends, and holds back nothing before it.
    reported = []
    text = GrowingText(tokenizer("llama"), ("bX",), reported.append)
    for token, expected in (("b", ""), ("<0x41>", "b"), ("▁a", "bA a"), ("b", "bA a")):
        text.add(*ids_of("llama", token))
        assert "".join(reported) == expected
    assert possible_start("abc", ("bcd", "x")) == 1
    assert possible_start("abc", ()) == 3


def test_without_a_stop_text_all_is_reported_at_the_end():
    reported = []
    text = GrowingText(ByteTokenizer(), ("END",), reported.append)
    for token in b"an EN":
        text.add(token)
    assert "".join(reported) == "an "
    assert text.end() == "an EN" == "".join(reported)
    assert GrowingText(None, ()).end() == ""
