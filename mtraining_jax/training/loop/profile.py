"""Traces a window of steps with JAX's profiler."""

from pathlib import Path

import jax

from mtraining_jax.config import ProfileConfig

# Name of a step in the trace.
STEP_NAME = "train_step"


class ProfileWindow:
    """Traces some steps into a folder, for TensorBoard or `benchmarks.step.trace_summary`.

    The caller waits for the devices before `begin` and `end`, so that the trace has full steps.

    Args:
        config: the `profile` section.
        folder: folder of the trace.
        enabled: whether this process traces its own devices; one process is enough.
    """

    def __init__(self, config: ProfileConfig, folder: Path, enabled: bool) -> None:
        self.folder = folder
        self._first = config.start if enabled else None
        self._last = None if self._first is None else self._first + config.steps - 1
        self._open = False

    def begins(self, step: int) -> bool:
        """Whether the trace starts with this step."""
        return step == self._first

    def ends(self, step: int) -> bool:
        """Whether this step is the last of the trace."""
        return self._open and step == self._last

    @property
    def open(self) -> bool:
        """Whether steps are traced now."""
        return self._open

    def begin(self) -> None:
        """Starts tracing."""
        options = jax.profiler.ProfileOptions()
        # The trace holds a million events, which Python calls alone would fill.
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self._open = True

    def end(self) -> None:
        """Writes the trace, if one is open."""
        if self._open:
            self._open = False
            jax.profiler.stop_trace()

    def step(self, number: int) -> jax.profiler.StepTraceAnnotation:
        """Returns a context for the dispatch of a step; without a trace it has no effect."""
        return jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=number)
