"""Measures the cases, and compares what they give with what bits.json holds.

Indices are integers and the same everywhere. Floating point depends on the instructions that XLA
and its libraries choose for a processor, so bits are compared where `probe` gives the recorded
result, and otherwise the samples.
"""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.golden import adapter, cases

FILE = Path(__file__).with_name("bits.json")
HOW = "if that is intended, run `python -m tests.golden.write` and say in the commit why"
# Numbers have moved in their last bits up to these limits: samples of an array, in ulp of its
# largest value; its sum of absolute values, relative; loss and gradient norm of a step, in ulp.
_SAMPLE_ULP = 4
_SUM = {"float32": 1e-6, "bfloat16": 1e-4}
_STEP_ULP = 32
_SAMPLES = 16

Entry = dict[str, Any]


def digest(*arrays: np.ndarray) -> str:
    """Returns the start of a SHA-256 of values, shapes and dtypes."""
    found = hashlib.sha256()
    for x in arrays:
        found.update(f"{x.dtype} {x.shape} ".encode() + np.ascontiguousarray(x).tobytes())
    return found.hexdigest()[:16]


def environment() -> Entry:
    """Returns what bits depend on apart from the code: libraries, inputs and processor."""
    return {
        "jaxlib": importlib.metadata.version("jaxlib"),
        "inputs": digest(*cases.inputs().values()),
        "probe": probe(),
    }


@functools.cache
def probe() -> str:
    """Digest of a step of attention and MLP in plain JAX, without the package."""
    arrays = cases.inputs()

    def loss(q, k, v, w):
        k, v = (jnp.repeat(x, cases.HEADS // cases.KV_HEADS, axis=2) for x in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * 0.3
        high = logits.max(-1, keepdims=True)
        weights = jnp.exp(logits - high)
        total = weights.sum(-1, keepdims=True)
        out = jnp.einsum("bhqk,bkhd->bqhd", (weights / total).astype(v.dtype), v)
        x = out.reshape(*out.shape[:2], -1).astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        x = jax.nn.silu(x @ w) + jnp.tanh(x @ w[::-1]) * jnp.sqrt(jnp.abs(x) + 0.1)
        found = jax.nn.logsumexp(x @ w.T, axis=-1)
        return found.sum() + (jnp.log(total) + high).sum(), (logits, x, found, jnp.cumsum(x, 1))

    def run(q, k, v):
        w = jnp.asarray(arrays["dout"][0, :64].reshape(64, 64), jnp.float32)
        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, w)

    both = [
        jax.jit(run)(*(arrays[name].astype(dtype) for name in "qkv"))
        for dtype in (np.float32, ml_dtypes.bfloat16)
    ]
    return digest(*map(np.asarray, jax.tree.leaves(both)))


def attention_entry(name: str) -> Entry:
    """Runs a case of attention."""
    pattern, fields, options = cases.ATTENTION[name]
    given, real = cases.arguments(**options)
    results = adapter.attention(pattern, fields, **given)
    shape = cases.BATCH, cases.HEADS, cases.TOKENS, cases.TOKENS
    mask = np.broadcast_to(results.index, shape)
    pairs = [x[:, row][:, :, row] for x, row in zip(mask, real, strict=True)]
    entry: Entry = {"index": {"digest": digest(*pairs), "pairs": sum(int(x.sum()) for x in pairs)}}
    for which in ("out", "lse", "dq", "dk", "dv"):
        x = getattr(results, which)
        entry[which] = _summary(np.moveaxis(x, 1, 2)[real] if which == "lse" else x[real])
    if results.dsinks is not None:
        entry["dsinks"] = _summary(results.dsinks)
    return entry


def training_entry(name: str, folder: Path) -> Entry:
    """Runs a case of training; losses and norms of gradients as hexadecimal floats."""
    table, records = cases.configuration(name, folder), []
    if name.startswith("resumed"):
        records += adapter.train(table | {"run": table["run"] | {"steps": cases.STEPS // 2}})
    records += adapter.train(table)
    return {which: " ".join(_hex(x[which]) for x in records) for which in ("loss", "grad_norm")}


def _summary(x: np.ndarray) -> Entry:
    """Returns a digest of all bits, and numbers that show how far two arrays are apart."""
    values = x.astype(np.float64).ravel()
    return {
        "digest": digest(x),
        "type": f"{x.dtype} {list(x.shape)}",
        "sum_abs": _hex(np.abs(values).sum()),
        "max_abs": _hex(np.abs(values).max()),
        # Spread by a prime, over all tokens, heads and dimensions.
        "samples": " ".join(_hex(values[i * 7919 % x.size]) for i in range(min(_SAMPLES, x.size))),
    }


def _hex(value: float) -> str:
    """Returns `float.hex` without trailing zeros."""
    mantissa, p, exponent = float(value).hex().partition("p")
    return f"{mantissa.rstrip('0')}{p}{exponent}" if p else mantissa


def read() -> Entry:
    return json.loads(FILE.read_text(encoding="utf-8"))


def compares_bits(recorded: Entry) -> bool:
    return recorded["environment"] == environment()


def differences(recorded: Entry, found: Entry, bits: bool) -> Iterator[str]:
    """Says what moved in one case, and how far; without `bits`, last bits may differ."""
    for which in recorded | found:
        old, new = recorded.get(which), found.get(which)
        if old == new:
            continue
        if old is None or new is None:
            yield f"{which} is {'new' if old is None else 'gone'}"
        elif which == "index":
            yield f"index moved: it computes {new['pairs']} pairs and computed {old['pairs']}"
        else:
            few, sentence = _distance(old, new)
            if bits or not few:
                how = "moved in its last bits" if few else "is another result"
                yield f"{which} {how}: {sentence}"


def _distance(old: Entry | str, new: Entry | str) -> tuple[bool, str]:
    """Returns whether only last bits differ, and a sentence with numbers."""
    if isinstance(old, str) or isinstance(new, str):
        return _distance_of_steps(old, new)
    if old["type"] != new["type"]:
        return False, f"{new['type']}, was {old['type']}"
    dtype = old["type"].split()[0]
    a, b = _floats(old["samples"]), _floats(new["samples"])
    moved, largest = np.abs(b - a), float.fromhex(old["max_abs"])
    own, apart = (moved / _ulp(x, dtype) for x in (a, largest))
    sums = float.fromhex(old["sum_abs"]), float.fromhex(new["sum_abs"])
    change = abs(sums[1] - sums[0]) / sums[0]
    sentence = (
        f"{np.count_nonzero(moved)} of {a.size} samples differ, by up to {own.max():.3g} ulp of "
        f"their own and {apart.max():.3g} ulp of the largest value; the sum of absolute values "
        f"changes by {change:.1e} of itself"
    )
    return bool(apart.max() <= _SAMPLE_ULP and change <= _SUM[dtype]), sentence


def _distance_of_steps(old: str, new: str) -> tuple[bool, str]:
    a, b = _floats(old), _floats(new)
    if a.size != b.size:
        return False, f"{b.size} steps, were {a.size}"
    apart = np.abs(b - a) / _ulp(a, "float32")
    first = int(np.argmax(a != b)) + 1
    listed = ", ".join(f"{x:.3g}" for x in apart)
    return bool(apart.max() <= _STEP_ULP), f"from step {first} on; steps differ by {listed} ulp"


def _floats(text: str) -> np.ndarray:
    return np.array([float.fromhex(x) for x in text.split()])


def _ulp(x: Any, dtype: str) -> Any:
    """Returns the distance of values to the next larger one of a dtype."""
    return np.ldexp(1.0, np.frexp(x)[1] - 1 - ml_dtypes.finfo(dtype).nmant)
