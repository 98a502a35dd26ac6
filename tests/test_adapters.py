"""The adapters for other trainers, against a dense reference; and the trainers where installed."""

import dataclasses
import functools
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from examples import levanter_attention, maxtext_attention
from examples.trainer_attention import segment_attention
from mtraining_jax import Dense, SampledRows, Sharding, sparse_attention

BATCH, TOKENS, KV_HEADS, GROUP, DIM = 2, 64, 2, 2, 8
HEADS = KV_HEADS * GROUP
AUTO = AxisType.Auto
DENSE = Dense(block_size=16)
ROWS = SampledRows(block_size=16, tau=0.5, probe_queries_per_block=4)
CAUSAL = np.tril(np.ones((BATCH, TOKENS, TOKENS), bool))
WINDOW = CAUSAL & np.triu(np.ones_like(CAUSAL), -19)  # 20 keys
# Lengths of documents and of the padding at the end.
LENGTHS = ((5, 1, 40, 18), (33, 21, 0, 10))
IDS = np.stack([np.repeat([1, 2, 3, 0], lengths) for lengths in LENGTHS])
SAME = CAUSAL & (IDS[:, :, None] == IDS[:, None])
REAL = (IDS != 0)[..., None, None]


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    q, k, v, weights = (rng.normal(size=(BATCH, TOKENS, n, DIM)) for n in heads)
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, rng.normal(size=HEADS), weights)]


def reference(q, k, v, sinks=None, *, allowed, scale=DIM**-0.5):
    k, v = (jnp.repeat(x, GROUP, axis=2) for x in (k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    logits = jnp.where(allowed[:, None], logits, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(logits)[..., :TOKENS]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def results(attend, real=1.0, sinks=False, gradients=True):
    """Output and gradients of a function of q, k, v and perhaps sinks."""
    *arguments, weights = inputs()
    if not gradients:
        return (jax.jit(attend)(*arguments[:3]) * real,)

    @functools.partial(jax.value_and_grad, argnums=range(4 if sinks else 3), has_aux=True)
    def weighed(*arguments):
        out = attend(*arguments) * real
        return (out * weights).sum(), out

    (_, out), gradients = jax.jit(weighed)(*arguments[: 4 if sinks else 3])
    return out, *gradients


def check(attend, allowed, real=1.0, sinks=False, gradients=True, **options):
    dense = functools.partial(reference, allowed=allowed, **options)
    wanted, actual = (results(f, real, sinks, gradients) for f in (dense, attend))
    for x, y in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_segments_refuse_sharded_tokens():
    arguments = (*inputs()[:3], jnp.asarray(IDS))
    with pytest.raises(ValueError, match="cannot be sharded over tokens, here by .'x',."):
        segment_attention(
            *arguments, padding=0, max_documents=4, sharding=Sharding(sequence=("x",))
        )


class Axis(NamedTuple):
    name: str
    size: int


@dataclasses.dataclass
class Named:
    """What the adapter uses of haliax.NamedArray."""

    array: jax.Array
    axes: tuple[Axis, ...]


@dataclasses.dataclass
class Mask:
    """Levanter's AttentionMask."""

    is_causal: bool = True
    causal_offset: Any = None
    explicit_mask: Any = None
    segment_ids: Any = None
    sliding_window: int | None = None


def published(
    QPos, KPos, Key, query, key, value, mask=None, bias=None, attention_dtype=None,
    precision=None, use_flash=None, attn_backend=None, flash_block_size=None, dropout=0.0, *,
    logits_soft_cap=None, scaling_factor=None, inference=True, prng=None, attn_sink=None,
):  # fmt: skip
    """The signature of levanter's dot_product_attention."""
    return "levanter's"


SIZES = dict(batch=BATCH, position=TOKENS, key_position=TOKENS, kv_head=KV_HEADS)
SIZES |= dict(q_heads_per_group=GROUP, head_size=DIM)


def named(x, *names):
    """Transposes a [B, S, ...] array to levanter's order, heads before tokens."""
    axes = tuple(Axis(name, SIZES[name]) for name in names)
    order = [names.index(name) for name in sorted(names, key=RANK.index)]
    return Named(x.reshape([axes[i].size for i in order]).transpose(np.argsort(order)), axes)


RANK = "batch", "position", "key_position", "kv_head", "q_heads_per_group", "head_size"


@pytest.fixture
def haliax(monkeypatch):
    """A haliax with a mapping of axes that is empty unless a test sets it."""
    partitioning = types.SimpleNamespace(mapping={}, mesh=None)
    partitioning.current_thread_local_mapping = lambda: partitioning.mapping
    partitioning.physical_axis_name = lambda name: partitioning.mapping.get(name)
    partitioning.sharding_for_axis = lambda axes: types.SimpleNamespace(mesh=partitioning.mesh)
    monkeypatch.setitem(sys.modules, "haliax", types.SimpleNamespace(partitioning=partitioning))
    return partitioning


@pytest.mark.usefixtures("haliax")
class TestLevanter:
    def attend(self, q, k, v, sinks=None, mask=None, pattern=DENSE, **options):
        attention = levanter_attention.make_attention(published, max_documents=4, pattern=pattern)
        q = named(q, "batch", "kv_head", "q_heads_per_group", "position", "head_size")
        k, v = (named(x, "batch", "kv_head", "key_position", "head_size") for x in (k, v))
        if sinks is not None:
            options["attn_sink"] = named(sinks, "kv_head", "q_heads_per_group")
        mask = mask or Mask()
        out = attention(
            "position", "key_position", Axis("head_size", DIM), q, k, v, mask, **options
        )
        assert out == "levanter's" or out.axes == q.axes
        if out == "levanter's":
            return out
        return out.array.transpose(0, 3, 1, 2, 4).reshape(BATCH, TOKENS, HEADS, DIM)

    def test_causal_with_sinks_and_scale(self):
        scaled = functools.partial(self.attend, scaling_factor=0.5)
        check(scaled, CAUSAL, sinks=True, scale=0.5)

    def test_segments(self):
        ids = named(jnp.asarray(IDS) - 1, "batch", "position")
        mask = Mask(segment_ids=(ids, ids))
        check(functools.partial(self.attend, mask=mask), SAME, REAL)

    def test_segments_of_all_sequences_and_windows(self):
        mask = Mask(segment_ids=named(jnp.asarray(IDS[0]) - 1, "position"), sliding_window=20)
        first = np.broadcast_to(SAME[:1], SAME.shape)
        check(functools.partial(self.attend, mask=mask), WINDOW & first, REAL[:1], gradients=False)

    def test_sampled_rows(self):
        q, k, v = inputs()[:3]
        options = dict(scaling_factor=1.0, attention_dtype=jnp.float32)
        out = self.attend(q, k, v, pattern=ROWS, **options)
        np.testing.assert_array_equal(out, sparse_attention(q, k, v, pattern=ROWS, scale=1.0))

    def test_sharded_batch_and_heads(self, haliax):
        haliax.mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AUTO,) * 2)
        haliax.mapping = dict(batch=("x",), kv_head="y")
        check(self.attend, CAUSAL, gradients=False)
        haliax.mapping = dict(position=("x", "y"))
        check(self.attend, CAUSAL, gradients=False)
        haliax.mapping = dict(q_heads_per_group="y")
        with pytest.raises(ValueError, match="sharding over q_heads_per_group"):
            self.attend(*inputs()[:3])

    def test_a_named_backend_is_levanters(self):
        for options in (
            dict(attn_backend=types.SimpleNamespace(value="nvte")),
            dict(use_flash=False),
        ):
            assert self.attend(*inputs()[:3], **options) == "levanter's"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(bias=np.zeros(1)), "bias is not supported"),
            (dict(logits_soft_cap=30.0), "logits_soft_cap=30.0 is not supported"),
            (dict(dropout=0.1, inference=False), "dropout=0.1 is not supported"),
            (dict(mask=Mask(is_causal=False)), "needs a causal AttentionMask"),
            (dict(mask=Mask(causal_offset=np.zeros(1))), "AttentionMask.causal_offset is not"),
        ],
    )
    def test_refuses(self, options, message):
        with pytest.raises(ValueError, match=message):
            self.attend(*inputs()[:3], **options)

    def test_installs_in_each_module_of_levanter(self, monkeypatch):
        names = "levanter.layers.attention", "levanter.models.gpt2", "levanter.other"
        modules = [types.ModuleType(name) for name in names]
        for module in modules:
            vars(module)["dot_product_attention"] = published
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(modules[2])["dot_product_attention"] = "another function"
        package = types.SimpleNamespace(attention=modules[0])
        monkeypatch.setitem(sys.modules, "levanter", types.ModuleType("levanter"))
        monkeypatch.setitem(sys.modules, "levanter.layers", package)
        levanter_attention.install(pattern=DENSE)
        found = [vars(module)["dot_product_attention"] for module in modules]
        assert found[0] is found[1] is not published
        assert found[2] == "another function"


class AttentionOp:
    """What the adapter uses of MaxText's AttentionOp."""

    attention_kernel = "mtraining"
    attention_type = types.SimpleNamespace(value="global")
    attn_logits_soft_cap = None
    dropout_rate = 0.0
    use_ragged_attention = False
    sliding_window_size = None
    flash_axis_names_q = "batch", "heads", "length", "kv"
    axes = None, None, None, None

    def __init__(self, mesh=None, **options):
        self.mesh = mesh or jax.make_mesh((1, 1), ("x", "y"), axis_types=(AUTO,) * 2)
        config = dict(packing=True, dataset_type="synthetic", max_segments_per_seq=4)
        config["context_parallel_load_balance"] = True
        given = {name: options.pop(name) for name in config.keys() & options.keys()}
        self.config = types.SimpleNamespace(**config | given)
        vars(self).update(options)

    def _logical_to_mesh_axes(self, names):
        assert names == self.flash_axis_names_q
        return P(*self.axes)

    def apply_attention(
        self, query, key, value, decoder_segment_ids, segment_positions, lengths, model_mode,
        use_ragged_attention=False, previous_chunk=None, bidirectional_mask=None, sinks=None,
        indexer_mask=None, compressed_mask=None, record_max_logits=False,
        decoder_segment_ids_kv=None, *, qk_product_einsum, wv_product_einsum,
    ):  # fmt: skip
        assert qk_product_einsum is wv_product_einsum is jnp.einsum
        return "MaxText's"


class TestMaxText:
    def attend(self, q, k, v, sinks=None, op=None, ids=IDS, mode="train", pattern=DENSE, **options):
        class Extended(AttentionOp):
            apply_attention = maxtext_attention.extended(
                AttentionOp.apply_attention, "mtraining", pattern=pattern
            )

        # `AttentionOp.__call__` passes these by name.
        found = Extended(**op or {}).apply_attention(
            query=q, key=k, value=v, decoder_segment_ids=jnp.asarray(ids), segment_positions=None,
            lengths=None, model_mode=mode, use_ragged_attention=False, previous_chunk=None,
            sinks=sinks, record_max_logits=False, qk_product_einsum=jnp.einsum,
            wv_product_einsum=jnp.einsum, **options,
        )  # fmt: skip
        if found == "MaxText's":
            return found
        out, maximum, total = found
        assert maximum is total is None
        return out

    def test_causal_with_sinks_and_queries_that_are_scaled(self):
        check(self.attend, CAUSAL, sinks=True, scale=1.0)

    def test_packed(self):
        op = dict(dataset_type="grain")
        check(functools.partial(self.attend, op=op), SAME, REAL, scale=1.0)

    def test_window(self):
        op = dict(attention_type="local_sliding", sliding_window_size=20)
        check(functools.partial(self.attend, op=op), WINDOW, scale=1.0, gradients=False)

    def test_sampled_rows(self):
        q, k, v = inputs()[:3]
        out = self.attend(q, k, v, pattern=ROWS)
        np.testing.assert_array_equal(out, sparse_attention(q, k, v, pattern=ROWS, scale=1.0))

    def test_context_parallel_with_load_balance(self):
        mesh = jax.make_mesh((2, 2, 1), ("x", "y", "z"), axis_types=(AUTO,) * 3)
        op = dict(mesh=mesh, axes=(("x", "z"), "z", "y", None))
        # Rank 0 of 2 has the first and the last quarter.
        order = np.arange(TOKENS).reshape(4, -1)[[0, 3, 1, 2]].ravel()

        def attend(q, k, v):
            out = self.attend(*(x[:, order] for x in (q, k, v)), op=op)
            return out[:, np.argsort(order)]

        check(attend, CAUSAL, scale=1.0, gradients=False)

    def test_another_kernel_is_maxtexts(self):
        op = dict(attention_kernel="dot_product")
        assert self.attend(*inputs()[:3], op=op) == "MaxText's"

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(mode="prefill"), "for training, not for model_mode=prefill"),
            (dict(op=dict(attention_type="chunk")), "attention_type=chunk is not supported"),
            (dict(op=dict(attn_logits_soft_cap=50.0)), "attn_logits_soft_cap=50.0 is not"),
            (dict(op=dict(dropout_rate=0.1)), "dropout_rate=0.1 is not supported"),
            (dict(indexer_mask=np.ones(1)), "indexer_mask is not supported"),
            (dict(op=dict(dataset_type="c4", max_segments_per_seq=-1)), "needs max_segments_per"),
        ],
    )
    def test_refuses(self, options, message):
        with pytest.raises(ValueError, match=message):
            self.attend(*inputs()[:3], **options)


def installed(name):
    """A module of a trainer; its imports may warn."""
    pytest.importorskip(name.split(".")[0])
    with warnings.catch_warnings(action="ignore"):
        return pytest.importorskip(name)


def test_equals_dense_attention_of_levanter(monkeypatch):
    attention = installed("levanter.layers.attention")
    haliax = installed("haliax")
    # haliax 1.4.dev453 uses what jax 0.11 removed.
    monkeypatch.setattr(jax.core, "is_constant_dim", lambda size: True, raising=False)
    adapted = levanter_attention.make_attention(attention.dot_product_attention, pattern=DENSE)
    axis = {name: haliax.Axis(name, size) for name, size in SIZES.items()}

    def attend(dot_product_attention, mask, q, k, v):
        """As levanter's Attention calls it."""
        q = named(q, "batch", "kv_head", "q_heads_per_group", "position", "head_size")
        k, v = (named(x, "batch", "kv_head", "key_position", "head_size") for x in (k, v))
        backend = {} if dot_product_attention is adapted else dict(attn_backend=VANILLA)
        out = dot_product_attention(
            "position", "key_position", "head_size",
            *(haliax.named(x.array, tuple(axis[name] for name, _ in x.axes)) for x in (q, k, v)),
            mask, attention_dtype=jnp.float32, inference=True, **backend,
        )  # fmt: skip
        return out.array.transpose(0, 3, 1, 2, 4).reshape(BATCH, TOKENS, HEADS, DIM)

    VANILLA = attention.AttentionBackend.VANILLA
    causal = attention.AttentionMask.causal(sliding_window=20)
    ids = haliax.named(jnp.asarray(IDS) - 1, (axis["batch"], axis["position"]))
    for mask in (attention.AttentionMask.causal(), causal.with_segment_ids(ids)):
        theirs, ours = (
            results(functools.partial(attend, f, mask), REAL)
            for f in (attention.dot_product_attention, adapted)
        )
        for x, y in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_equals_dense_attention_of_maxtext(monkeypatch):
    op = installed("maxtext.layers.attention_op")
    base = Path(op.__file__).parents[1] / "configs/base.yml"
    config = installed("maxtext.configs.pyconfig").initialize(
        ["", str(base), "attention=mtraining", "hardware=cpu", "skip_jax_distributed_system=true",
         "enable_checkpointing=false", "run_name=test", "dataset_type=hf", "hf_path=text",
         "max_segments_per_seq=4"]
    )  # fmt: skip
    shape = [{"fsdp": 2, "tensor": 2}.get(axis, 1) for axis in config.mesh_axes]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(shape), config.mesh_axes)
    monkeypatch.setattr(op.AttentionOp, "apply_attention", op.AttentionOp.apply_attention)
    maxtext_attention.install(pattern=DENSE)

    def attend(kernel, kind, q, k, v, sinks):
        options = dict(num_query_heads=HEADS, num_kv_heads=KV_HEADS, dtype=jnp.float32)
        options |= dict(max_target_length=TOKENS, sliding_window_size=20, attention_type=kind)
        module = op.AttentionOp(config, mesh, kernel, rngs=nnx.Rngs(0), **options)
        positions = jnp.broadcast_to(jnp.arange(TOKENS), IDS.shape)
        return module(q, k, v, jnp.asarray(IDS), positions, "train", None, None, None, sinks)

    with mesh, linen.logical_axis_rules(config.logical_axis_rules):
        for kind in ("global", "local_sliding"):
            theirs, ours = (
                results(functools.partial(attend, kernel, op.AttentionType(kind)), REAL, True)
                for kernel in ("dot_product", "mtraining")
            )
            for x, y in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
