"""Pictures of the masks of audited steps."""

from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from mtraining_jax.callbacks import Callback, Record, Result
from mtraining_jax.config import Config
from mtraining_jax.reporting.writers import written
from mtraining_jax.tools.audit.picture import Panel, check_pictures, draw


class Masks(Callback):
    """Draws RUN_FOLDER/masks/step_N.png, in one process only.

    A picture takes longer than most steps and must not delay their report, so it has its own
    thread.
    """

    def __init__(self, config: Config) -> None:
        check_pictures("audit.masks")
        self._config, self._masks = config, None
        self._thread = ThreadPoolExecutor(1, "pictures")
        self._drawn: Future[None] | None = None  # the last one

    def measured(self, metrics: MutableMapping[str, Any]) -> Record:
        self._masks = metrics.get("masks")
        return {}

    def step(self, record: Record) -> None:
        if self._masks is not None:
            self._wait()
            self._drawn = self._thread.submit(self._draw, self._masks, record)

    def end(self, result: Result) -> None:
        del result
        self._wait()

    def close(self) -> None:
        self._thread.shutdown()

    def _wait(self) -> None:
        if self._drawn is not None:
            self._drawn.result()

    def _draw(self, masks: Any, record: Record) -> None:
        path = self._config.run.folder / "masks" / f"step_{record['step']:07d}.png"
        chosen = self._config.audited_masks
        heads = sorted({head for _, head in chosen})
        panels = []
        for layer, head in chosen:
            index = jax.tree.map(lambda x, layer=layer: x[layer], masks)
            recall = record["recall_per_head"][layer][head]
            title = f"layer {layer}, head {head}"
            if recall is not None:
                title += f"\nstep {record['step']}, recall {recall:.1%}"
            panels.append(Panel(index, 0, heads.index(head), title))
        with written(path, record["step"]):
            path.parent.mkdir(exist_ok=True)
            draw(path, panels, self._config.data.seq_len)
