"""The tuner of the Triton kernels: what it prints of what its workers send."""

from benchmarks.kernels import tune_triton


def test_the_table_has_the_fastest_first_and_says_what_does_not_run():
    def sent(mask, rows, ms, **more):
        values = {"kernel": "dq", "dim": 128, "code": "sm80", "mask": mask, "error": None}
        values |= {"config": [rows, 32, 4, 3], "shipped": False, "ms": ms, "tflops": 100.4}
        return values | more

    text = tune_triton.table([
        sent("B", 64, 3.0, shipped=True), sent("B", 256, None, error="too much shared memory"),
        sent("D", 64, 30.0), sent("B", 128, 2.0),
    ])  # fmt: skip
    assert text.splitlines()[1] == "dq, D = 128, sm80"
    assert text.splitlines()[5:] == [
        "| B | 128 x 32, 4, 3 | 2.00 | 100 |",
        "| B | 64 x 32, 4, 3 (in configs.py) | 3.00 | 100 |",
        "| B | 256 x 32, 4, 3 | too much shared memory | – |",
        "| D | 64 x 32, 4, 3 | 30.00 | 100 |",
    ]
