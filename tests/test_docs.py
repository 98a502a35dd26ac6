"""Links between the documents of this repository lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "experiments/*.md")
    for path in ROOT.glob(pattern)
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text()), flags=re.MULTILINE)
    texts = (re.sub(r"\]\([^)]*\)", "]", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document):
    broken = []
    for link in _LINK.findall(without_code(document.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs"])
def test_commands_start_in_one_way(name):
    """In the activated environment of docs/install.md, as train.py says without its packages."""
    pages = [ROOT / name] if name.endswith(".md") else sorted((ROOT / name).rglob("*.md"))
    assert not [page.name for page in pages if "uv run" in page.read_text()]


def test_a_model_can_be_called_as_the_page_on_training_says():
    page = (ROOT / "docs/training.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    found = {}
    exec(code.replace("path/to/checkpoint", str(ROOT / "tests/checkpoints/qwen2_tiny")), found)
    assert found["logits"].shape == (1, 256, found["spec"].vocab_size)


def test_every_promise_of_the_page_on_bits_has_its_test():
    page = (ROOT / "docs/reproducibility.md").read_text()
    promises = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", page)
    assert len(promises) >= 15
    for name, path in promises:
        pattern = rf"^\s*(def|class) {name}\b"
        assert re.search(pattern, (ROOT / path).read_text(), re.MULTILINE), f"{path}: {name}"


def test_the_table_of_the_interpreters_branches_is_whole():
    page = (ROOT / "docs/design/testing.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    kernels = ROOT / "pallas_kernels/mosaic_gpu"
    branching = {
        path.relative_to(kernels).as_posix()
        for path in kernels.rglob("*.py")
        if re.search(r"interpreted\b|_INTERPRETED", path.read_text())
    }
    listed = {name for name in re.findall(r"`([\w/.]+)`", rows)}
    assert branching == listed


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_files_that_the_pages_name_exist(name):
    """In backticks; a path may begin in a package, in the folder named last or beside the file."""
    named = re.findall(r"`([\w./]+(?:\.py|\.toml|/))`", without_code((ROOT / name).read_text()))
    packages = (ROOT, ROOT / "mtraining_jax", ROOT / "pallas_kernels")
    folder = beside = ROOT
    missing = []
    for path in named:
        roots = (*packages, folder, beside)
        found = next((root / path for root in roots if (root / path).exists()), None)
        if found is None:
            missing.append(path)
        elif found.is_dir():
            folder = found
        else:
            beside = found.parent
    assert not missing
