"""Loss, recall and time of a model with one setting of a sparse pattern."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_kernels
from benchmarks.quality.far_copies import far_copies
from benchmarks.quality.stepped_model import SteppedModel
from benchmarks.timing import median_ms
from mtraining_jax.attention.sharded import select_pairs
from mtraining_jax.patterns.base import Pattern
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.metrics import attention_recall, causal_pairs
from pallas_kernels.index import Index

PARTS = ("select", "forward", "backward")  # of the attention time of a layer


class Selector:
    """Selection of an index by one setting, compiled for the shapes of q and k [1, S, H, D].

    Arrays of the pattern have a leading axis of layers.
    """

    def __init__(
        self, pattern: Pattern, q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct,
        backend: str | None,
    ) -> None:  # fmt: skip
        self._pattern, self._backend = pattern, backend
        num_blocks = q.shape[1] // pattern.block_size
        self._blocks = np.arange(num_blocks, dtype=np.int32)
        self._compiled = jax.jit(self._select).lower(q, k, self._of_layer(0)).compile()

    def __call__(self, layer: int, q: Array, k: Array) -> Index:
        """Returns the index of a layer."""
        return self._compiled(q, k, self._of_layer(layer))

    def _of_layer(self, layer: int) -> Pattern | None:
        """The arrays of the pattern are arguments of the program, if it has any."""
        if not self._pattern.arrays:
            return None
        return jax.tree.map(lambda x: jnp.asarray(x[layer]), self._pattern)

    def _select(self, q: Array, k: Array, pattern: Pattern | None) -> Index:
        context = SelectionContext(
            jnp.asarray(self._blocks), len(self._blocks), backend=self._backend
        )
        return select_pairs(self._pattern if pattern is None else pattern, q, k, context).index


class Programs:
    """Programs shared by all settings, compiled once for each kind and size of index.

    `recall_rows`, int32 [R], are the positions of the queries for recall.
    """

    def __init__(self, backend: str | None, seq_len: int, recall_rows: np.ndarray) -> None:
        attend = functools.partial(pallas_kernels.attention, backend=backend)
        self.attention = jax.jit(attend)
        self.forward = jax.jit(
            lambda q, k, v, index: jax.vjp(lambda *qkv: attend(*qkv, index), q, k, v)
        )
        self.backward = jax.jit(lambda gradients, dout: gradients(dout))
        self.densities = jax.jit(functools.partial(_densities, seq_len=seq_len))
        self.recall = jax.jit(functools.partial(_recall, rows=jnp.asarray(recall_rows)))


def _densities(index: Index, seq_len: int) -> Array:
    """fp32 [2, Hq or 1]: computed and executed pairs over the causal pairs."""
    pairs = index.computed_pairs(seq_len), index.executed_pairs(seq_len)
    return jnp.stack([x[0].astype(jnp.float32) / float(causal_pairs(seq_len)) for x in pairs])


def _recall(q: Array, k: Array, index: Index, rows: Array) -> Array:
    blocks = jnp.arange(q.shape[1] // index.block_size, dtype=jnp.int32)
    return attention_recall(q, k, index, rows, block_ids=blocks)[0]


def measure_losses(
    model: SteppedModel, programs: Programs, selector: Selector, texts: np.ndarray
) -> dict[str, np.ndarray]:
    """Runs a model with sparse attention in every layer, on texts [N, S].

    Returns:
        "losses" fp32 [N, S - 1]; "density" and "executed" fp32 [N, L, Hq or 1], over the causal
        pairs; "recall" fp32 [N, L, Hq], attention mass on computed pairs with the queries and keys
        of the sparse model.
    """
    found: dict[str, list] = {"losses": [], "densities": [], "recall": []}
    for tokens in texts:
        densities, recall = [], []

        def attend(number: int, q: Array, k: Array, v: Array, densities=densities, recall=recall):
            index = selector(number, q, k)
            densities.append(programs.densities(index))
            recall.append(programs.recall(q, k, index))
            return programs.attention(q, k, v, index)

        found["losses"].append(jax.device_get(model.losses(tokens, attend)))
        found["densities"].append(jax.device_get(densities))
        found["recall"].append(jax.device_get(recall))
    density, executed = np.moveaxis(np.array(found["densities"]), 2, 0)
    return {
        "losses": np.array(found["losses"]), "density": density, "executed": executed,
        "recall": np.array(found["recall"]),
    }  # fmt: skip


def summary(
    measured: dict[str, np.ndarray], dense: np.ndarray, texts: np.ndarray, kinds: Sequence[str]
) -> dict[str, Any]:
    """The numbers of one setting, from `measure_losses` and the losses of dense attention.

    Returns:
        Densities, also of each layer and head; `keys`, computed pairs per row; recall (mean, and of
        the worst head, the least mean over sequences of any layer and head); and increases of the
        loss over dense attention in nats: `rise` of all tokens with `rise_error`, its standard
        error over sequences, `rise_copies` of far copies, `rise_kinds` of each kind of text.
    """
    rise = measured["losses"].astype(np.float64) - dense
    recall = measured["recall"].mean(0)
    density = float(measured["density"].mean())
    sequences = rise.mean(1)
    return {
        "density": density,
        "executed": float(measured["executed"].mean()),
        "density_heads": [[round(float(x), 4) for x in y] for y in measured["density"].mean(0)],
        "keys": density * (texts.shape[1] + 1) / 2,
        "rise": float(rise.mean()),
        "rise_error": float(sequences.std(ddof=1) / len(rise) ** 0.5) if len(rise) > 1 else None,
        "rise_copies": _mean(rise[_copies(texts)]),
        "rise_kinds": {
            kind: float(sequences[[x == kind for x in kinds]].mean())
            for kind in dict.fromkeys(kinds)
        },
        "recall": float(recall.mean()),
        "recall_worst": float(recall.min()),
    }


def baseline(dense: np.ndarray, texts: np.ndarray) -> dict[str, float | None]:
    """The dense losses themselves, and the fraction of tokens that are far copies."""
    copies = _copies(texts)
    return {
        "loss": float(dense.mean(dtype=np.float64)),
        "loss_copies": _mean(dense[copies]),
        "share_copies": float(copies.mean()),
    }


def measure_times(
    programs: Programs, selector: Selector, layers: Sequence[tuple], dout: Array, repeats: int,
    numbers: Sequence[int],
) -> dict[str, float]:  # fmt: skip
    """Times attention on the queries, keys and values of some layers with these numbers, in ms.

    Returns:
        Means over the layers: medians of each of `PARTS` (selection of an index, both passes) and
        of all of them one after another (`together`, with less time of the host than the parts),
        and the `density` of what was timed.
    """
    times = dict.fromkeys((*PARTS, "together", "density"), 0.0)
    for number, (q, k, v) in zip(numbers, layers, strict=True):
        select = functools.partial(selector, number, q, k)
        index = select()
        _, gradients = programs.forward(q, k, v, index)

        def together(select=select, qkv=(q, k, v)) -> Any:
            _, gradients = programs.forward(*qkv, select())
            return programs.backward(gradients, dout)

        runs = {
            "select": select,
            "forward": functools.partial(programs.forward, q, k, v, index),
            "backward": functools.partial(programs.backward, gradients, dout),
            "together": together,
        }
        for part, run in runs.items():
            times[part] += median_ms(run, repeats) / len(layers)
        times["density"] += float(programs.densities(index)[0].mean()) / len(layers)
    return times


def _copies(texts: np.ndarray) -> np.ndarray:
    """Far copies, bool [N, S - 1], of all tokens but the first."""
    return np.stack([far_copies(tokens)[1:] for tokens in texts])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if values.size else None
