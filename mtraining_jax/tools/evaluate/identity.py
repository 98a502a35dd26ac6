"""Identifies a model by content, so that stored answers are not taken for those of another one."""

import hashlib
import json
from pathlib import Path

import jax

from mtraining_jax.data.files import named_files
from mtraining_jax.data.tokenizer import HuggingFaceTokenizer
from mtraining_jax.models.huggingface.checksums import digest
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.tools.evaluate.load import Loaded


def digests_of(loaded: Loaded) -> dict[str, str]:
    """Returns digests of all that determines the answers of a model, whatever its files."""
    network, tokenizer = loaded.network, loaded.tokenizer
    names = jax.tree.leaves(parameter_names(loaded.state))
    parameters = dict(zip(names, jax.tree.leaves(loaded.state), strict=True))
    files = []
    if isinstance(tokenizer, HuggingFaceTokenizer):
        paths = Path(tokenizer.name), tokenizer.settings_file
        files = [path for path in paths if path.is_file()]
    ends = tokenizer and (tokenizer.bos, tokenizer.eos), sorted(loaded.stop_ids)
    found = {
        "parameters": digest(parameters, exact=True),
        "configuration": digest_of(network.spec),
        "tokenizer": digest_of(type(tokenizer).__name__, ends, *files),
    }
    if network.settings.sparse:
        budgets = named_files(vars(network.settings))
        found["sparsity"] = digest_of(network.settings, *budgets)
    return found


def digest_of(*contents: object) -> str:
    """Returns a digest of values, and of the contents of files (`Path`)."""
    found = []
    for content in contents:
        if isinstance(content, Path):
            with content.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        found.append(repr(content))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
