"""The counts of benchmarks/house.py on a small tree, and its row for this checkout."""

import inspect

import mtraining_jax
from benchmarks import house


def test_counts_of_a_small_tree(tmp_path):
    files = {
        "mtraining_jax/attention/a.py": "import jax\n\n@jax.custom_vjp\ndef f(q):\n    return q\n",
        "mtraining_jax/models/b.py": '"""Not about tau."""\n' + "x = 1\n" * 59 + "g = h(tau=1)\n",
        "mtraining_jax/c.py": "from functools import partial\nf = partial(custom_vjp, x['tau'])\n",
        "pallas_kernels/d.py": "f.defvjp(custom_vjp_of(x))\n",
        "mtraining_jax/tools/e.py": "x = 1\n",
        "tests/test_a.py": "\n\n",
        "other/e.py": "tau = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert house.count_files(tmp_path) == {
        "lines": 5 + 61 + 2 + 1 + 1,
        "without tools": 5 + 61 + 2 + 1,
        "files": 5,
        "files < 60 lines": 4,
        "lines of tests": 2,
        "custom_vjp": 2,
        "of attention": 1,
        "files with tau": 2,
    }


def test_the_row_of_this_checkout(capsys):
    house.main()
    head, rule, row = (line.strip("|").split("|") for line in capsys.readouterr().out.splitlines())
    assert len(head) == len(row) and rule[:-1] == ["--:"] * (len(row) - 1)
    counts = {name.strip(): int(number) for name, number in zip(head, row, strict=True)}
    names = len(inspect.signature(mtraining_jax.sparse_attention).parameters)
    assert counts["parameters of the call"] == names
    assert 5 < counts["of a query"] < counts["files of a call"] < counts["files"]
