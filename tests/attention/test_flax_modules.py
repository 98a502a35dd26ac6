"""Flax attention modules with sparse attention."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from mtraining_jax import Dense, Documents, attention_fn
from tests.attention.inputs import PATTERN

BATCH, TOKENS, FEATURES = 2, 64, 16
# Our dense kernels compute the same as Flax with a causal mask.
DENSE = attention_fn(pattern=Dense(block_size=8))


def activations():
    x = np.random.default_rng(0).normal(size=(BATCH, TOKENS, FEATURES))
    return jnp.asarray(x, jnp.float32)


def nnx_module(**options):
    return nnx.MultiHeadAttention(
        num_heads=4,
        in_features=FEATURES,
        decode=False,
        rngs=nnx.Rngs(0),
        **{"num_kv_heads": 2, **options},
    )


def squares(module, x, **options):
    return jnp.square(module(x, **options)).sum()


def test_nnx_module_matches_flax_forward_and_backward():
    theirs, ours = nnx_module(), nnx_module(attention_fn=DENSE)
    reference = nnx.value_and_grad(lambda module, x: squares(module, x, is_causal=True))
    wanted = nnx.jit(reference)(theirs, activations())
    # Causal whether or not the module sets is_causal.
    actual = nnx.jit(nnx.value_and_grad(squares))(ours, activations())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        jax.tree.leaves(actual),
        jax.tree.leaves(wanted),
    )


def test_linen_module_matches_flax_with_the_same_parameters():
    module = functools.partial(linen.MultiHeadDotProductAttention, num_heads=4)
    x = activations()
    params = module().init(jax.random.key(0), x)
    mask = linen.make_causal_mask(x[..., 0])
    wanted = module().apply(params, x, mask=mask)
    for options in ({}, {"mask": np.asarray(mask)}):  # a concrete causal mask is accepted
        actual = module(attention_fn=DENSE).apply(params, x, **options)
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("batch", [1, BATCH])
def test_a_block_diagonal_mask_is_converted_to_documents(batch):
    module = functools.partial(linen.MultiHeadDotProductAttention, num_heads=4)
    x = activations()
    params = module().init(jax.random.key(0), x)
    # Distinct numbers per document; the second sequence, if there is one, ends with padding.
    segments = np.stack([np.repeat([5, 5, 7, 2], 16), np.repeat([3, 1, 0, 0], 16)])[:batch]
    mask = linen.make_causal_mask(segments) * linen.make_attention_mask(
        segments, segments, lambda a, b: (a == b) & (a > 0)
    )
    actual = module(attention_fn=DENSE).apply(params, x, mask=np.asarray(mask))
    wanted = module().apply(params, x, mask=mask)
    real = np.broadcast_to(segments > 0, x.shape[:2])
    np.testing.assert_allclose(actual[real], wanted[real], rtol=2e-5, atol=2e-5)
    q = jnp.ones((BATCH, TOKENS, 2, 8))
    with pytest.raises(ValueError, match="document 1 begins at token 20, which must be"):
        unaligned = np.arange(TOKENS) >= 20
        DENSE(q, q, q, mask=np.tri(TOKENS, dtype=bool) & (unaligned == unaligned[:, None]))
    both = attention_fn(pattern=Dense(8), documents=Documents.from_segment_ids(segments, 8))
    with pytest.raises(ValueError, match="mask separates documents, and documents= is set"):
        both(q, q, q, mask=np.asarray(mask))


def test_reading_a_mask_takes_no_memory_for_a_second_one():
    tokens = 2048
    q = jax.ShapeDtypeStruct((1, tokens, 1, 8), jnp.float32)
    causal = np.tri(tokens, dtype=np.float32)
    within = causal.copy()
    within[1024:, :1024] = 0
    for mask in (causal, within):
        tracemalloc.start()
        jax.eval_shape(functools.partial(DENSE, mask=mask), q, q, q)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10 * tokens * tokens  # bytes; the mask itself has 4 a pair


@pytest.mark.parametrize("at", [(40, 3), (10, 20), (0, 0)])
def test_a_mask_that_differs_from_the_causal_one_in_one_pair_is_refused(at):
    mask = np.tri(TOKENS, dtype=bool)
    mask[at] ^= True
    q = jnp.ones((1, TOKENS, 2, 8))
    with pytest.raises(ValueError, match="is neither causal nor|document 1 begins at token"):
        DENSE(q, q, q, mask=mask)


def test_a_mask_assumed_causal_may_be_traced():
    promised = nnx_module(attention_fn=attention_fn(pattern=PATTERN, assume_causal_mask=True))
    plain = nnx_module(attention_fn=attention_fn(pattern=PATTERN))

    @nnx.jit
    def both(promised, plain, x):
        return promised(x, mask=nnx.make_causal_mask(x[..., 0])), plain(x)

    with_mask, without = both(promised, plain, activations())
    np.testing.assert_array_equal(with_mask, without)


def test_nnx_scan_over_remat_layers_matches_a_loop():
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return nnx.MultiHeadAttention(
            num_heads=2,
            in_features=FEATURES,
            decode=False,
            keep_rngs=False,
            rngs=rngs,
            attention_fn=DENSE,
        )

    layers = create(nnx.Rngs(0).split(2))

    def scanned(layers, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def body(x, layer):
            return x + layer(x)

        return body(x, layers).var()

    def loop(layers, x):
        graphdef, state = nnx.split(layers)
        for i in range(2):
            x = x + nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], state))(x)
        return x.var()

    actual, wanted = (
        nnx.jit(nnx.value_and_grad(f))(layers, activations()) for f in (scanned, loop)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        jax.tree.leaves(actual),
        jax.tree.leaves(wanted),
    )


def test_inputs_are_cast_to_the_dtype_of_the_module():
    q, k = (jnp.ones((TOKENS, 2, 8), dtype) for dtype in (jnp.float32, jnp.bfloat16))
    assert jax.eval_shape(DENSE, q, k, q).dtype == jnp.float32
    cast = functools.partial(DENSE, dtype=jnp.bfloat16)
    assert jax.eval_shape(cast, q, k, q).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bias": jnp.zeros(())}, "bias must be None"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1 must be 0, or deterministic=True"),
        ({"module": object()}, "sow_weights must be False"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "einsum_cls must be None"),
        ({"mask": np.ones((1, 1, TOKENS, TOKENS), bool)}, "mask of shape .1, 1, 64, 64. is "
                                                           "neither causal nor causal within"),
        # A sliding window cannot be expressed as documents.
        ({"mask": np.tri(TOKENS, dtype=bool) & ~np.tri(TOKENS, k=-16, dtype=bool)},
         "sliding window of 16 tokens; it must be None: pass pattern=SlidingWindow.16. to attent"),
        # Of a prefix LM: all tokens see the first 16.
        ({"mask": np.tri(TOKENS, dtype=bool) | (np.arange(TOKENS) < 16)},
         "neither causal .* window is pattern=SlidingWindow.* prefix LM, are not supported"),
        ({"mask": np.tri(1, dtype=bool)}, "mask of shape .1, 1. is neither causal nor"),
    ],
)  # fmt: skip
def test_unsupported_arguments_raise(options, sentence):
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, 2, 8), jnp.float32)
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(functools.partial(DENSE, **options), x, x, x)


def test_a_traced_mask_decoding_and_other_results_raise():
    x = activations()
    module = nnx_module(attention_fn=DENSE)
    with pytest.raises(ValueError, match="mask is a traced array; .*assume_causal_mask=True"):
        nnx.jit(lambda m, x: m(x, mask=nnx.make_causal_mask(x[..., 0])))(module, x)
    decoding = nnx_module(attention_fn=DENSE, num_kv_heads=4)
    decoding.init_cache(x.shape)
    with pytest.raises(ValueError, match="query has 1 tokens but key has 64: .*decode=True"):
        decoding(x[:, :1], decode=True)
    with pytest.raises(ValueError, match="return_residuals is not supported by attention_fn"):
        attention_fn(return_residuals=True)
    with pytest.raises(ValueError, match="unknown option 'patern'; choose from .*, pattern, "):
        attention_fn(patern=DENSE)
    with pytest.raises(ValueError, match="pattern='dense' is not a Pattern"):
        attention_fn(pattern="dense")


def test_dropout_of_a_deterministic_module_is_ignored():
    x = activations()
    module = nnx_module(attention_fn=DENSE, dropout_rate=0.5)
    assert jax.jit(lambda x: module(x, deterministic=True))(x).shape == x.shape
