"""What one setting of a sparse pattern costs a model, and what it saves."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_kernels
from benchmarks.kernels.programs import Attention
from benchmarks.quality.frontier_report import PARTS
from benchmarks.quality.stepped_model import SteppedModel
from benchmarks.ring.balance import ring_balance
from benchmarks.timing import median_ms
from mtraining_jax.evaluation.far_copies import GRAM, far_copies
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.ring import RingTopology
from mtraining_jax.sparsity import Pattern, Shards
from mtraining_jax.sparsity.choose import choose
from mtraining_jax.sparsity.metrics import attention_recall, causal_pairs
from pallas_kernels.index import BlockMaskIndex, DenseIndex, Index, VerticalSlashIndex

BALANCED_RANKS = 8  # of the ring that `busiest` is about
STRICT_GRAM = GRAM + 1  # the four tokens before a token, and the same token behind them


class Chooser:
    """The choice of an index by one setting, compiled when it is made.

    Args:
        pattern: of all layers; its arrays, if any, have a leading axis of layers.
        q: shape and dtype of the queries, [1, S, Hq, D].
        k: of the keys, [1, S, Hk, D].
        backend: of kernels that the choice may use; None for the best here.
    """

    def __init__(
        self, pattern: Pattern, q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct,
        backend: str | None,
    ) -> None:  # fmt: skip
        self._pattern, self._backend = pattern, backend
        num_blocks = q.shape[1] // pattern.block_size
        self._blocks = np.arange(num_blocks, dtype=np.int32)
        start = time.perf_counter()
        jitted = jax.jit(self._choose)
        self._compiled = jitted.lower(q, k, self._given(0)).compile()
        self.compile_seconds = time.perf_counter() - start

    def __call__(self, layer: int, q: Array, k: Array) -> Index:
        """The index of a layer."""
        return self._compiled(q, k, self._given(layer))

    def _given(self, layer: int) -> Pattern | None:
        """What is an argument of the program: the arrays of a pattern that has any."""
        if not self._pattern.arrays:
            return None
        return jax.tree.map(lambda x: jnp.asarray(x[layer]), self._pattern)

    def _choose(self, q: Array, k: Array, given: Pattern | None) -> Index:
        pattern = self._pattern if given is None else given
        shards = Shards(jnp.asarray(self._blocks), len(self._blocks), backend=self._backend)
        return choose(pattern, q, k, shards).index


class Programs:
    """What settings share, compiled once for each kind and size of index.

    Args:
        backend: of the kernels; None for the best here.
        seq_len: S.
        recall_rows: int32 [R], positions of the queries on which recall is measured.
    """

    def __init__(self, backend: str | None, seq_len: int, recall_rows: np.ndarray) -> None:
        kernels = Attention(backend)
        self.attention = jax.jit(
            lambda q, k, v, index: pallas_kernels.attention(q, k, v, index, backend=backend)
        )
        self.build, self.forward, self.backward = map(
            jax.jit, (kernels.build, kernels.forward, kernels.backward)
        )
        # An index that no tiles say has no plan: its passes are those of the whole call.
        self.whole_forward = jax.jit(
            lambda q, k, v, index: jax.vjp(
                lambda *qkv: pallas_kernels.attention(*qkv, index, backend=backend), q, k, v
            )
        )
        self.whole_backward = jax.jit(lambda gradients, dout: gradients(dout))
        self.shares = jax.jit(functools.partial(_shares, seq_len=seq_len))
        self.busiest = jax.jit(functools.partial(_busiest, seq_len=seq_len))
        self.recall = jax.jit(functools.partial(_recall, rows=jnp.asarray(recall_rows)))


def _shares(index: Index, seq_len: int) -> Array:
    """fp32 [2, Hq or 1], the computed and the executed share of the causal pairs."""
    pairs = index.computed_pairs(seq_len), index.executed_pairs(seq_len)
    return jnp.stack([x[0].astype(jnp.float32) / float(causal_pairs(seq_len)) for x in pairs])


def _busiest(index: Index, seq_len: int) -> Array:
    """fp32 [], blocks of the busiest rank of a striped ring over those of the mean rank.

    NaN where the blocks cannot be dealt evenly, or the index is of another kind.
    """
    size = index.block_size
    counted = isinstance(index, VerticalSlashIndex | DenseIndex | BlockMaskIndex)
    if seq_len % (BALANCED_RANKS * size) or not counted:
        return jnp.float32(jnp.nan)
    layout = Layout("striped", seq_len, BALANCED_RANKS, size)
    ring = RingTopology(layout, ("device",), (BALANCED_RANKS,))
    return ring_balance(index, ring).imbalance


def _recall(q: Array, k: Array, index: Index, rows: Array) -> Array:
    blocks = jnp.arange(q.shape[1] // index.block_size, dtype=jnp.int32)
    return attention_recall(q, k, index, rows, block_ids=blocks)[0]


def measure_losses(
    model: SteppedModel, programs: Programs, chooser: Chooser, texts: np.ndarray
) -> dict[str, np.ndarray]:
    """Runs a model with sparse attention in every layer.

    Args:
        model: to run.
        programs: shared.
        chooser: of the setting.
        texts: integers [N, S].

    Returns:
        "losses" fp32 [N, S - 1]; "density" and "executed" fp32 [N, L, Hq or 1], shares of the
        causal pairs; "recall" fp32 [N, L, Hq], the share of exact attention's mass on computed
        pairs, with the queries and keys of the running sparse model; "busiest" fp32 [N, L], blocks
        of the busiest of 8 ranks of a striped ring over those of the mean rank, or NaN.
    """
    found: dict[str, list] = {"losses": [], "shares": [], "recall": [], "busiest": []}
    for tokens in texts:
        shares, recall, busiest = [], [], []

        def attend(
            number: int, q: Array, k: Array, v: Array, shares=shares, recall=recall, busiest=busiest
        ):
            index = chooser(number, q, k)
            busiest.append(programs.busiest(index))
            shares.append(programs.shares(index))
            recall.append(programs.recall(q, k, index))
            return programs.attention(q, k, v, index)

        found["losses"].append(jax.device_get(model.losses(tokens, attend)))
        found["shares"].append(jax.device_get(shares))
        found["recall"].append(jax.device_get(recall))
        found["busiest"].append(jax.device_get(busiest))
    shares = np.moveaxis(np.array(found["shares"]), 2, 0)
    return {
        "losses": np.array(found["losses"]), "density": shares[0], "executed": shares[1],
        "recall": np.array(found["recall"]), "busiest": np.array(found["busiest"]),
    }  # fmt: skip


def summary(
    measured: dict[str, np.ndarray], dense: np.ndarray, texts: np.ndarray, kinds: Sequence[str]
) -> dict[str, Any]:
    """The numbers of one setting.

    Args:
        measured: from `measure_losses`.
        dense: fp32 [N, S - 1], the losses with dense attention.
        texts: integers [N, S].
        kinds: of text, one for each sequence.

    Returns:
        Plain numbers: shares, `keys` (computed pairs of a row, mean), recall (mean, and of the
        worst head, which is the least mean over sequences of any layer and head), `busiest` (the
        busiest of 8 ranks over the mean, mean and most of layers; None if unknown), and rises of
        the loss over dense in nats: `rise` (mean of all tokens) with `rise_error`, its standard
        error over sequences; `rise_copies` of far copies; `rise_strict` of those whose gram has
        one token more; `rise_kinds` of each kind of text.
    """
    rise = measured["losses"].astype(np.float64) - dense
    copies, strict = (_copies(texts, gram) for gram in (GRAM, STRICT_GRAM))
    of_heads = measured["recall"].mean(0)
    density = float(measured["density"].mean())
    of_sequences = rise.mean(1)
    return {
        "density": density,
        "executed": float(measured["executed"].mean()),
        "density_layers": [round(float(x), 4) for x in measured["density"].mean((0, 2))],
        "keys": density * (texts.shape[1] + 1) / 2,
        "rise": float(rise.mean()),
        "rise_error": float(of_sequences.std(ddof=1) / len(rise) ** 0.5) if len(rise) > 1 else None,
        "rise_copies": _mean(rise[copies]),
        "rise_strict": _mean(rise[strict]),
        "rise_kinds": {
            kind: float(of_sequences[[x == kind for x in kinds]].mean())
            for kind in dict.fromkeys(kinds)
        },
        "recall": float(of_heads.mean()),
        "recall_worst": float(of_heads.min()),
        "busiest": _finite(measured["busiest"].mean()),
        "busiest_most": _finite(measured["busiest"].max()),
    }


def _finite(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def baseline(dense: np.ndarray, texts: np.ndarray) -> dict[str, float | None]:
    """The dense losses themselves, and how many tokens are far copies."""
    copies, strict = (_copies(texts, gram) for gram in (GRAM, STRICT_GRAM))
    return {
        "loss": float(dense.mean(dtype=np.float64)),
        "loss_copies": _mean(dense[copies]),
        "loss_strict": _mean(dense[strict]),
        "share_copies": float(copies.mean()),
        "share_strict": float(strict.mean()),
    }


def measure_times(
    programs: Programs, chooser: Chooser, layers: Sequence[tuple], dout: Array, repeats: int,
    numbers: Sequence[int],
) -> dict[str, float]:  # fmt: skip
    """Times of one layer's attention on real queries, keys and values, in ms.

    Args:
        programs: shared.
        chooser: of the setting.
        layers: q, k and v of some layers.
        dout: gradient of the output, [1, S, Hq, D].
        repeats: a time is the median of so many.
        numbers: which layers they are.

    Returns:
        Means over the layers: of the medians of each of `PARTS` (the choice of an index, what
        kernels walk made from it, and the two passes), of all of them one after another
        (`together`, which holds less of the host's time than the parts do), and of the `density` of
        what was timed.
    """
    times = dict.fromkeys((*PARTS, "together", "density"), 0.0)
    for number, (q, k, v) in zip(numbers, layers, strict=True):
        index = chooser(number, q, k)
        parts = _whole_parts if index.composed else _parts
        runs = parts(programs, functools.partial(chooser, number, q, k), index, q, k, v, dout)
        for part, run in runs.items():
            times[part] += median_ms(run, repeats) / len(layers)
        times["density"] += float(programs.shares(index)[0].mean()) / len(layers)
    return times


def _parts(
    programs: Programs, choose: Callable[[], Index], index: Index, q: Array, k: Array, v: Array,
    dout: Array,
) -> dict[str, Callable[[], Any]]:
    """What is timed, by the names of `measure_times`."""
    built = programs.build(q, k, v, index)
    out, lse = programs.forward(q, k, v, built)

    def together() -> Any:
        built = programs.build(q, k, v, choose())
        out, lse = programs.forward(q, k, v, built)
        return programs.backward(q, k, v, dout, out, lse, built)

    return {
        "choose": choose,
        "build": functools.partial(programs.build, q, k, v, index),
        "forward": functools.partial(programs.forward, q, k, v, built),
        "backward": functools.partial(programs.backward, q, k, v, dout, out, lse, built),
        "together": together,
    }


def _whole_parts(
    programs: Programs, choose: Callable[[], Index], index: Index, q: Array, k: Array, v: Array,
    dout: Array,
) -> dict[str, Callable[[], Any]]:
    """The same of an index that no tiles say; it builds within its forward pass."""
    _, gradients = programs.whole_forward(q, k, v, index)

    def together() -> Any:
        _, gradients = programs.whole_forward(q, k, v, choose())
        return programs.whole_backward(gradients, dout)

    return {
        "choose": choose,
        "forward": functools.partial(programs.whole_forward, q, k, v, index),
        "backward": functools.partial(programs.whole_backward, gradients, dout),
        "together": together,
    }


def _copies(texts: np.ndarray, gram: int) -> np.ndarray:
    """Bool [N, S - 1], for all tokens but the first."""
    return np.stack([far_copies(tokens, gram)[1:] for tokens in texts])


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean(dtype=np.float64)) if values.size else None
