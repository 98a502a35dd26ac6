"""Traces a window of steps with JAX's profiler."""

from pathlib import Path

import jax

from mtraining_jax.config.sections import ProfileConfig


class ProfileWindow:
    """Traces some steps into a folder, for TensorBoard or `benchmarks.step.trace_summary`.

    The caller waits for the devices before `begin` and `end`, so that the trace has full steps.
    """

    def __init__(self, config: ProfileConfig, folder: Path, enabled: bool) -> None:
        self.folder, self.open = folder, False
        self._steps = range(0)
        if enabled and config.start is not None:
            self._steps = range(config.start, config.start + config.steps)

    def begins(self, step: int) -> bool:
        return step in self._steps[:1]

    def ends(self, step: int) -> bool:
        return self.open and step in self._steps[-1:]

    def begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        # The trace holds a million events, which Python calls alone would fill.
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self.open = True

    def end(self) -> None:
        if self.open:
            self.open = False
            jax.profiler.stop_trace()
