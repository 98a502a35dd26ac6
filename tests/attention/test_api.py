"""`sparse_attention` on one device: values, gradients, patterns, transformations, warnings."""

import dataclasses
import functools
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mtraining_jax
from mtraining_jax import (
    Dense,
    Documents,
    FixedBudget,
    FlexPrefill,
    Layout,
    MoBA,
    SampledRows,
    Sharding,
    sparse_attention,
    stripe,
    unstripe,
)
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.utils.errors import UserError
from pallas_kernels import backends
from pallas_kernels.checks import unsupported_operands
from pallas_kernels.index import BlockSparseIndex, DenseIndex
from pallas_kernels.reference import reference_attention
from pallas_kernels.xla.backend import Xla
from tests.attention.inputs import (
    BLOCK,
    HEADS,
    KV_HEADS,
    PATTERN,
    TOKENS,
    inputs,
    with_lse,
    with_residuals,
)

CLOSE = dict(rtol=2e-5, atol=2e-5)
# Compiles in half of the time of `PATTERN`.
ROWS = SampledRows(tau=0.6, probe_queries_per_block=4, block_size=BLOCK)


def loss(attend):
    """Returns gradients through the output, lse, and both; also the outputs."""

    def value(q, k, v):
        out, lse, *rest = attend(q, k, v)
        return jnp.sin(out).sum() + jnp.cos(lse).sum(), (out, lse, *rest)

    return jax.grad(value, argnums=(0, 1, 2), has_aux=True)


@functools.cache
def expected():
    """Oracle gradients, out and lse, and the index, of `PATTERN` on `inputs()`."""
    q, k, v = inputs()
    attend = functools.partial(with_residuals, pattern=PATTERN)
    gradients, (out, lse, index) = jax.jit(loss(attend))(q, k, v)
    mask = index.to_mask(TOKENS)
    oracle = jax.jit(loss(lambda q, k, v: reference_attention(q, k, v, mask)))(q, k, v)
    return (gradients, (out, lse)), oracle, index, np.asarray(mask)


def test_output_lse_and_all_gradients_match_the_oracle():
    actual, oracle, index, mask = expected()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, oracle
    )
    assert actual[1][0].dtype == jnp.float32 and actual[1][1].dtype == jnp.float32
    causal = TOKENS * (TOKENS + 1) / 2
    assert 0.05 < mask.sum() / causal / mask[:, :, 0, 0].size < 0.8
    assert index.slash_count.shape == (2, HEADS)


def test_eager_bfloat16_returns_bfloat16():
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs())
    out = sparse_attention(q, k, v, pattern=Dense(block_size=BLOCK))
    wanted, _ = reference_attention(q, k, v, jnp.tri(TOKENS, dtype=bool)[None, None])
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), wanted, rtol=2e-2, atol=2e-2)


def test_vmap_over_the_batch_matches_the_batch_in_both_orders():
    attend = functools.partial(with_lse, pattern=ROWS)
    gradients, (out, lse) = jax.jit(loss(attend))(*inputs())
    # Inputs [S, H, D] per call; gradients of each entry.
    each, (out_each, lse_each) = jax.jit(jax.vmap(loss(attend)))(*inputs())
    np.testing.assert_allclose(out_each, out, **CLOSE)
    np.testing.assert_allclose(lse_each, lse, **CLOSE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), each, gradients
    )
    whole, _ = jax.jit(loss(jax.vmap(attend)))(*inputs())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, gradients
    )


def test_extra_batch_axes_are_kept():
    q, k, v = (x[:, None] for x in inputs())
    out, lse = jax.eval_shape(functools.partial(with_lse, pattern=PATTERN), q, k, v)
    assert out.shape == q.shape and lse.shape == (2, 1, HEADS, TOKENS)


def test_layers_under_scan_and_remat_with_a_policy_match_a_plain_loop():
    x = inputs()[0][:1]
    weights = 0.3 * jax.random.normal(jax.random.key(2), (2, 3, x.shape[-1], x.shape[-1]))

    def layer(x, w):
        q, k, v = (x @ w[i] for i in range(3))
        return x + sparse_attention(q, k[:, :, ::2], v[:, :, ::2], pattern=ROWS), None

    policy = jax.checkpoint_policies.save_only_these_names("sparse_index", "attn_out", "attn_lse")

    def scanned(weights, x):
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].var()

    def loop(weights, x):
        for w in weights:
            x, _ = layer(x, w)
        return x.var()

    actual, wanted = (jax.jit(jax.value_and_grad(f))(weights, x) for f in (scanned, loop))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), actual, wanted
    )
    # Saved residuals are not recomputed: no second selection of an index.
    kept = str(jax.make_jaxpr(jax.grad(scanned))(weights, x)).count("name=sparse_index")
    everything = jax.checkpoint_policies.nothing_saveable

    def recomputed(weights, x):
        return jax.lax.scan(jax.checkpoint(layer, policy=everything), x, weights)[0].var()

    again = str(jax.make_jaxpr(jax.grad(recomputed))(weights, x)).count("name=sparse_index")
    assert kept < again


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("vertical_slash", True), ("vertical_slash", False), ("sampled_rows", False),
        ("moba", False), ("flex_prefill", True), ("flex_prefill", False),
    ],
)  # fmt: skip
def test_programs_that_forbid_promotion_are_traced(name, padded):
    pattern = {
        "vertical_slash": PATTERN,
        "sampled_rows": ROWS,
        "moba": MoBA(block_size=BLOCK, chunk_size=32, top_k=3),
        "flex_prefill": FlexPrefill(block_size=BLOCK),
    }[name]
    documents = Documents.from_lengths([[50, 40], [TOKENS]], TOKENS, BLOCK)
    documents = Documents.padded(100, TOKENS, BLOCK) if padded else documents

    def value(q, k, v):
        return sparse_attention(q, k, v, pattern=pattern, documents=documents).sum()

    arrays = inputs()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(jax.grad(value, argnums=(0, 1, 2)), *arrays)
        with pytest.raises(ValueError, match="no available implicit dtype promotion path"):
            arrays[0] + jnp.int32(1)


def test_a_block_sparse_index_is_accepted_as_pattern():
    blocks = TOKENS // BLOCK
    mask = np.random.default_rng(0).random((2, HEADS, blocks, blocks)) < 0.3
    mask |= np.eye(blocks, dtype=bool)
    index = BlockSparseIndex.from_block_mask(jnp.asarray(mask), BLOCK)
    out = jax.jit(sparse_attention)(*inputs(), pattern=index)
    wanted, _ = reference_attention(*inputs(), index.to_mask(TOKENS))
    np.testing.assert_allclose(out, wanted, **CLOSE)


def test_non_causal_dense_attention_allows_another_key_length():
    q, k, v = inputs()
    dense = Dense(block_size=BLOCK)
    attend = functools.partial(sparse_attention, pattern=dense)
    out = jax.jit(functools.partial(attend, causal=False))(q[:, :BLOCK], k, v)
    wanted, _ = reference_attention(q[:, :BLOCK], k, v, jnp.ones((2, HEADS, BLOCK, TOKENS), bool))
    np.testing.assert_allclose(out, wanted, **CLOSE)
    _, _, index = jax.jit(functools.partial(with_residuals, pattern=dense))(q, k, v)
    assert (index.to_mask(TOKENS) == np.tri(TOKENS, dtype=bool)).all()


def test_permuted_tokens_attend_to_the_same_tokens():
    (_, (out, lse)), _, index, _ = expected()
    order = np.random.default_rng(3).permutation(TOKENS)
    shuffled = [x[:, order] for x in inputs()]
    attend = functools.partial(with_residuals, pattern=PATTERN, sharding=Sharding(order=order))
    actual_out, actual_lse, actual_index = jax.jit(attend)(*shuffled)
    np.testing.assert_allclose(actual_out, out[:, order], **CLOSE)
    np.testing.assert_allclose(actual_lse, lse[:, :, order], **CLOSE)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, actual_index, index))


def test_a_layout_for_many_devices_is_accepted_on_one():
    (_, (out, _)), *_ = expected()
    layout = Layout("striped", TOKENS, 4, BLOCK)
    striped = [stripe(x, layout) for x in inputs()]
    attend = functools.partial(sparse_attention, pattern=PATTERN, sharding=Sharding(order=layout))
    actual = jax.jit(attend)(*striped)
    np.testing.assert_allclose(unstripe(actual, layout), out, **CLOSE)


def test_stripe_reorders_any_tree_and_unstripe_undoes_it():
    layout = Layout("striped", 8, 2, 2)
    tree = {"tokens": np.arange(8)[None], "x": jnp.arange(8.0)[None, :, None]}
    striped = stripe(tree, layout)
    assert striped["tokens"].tolist() == [[0, 1, 4, 5, 2, 3, 6, 7]]
    assert isinstance(striped["tokens"], np.ndarray) and isinstance(striped["x"], jax.Array)
    assert jax.tree.all(jax.tree.map(np.array_equal, unstripe(striped, layout), tree))
    assert stripe(np.arange(8), layout, axis=0).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    with pytest.raises(ValueError, match=r"x has shape \(1, 8\); .* 8 tokens.*axis=0"):
        stripe(tree["tokens"], layout, axis=0)


def shaped(q=(2, TOKENS, HEADS, 8), k=None, v=None, dtype=jnp.float32, k_dtype=None):
    k = (*q[:-2], KV_HEADS, q[-1]) if k is None else k
    v = k if v is None else v
    return (
        jax.ShapeDtypeStruct(q, dtype),
        jax.ShapeDtypeStruct(k, k_dtype or dtype),
        jax.ShapeDtypeStruct(v, k_dtype or dtype),
    )


@dataclasses.dataclass
class NotFrozen(mtraining_jax.Pattern):
    block_size: int = 8


@dataclasses.dataclass(frozen=True)
class OwnTau(mtraining_jax.Pattern):
    """Not made by `options`, so its values are not validated."""

    tau: float = 0.9
    block_size: int = 8


@dataclasses.dataclass(frozen=True)
class Mistaken(mtraining_jax.Pattern):
    """Its `select` does not return a Selection."""

    block_size: int = 8

    def select(self, q, k, context):
        return None


@pytest.mark.parametrize(
    ("arrays", "options", "sentence"),
    [
        (shaped((2, 100, 6, 8)), {}, "q has 100 tokens; expected a multiple of 8 .block_size=8., "
                                     "such as 96 or 104"),
        (shaped((2, 5, 6, 8)), {}, "q has 5 tokens; .* such as 8"),
        (shaped((2, 64, 6, 8)), {"pattern": mtraining_jax.VerticalSlash()},
         "q has 64 tokens; expected a multiple of 128 .* such as 128"),
        (shaped((64, 8)), {}, r"q has shape \(64, 8\); expected \[batch, tokens, heads, dim\]"),
        (shaped((2, 64, 4, 8)), {}, "q has 4 heads; .* multiple of the 3 heads of k.* 3 or 6"),
        (shaped((64, 3, 8), k=(64, 2, 8)), {}, "q has 3 heads; .* multiple of the 2 heads of k"),
        (shaped(dtype=jnp.int32), {}, "q has dtype int32; it must be bfloat16, float16 or float32"),
        (shaped(dtype=jnp.float8_e4m3fn), {}, "q has dtype float8_e4m3fn; it must be bfloat16"),
        (shaped(k_dtype=jnp.bfloat16), {}, "k has dtype bfloat16 but q has float32"),
        (shaped(v=(2, TOKENS, KV_HEADS, 16)), {}, "v has shape .* but k has"),
        (shaped(k=(2, TOKENS, KV_HEADS, 16)), {}, "k has head dim 16 but q has 8"),
        (shaped(k=(1, TOKENS, KV_HEADS, 8)), {}, r"k has batch axes \(1,\) but q has \(2,\)"),
        (shaped(k=(2, 2 * TOKENS, KV_HEADS, 8)), {}, "k has .* tokens but q has .*; causal"),
        (shaped(), {"scale": -1.0}, "scale=-1.0 must be a positive number"),
        (shaped(), {"scale": "a"}, "scale='a' must be a positive number"),
        (shaped(), {"sharding": Sharding(batch=3)}, ".3,. but no mesh: set sharding.mesh"),
        (shaped((0, TOKENS, 4, 8), k=(0, TOKENS, 2, 8)), {}, "q has shape .* empty axes are not"),
        (shaped(), {"pattern": None}, "pattern=None is not a Pattern, such as SampledRows"),
        (shaped(), {"pattern": FixedBudget(budget_file="budgets.json")},
         r"FixedBudget\(...\) has no arrays yet; pass one layer of pattern.bind\(ModelSizes"),
        (shaped(), {"pattern": mtraining_jax.Dense}, r"or an index; did you mean Dense\(\)\?"),
        (shaped(), {"pattern": NotFrozen()}, "NotFrozen.* cannot be hashed .*frozen dataclass"),
        (shaped(), {"pattern": OwnTau(tau=jnp.float32(1))},
         "OwnTau.* cannot be hashed .*numbers instead of JAX arrays"),
        (shaped(), {"causal": "no"}, "causal='no' must be True or False"),
        (shaped(), {"causal": False}, "causal=False is not supported by Vert.*; use pattern=Dense"),
        (shaped(), {"sharding": Sharding(order="stripes")},
         "sharding.order='stripes' must be one of striped, zigzag"),
        (shaped(), {"sharding": Sharding(order=Layout("striped", 2 * TOKENS, 2, 8))},
         "sharding.order has seq_len=256"),
        (shaped(), {"sharding": Sharding(order=np.zeros(TOKENS, int))},
         "sharding.order must contain each of 0 .. 127"),
        (shaped(), {"sharding": Sharding(order=np.arange(4))},
         r"sharding.order is int64 \[4\]; expected a Layout, or integers \[128\]"),
        (shaped(), {"sharding": "node"}, "sharding is a str; it must be a mtraining_jax.Sharding"),
        (shaped(), {"backend": "mosaic_gpu"}, "backend='mosaic_gpu' cannot run here: no GPU"),
        (shaped(), {"sharding": Sharding(sequence="x")},
         "sharding.sequence=..x',. but no mesh: set sharding.mesh"),
        (shaped(), {"pattern": FixedBudget(np.zeros(3, int), np.zeros(3, int), 8, 8)},
          r"pattern.verticals has shape \(3,\); expected one entry for each of the 6 query"),
        (shaped(), {"pattern": FixedBudget(np.zeros(6), np.zeros(6, int), 8, 8)},
         "verticals or slashes are float.*; they must be integers"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise(arrays, options, sentence):
    options = {"pattern": PATTERN, **options}
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(functools.partial(sparse_attention, **options), *arrays)


def test_an_incomplete_pattern_class_raises():
    with pytest.raises(ValueError, match=r"max_slashes='8' must be an integer \(at least 0\)"):
        FixedBudget(np.zeros(4, int), np.zeros(4, int), 8, "8")
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        Mistaken(block_size=0)

    @dataclasses.dataclass(frozen=True)
    class Unfinished(mtraining_jax.Pattern):
        block_size: int = 8

    @dataclasses.dataclass(frozen=True)
    class Short(Unfinished):
        def select(self, q, k):
            return None

    @dataclasses.dataclass(frozen=True)
    class Returns(Unfinished):
        result: object = None

        def select(self, q, k, context):
            return mtraining_jax.Selection(self.result)

    for pattern, sentence in (
        (Mistaken(), "Mistaken.select returned NoneType; it must return Selection"),
        (Returns(), "Returns.select returned Selection of NoneType; it must return Selection"),
        (Returns(result=DenseIndex(16)), "index with block_size=16; block_size=8 is needed"),
        (Returns(result=DenseIndex(8, causal=False)), "index with causal=False; causal=True is"),
        (Unfinished(), r"Unfinished must implement select\(self"),
        (Short(), r"Short has select\(self, q, k\); it must be select\(self, q, k, context\)"),
    ):
        with pytest.raises(UserError, match=sentence):
            jax.eval_shape(functools.partial(sparse_attention, pattern=pattern), *shaped())


def test_arguments_that_are_not_arrays_raise():
    with pytest.raises(ValueError, match=r"q is a list; .*array \[\.\.\., tokens, heads, dim\]"):
        sparse_attention([1], [2], [3])
    with pytest.raises(ValueError, match="sharding.mesh='x' must be a jax.sharding.Mesh"):
        sparse_attention(*shaped(), pattern=PATTERN, sharding=Sharding("x"))


def test_traced_settings_and_an_index_of_another_batch_raise():
    def attend(extra, name):
        return sparse_attention(*inputs(), pattern=PATTERN, **{name: extra})

    with pytest.raises(ValueError, match="scale is a traced array; .* multiply q"):
        jax.eval_shape(functools.partial(attend, name="scale"), jnp.float32(1))
    with pytest.raises(ValueError, match="sharding.order is a traced array; .* such as a Layout"):
        jax.eval_shape(lambda x: attend(Sharding(order=x), "sharding"), jnp.arange(TOKENS))
    _, _, index, _ = expected()
    with pytest.raises(ValueError, match=r"pattern.slash_blocks has .*\(2, 6, .* = \[1, 6\]"):
        sparse_attention(*(x[:1] for x in inputs()), pattern=index)
    with pytest.raises(ValueError, match="pattern is an index of 128 tokens, but q has 64"):
        jax.eval_shape(functools.partial(sparse_attention, pattern=index), *shaped((2, 64, 6, 8)))


def traced_for(device_kind, dtype, head_dim, tokens):
    """Traces a call for a GPU that does not have to exist on this machine."""
    device = jax.sharding.AbstractDevice(device_kind, 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    arrays = shaped((1, tokens, 6, head_dim), dtype=dtype)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(functools.partial(sparse_attention, pattern=Dense(block_size=32)), *arrays)


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_unsupported_gpu_call_warns_once(caplog):
    with caplog.at_level(logging.INFO):
        for tokens in (32, 64):
            traced_for("NVIDIA of the test", jnp.float16, 40, tokens)
    (message,) = warnings_in(caplog)
    assert "XLA backend" in message and "head dim 40 (must be 64, 128, 192 or 256)" in message


def test_a_cpu_is_not_warned(caplog):
    with caplog.at_level(logging.INFO):
        jax.eval_shape(
            functools.partial(sparse_attention, pattern=Dense(block_size=32)),
            *shaped((1, 96, 6, 24)),
        )
    assert not warnings_in(caplog)


def test_importing_the_package_does_not_load_jax_until_a_name_is_used():
    code = (
        "import sys, mtraining_jax; assert 'jax' not in sys.modules; "
        "assert set(mtraining_jax._MODULES) <= set(dir(mtraining_jax)); "
        "mtraining_jax.sparse_attention; assert 'jax' in sys.modules; "
        "from mtraining_jax import *; assert Layout is mtraining_jax.Layout; "
        # It takes seconds to import and is needed on Hopper GPUs only.
        "assert 'jax.experimental.pallas.mosaic_gpu' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in mtraining_jax._MODULES:
        assert getattr(mtraining_jax, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'dense'"):
        mtraining_jax.dense  # noqa: B018


class _Widths(Xla):
    """A backend for heads of 64 and 128 only, which notes those that it gets."""

    name = "widths"

    def __init__(self):
        self.seen = set()

    def unsupported(self, q, block_size):
        return unsupported_operands(jax.ShapeDtypeStruct(q.shape, jnp.bfloat16), block_size)

    def plan(self, q, k, tiles, columns, *, single_call):
        self.seen.add(q.shape[-1])
        return super().plan(q, k, tiles, columns, single_call=single_call)


@pytest.mark.parametrize("devices", [1, 2])
def test_heads_without_kernels_are_padded_with_zeros(devices):
    widths = _Widths()
    backends.register(widths)
    rng = np.random.default_rng(0)
    shapes = [(1, 512, heads, 24) for heads in (2, 1, 1, 2)]
    q, k, v, dout = (jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes)
    layout = Layout("contiguous", 512, devices, 128)
    sharding = None if devices == 1 else Sharding(make_mesh(1, 1, devices), order=layout)

    @functools.partial(jax.jit, static_argnums=0)
    def both(backend, q, k, v, dout):
        attend = functools.partial(
            sparse_attention, pattern=DenseIndex(128), backend=backend, sharding=sharding
        )
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    for found, expected in zip(*(both(x, q, k, v, dout) for x in ("widths", "xla")), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert widths.seen == {64}
