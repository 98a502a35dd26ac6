import pytest

from tests.pallas_kernels.helpers.quick_pallas import (
    quicken_callbacks,
    quicken_lowering,
    round_products_alike,
)


@pytest.fixture(autouse=True)
def _quick_pallas(monkeypatch):
    quicken_callbacks(monkeypatch)
    quicken_lowering(monkeypatch)
    round_products_alike(monkeypatch)
