"""Tier A's tasks on token ids: copying, key-value recall at the end or anywhere, and a passkey.

Token ids of a vocabulary of size V: 0 is the separator, 1 to 4 start a problem of each task, ids up
to V/2 - 1 are filler, V/2 to 3V/4 - 1 keys, and the others values. Random numbers are counter-based
(`Stream`), so a problem is the same on every machine.
"""

from typing import NamedTuple

import numpy as np

from mtraining_jax.utils.random_bits import Stream

TASKS = ("copy", "needle_end", "needle_any", "passkey")
SEPARATOR, FIRST_FILLER = 0, 1 + len(TASKS)
# Maximum number of key-value pairs in needle_end and needle_any (recall is learned late if there
# are few questions), questions for each key of needle_any, tokens of a passkey, and tokens of the
# repeated phrase around it.
PAIRS_END, PAIRS_ANY, QUESTIONS, DIGITS, PHRASE = 32, 256, 4, 5, 16
# The questions of needle_end lie in the last tokens, which are the probe queries of vertical-slash.
LAST = 64
SHORTEST = 256
# Training mixes lengths; otherwise recall is learned late or never.
TRAINING_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


class Problem(NamedTuple):
    """A problem of one task."""

    tokens: np.ndarray  # int32 [L]
    asked: np.ndarray  # bool [L], the answer tokens, which earlier tokens determine


def problem(task: str, length: int, vocab_size: int, seed: int) -> Problem:
    """Makes a problem of L = `length` tokens.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}")
    if length < SHORTEST or length % 2:
        raise ValueError(f"length={length} must be even and at least {SHORTEST}")
    if vocab_size < 256 or vocab_size % 4:
        raise ValueError(f"vocab_size={vocab_size} must be divisible by 4 and at least 256")
    number = TASKS.index(task)
    streams = [Stream(seed, 16 * number + i) for i in range(6)]
    tokens = _filler(streams[0], length, vocab_size)
    tokens[0] = 1 + number
    asked = np.zeros(length, bool)
    make = {"copy": _copy, "needle_end": _end, "needle_any": _any, "passkey": _passkey}[task]
    make(tokens, asked, vocab_size, streams[1:])
    return Problem(tokens.astype(np.int32), asked)


def training_row(number: int, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """A training sequence, int32 [L]: concatenated problems of one task and one length."""
    stream = Stream(seed, 1000 + number)
    fitting = [n for n in TRAINING_LENGTHS if length % n == 0 and n <= length]
    part = stream.choose(fitting)
    task = TASKS[number % len(TASKS)]
    seeds = stream.bits(length // part)
    return np.concatenate([problem(task, part, vocab_size, int(x)).tokens for x in seeds])


def _filler(stream: Stream, count: int, vocab_size: int) -> np.ndarray:
    most = np.full(count, vocab_size // 2 - FIRST_FILLER)
    return FIRST_FILLER + stream.below_each(most)


def _copy(tokens: np.ndarray, asked: np.ndarray, vocab_size: int, streams: list[Stream]) -> None:
    half = len(tokens) // 2
    tokens[half] = SEPARATOR
    tokens[half + 1 :] = tokens[1:half]
    asked[half + 1 :] = True


def _pairs(count: int, vocab_size: int, streams: list[Stream]) -> tuple[np.ndarray, np.ndarray]:
    quarter = vocab_size // 4
    key = 2 * quarter + np.array(streams[0].sample(quarter, count))
    value = 3 * quarter + streams[1].below_each(np.full(count, quarter))
    return key, value


def _write(tokens: np.ndarray, places: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
    tokens[places], tokens[places + 1] = key, value


def _end(tokens: np.ndarray, asked: np.ndarray, vocab_size: int, streams: list[Stream]) -> None:
    count = min(PAIRS_END, len(tokens) // 16)
    key, value = _pairs(count, vocab_size, streams)
    room = (len(tokens) - LAST - 2) // 2
    _write(tokens, 2 + 2 * np.array(streams[2].sample(room, count)), key, value)
    order = streams[3].order(count)[: LAST // 2]
    places = len(tokens) - 2 * len(order) + 2 * np.arange(len(order))
    _write(tokens, places, key[order], value[order])
    asked[places + 1] = True


def _any(tokens: np.ndarray, asked: np.ndarray, vocab_size: int, streams: list[Stream]) -> None:
    """Key-value pairs in the first quarter; each key is asked four times, anywhere after it."""
    quarter = len(tokens) // 4 // 2 * 2
    count = min(PAIRS_ANY, len(tokens) // 32)
    key, value = _pairs(count, vocab_size, streams)
    _write(tokens, 2 + 2 * np.array(streams[2].sample(quarter // 2 - 1, count)), key, value)
    room = (len(tokens) - quarter) // 2
    places = quarter + 2 * np.array(streams[3].sample(room, QUESTIONS * count))
    which = np.arange(QUESTIONS * count) % count
    _write(tokens, places, key[which], value[which])
    asked[places + 1] = True


def _passkey(tokens: np.ndarray, asked: np.ndarray, vocab_size: int, streams: list[Stream]) -> None:
    """A repeated phrase with one key and its five values; the question is at the end."""
    phrase = _filler(streams[0], PHRASE, vocab_size)
    tokens[1:] = np.resize(phrase, len(tokens) - 1)
    key, _ = _pairs(1, vocab_size, streams[1:])
    digits = 3 * vocab_size // 4 + streams[3].below_each(np.full(DIGITS, vocab_size // 4))
    needle = np.concatenate([key, digits])
    end = len(tokens) - len(needle)
    place = 1 + streams[4].below(end - len(needle) - 1)
    tokens[place : place + len(needle)] = needle
    tokens[end:] = needle
    asked[end + 1 :] = True
