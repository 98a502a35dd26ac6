"""Command lines that work where this process was started: in a checkout or after installation."""

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

_INSTALLED = "mtraining"  # the console command
_SCRIPTS = ("train", "evaluate", "generate")  # in the root of a checkout


def command_of(name: str) -> str:
    """The command line that runs the command `name`, such as "evaluate", as this process runs.

    `python evaluate.py` or `uv run evaluate.py` in a checkout, `mtraining evaluate` if that is
    installed and in use, else `python -m mtraining_jax evaluate`.
    """
    this = Path(sys.argv[0])
    script = this.with_name(f"{name}.py")
    scripts = {f"{x}.py" for x in _SCRIPTS}
    if _module() is None and {this.name, script.name} <= scripts and script.is_file():
        return shlex.join(_run_with_python(str(script)))
    name = name.replace("_", "-")
    if this.name == _INSTALLED:
        return shlex.join([*_program(), name])
    return shlex.join(_run_with_python("-m", "mtraining_jax", name))


def command_with(options: Iterable[str], without: Collection[str] = ()) -> str:
    """The command of this process with other options, and without some.

    Args:
        options: as `--section.field=value`; they replace those of the same name.
        without: names of options, with dashes.
    """
    options = list(options)
    names = {option.partition("=")[0] for option in options}.union(without)
    kept, rest = [], sys.argv[1:]
    while rest:
        argument = rest.pop(0)
        if argument.partition("=")[0] not in names:
            kept.append(argument)
        elif "=" not in argument and rest and not rest[0].startswith("--"):
            rest.pop(0)  # its value
    command = shlex.join([*_program(), *kept, *options])
    if "SLURM_STEP_NODELIST" in os.environ and os.environ.get("SLURM_NTASKS") != "1":
        command = f"srun {command}"
    return command


def _program() -> list[str]:
    """The words of this process's command line before its arguments."""
    this, module = sys.argv[0], _module()
    if module is not None:
        return _run_with_python("-m", module)
    if Path(this).name == _INSTALLED:
        found = shutil.which(_INSTALLED)
        on_path = found is not None and Path(found).resolve() == Path(this).resolve()
        return [*_uv(), _INSTALLED if on_path else this]
    return _run_with_python(this)


def _module() -> str | None:
    """The module that this process runs by `python -m`; None if it runs a script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.origin != sys.argv[0]:
        return None
    return spec.name.removesuffix(".__main__")


def _run_with_python(*words: str) -> list[str]:
    uv = _uv()
    return [*uv, *([] if uv and words[0].endswith(".py") else ["python"]), *words]


def _uv() -> list[str]:
    return ["uv", "run"] if "UV" in os.environ else []
