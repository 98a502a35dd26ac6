"""Replacements of parts of Pallas in tests: faster ones with equal results, and of products."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax.experimental.mosaic.gpu import constraints, layout_inference, layouts
from jaxlib.mlir import ir


def quicken_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds up the interpreter's callbacks, thousands per kernel: avoids device round trips."""
    to_int = shared_memory._to_int

    def call(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*map(np.array, args)))

    def also_of_numpy(x):
        return int(x) if isinstance(x, np.ndarray) else to_int(x)

    monkeypatch.setattr(callback, "io_callback_impl", call)
    monkeypatch.setattr(shared_memory, "_to_int", also_of_numpy)


def round_products_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter's products independent of the place in a tile, as they are on a GPU.

    NumPy's BLAS adds in an order that depends on it, on CPUs without AVX-512.
    """

    class Products:
        def __getattr__(self, name):
            return getattr(np, name)

        def matmul(self, a, b, dtype):
            return np.matmul(a, b, dtype=np.float64).astype(dtype)

    monkeypatch.setattr(gpu_callbacks, "np", Products())


def quicken_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds up layout inference, which tries hundreds of assignments per kernel."""
    _number_once(monkeypatch)
    _reduce_what_changed(monkeypatch)
    _hash_once(monkeypatch, constraints.Variable)
    _hash_once(monkeypatch, layout_inference.ValueSite)
    _read_once(monkeypatch)
    _look_up_unknowns(monkeypatch)


def _number_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers a kernel once, instead of for each name when sorting layout variables."""
    in_order = constraints.compute_transitively_equal_vars
    slow_name, numbers, sorts = layout_inference.ValueSite.__str__, [], []

    def name(self):
        if not sorts:  # a changed kernel is numbered again
            return slow_name(self)
        if not numbers:
            root = self.operation.operation
            while root.parent is not None:
                root = root.parent.operation
            numbers.append(ir.AsmState(root))
        text = io.StringIO()
        self.operation.print(state=numbers[0], file=text)
        start = layout_inference._op_name_regex.match(text.getvalue()).group(0)
        kinds = layout_inference.VariableType
        kind = {kinds.OPERAND: "o", kinds.RESULT: "r"}.get(self.type, "a")
        return f"{start}:{kind}-{self.index}"

    def numbered_once(system):
        sorts.append(system)
        try:
            return in_order(system)
        finally:
            sorts.clear()
            numbers.clear()

    monkeypatch.setattr(layout_inference.ValueSite, "__str__", name)
    monkeypatch.setattr(constraints, "compute_transitively_equal_vars", numbered_once)


def _reduce_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces only constraints that a new layout affects, instead of all.

    Constraints that were reduced before and have no newly assigned variable do not change.
    """
    reduce = constraints.reduce_constraint

    def reduced(constraint, assignments):
        variables = constraint.__dict__.get("_variables")
        if variables is None or any(x in assignments for x in variables):
            constraint = reduce(constraint, assignments)
            if not isinstance(constraint, constraints.Unsatisfiable):
                constraint.__dict__["_variables"] = tuple(_variables(constraint))
        return constraint

    monkeypatch.setattr(constraints, "reduce_constraint", reduced)


def _variables(expression):
    """Returns the variables of a constraint or expression."""
    if isinstance(expression, constraints.Variable):
        yield expression
    elif not isinstance(expression, constraints.Constant):
        for field in dataclasses.fields(expression):
            value = getattr(expression, field.name)
            if isinstance(value, constraints.Expression):
                yield from _variables(value)


def _hash_once(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """Caches the hash of a frozen dataclass, which otherwise covers all of its contents."""
    slow_hash = kind.__hash__

    def hash_of(self):
        known = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = slow_hash(self)
        return known

    monkeypatch.setattr(kind, "__hash__", hash_of)


def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches parsed layouts: every operand has one, but few are distinct."""
    read, known = layouts.from_layout_attr, {}

    def layout(attribute):
        text = str(attribute)
        if text not in known:
            known[text] = read(attribute)
        return known[text]

    monkeypatch.setattr(layouts, "from_layout_attr", layout)


def _look_up_unknowns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a set for the final lookup of variables in the list of all."""
    find = layout_inference.find_assignments_for

    def found(unknowns, *args, **options):
        ordered = unknowns if isinstance(unknowns, dict) else dict.fromkeys(unknowns)
        return find(ordered, *args, **options)

    monkeypatch.setattr(layout_inference, "find_assignments_for", found)
