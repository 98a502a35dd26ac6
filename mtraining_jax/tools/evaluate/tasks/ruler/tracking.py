"""RULER's variable tracking (scripts/data/synthetic/variable_tracking.py)."""

from typing import ClassVar

from mtraining_jax.tools.evaluate.tasks.haystack import NOISE
from mtraining_jax.tools.evaluate.tasks.sized import Draft, SizedTask
from mtraining_jax.tools.evaluate.tasks.words import letters_of
from mtraining_jax.utils.fields import options
from mtraining_jax.utils.random_bits import Stream

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
    "above. Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)
_HOPS = 4
# RULER's worked example is as long as fits into 500 tokens. This many pieces of noise come close,
# and need no tokenizer.
_EXAMPLE_SIZE = 12


@options(kw_only=True)
class VariableTracking(SizedTask):
    """Finds five variables with one value, four of them assigned from another variable."""

    max_new_tokens: ClassVar[int] = 30
    min_size: ClassVar[int] = _HOPS + 1

    def build(self, size: int, length: int, number: int, seed: int) -> Draft:
        example, known = _question(_EXAMPLE_SIZE, 3, self.stream(length, number, seed, 1))
        question, asked = _question(size, 5, self.stream(length, number, seed))
        return Draft(prompt=f"{example} {' '.join(known)}\n\n{question}", references=tuple(asked))


def _question(size: int, letters: int, stream: Stream) -> tuple[str, list[str]]:
    names = [letters_of(i, letters).upper() for i in stream.sample(26**letters, _HOPS + 1)]
    value = 10_000 + stream.below(89_999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {names[i + 1]} = VAR {names[i]} " for i in range(_HOPS)]
    pieces = [NOISE] * size
    for shift, place in enumerate(sorted(stream.sample(size, len(chain)))):
        pieces.insert(place + shift, chain[shift])
    context = "\n".join(pieces)
    return _TEMPLATE.format(context=context, value=value, count=len(names)), names
