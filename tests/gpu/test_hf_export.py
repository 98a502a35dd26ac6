"""Exported models in transformers: the same logits as ours, and the kernels of sparse attention.

Needs torch, transformers and a GPU. Logits are compared in fp32, transformers' on the CPU.
"""

import jax
import numpy as np
import pytest

from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.huggingface.config import read_hf_config
from mtraining_jax.models.huggingface.read import load_hf
from mtraining_jax.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from mtraining_jax.models.transformer import init_model
from mtraining_jax.tools.export.write import save_hf
from tests.models.common import forward, some_tokens, tiny_spec
from tests.models.huggingface.test_sparse_attention import (
    entry_of,
    imported,
    layer_with,
    new_token,
    selected_at_random,
)
from tests.training.common import run, tiny_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
CUDA = "cuda"
# torch.compile imports parts of torch that warn of their own deprecation.
compiles = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def their_logits(folder, tokens):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.from_numpy(np.array(tokens, np.int64))).logits.numpy()


def our_logits(folder, spec, tokens):
    state = load_hf(folder, spec)
    graphdef, _ = init_model(spec, seed=0)
    positions = np.arange(tokens.shape[1], dtype=np.int32)
    return np.asarray(forward(graphdef, state, tokens, positions)[1])


def assert_same_logits(folder, spec):
    tokens = some_tokens(spec, (2, 96))
    ours, theirs = our_logits(folder, spec, tokens), their_logits(folder, tokens)
    assert ours.std() > 0.1  # something to compare
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(ours).max())


def test_transformers_loads_an_exported_run(tmp_path):
    config = tiny_config(
        tmp_path,
        run={"steps": 3},
        parallel={"nodes": 1, "devices_per_node": 1},
        checkpoint={"export_hf": True},
        model={"initializer_range": 0.2},
    )
    records = run(config)
    assert len(records) == 3
    spec = read_hf_config(config.run.folder / "hf", dtype="float32", remat="none")
    assert spec.hidden_size == config.model.hidden_size
    assert_same_logits(config.run.folder / "hf", spec)


SCALINGS = {
    "qwen2": YarnScaling(4.0, 32),
    "qwen3": LinearScaling(2.0),
    "llama": Llama3Scaling(4.0, 32),
    # For head dim 8. The sequence is longer than 32 tokens, so the second list applies.
    "phi3": LongRopeScaling(4.0, 32, None, (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0)),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MORE = {
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 8},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {"sliding_window": 24, "full_attention_interval": 2, **EXPERTS},
}


@pytest.mark.parametrize("family", FAMILIES.names)
def test_transformers_loads_sharded_files_of_every_family(family, tmp_path):
    spec = tiny_spec(
        family=family,
        tie_word_embeddings=False,
        rope_scaling=SCALINGS.get(family),
        max_position_embeddings=128,
        **MORE.get(family, {}),
    )
    state = init_model(spec, seed=jax.random.key(1))[1]
    folder = save_hf(tmp_path / "out", spec, state, max_shard_bytes=20_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same_logits(folder, spec)


@pytest.fixture(scope="module")
def attention():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return imported()


@compiles
@pytest.mark.parametrize("with_columns", [False, True])
@pytest.mark.parametrize("length", [100, 600, 640, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_flex_attention(attention, dtype, length, with_columns):
    q, k, v, blocks, columns = (x.to(CUDA) for x in selected_at_random(torch, length))
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, k, v))
    columns = columns if with_columns else None
    exact = attention._attend(q.double(), k.double(), v.double(), blocks, columns, 0.2, 128)
    found = attention._attend_on_gpu(q, k, v, blocks, columns, 0.2, 128)
    limit = 2e-2 if dtype == "bfloat16" else 2e-5
    torch.testing.assert_close(found.double(), exact, atol=limit, rtol=limit)


@compiles
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_scores_of_probe_queries(attention, width):
    torch.manual_seed(0)
    rows = torch.randn(2, 4, 500, 5, width, device=CUDA).bfloat16()
    keys = torch.randn(2, 2, 80 * 128, width, device=CUDA).bfloat16()
    positions = torch.randint(-1, 80 * 128, (2500,), device=CUDA).sort()[0].view(500, 5)
    exact = attention._block_masses(rows.float(), keys.float(), positions, 128, 0.1)
    found = attention._block_masses_on_gpu(rows, keys, positions, 128, 0.1)
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-4)
    assert found.equal(attention._block_masses_on_gpu(rows, keys, positions, 128, 0.1))


@compiles
@pytest.mark.parametrize("kind", ["sampled_rows", "xattention", "vertical_slash"])
def test_selections_are_those_of_a_cpu(attention, kind):
    q, k, *_ = selected_at_random(torch, 4000)
    q, k, options = 2 * q.bfloat16(), k.bfloat16(), attention._options(entry_of(kind, {}))
    expected = attention._select(q, k, 32**-0.5, options)
    found = attention._select(q.to(CUDA), k.to(CUDA), 32**-0.5, options)
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        # Room for blocks with equal mass up to rounding.
        assert x is None or (x.cpu() != y).float().mean() <= 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_new_tokens_attend_as_on_a_cpu(attention, dtype):
    q, *cached = (torch.tensor(x) for x in new_token(torch, 5000, dim=64))
    q, k, v = (x.to(getattr(torch, dtype)) for x in (q, *cached))
    mask = torch.ones(2, 1, 1, 5000, dtype=torch.bool)
    mask[1, ..., :131] = False
    arguments = q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), mask
    module, dense = layer_with(tau=0.8), layer_with(dense_new_tokens=True)
    expected, _ = attention.sparse_attention(module, *arguments)
    on_gpu = [x.to(CUDA) for x in arguments]
    found, _ = attention.sparse_attention(module, *on_gpu)
    limit = 2e-2 if dtype == "bfloat16" else 2e-5
    torch.testing.assert_close(found.cpu(), expected, atol=limit, rtol=limit)
    assert found.equal(attention.sparse_attention(module, *on_gpu)[0])
    assert (attention.sparse_attention(dense, *on_gpu)[0] - found).abs().max() > 5 * limit
