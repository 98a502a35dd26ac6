"""Models and data sets of Hugging Face by name: `hf://[datasets/]OWNER/NAME[@REVISION][/PATH]`.

huggingface_hub downloads them into its cache, once per host, and checks the sizes of files.
"""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtraining_jax.utils.errors import UserError

HUB, _REMEDY = "hf://", "pip install huggingface_hub, or uv run --extra hub"
_WEIGHTS = "model*.safetensors", "adapter_model.safetensors"
_SMALL = "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICEN*", "NOTICE*", "USE*"


def with_commit(name: str, recorded: str = "", field: str = "") -> str:
    """Replaces a branch or tag in a name by its commit; raises a UserError, after `field`.

    The commit takes precedence that a `recorded` name of the same repository has.
    """
    with _one_sentence(f"{field}{name}") as hub:
        uri = hub.parse_hf_uri(name)
        repository = f"{HUB}{'datasets/' if uri.type == 'dataset' else ''}{uri.id}@"
        known = re.fullmatch("([0-9a-f]{40})", uri.revision or "")
        known = known or re.search(rf"{re.escape(repository)}([0-9a-f]{{40}})", recorded)
        where = {"repo_type": uri.type, "revision": uri.revision}
        commit = known[1] if known else hub.resolve_revision(uri.id, **where).resolved
    return f"{repository}{commit}/{uri.path_in_repo}".rstrip("/")


def repository(name: str) -> tuple[str, str] | None:
    """Returns OWNER/NAME and the commit of `hf://OWNER/NAME@COMMIT`; None for all other names."""
    found = re.fullmatch(f"{HUB}([^@]+)@([0-9a-f]{{40}})", name)
    return found and (found[1], found[2])


def local_folder(name: str | Path, weights: bool = False) -> Path:
    """The local path of a checkpoint's folder or file; with `hf://` it is downloaded first."""
    if not str(name).startswith(HUB):
        return Path(name).expanduser()
    return downloaded(str(name), _SMALL + weights * _WEIGHTS)


@functools.cache
def downloaded(name: str, files: tuple[str, ...] = ()) -> Path:
    """Downloads files, by default the path in the name, and returns its local path or UserError."""
    with _one_sentence(name) as hub:
        uri = hub.parse_hf_uri(with_commit(name))
        path = uri.path_in_repo
        # A superset: here * crosses folders, also in `**/`, which may be none.
        files = files or (path, path.replace("**/", ""), f"{path}/*".lstrip("/"))
        where = {"repo_type": uri.type, "revision": uri.revision}
        return Path(hub.snapshot_download(uri.id, **where, allow_patterns=list(files)), path)


@contextlib.contextmanager
def _one_sentence(name: str) -> Iterator[Any]:
    """Yields huggingface_hub, and raises its errors as a UserError."""
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise UserError(f"{name} needs huggingface_hub: {_REMEDY}") from error
    login = "log in with `hf auth login` or set HF_TOKEN"
    form = f"{HUB}OWNER/NAME[@REVISION], or {HUB}datasets/OWNER/NAME[@REVISION]/FILES for data"
    sentences = {
        "GatedRepoError": f"is gated: accept its terms on its page, and {login}",
        "RepositoryNotFoundError": f"does not exist, or is private: correct the name, or {login}",
        "RevisionNotFoundError": "has no such revision; after @ give a branch, tag or commit hash",
        "HfUriError": f"is not a valid name: it must be {form}",
    }
    try:
        yield hub
    except UserError:
        raise
    except Exception as error:  # of several libraries
        reason, *_ = str(error.__cause__ or error).splitlines() or [type(error).__name__]
        other = f"cannot be downloaded ({reason[:200]}) and is not completely in the cache, "
        other += f"{hub.constants.HF_HUB_CACHE}; check the network, or download it before"
        kinds = (kind.__name__ for kind in type(error).__mro__)  # the nearest one counts
        problem = next((sentences[kind] for kind in kinds if kind in sentences), other)
        raise UserError(f"{name} {problem}") from error
