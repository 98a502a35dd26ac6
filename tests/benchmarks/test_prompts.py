from benchmarks.prompts import _COLUMNS, row
from mtraining_jax.data.tokenizer import ByteTokenizer
from mtraining_jax.evaluation.tasks import make_tasks


def test_a_row_says_what_a_prompt_takes_up():
    (task,) = make_tasks(["passkey"], {})
    name, used, *_, share = row(task, 2048, 2, ByteTokenizer())
    assert name == "passkey" and 1900 < int(used) <= 2048
    assert 0 < int(share.removesuffix(" %")) <= 100
    assert len(_COLUMNS) == 6
