"""Checks in PTX that asynchronous units see what threads wrote, and what they waited for.

Threads write shared memory through one proxy; bulk copies and wgmma access it through another.
In between, a thread that wrote needs `fence.proxy.async`, and then a barrier with whoever starts
the copy or product. No tool of compute-sanitizer (2026.4) reports a missing fence
(`store-unfenced` of `tests/gpu/barriers.cu`), and results may be correct without it.

The check follows all paths of a thread through a kernel: between a store and the next fence there
may be no barrier, bulk copy or product, and between that fence and the next barrier of its
warpgroup or thread block no copy or product. Stores to memory that no asynchronous unit accesses
are exempt: to a separate variable, or below all addresses passed to such units. For this, numbers
of unknown size are assumed to be nonnegative indices.

A wait on global memory, which ends with `fence.acquire`, orders only accesses of the proxy of
threads: a `fence.proxy.async.global` has to follow before the next bulk copy.

Not checked: memory that threads have read and a copy overwrites, which only barriers order, and
stores of threads to global memory.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_ENTRY = re.compile(r"^\.visible \.entry (\w+)\(", re.MULTILINE)
_SHARED = re.compile(r"\.shared\s+(?:\.align \d+\s+)?\.\w+\s+(\w+)")
_LABEL = re.compile(r"^\s*(\$\w+):", re.MULTILINE)
_STATEMENT = re.compile(r"(?:\{\s*)?(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_NO_INSTRUCTION = re.compile(r"\{?\s*(\.(reg|shared|pragma)\b[^\n]*)?|\w+:")
_REGISTER = re.compile(r"%[a-z]+\d+")
_STORE = re.compile(r"(st|red|atom)\.(?!async)(\S*\.)?shared|stmatrix|cp\.async\.(ca|cg)\.shared")
_GENERIC_STORE = re.compile(r"(st|red|atom)\.(?!\S*(global|shared|local|param|async))")
_COPY_OUT = re.compile(r"cp\.(reduce\.)?async\.bulk\.\S*global\.shared")
_COPY_IN = re.compile(r"cp\.async\.bulk\.\S*shared\S*\.global")
_PRODUCT = re.compile(r"wgmma\.mma_async")
_FENCE = re.compile(r"fence\.proxy\.async(?!\.global)")
_ACQUIRE = re.compile(r"fence\.acquire|(ld|atom)\.acquire\S*\.global")
_FENCE_OF_ALL = re.compile(r"fence\.proxy\.async(?!\.shared)")
_MEETING = re.compile(r"(bar|barrier)\.(?!warp)")
_RELEASE = re.compile(r"(bar|barrier)\.|mbarrier\.arrive")
# For other GPUs, or not used in our kernels: the checker does not support them.
_UNKNOWN = re.compile(r"call|brx|(st|red)\.async|st\.bulk|tcgen|multimem")


@dataclasses.dataclass(frozen=True)
class Fences:
    """Counts and errors of a kernel.

    Attributes:
        kernel: its name, without the suffix added by Pallas.
        stores: instructions with which threads store to shared memory.
        fences: fences between the proxies.
        copies: bulk copies out of shared memory, including those that add.
        products: wgmma instructions.
        apart: stores without a fence, to memory that no asynchronous unit accesses.
        unfenced: stores that reach a barrier, copy or product without a fence.
        unmet: stores that are fenced, but reach a copy or product without a barrier.
        unordered: waits on global memory that reach a bulk copy without a fence.
    """

    kernel: str
    stores: int
    fences: int
    copies: int
    products: int
    apart: int
    unfenced: tuple[str, ...]
    unmet: tuple[str, ...]
    unordered: tuple[str, ...]

    @property
    def wrong(self) -> tuple[str, ...]:
        return self.unfenced + self.unmet + self.unordered


def read(ptx: str) -> list[Fences]:
    """Analyzes every kernel in some PTX, in order."""
    starts = [match.start() for match in _ENTRY.finditer(ptx)]
    return [_Kernel(ptx[a:b]).fences() for a, b in zip(starts, [*starts[1:], None], strict=True)]


class _Instruction(NamedTuple):
    guard: str | None  # the predicate, without @
    name: str
    operands: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.operands}"[:80]


class _Range(NamedTuple):
    """Numbers from low to high, relative to a shared memory variable if there is one."""

    variable: str | None
    low: float
    high: float


_ANY = _Range(None, 0, math.inf)


class _Kernel:
    def __init__(self, text: str):
        self.name = _ENTRY.match(text)[1].removesuffix("_mosaic_gpu_kernel")
        self.variables = set(_SHARED.findall(text))
        self.code: list[_Instruction] = []
        self.labels: dict[str, int] = {}
        for statement in _statements(text):
            if label := _LABEL.match(statement):
                self.labels[label[1]] = len(self.code)
            elif match := _STATEMENT.fullmatch(statement):
                self.code.append(_Instruction(*match.groups()))
            elif not _NO_INSTRUCTION.fullmatch(statement):
                raise NotImplementedError(f"{self.name}: {statement[:80]}")
        if strange := [x.text for x in self.code if _UNKNOWN.match(x.name)]:
            raise NotImplementedError(f"{self.name}: {strange[0]}")
        self.known: dict[str, _Range] = {}
        self.definitions: dict[str, list[_Instruction]] = {}
        for instruction in self.code:
            first = re.match(r"\{[^}]*\}|[^,]*", instruction.operands)[0]
            if "[" not in first:
                for register in _REGISTER.findall(first):
                    self.definitions.setdefault(register, []).append(instruction)

    def fences(self) -> Fences:
        stores = [i for i, x in enumerate(self.code) if self._is_store(x)]
        unfenced, unmet = self._along_paths(stores)
        unordered = self._unordered()
        touched = [place for x in self.code for place in self._touched(x)]
        apart = {i for i in unfenced if self._is_apart(i, touched)}
        count = {kind: sum(bool(kind.match(x.name)) for x in self.code) for kind in _KINDS}
        return Fences(
            self.name,
            len(stores),
            *count.values(),
            len(apart),
            *(
                tuple(self.code[i].text for i in sorted(x))
                for x in (unfenced - apart, unmet, unordered)
            ),
        )

    def _unordered(self) -> set[int]:
        """Returns waits from which a path leads to a bulk copy without a fence of both proxies."""
        return {i for i, x in enumerate(self.code) if _ACQUIRE.match(x.name) and self._copies(i)}

    def _copies(self, wait: int) -> bool:
        todo, seen = list(self._next(wait)), set()
        while todo:
            i = todo.pop()
            x = self.code[i]
            if i in seen or (x.guard is None and _FENCE_OF_ALL.match(x.name)):
                continue
            if _COPY_IN.match(x.name) or _COPY_OUT.match(x.name):
                return True
            seen.add(i)
            todo += self._next(i)
        return False

    def _along_paths(self, stores: list[int]) -> tuple[set[int], set[int]]:
        """Returns stores that are passed on without a fence, and without a barrier after the fence.

        Sets of stores are bits of an integer.
        """
        bits = {i: 1 << n for n, i in enumerate(stores)}
        before = {0: (0, 0)}  # per instruction: stores that need a fence, or a barrier
        unfenced = unmet = 0
        todo = [0]
        while todo:
            i = todo.pop()
            x, (open_, fenced) = self.code[i], before[i]
            if _RELEASE.match(x.name) or _is_asynchronous(x):
                unfenced |= open_
            if _is_asynchronous(x):
                unmet |= fenced
            if i in bits:
                open_, fenced = open_ | bits[i], fenced & ~bits[i]
            if x.guard is None and _FENCE.match(x.name):
                open_, fenced = 0, fenced | open_
            if x.guard is None and _MEETING.match(x.name):
                fenced = 0
            for after in self._next(i):
                known = before.get(after)
                joined = (open_, fenced)
                if known is not None:
                    joined = known[0] | open_, known[1] | fenced
                if joined != known:
                    before[after] = joined
                    todo.append(after)
        return (*({i for i, bit in bits.items() if bit & found} for found in (unfenced, unmet)),)

    def _next(self, i: int) -> Iterator[int]:
        x = self.code[i]
        ends = x.guard is None and x.name.split(".")[0] in ("ret", "exit", "trap")
        # Labels of inline assembly belong to wait loops: continue after their end.
        jumps = x.name.startswith("bra") and x.operands.startswith("$")
        if jumps:
            yield self.labels[x.operands]
        if not ends and not (jumps and x.guard is None) and i + 1 < len(self.code):
            yield i + 1

    def _is_store(self, x: _Instruction) -> bool:
        if _STORE.match(x.name):
            return True
        if not _GENERIC_STORE.match(x.name):
            return False
        return any(place.variable for place in self._places(_addresses(x)[0]))

    def _touched(self, x: _Instruction) -> Iterator[_Range]:
        """Yields the shared memory ranges accessed by an instruction's asynchronous unit."""
        if _COPY_IN.match(x.name):
            yield from self._places(_addresses(x)[0])
        elif _COPY_OUT.match(x.name):
            yield from self._places(_addresses(x)[1])
        elif _PRODUCT.match(x.name):
            descriptors = re.findall(r"%rd\d+", x.operands.partition("}")[2])
            for descriptor in descriptors:
                yield from self._places(descriptor)

    def _is_apart(self, store: int, touched: list[_Range]) -> bool:
        if not touched:
            return True
        place = self._value(_addresses(self.code[store])[0])
        if place.variable is None or any(other.variable is None for other in touched):
            return False
        others = [other.low for other in touched if other.variable == place.variable]
        return place.high < min(others, default=math.inf)

    def _places(self, operand: str) -> list[_Range]:
        """Returns the shared memory addresses an operand is derived from; unknown if none."""
        found, todo, seen = [], [operand], set()
        while todo:
            name = todo.pop()
            value = self._value(name)
            if value.variable is not None:
                found.append(value)
                continue
            for register in set(_REGISTER.findall(name)) - seen:
                seen.add(register)
                todo += [
                    part
                    for x in self.definitions.get(register, ())
                    if not x.name.startswith("ld")
                    for part in _parts(x.operands)[1:]
                ]
        return found or [_ANY]

    def _value(self, operand: str, within: frozenset[str] = frozenset()) -> _Range:
        """Returns the range of an operand: a register, number, variable, or sum of two."""
        operand = operand.strip()
        if "+" in operand:
            first, _, second = operand.partition("+")
            return _plus(self._value(first, within), self._value(second, within))
        if re.fullmatch(r"-?\d+", operand):
            return _Range(None, int(operand), int(operand))
        if operand in self.variables:
            return _Range(operand, 0, 0)
        if operand == "%tid.x":
            return _Range(None, 0, 1023)
        if operand in within:
            return _ANY
        if within or operand not in self.known:
            values = [
                self._result(x, within | {operand}) for x in self.definitions.get(operand, ())
            ]
            value = functools.reduce(_either, values) if values else _ANY
            if within:
                return value
            self.known[operand] = value
        return self.known[operand]

    def _result(self, x: _Instruction, within: frozenset[str]) -> _Range:
        """Returns the result range of an instruction, as far as used for addresses."""
        kind = x.name.split(".")[0]
        parts = _parts(x.operands)[1:]
        if kind not in (
            "mov",
            "cvt",
            "cvta",
            "shfl",
            "add",
            "sub",
            "mul",
            "mad",
            "shl",
            "shr",
            "and",
            "or",
            "xor",
            "bfe",
            "selp",
        ):
            return _ANY
        if kind == "sub" and (slots := self._slots(parts)):
            return _Range(None, 0, slots - 1)
        a, *others = (self._value(part, within) for part in parts)
        b = others[0] if others else _ANY
        if kind in ("mov", "cvt", "cvta", "shfl"):
            return a
        if kind == "selp":
            return _either(a, b)
        if kind == "add":
            return _plus(a, b)
        if kind in ("mul", "mad"):
            product = _times(a, b)
            return product if kind == "mul" else _plus(product, others[1])
        if a.variable or b.variable or a.low < 0:
            return _plus(a, b) if kind == "or" else _ANY
        if kind == "shl" and b.low == b.high:
            return _times(a, _Range(None, 2**b.low, 2**b.low))
        if kind == "shr":
            return _Range(None, 0, a.high if b.low != b.high else a.high / 2**b.low)
        if kind == "and":
            return _Range(None, 0, min(y.high for y in (a, b) if y.low >= 0))
        if kind in ("or", "xor") and max(a.high, b.high) < math.inf:
            return _Range(None, 0, 2 ** max(int(a.high).bit_length(), int(b.high).bit_length()) - 1)
        if kind == "bfe" and others[1].low == others[1].high:
            return _Range(None, 0, 2 ** others[1].low - 1)
        return _ANY

    def _slots(self, parts: list[str]) -> int | None:
        """Returns n if a difference is a remainder of a power of two: x - ((x + (x < 0)) & -n)."""
        for x in self.definitions.get(parts[1], ()):
            mask = _parts(x.operands)[-1]
            if x.name.startswith("and") and re.fullmatch(r"-\d+", mask):
                return -int(mask)
        return None


_KINDS = {_FENCE: "fences", _COPY_OUT: "copies", _PRODUCT: "products"}


def _statements(text: str) -> Iterator[str]:
    body = text[text.index("\n{") + 2 : text.rindex("\n}")]
    body = re.sub(r"//.*|^\s*\.(loc|file)\b.*", "", body, flags=re.MULTILINE)
    for part in re.split(r";|(?<=:)\s*\n|\n\s*(?=\.)", body):
        yield part.strip().lstrip("}").lstrip()


def _is_asynchronous(x: _Instruction) -> bool:
    return any(kind.match(x.name) for kind in (_COPY_IN, _COPY_OUT, _PRODUCT))


def _addresses(x: _Instruction) -> list[str]:
    """Returns the operands in brackets, without the coordinates of tensor maps."""
    return [inner.partition(",")[0] for inner in re.findall(r"\[([^\]]*)\]", x.operands)]


def _parts(operands: str) -> list[str]:
    return [part.strip() for part in re.sub(r"\{[^}]*\}", "{}", operands).split(",")]


def _plus(a: _Range, b: _Range) -> _Range:
    return _Range(a.variable or b.variable, a.low + b.low, a.high + b.high)


def _times(a: _Range, b: _Range) -> _Range:
    if a.variable or b.variable or a.low < 0 or b.low < 0:
        return _ANY
    high = math.inf if math.inf in (a.high, b.high) else a.high * b.high
    return _Range(None, a.low * b.low, high)


def _either(a: _Range, b: _Range) -> _Range:
    if a.variable and b.variable and a.variable != b.variable:
        return _ANY
    return _Range(a.variable or b.variable, min(a.low, b.low), max(a.high, b.high))


def table(rows: Iterable[tuple[str, Fences]]) -> list[str]:
    """Formats the counts by problem as Markdown; problems with the same kernel share a row."""
    problems: dict[Fences, list[str]] = {}
    for problem, found in rows:
        if problem not in problems.setdefault(found, []):
            problems[found].append(problem)
    lines = [
        "| kernel | problems | stores | fences | copies | products | apart | unfenced | unmet "
        "| unordered |",
        f"|---|---|{'--:|' * 8}",
    ]
    for x, names in sorted(problems.items(), key=lambda item: item[0].kernel):
        wrong = (len(found) for found in (x.unfenced, x.unmet, x.unordered))
        numbers = (x.stores, x.fences, x.copies, x.products, x.apart, *wrong)
        lines.append(f"| {x.kernel} | {', '.join(names)} | {' | '.join(map(str, numbers))} |")
    return lines
