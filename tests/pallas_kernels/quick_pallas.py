"""Parts of Pallas that take most of its time in tests, done in quicker ways with equal results."""

import io

import jax
import numpy as np
import pytest
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.mosaic.gpu import constraints, layout_inference
from jaxlib.mlir import ir


def quicken_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's, thousands for each kernel: each argument goes through a device."""
    to_int = shared_memory._to_int

    def call(*args, callback, **_):
        return jax.tree.map(np.asarray, callback(*map(np.array, args)))

    def also_of_numpy(x):
        return int(x) if isinstance(x, np.ndarray) else to_int(x)

    monkeypatch.setattr(callback, "io_callback_impl", call)
    monkeypatch.setattr(shared_memory, "_to_int", also_of_numpy)


def quicken_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of layouts are sorted by name, and for each name the whole kernel is numbered."""
    in_order = constraints.compute_transitively_equal_vars
    slow_name, numbers, sorts = layout_inference.ValueSite.__str__, [], []

    def name(self):
        if not sorts:  # a kernel that has changed is numbered anew
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
