import pytest

from tests.training.common import VERTICAL_SLASH, tiny_config


@pytest.fixture
def config(tmp_path):
    """A small run on a 1 x 2 x 2 mesh."""
    return tiny_config(tmp_path, sparsity=VERTICAL_SLASH)
