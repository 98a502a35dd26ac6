"""Tests of this folder need a Hopper GPU and are skipped elsewhere."""

import os

import jax
import pytest


def _why_not() -> str | None:
    """Why these tests cannot run here, or None if they can."""
    if os.environ.get("MTRAINING_TEST_GPU") != "1":
        return "set MTRAINING_TEST_GPU=1 to run the tests that need a GPU"
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"needs a GPU, but JAX found only platform {device.platform!r}"
    if (capability := str(device.compute_capability)) != "9.0":
        return f"needs a Hopper GPU (compute capability 9.0), but this one has {capability}"
    return None


class _FailuresAtOnce:
    """Prints each failure when it happens: a job may end before pytest's summary."""

    def __init__(self, terminal: "pytest.TerminalReporter"):
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)  # once the terminal exists
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("MTRAINING_TEST_GPU") == "1" and terminal is not None:
        config.pluginmanager.register(_FailuresAtOnce(terminal))


@pytest.fixture(scope="session")
def _hopper_missing() -> str | None:
    return _why_not()


@pytest.fixture(autouse=True)
def _needs_hopper(_hopper_missing: str | None) -> None:
    if _hopper_missing:
        pytest.skip(_hopper_missing)
