"""A window of steps under JAX's profiler."""

from pathlib import Path

import jax

from mtraining_jax.config import ProfileConfig

# What a traced step is called in the trace.
STEP_NAME = "train_step"


class ProfileWindow:
    """Traces some steps into a folder: TensorBoard and `benchmarks/trace_summary.py` read it.

    The caller waits for the devices before `begin` and before `end`, so that the trace holds
    whole steps.

    Args:
        config: which steps.
        folder: where the trace goes.
        enabled: whether this process traces; of several, one is enough. It sees its own devices.
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
        # The trace has room for a million events, which Python's calls would fill.
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
        """A context for the dispatch of a step; it does nothing without a trace."""
        return jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=number)
