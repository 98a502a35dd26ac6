"""The source code must not execute code from files."""

import ast
from pathlib import Path

import numpy as np
import pytest

from mtraining_jax.data.sources.token_files import open_token_file, read_lengths
from mtraining_jax.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for pattern in ("mtraining_jax/**/*.py", "pallas_kernels/**/*.py", "examples/**/*.py",
                    "benchmarks/**/*.py", "experiments/**/*.py", "tests/**/*.py", "*.py")
    for path in ROOT.glob(pattern)
)  # fmt: skip
# Exceptions by file, with all findings.
ALLOWED = {
    # Run examples of the documentation.
    "tests/test_docs.py": ["exec(...)"],
    "tests/training/test_fit.py": ["exec(...)"],
    # Runs the parts of the exported PyTorch file that need no PyTorch.
    "tests/models/huggingface/test_sparse_attention.py": ["exec(...)", "compile(...)"],
    # Writes an array that readers must reject.
    "tests/security/test_sources.py": ["allow_pickle"],
}
# Modules that execute code while reading files.
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_METHODS = {"read_pickle", "to_pickle"}
# Functions that import by name; number of arguments of numpy.load before allow_pickle.
IMPORTERS, PLACES = {"import_module", "importorskip"}, 2


def problems(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.split(".")[0] in UNSAFE else []
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            if name in UNSAFE_CALLS:
                found.append(f"{name}(...)")
            dotted = ast.unparse(node.func)
            last = dotted.rpartition(".")[2]
            if dotted in ("torch.load", "yaml.load", "os.system", "os.popen"):
                found.append(dotted)
            if last in UNSAFE_METHODS:
                found.append(last)
            if dotted in ("np.load", "numpy.load") and len(node.args) > PLACES:
                found.append("allow_pickle")
            if last in IMPORTERS and node.args and isinstance(node.args[0], ast.Constant):
                module = str(node.args[0].value)
                found += [module] if module.split(".")[0] in UNSAFE else []
        if isinstance(node, ast.keyword):
            value = getattr(node.value, "value", "a value")
            if node.arg == "allow_pickle" and value is not False:
                found.append("allow_pickle")
            if node.arg in ("shell", "trust_remote_code") and value is not False:
                found.append(node.arg)
    return found


def test_no_source_can_execute_code_from_files():
    assert len(SOURCES) > 400
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} >= {"tests", "experiments"}
    found = {
        str(path.relative_to(ROOT)): problems(ast.parse(path.read_text(encoding="utf-8")))
        for path in SOURCES
    }
    assert {name: what for name, what in found.items() if what} == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from joblib import load", "eval(x)", "np.load(x, allow_pickle=True)",
        "np.load(x, allow_pickle=y)", "torch.load(x)", "run(x, shell=True)",
        "np.load(x, None, True)", "pandas.read_pickle(x)", "importlib.import_module('dill.source')",
    ],
)  # fmt: skip
def test_unsafe_code_is_found(text):
    assert problems(ast.parse(text))


def test_pickled_arrays_are_rejected(tmp_path):
    class Runs:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was_run",)

    path = tmp_path / "tokens.npy"
    np.save(path, np.array([Runs()], object), allow_pickle=True)
    for read in (lambda: open_token_file(path, "uint16"), lambda: read_lengths(path, 1)):
        with pytest.raises(UserError) as error:
            read()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "was_run").exists()
