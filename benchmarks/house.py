"""Counts what there is to read, as one row of a table: `python -m benchmarks.house`.

Lines are physical lines of Python. "Files of a call" run, as Python, while `sparse_attention` and
its gradients are traced over a mesh; those "of a query" call a function with a parameter `q` there.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

import mtraining_jax

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("mtraining_jax", "pallas_kernels")
ATTENTION = ("mtraining_jax/attention/", "mtraining_jax/parallel/ring/", "pallas_kernels/")
TOOLS = "mtraining_jax/tools/", "mtraining_jax/cli/"
SMALL = 60  # lines


def count_files(root: Path) -> dict[str, int]:
    """Counts lines, files, custom gradients, and files that name the option `tau`."""
    product = _sources(root, PRODUCT)
    sizes = [len(text.splitlines()) for text in product.values()]
    names = {path: list(_names(text)) for path, text in product.items()}
    rules = {path: found.count("custom_vjp") for path, found in names.items()}
    return {
        "lines": sum(sizes),
        "without tools": sum(
            size for path, size in zip(product, sizes, strict=True) if not path.startswith(TOOLS)
        ),
        "files": len(sizes),
        f"files < {SMALL} lines": sum(size < SMALL for size in sizes),
        "lines of tests": sum(
            len(text.splitlines()) for text in _sources(root, ["tests"]).values()
        ),
        "custom_vjp": sum(rules.values()),
        "of attention": sum(n for path, n in rules.items() if path.startswith(ATTENTION)),
        "files with tau": sum("tau" in found for found in names.values()),
    }


def count_call() -> dict[str, int]:
    """Counts public names, parameters of `sparse_attention`, and the files that a call runs."""
    axes = "data", "node", "device"
    mesh = AbstractMesh((1, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
    q, k = (jax.ShapeDtypeStruct((1, 1024, heads, 64), jnp.bfloat16) for heads in (2, 1))

    def attend(*arrays: jax.Array) -> jax.Array:
        sharding = mtraining_jax.Sharding(mesh)
        return mtraining_jax.sparse_attention(*arrays, sharding=sharding, backend="xla").sum()

    started = _started(lambda: jax.eval_shape(jax.grad(attend, (0, 1, 2)), q, k, k))
    folders = tuple(f"{ROOT / folder}/" for folder in PRODUCT)
    inside = [code for code in started if code.co_filename.startswith(folders)]
    of_query = [code for code in inside if "q" in inspect.getargs(code).args]
    return {
        "public names": sum(len(importlib.import_module(name).__all__) for name in PRODUCT),
        "parameters of the call": len(inspect.signature(mtraining_jax.sparse_attention).parameters),
        "files of a call": len({code.co_filename for code in inside}),
        "of a query": len({code.co_filename for code in of_query}),
    }


def main() -> None:
    """Prints the table."""
    row = count_files(ROOT) | count_call()
    print(f"| {' | '.join(row)} |\n|{'--:|' * len(row)}\n| {' | '.join(map(str, row.values()))} |")


def _sources(root: Path, folders: Sequence[str]) -> dict[str, str]:
    paths = [path for folder in folders for path in (root / folder).rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in paths}


def _names(source: str) -> Iterator[str]:
    """The variables, attributes, parameters, keywords and strings of a program."""
    for node in ast.walk(ast.parse(source)):
        values = (getattr(node, field, None) for field in ("id", "attr", "arg", "value"))
        yield from (value for value in values if isinstance(value, str))


def _started(run: Callable[[], object]) -> set[CodeType]:
    """The functions that Python starts during a call."""
    started: set[CodeType] = set()

    def note(code: CodeType, _: int) -> object:
        started.add(code)
        return sys.monitoring.DISABLE  # once is enough

    tool, event = sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START
    sys.monitoring.use_tool_id(tool, "house")
    sys.monitoring.register_callback(tool, event, note)
    sys.monitoring.set_events(tool, event)
    try:
        run()
    finally:
        sys.monitoring.set_events(tool, sys.monitoring.events.NO_EVENTS)
        sys.monitoring.register_callback(tool, event, None)
        sys.monitoring.free_tool_id(tool)
    return started


if __name__ == "__main__":
    main()
