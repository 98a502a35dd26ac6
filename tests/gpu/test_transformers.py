"""The kernels of exported models in transformers. Needs torch, transformers and a GPU."""

import pytest

from tests.models.test_sparse_attention import entry_of, imported, selected_at_random

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
CUDA = "cuda"
# torch.compile imports parts of torch that warn of their own deprecation.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture(scope="module")
def attention():
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return imported()


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


@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_scores_of_probe_queries(attention, width):
    torch.manual_seed(0)
    rows, keys = (torch.randn(2, h, n, width, device=CUDA) for h, n in ((4, 200), (2, 640)))
    rows, keys = rows.bfloat16(), keys.bfloat16()
    positions = torch.randint(-1, 640, (200,), device=CUDA).sort()[0]
    exact = attention._block_lse(rows.float(), keys.float(), positions, 128, 0.1)
    found = attention._block_lse_on_gpu(rows, keys, positions, 128, 0.1)
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-5)


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
