"""The page of what fits."""

from pathlib import Path

from benchmarks import what_fits
from mtraining_jax.tools.plan.hardware import H100, H200


def test_the_page_of_what_fits_is_up_to_date(tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs/what-fits.md").read_text()
    on_h100, on_h200 = page.split("## 141 GB")
    assert what_fits.row("Qwen2.5-0.5B", H100) in on_h100
    assert what_fits.row("Qwen3-8B", H200) in on_h200
    for path, text in ((tmp_path / "none.md", None), (tmp_path / "other.md", "# Other")):
        if text is not None:
            path.write_text(text)
        assert what_fits.main(["--out", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --out {path}")
