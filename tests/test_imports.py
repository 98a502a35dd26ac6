"""Imports run one way: lower packages do not import higher ones, and no modules in circles."""

import ast
import functools
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_kernels", "mtraining_jax")
# From lowest to highest; each imports only those before it.
LAYERS = (
    "mtraining_jax.utils",
    "pallas_kernels",
    "mtraining_jax.documents",
    "mtraining_jax.realignment",
    "mtraining_jax.selection",
    "mtraining_jax.patterns",
    "mtraining_jax.parallel",
    "mtraining_jax.attention",
    "mtraining_jax.models",
    "mtraining_jax.data",
    "mtraining_jax.config",
    "mtraining_jax.callbacks",
    "mtraining_jax.reporting",
    "mtraining_jax.training",
    # The trainer, up to here, imports none of the tools that follow.
    "mtraining_jax.tools.corpus",
    "mtraining_jax.tools.plan",
    "mtraining_jax.tools.balance",
    "mtraining_jax.tools.audit",
    "mtraining_jax.tools.export",
    "mtraining_jax.tools.cluster",
    "mtraining_jax.tools.report",
    "mtraining_jax.tools.evaluate",
    "mtraining_jax.trainer",
    "mtraining_jax.cli",
)
# Installed only if wanted, or slow and needed for few inputs.
EXTRAS = (
    "etils", "google.cloud", "huggingface_hub", "jax_triton", "jinja2", "lm_eval", "matplotlib",
    "PIL", "pallas_kernels.triton.kernels", "pyarrow", "tensorboardX", "triton", "wandb",
)  # fmt: skip
# Commands load what computes, and with it JAX, after they have checked their arguments.
BOUNDARY = ("mtraining_jax.cli.", "mtraining_jax.check_cluster", "mtraining_jax.utils.jax_platform")
PATTERNS = "mtraining_jax.patterns."  # read without JAX: methods load what selects
LAZY = "mtraining_jax"  # its public names are loaded on first use
WITHOUT_JAX = (
    "mtraining_jax",
    "mtraining_jax.config",
    "mtraining_jax.data.sources",
    "mtraining_jax.models.families",
    "mtraining_jax.patterns",
    "mtraining_jax.utils",
    "mtraining_jax.cli",
    "mtraining_jax.check_cluster",
)
MAX_FILES = 15


@functools.cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module of both packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that a syntax tree imports, anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in modules() else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def own_imports() -> Iterator[tuple[str, str]]:
    """Pairs of a module and a module of these packages that it imports."""
    for name, tree in modules().items():
        if name != LAZY:
            yield from ((name, other) for other in set(imported(tree)) if other in modules())


def layer(module: str) -> int | None:
    found = (n for n, package in enumerate(LAYERS) if f"{module}.".startswith(f"{package}."))
    return next(found, None)


def test_every_module_has_a_layer():
    names = "__main__", "report", "check_cluster", "tools"
    entry_points = {LAZY, *(f"{LAZY}.{name}" for name in names)}
    assert {name for name in modules() if layer(name) is None} == entry_points


def test_no_imports_from_higher_layers():
    wrong = {
        f"{name} imports {other}"
        for name, other in own_imports()
        if (own := layer(name)) is not None and ((found := layer(other)) is None or found > own)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_no_circles():
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for name, other in own_imports():
        graph[name].add(other)
    order = list(graphlib.TopologicalSorter(graph).static_order())  # a circle is a CycleError
    place = {name: n for n, name in enumerate(order)}
    assert place.keys() == modules().keys()
    assert all(place[other] < place[name] for name, other in own_imports())


def test_kernels_import_no_model_mesh_or_configuration():
    others = ("mtraining_jax", "flax", "optax", "orbax", "pydantic")
    wrong = [
        f"{name} imports {other}"
        for name, tree in modules().items()
        if name.startswith("pallas_kernels")
        for other in imported(tree)
        if other.startswith(others)
    ]
    assert not wrong


def test_backends_are_not_imported_outside_of_the_kernels():
    backends = tuple(f"pallas_kernels.{name}" for name in ("mosaic_gpu", "triton", "xla"))
    names = (f"{a} imports {b}" for a, b in own_imports() if b.startswith(backends))
    assert not [name for name in names if not name.startswith("pallas_kernels")]


def test_imports_are_at_the_top():
    wrong = []
    for name, tree in modules().items():
        functions = (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.Lambda))
        inside = {other for function in functions for other in imported(function)}
        inside = {other for other in inside if not other.startswith(EXTRAS)}
        if inside and name != LAZY and not f"{name}.".startswith((*BOUNDARY, PATTERNS)):
            wrong.append(f"{name} imports {', '.join(sorted(inside))} in a function")
        lazy = {getattr(x, "id", getattr(x, "name", None)) for x in ast.walk(tree)}
        if name != LAZY and "TYPE_CHECKING" in lazy and not name.startswith(PATTERNS):
            wrong.append(f"{name} imports for type checkers only")
        top = {getattr(x, "name", None) for x in tree.body}
        if name != LAZY and "__getattr__" in top:
            wrong.append(f"{name} has a __getattr__")
    assert not wrong, "\n".join(wrong)


def test_folders_are_small():
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    sizes = {str(x.relative_to(ROOT)): len(list(x.glob("*.py"))) for x in folders}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILES}


def test_a_configuration_loads_no_jax():
    names = [
        name
        for name in modules()
        if name in WITHOUT_JAX or name.rpartition(".")[0] in WITHOUT_JAX[1:]
    ]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {names!r}]\n"
        "slow = {'jax', 'flax', 'grain', 'orbax', 'pyarrow', 'matplotlib', 'huggingface_hub'}"
        " & set(sys.modules)\n"
        "sys.exit(', '.join(slow) or None)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, f"imported: {run.stderr}"


@pytest.mark.slow
def test_modules_can_be_imported_in_another_order():
    # These import an extra; all other modules work without.
    needed = {
        "triton": "pallas_kernels.triton.kernels",
        "lm_eval": "mtraining_jax.tools.evaluate.lm_eval",
        "torch": "mtraining_jax.tools.export.sparse_attention",
    }  # fmt: skip
    missing = tuple(place for name, place in needed.items() if not importlib.util.find_spec(name))
    names = [name for name in modules() if not name.startswith(missing)]
    # Reversed: nearly always another order than that of the normal imports.
    code = (
        f"import importlib, sys; [importlib.import_module(n) for n in {names[::-1]!r}]\n"
        "print(*(name for name in sys.modules if name.startswith(('mtraining_jax', 'pallas_'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == set(names)
