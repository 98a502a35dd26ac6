r"""Writes chats about long public texts, with answers that can be checked.

    python -m experiments.chats
    python train.py --config experiments/configs/chats.toml
    python generate.py --model runs/quality/chats --chat \
        --prompts runs/quality/data/chats/needles.jsonl > answers.jsonl
    python -m experiments.chats --score answers.jsonl

Writes three files to runs/quality/data/chats. A line of train.jsonl and heldout.jsonl has
`messages`: a part of a play by Shakespeare with two secret numbers hidden in it, and questions
about secret numbers and lines of the text. A line of needles.jsonl has `prompt`,
such a text with one question, and `answer`, the number. Validation plays are in no training chat.
The same options write the same files.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import make_parser
from benchmarks.quality import texts
from experiments.data import FOLDER, plays
from mtraining_jax.data.tokenizer import Tokenizer, make_tokenizer
from mtraining_jax.utils.errors import UserError
from mtraining_jax.utils.random_bits import Stream

TRAINED, HELD_OUT, NEEDLES = 0, 1, 2  # seeds
ROOM = 512  # tokens for the template, questions and answers
DEPTHS = 5  # depths of needles, from the beginning to the end of the text
QUESTIONS = 3
NAMES = (
    "Ada", "Boris", "Chloe", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kofi",
    "Lucia", "Mateo", "Nadia", "Omar", "Petra", "Quentin", "Rosa", "Stefan", "Tomoko", "Ulrich",
    "Vera", "Wanda", "Yusuf",
)  # fmt: skip
Message = dict[str, str]


class Play:
    """Lines of a text that are not empty, and the tokens up to the end of each, int64 [n]."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self.lines = [line.strip() for line in text.splitlines() if line.strip()]
        self._ends = np.cumsum(
            [len(tokenizer.encode(f"{line}\n", bos=False)) for line in self.lines]
        )

    def part(self, tokens: int, random: Stream) -> list[str]:
        """Consecutive lines from a random one, with about this many tokens or all."""
        size = int(self._ends[-1])
        first = int(np.searchsorted(self._ends, random.below(max(size - tokens, 1))))
        last = int(np.searchsorted(self._ends, self._ends[first] + tokens))
        return self.lines[first:last]


def secret(name: str, number: int) -> str:
    """The needle, which is also the answer to the question about it."""
    return f"The secret number of {name} is {number}."


def about(lines: list[str], question: str) -> Message:
    """The first message: a text and a question."""
    text = "\n".join(lines)
    return {"role": "user", "content": f"Here is a text.\n\n{text}\n\n{question}"}


def questions(lines: list[str], random: Stream) -> Iterator[tuple[str, str]]:
    """Questions about a text and their answers; hides secret numbers in the lines."""
    *hidden, absent = (NAMES[i] for i in random.sample(len(NAMES), 3))
    pairs = [i for i, line in enumerate(lines[:-1]) if len(line) > 30 and lines.count(line) == 1]
    chosen = pairs[random.below(len(pairs))]
    following = lines[chosen : chosen + 2]
    ask = "What is the secret number of {}?"
    found = [
        (f'Which line follows "{following[0]}"?', following[1]),
        (ask.format(absent), f"The text does not say what the secret number of {absent} is."),
    ]
    for name in hidden:
        place, answer = random.below(len(lines) + 1), secret(name, 10000 + random.below(90000))
        # Not between the lines of the other question.
        lines.insert(place + (lines[place - 1 : place + 1] == following), answer)
        found.append((ask.format(name), answer))
    for i in random.sample(len(found), QUESTIONS):
        yield found[i]


def chat(play: Play, tokens: int, random: Stream) -> dict[str, list[Message]]:
    """A conversation about a part of a play."""
    lines = play.part(tokens, random)
    asked = list(questions(lines, random))
    messages = [about(lines, asked[0][0])]
    for number, (question, answer) in enumerate(asked):
        if number:
            messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def needle(play: Play, tokens: int, number: int, random: Stream) -> dict[str, Any]:
    """A prompt with one secret number, and its answer."""
    lines, depth = play.part(tokens, random), number % DEPTHS / (DEPTHS - 1)
    name, value = NAMES[random.below(len(NAMES))], 10000 + random.below(90000)
    lines.insert(round(depth * len(lines)), secret(name, value))
    prompt = [about(lines, f"What is the secret number of {name}?")]
    return {"prompt": prompt, "answer": str(value), "depth": depth, "tokens": tokens}


def length(seq_len: int, random: Stream) -> int:
    """Tokens of a text: as many texts are up to half as long as the longest as are longer."""
    longest = seq_len - ROOM
    return (longest >> random.below(3)) - random.below(longest // 8)


def score(path: Path) -> dict[float, tuple[int, int]]:
    """Correct answers and all, by depth, in the output of generate.py for needles.jsonl."""
    found: defaultdict[float, list[bool]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found[record["depth"]].append(record["answer"] in record["text"])
    return {depth: (sum(right), len(right)) for depth, right in sorted(found.items())}


def main(argv: list[str] | None = None) -> None:
    """Writes the files, or prints scores."""
    parser = make_parser(__doc__)
    parser.add_argument("--seq-len", type=int, default=8192, help="most tokens of a chat")
    parser.add_argument("--count", type=int, default=600, help="number of training chats")
    parser.add_argument("--held-out", type=int, default=40, help="validation chats and needles")
    parser.add_argument("--tokenizer", default=str(FOLDER / "model/tokenizer.json"))
    parser.add_argument("--packages", type=Path, default=FOLDER / "packages", help="cache")
    parser.add_argument("--out", type=Path, default=FOLDER / "data/chats", help="folder to write")
    parser.add_argument("--score", type=Path, help="output of generate.py for needles.jsonl")
    args = parser.parse_args(argv)
    if args.score:
        for depth, (right, count) in score(args.score).items():
            print(f"depth {depth:.2f}: {right} of {count} correct")
        return
    try:
        tokenizer = make_tokenizer(args.tokenizer)
        held_out = [texts.read(x, args.packages) for x in texts.TEXTS[1:3]]
        of_seed = {
            seed: [Play(text, tokenizer) for text in found]
            for seed, found in ((TRAINED, plays(args.packages).values()), (HELD_OUT, held_out))
        }
    except UserError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    for name, seed, count in (
        ("train", TRAINED, args.count),
        ("heldout", HELD_OUT, args.held_out),
        ("needles", NEEDLES, args.held_out),
    ):
        found = of_seed[min(seed, HELD_OUT)]
        with (args.out / f"{name}.jsonl").open("w") as file:
            for number in range(count):
                random = Stream(seed, number)
                play = found[random.below(len(found))]
                if seed == NEEDLES:
                    line = needle(play, args.seq_len - ROOM, number, random)
                else:
                    line = chat(play, length(args.seq_len, random), random)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(f"{file.name}: {count} lines")


if __name__ == "__main__":
    main()
