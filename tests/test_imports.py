"""Imports follow the layers: lower packages do not import higher ones."""

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# From lowest to highest; packages on one line do not import each other.
LAYERS = [
    {"pallas_kernels"},
    {"mtraining_jax.patterns", "mtraining_jax.parallel"},
    {"mtraining_jax.attention"},
    {"mtraining_jax.models"},
    {"mtraining_jax.reporting"},
    {"mtraining_jax.training"},
    {"mtraining_jax.planning", "mtraining_jax.evaluation"},
    {"mtraining_jax.cli.train"},
]
# Packages with the declarations that configurations consist of, importable without JAX.
DECLARED_IN = ("mtraining_jax.patterns", "mtraining_jax.data", "mtraining_jax.models")


@functools.cache
def modules() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every module of both packages and its imports; parsed once for all tests."""
    found = []
    for package in ("pallas_kernels", "mtraining_jax"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            imports = tuple(imported(ast.parse(path.read_text())))
            found.append((name.removesuffix(".__init__"), imports))
    return tuple(found)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer(module: str) -> tuple[int, str] | None:
    """Returns the layer's number and its package; None for modules below all layers."""
    for number, packages in enumerate(LAYERS):
        for package in packages:
            if module == package or module.startswith(f"{package}."):
                return number, package
    return None


def test_no_imports_from_the_same_or_a_higher_layer():
    wrong = []
    for name, imports in modules():
        own = layer(name)
        for other in imports:
            found = layer(other)
            if own and found and (found[0] > own[0] or (found[0] == own[0] and found != own)):
                wrong.append(f"{name} imports {other}")
    assert not wrong


def test_kernels_import_no_model_mesh_or_configuration():
    wrong = [
        f"{name} imports {other}"
        for name, imports in modules()
        if name.startswith("pallas_kernels")
        for other in imports
        if other.startswith(("mtraining_jax", "flax", "optax", "orbax", "pydantic"))
    ]
    assert not wrong


def test_a_configuration_imports_only_declarations():
    wrong = [
        f"{name} imports {other}"
        for name, imports in modules()
        if name.startswith("mtraining_jax.config")
        for other in imports
        if layer(other) and not other.startswith(DECLARED_IN)
    ]
    assert not wrong


def test_backends_are_not_imported_outside_of_the_kernels():
    backends = tuple(f"pallas_kernels.{name}" for name in ("mosaic_gpu", "triton", "xla"))
    wrong = [
        f"{name} imports {other}"
        for name, imports in modules()
        if name.startswith("mtraining_jax")
        for other in imports
        if other.startswith(backends)
    ]
    assert not wrong


def test_modules_can_be_imported_in_another_order():
    # The Triton kernels import triton; all other modules work without the extra.
    triton = importlib.util.find_spec("triton") is not None
    names = [n for n, _ in modules() if triton or not n.startswith("pallas_kernels.triton.kernels")]
    # Reversed: nearly always another order than that of the normal imports.
    code = f"import importlib; [importlib.import_module(n) for n in {names[::-1]!r}]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
