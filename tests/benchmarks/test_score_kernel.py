"""The benchmark of the kernel that scores key blocks, as far as a CPU goes."""

import pytest

from benchmarks import score_kernel
from mtraining_jax.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "0:none", "5:none"], '"5:none" is not a setting: 0 to 4, a colon'),
        (["--head-dim", "256"], "--head-dim=256 is not 64 or 128"),
        (["--seq-len", "1024"], "--seq-len=1024 with --rows=16 does not make whole blocks"),
        ([], "no GPU"),
    ],
)
def test_what_it_cannot_time_is_said(arguments, message):
    with pytest.raises(UserError, match=message):
        score_kernel.main(arguments)
