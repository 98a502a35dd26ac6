"""The smallest calls that cover every path of the Hopper kernels.

`sanitize.py` runs them under compute-sanitizer, `repeat.py` thousands of times. A problem is a few
steps, each one compiled program; between steps, results pass through the host. Tools that do not
track the writes of bulk copies therefore do not report results as uninitialized, and memory that a
kernel does not write becomes visible.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.selection.scores import estimate, row_scores
from pallas_kernels import DiagonalTiles, ListedTiles, backends
from pallas_kernels.decode import DecodeCall, decode
from pallas_kernels.fp8_scores import KeepRule
from pallas_kernels.key_codes import KeyCodes, block_weights, selected_blocks
from pallas_kernels.mosaic_gpu.backend import MosaicGpu
from tests.pallas_kernels.helpers import cases
from tests.pallas_kernels.helpers.cases import Size
from tests.pallas_kernels.helpers.contract import resolve_index
from tests.pallas_kernels.helpers.striped import seen_by, segmented_step, split

HOPPER = {kind: f"mosaic_gpu, {kind}" for kind in ("two backward kernels", "one backward kernel")}
DTYPES = {64: "float16", 128: "bfloat16"}
DIMS = tuple(DTYPES)
BLOCK = 128
LAST_QUERIES = 64

Values = dict[str, Any]
Step = Callable[[Values, str], Values]  # existing values, backend name -> new values


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem with one head dim.

    Attributes:
        name: name on the command line and in tables.
        kernels: the Hopper kernels that it must run, by their names in compiled programs.
        inputs: creates the inputs of the steps, a pytree of host arrays by name.
        steps: functions to compile; each gets all existing values and the backend's name.
        backend: backend of the Hopper kernels.
    """

    name: str
    kernels: tuple[str, ...]
    inputs: Callable[[], Values]
    steps: tuple[Step, ...]
    backend: str


def register_backends() -> None:
    """Registers the backends of the problems by name."""
    for kind, name in HOPPER.items():
        one = kind.startswith("one")
        backends.register(MosaicGpu(name, one_backward_kernel=one))


def problems(blocks: int = 4) -> list[Problem]:
    """Returns all problems.

    Args:
        blocks: number of 128-token blocks per sequence, even and at least 4.
    """
    register_backends()
    return [problem for dim in DIMS for problem in _of_head_dim(dim, blocks)]


def run(
    problem: Problem, backend: str, programs: Callable[[Step, Values, str], Callable] | None = None
) -> Values:
    """Computes every result of a problem, as host arrays.

    Args:
        problem: problem to run.
        backend: its backend's name.
        programs: compiles a step for values; None for `jax.jit`.
    """
    programs = programs or (lambda step, values, backend: jitted(step, backend))
    with jax.default_device(jax.devices("cpu")[0]):
        values = jax.tree.map(np.asarray, problem.inputs())
    results: Values = {}
    for step in problem.steps:
        program = programs(step, values, backend)
        results |= jax.tree.map(np.asarray, program(values))
        values = values | results
    return results


def jitted(step: Step, backend: str) -> Callable[[Values], Values]:
    """Jits a step as a program with the step's name, whichever problem it belongs to."""

    def program(values: Values) -> Values:
        return step(values, backend)

    return jax.jit(program)


def close(a: Any, b: Any) -> bool:
    """Whether results of two backends agree up to a few roundings of 8 or 11 bits."""
    return jax.tree.all(jax.tree.map(_close, a, b))


def same_bits(a: Any, b: Any) -> bool:
    """Whether results are bit-identical; NaNs are equal."""
    return jax.tree.all(
        jax.tree.map(lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes(), a, b)
    )


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    live = np.isfinite(b)
    if not np.array_equal(a[~live], b[~live]):  # lse of empty rows
        return False
    return bool(np.linalg.norm(a[live] - b[live]) <= 1e-2 * np.linalg.norm(b[live]))


def _of_head_dim(dim: int, blocks: int) -> list[Problem]:
    rng = functools.partial(np.random.default_rng, dim)
    size = Size(1, 4, 2, blocks, blocks, BLOCK, dim)
    ungrouped = Size(1, 2, 2, blocks, blocks, BLOCK, dim)
    two, one = HOPPER.values()
    forward, delta = "attention_forward", "attention_delta"
    separate = forward, delta, "attention_dkdv", "attention_dq"
    fused = forward, delta, "attention_backward"

    def attention(
        kind: str, index: Callable[[], Any], backend: str, size: Size = size, **more: Any
    ) -> Problem:
        def inputs() -> Values:
            names = ("q", "k", "v", "dout")
            values = dict(zip(names, cases.qkv_dout(rng(), size, DTYPES[dim]), strict=True))
            return values | {"index": index()} | {name: make() for name, make in more.items()}

        return Problem(
            f"{kind}-{dim}",
            fused if backend == one else separate,
            inputs,
            (_forward, _backward),
            backend,
        )

    def vertical_slash() -> Any:
        # A generator with full, crowded and empty heads, and distant corners.
        return cases.vertical_slash(
            np.random.default_rng(3), size, max_slashes=3, max_verticals=150, garbage=rng()
        )

    def lists() -> Any:
        return cases.block_sparse(rng(), size, causal=True, garbage=rng()).tiles()

    def running() -> Any:
        normal = rng().standard_normal
        shape = 1, size.seq_len, size.heads
        return normal((*shape, dim)).astype(np.float32), normal(
            (1, size.heads, size.seq_len)
        ).astype(np.float32)

    return [
        attention("columns", vertical_slash, two),
        attention("columns-fused", vertical_slash, one),
        attention("dense-fused", lambda: _dense(size), one),
        attention("ungrouped-fused", lambda: _dense(ungrouped), one, ungrouped),
        attention("lists", lists, two),
        attention(
            "lists-columns",
            lambda: cases.block_mask_with_columns(rng(), size, max_columns=size.seq_len),
            two,
            running=running,
        ),
        attention("documents", lambda: cases.documents_of_columns(size, documents=2), two),
        Problem(
            f"ring-{dim}",
            separate,
            lambda: _ring_inputs(rng(), size, vertical_slash()),
            (_ring_forward, _ring_backward),
            two,
        ),
        Problem(
            f"estimate-{dim}",
            ("estimate_index",),
            lambda: _estimate_inputs(rng(), size),
            (_estimate,),
            two,
        ),
        Problem(
            f"sampled-rows-{dim}",
            ("short_block_scores",),
            lambda: _scores_inputs(rng(), 2 * blocks, 16, BLOCK, dim, documents=True),
            (_scores,),
            two,
        ),
        Problem(
            f"strided-rows-{dim}",
            ("block_scores",),
            lambda: _scores_inputs(rng(), 10 * blocks, 8, 8, 8 * dim, documents=False),
            (_scores,),
            two,
        ),
        Problem(
            f"new-tokens-{dim}",
            ("attention_decode", "combine_decoded"),
            lambda: _decode_inputs(rng(), size),
            (_decode,),
            two,
        ),
        Problem(
            f"selecting-tokens-{dim}",
            ("code_weights", "selected_blocks"),
            lambda: _decode_inputs(rng(), size),
            (_select,),
            two,
        ),
        Problem(f"kept-blocks-{dim}", ("kept_blocks",), lambda: _weights(rng()), (_keep,), two),
    ]


def _dense(size: Size) -> DiagonalTiles:
    blocks = size.key_blocks
    return DiagonalTiles.full(size.batch, size.heads, blocks, blocks, BLOCK, causal=True)


def _parts(x: Values) -> tuple:
    """Tiles, columns and the keys and values of columns."""
    index = x["index"]
    if isinstance(index, (DiagonalTiles, ListedTiles)):
        return index, None, None
    return resolve_index(index, x["k"], x["v"])


def _forward(x: Values, backend: str) -> Values:
    tiles, columns, column_kv = _parts(x)
    plan = pallas_kernels.plan(x["q"], x["k"], tiles, columns, single_call=True, backend=backend)
    out, lse = pallas_kernels.forward(
        x["q"], x["k"], x["v"], plan, column_kv, init=x.get("running")
    )
    return {"out": out, "lse": lse}


def _backward(x: Values, backend: str) -> Values:
    tiles, columns, column_kv = _parts(x)
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    plan = pallas_kernels.plan(q, k, tiles, columns, single_call=True, backend=backend)
    delta = pallas_kernels.delta_of(x["out"].astype(dout.dtype), dout, backend=backend)
    grads = pallas_kernels.backward(
        q, k, v, dout, x["lse"], delta, plan, column_kv, dq_dtype=q.dtype, key_dtype=k.dtype
    )
    return {"delta": delta, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def _ring_inputs(rng: np.random.Generator, size: Size, index: Any) -> Values:
    """One of two ranks, with the concatenated keys of both, and its columns."""
    rank, ranks, sources = 1, 2, [1, 0]
    q, k, v, dout = cases.qkv_dout(rng, size, DTYPES[size.dim])
    _, _, column_kv = resolve_index(index, k, v)
    keys, values = (
        jnp.concatenate([split(x, ranks, size)[s] for s in sources], axis=1) for x in (k, v)
    )
    return {
        "q": split(q, ranks, size)[rank],
        "dout": split(dout, ranks, size)[rank],
        "k": keys,
        "v": values,
        "column_kv": column_kv,
        "columns": seen_by(rank, index, ranks, size.key_blocks),
        "tiles": segmented_step(index, rank, sources, ranks, size.key_blocks // ranks),
    }


def _ring_forward(x: Values, backend: str) -> Values:
    """Columns first, then tiles on top of them, concurrent with transfers."""
    q, k, v = (x[name] for name in ("q", "k", "v"))
    plan = pallas_kernels.plan(q, k, None, x["columns"], backend=backend)
    running = pallas_kernels.forward(q, k, v, plan, x["column_kv"], out_dtype="float32")
    plan = pallas_kernels.plan(q, k, x["tiles"], backend=backend)
    out, lse = pallas_kernels.forward(q, k, v, plan, init=running, overlaps_collectives=True)
    return {"out": out, "lse": lse}


def _ring_backward(x: Values, backend: str) -> Values:
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    delta = pallas_kernels.delta_of(x["out"].astype(dout.dtype), dout, backend=backend)
    results: Values = {"delta": delta}
    for name, tiles, columns, kv in (
        ("columns", None, x["columns"], x["column_kv"]),
        ("tiles", x["tiles"], None, None),
    ):
        plan = pallas_kernels.plan(q, k, tiles, columns, backend=backend)
        grads = pallas_kernels.backward(q, k, v, dout, x["lse"], delta, plan, kv)
        found = {key: getattr(grads, key) for key in ("dq", "dk", "dv", "dk_columns", "dv_columns")}
        results |= {f"{key} of {name}": g for key, g in found.items() if g is not None}
    return results


def _estimate_inputs(rng: np.random.Generator, size: Size) -> Values:
    q, k, _, _ = cases.qkv_dout(rng, size, DTYPES[size.dim])
    return {"last": q[:, -LAST_QUERIES:].transpose(0, 2, 1, 3), "k": k}


def _estimate(x: Values, backend: str) -> Values:
    last, k = x["last"], x["k"]
    blocks = k.shape[1] // BLOCK
    context = SelectionContext(jnp.arange(blocks), blocks, backend=backend)
    columns, *diagonals = estimate.softmax_scores(last[:, None], k, context)
    return {"columns": columns, "diagonals": estimate.join_diagonals(*diagonals)}


def _scores_inputs(
    rng: np.random.Generator, blocks: int, rows: int, columns: int, length: int, documents: bool
) -> Values:
    """Rows of query blocks and of key blocks; with `documents` two of them, and padding."""
    dtype = DTYPES[64] if length % 128 else DTYPES[128]
    own = np.arange(blocks)[:, None]
    places = own * columns + (np.arange(rows) + 1) * columns // rows - 1
    values = {
        "rows": jnp.asarray(rng.standard_normal((1, 2, blocks, rows, length)) * 2, dtype),
        "keys": jnp.asarray(rng.standard_normal((1, 1, blocks, columns, length)), dtype),
    }
    if documents:
        places[-1, rows // 2 :] = -1
        values["first"] = np.where(np.arange(blocks) < blocks // 2, 0, blocks // 2)[None]
        values["first"] = values["first"].astype(np.int32)
    return values | {"places": places[None].astype(np.int32)}


def _scores(x: Values, backend: str) -> Values:
    rows = x["rows"]
    # Determines the backend: queries in blocks of 128 tokens.
    like = jax.ShapeDtypeStruct((1, rows.shape[2] * BLOCK, rows.shape[1], 64), rows.dtype)
    masses, levels = row_scores.block_masses_and_levels(
        rows,
        x["keys"],
        x["places"],
        x.get("first"),
        scale=rows.shape[-1] ** -0.5,
        like=like,
        backend=backend,
    )
    seen = jnp.asarray(x["places"])[:, None] >= 0
    return {"masses": masses, "levels": jnp.where(seen, levels, 0.0)}


def _decode_inputs(rng: np.random.Generator, size: Size) -> Values:
    """One token, with a list for each key/value head, one of them shorter, and hidden keys."""
    q, k, v, _ = cases.qkv_dout(rng, size, DTYPES[size.dim])
    blocks = size.key_blocks
    seen = np.tile(np.array([0, BLOCK], np.int32), (blocks, 1))
    seen[-1] = 5, 70
    return {
        "q": q[:, -1],
        "k": k.swapaxes(1, 2),
        "v": v.swapaxes(1, 2),
        "blocks": np.tile(np.arange(blocks - 1, -1, -1, dtype=np.int32), (1, size.kv_heads, 1)),
        "counts": np.array([[blocks, *[blocks - 1] * (size.kv_heads - 1)]], np.int32),
        "seen": seen[None],
    }


def _decode(x: Values, backend: str) -> Values:
    arrays = (x[name] for name in ("q", "k", "v", "blocks", "counts", "seen"))
    out, lse = decode(DecodeCall(*arrays, x["q"].shape[-1] ** -0.5), backend)
    return {"out": out, "lse": lse}


def _select(x: Values, backend: str) -> Values:
    k, q = jnp.asarray(x["k"], jnp.float32), x["q"]
    keys = KeyCodes.of(k, k.mean(2, keepdims=True), k.std(2, keepdims=True))
    weights, totals = block_weights(q, keys, x["seen"], q.shape[-1] ** -0.5, backend)
    num_blocks, group = k.shape[2] // BLOCK, q.shape[1] // k.shape[1]
    forced, least = jnp.arange(num_blocks)[None] == 0, jnp.full(1, 1 / num_blocks, jnp.float32)
    blocks, counts = selected_blocks(weights, totals, q, forced, least, backend)
    selected = jnp.where(jnp.arange(num_blocks) < counts[..., None], blocks, -1)
    weights = weights[:, :, :num_blocks, :group]
    some = weights > -jnp.inf
    middle = jnp.where(some, weights, 0).sum(2, keepdims=True) / some.sum(2, keepdims=True)
    return {"weights": jnp.where(some, weights - middle, -1e3), "selected": selected}


def _weights(rng: np.random.Generator) -> Values:
    """Weights of 1,100 blocks for eight rows of one query block, and of all blocks."""
    weights = rng.normal(size=(1, 2, 1152, 8)) * 3
    totals = np.log2(np.exp2(weights[:, :, :1100]).sum(2))
    return {"weights": weights.astype(np.float16), "totals": totals.astype(np.float32)}


def _keep(x: Values, backend: str) -> Values:
    number = jnp.arange(1100)
    if backend != "xla":
        bounds = (jnp.full((1, 1), n, jnp.int32) for n in (1099, 0, 1, 20000))
        rule = KeepRule(*bounds, local_blocks=1, least=1, rows=8)
        words = MosaicGpu.fp8_scores.kept(x["weights"], x["totals"], rule)[:, :, 0]
        return {"kept": (words[..., number // 32] >> (number % 32).astype(jnp.uint32)) & 1}
    share = jnp.exp2(x["weights"][:, :, :1100].astype(jnp.float32) - x["totals"][:, :, None])
    mass = (share * float(2**30 / 8) + 0.5).astype(jnp.int32).sum(3)
    forced = (number < 1) | (number == 1099)
    free = jnp.where(forced, 0, mass)
    order = jnp.argsort(-free, axis=2, stable=True)
    ordered = jnp.take_along_axis(free, order, 2).astype(jnp.float32)
    missing = 20000 / 2**15 * mass.sum(2) - jnp.where(forced, mass, 0).sum(2)
    taken = jnp.cumsum(ordered, 2) - ordered < missing[..., None]
    kept = jnp.put_along_axis(forced | jnp.zeros_like(taken), order, taken, 2, inplace=False)
    return {"kept": (kept | forced).astype(jnp.uint32)}
