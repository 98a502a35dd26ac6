"""The picture of the README: what it reads from the tables, and that it is drawn."""

import pytest

from benchmarks import plot_results

STEPS = """
| | a step | tokens/s |
|---|---|---|
| sparse | 9.94 s | 52,738 |

| kind | mean | largest | share | exposed | events |
|---|---|---|---|---|---|
| attention kernels | 4000.00 | 4100.00 | 40.0% |  | 324 |
| step | 10000.00 | 10000.50 | 100.0% |  |  |

| attention kernels | 60000.00 | 60000.00 | 90.0% |  | 180 |
| step | 66000.00 | 66000.00 | 100.0% |  |  |
"""


def attention(mask, who, total, seq_len=131072):
    return f"| {seq_len} | 16/2, 128 | {mask} | {who} | 1.0 | – | 1.0 | 2.0 | {total} | x |\n"


def tables(tmp_path):
    text = attention("D", "ours", 7.0, seq_len=65536)
    for total, (mask, who, _) in enumerate(plot_results.BARS, start=1):
        text += attention(mask, who, float(total))
    paths = tmp_path / "steps.md", tmp_path / "attention.md"
    for path, content in zip(paths, (STEPS, text), strict=True):
        path.write_text(content)
    return paths


def test_times_are_those_of_the_tables(tmp_path):
    steps, layer = (path.read_text() for path in tables(tmp_path))
    assert plot_results.step_times(steps) == [(4.0, 6.0), (60.0, 6.0)]
    found = plot_results.attention_times(layer)
    assert [ms for _, ms in found] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert found[0][0] == "dense, cuDNN"


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "results.png"
    plot_results.main([*map(str, tables(tmp_path)), str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        ("steps.md", None, "steps.md: no such file"),
        ("steps.md", "| step | 66000", "steps.md: 1 traces of a step, where a sparse and a dense"),
        ("attention.md", "| FlexAttention |", "attention.md: 0 rows of mask F by FlexAttention"),
    ],
)
def test_a_table_without_what_is_drawn_is_named(tmp_path, capsys, name, cut, message):
    paths = tables(tmp_path)
    changed = tmp_path / name
    if cut is None:
        changed.unlink()
    else:
        lines = changed.read_text().splitlines(keepends=True)
        changed.write_text("".join(line for line in lines if cut not in line))
    with pytest.raises(SystemExit):
        plot_results.main([*map(str, paths), str(tmp_path / "y.png")])
    assert message in capsys.readouterr().err and not (tmp_path / "y.png").exists()
