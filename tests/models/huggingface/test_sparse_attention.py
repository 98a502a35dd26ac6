"""Exported models attend in transformers as here; most tests need torch and transformers."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtraining_jax import Engine, GenerateOptions
from mtraining_jax.attention.sharded import select_pairs
from mtraining_jax.documents import Documents
from mtraining_jax.models.huggingface.config import SPARSE_ENTRY, sparse_entry
from mtraining_jax.patterns.base import ModelSizes
from mtraining_jax.patterns.dense import Dense
from mtraining_jax.patterns.sampled_rows import SampledRows
from mtraining_jax.patterns.vertical_slash import VerticalSlash
from mtraining_jax.patterns.xattention import XAttention
from mtraining_jax.selection.context import SelectionContext
from mtraining_jax.tools.export import write
from mtraining_jax.tools.export.write import save_hf
from pallas_kernels import key_codes
from pallas_kernels.key_codes import KeyCodes
from tests.models.common import drawn, tiny_spec
from tests.models.huggingface.new_tokens import attended, selected_blocks

FILE = Path(write.__file__).with_name("sparse_attention.py")
KINDS = {"sampled_rows": SampledRows, "xattention": XAttention, "vertical_slash": VerticalSlash}
NAME = "mtraining_sparse"
LENGTH = 1000  # the last of eight blocks ends with padding
VERTICALS = {
    "top_p": 0.5, "max_slashes": 4, "max_verticals": 70, "min_slashes": 1, "min_verticals": 8,
    "sink_tokens": 4,
}  # fmt: skip
MORE_VERTICALS = VERTICALS | {"top_p": 0.1, "min_verticals": 200, "max_verticals": 200}
ROWS = {"tau": 0.5, "local_blocks": 1}
NEW_TOKENS = ROWS | {"tau": 0.8, "min_sparse_tokens": 0}
ALL_ROWS = ROWS | {
    "sink_blocks": 2, "min_block_mass": 0.05, "random_block_prob": 0.1,
    "dense_prefix_tokens": 200, "dense_suffix_tokens": 150,
}  # fmt: skip
CASES = [
    ("sampled_rows", ROWS),
    ("sampled_rows", ALL_ROWS),
    ("xattention", ROWS | {"dense_suffix_tokens": 1}),
    ("vertical_slash", VERTICALS),
    ("vertical_slash", VERTICALS | {"preset": "paper"}),
]
SPEC = tiny_spec(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def attention(torch):
    return imported()


def imported():
    """Imports the file, as a user does from the folder."""
    spec = importlib.util.spec_from_file_location("sparse_attention", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry_of(kind, options):
    return sparse_entry(kind, KINDS[kind](**options), "llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "hf"
    how = {"dtype": "float32", "sparsity": entry_of("sampled_rows", ROWS)}
    return save_hf(path, SPEC, drawn(SPEC)[1], **how)


def test_the_folder_names_the_pattern_and_has_the_code(folder, tmp_path):
    files = {"config.json", "model.safetensors", "sparse_attention.py"}
    assert {path.name for path in folder.iterdir()} == files
    assert (folder / FILE.name).read_text() == FILE.read_text()
    written = json.loads((folder / "config.json").read_text())[SPARSE_ENTRY]
    pattern = SampledRows(**ROWS, dense_suffix_tokens=128)
    assert written == {"kind": "sampled_rows", **vars(pattern)}

    # The next training may be with another pattern.
    again = save_hf(tmp_path / "dense", SPEC, drawn(SPEC)[1], like=folder)
    assert SPARSE_ENTRY not in json.loads((again / "config.json").read_text())
    assert not (again / FILE.name).exists()


def test_entries_are_only_of_what_the_file_supports():
    assert sparse_entry("dense", Dense(), "llama") is None
    assert sparse_entry("sampled_rows", SampledRows(), "gpt_oss") is None
    assert sparse_entry("my:Pattern", SampledRows(), "llama") is None
    assert sparse_entry("sampled_rows", SampledRows(columns=128), "llama") is None
    suffix = sparse_entry("xattention", XAttention(dense_suffix_tokens=0), "llama")
    assert suffix is not None and suffix["dense_suffix_tokens"] == 0

    # The file, which cannot be imported without torch, lists the options of each kind.
    tree = ast.parse(FILE.read_text())
    tables = [x for x in tree.body if isinstance(x, ast.Assign) and "_OPTIONS" in ast.unparse(x)]
    code = [x for x in tree.body if isinstance(x, ast.Assign) and x.lineno < tables[0].lineno]
    found = {}
    exec(compile(ast.Module([*code, tables[0]], []), str(FILE), "exec"), found)
    options = {kind: sorted(text.split()) for kind, text in found["_OPTIONS"].items()}
    assert options == {kind: sorted(entry_of(kind, {})) for kind in KINDS}
    imports = {x for node in ast.walk(tree) if isinstance(node, ast.Import) for x in node.names}
    assert {x.name.partition(".")[0] for x in imports} == {"torch", "triton"}


def some_queries_and_keys(heads=(4, 2), length=LENGTH, dim=16):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, length, n, dim)).astype(np.float32) for n in heads)
    return 3 * q, k


@pytest.mark.parametrize(("kind", "options"), [*CASES, ("vertical_slash", MORE_VERTICALS)])
def test_the_selection_is_the_same(attention, torch, kind, options):
    q, k = some_queries_and_keys()
    num_blocks, padded = 8, 1024
    pattern = KINDS[kind](**options).bind(ModelSizes(1, 4, padded))
    blocks = jnp.arange(num_blocks, dtype=jnp.int32)
    documents = Documents.padded(LENGTH, padded)
    context = SelectionContext(blocks, num_blocks, documents=documents)
    select = jax.jit(lambda q, k: select_pairs(pattern, q, k, context).index)
    padding = ((0, 0), (0, padded - LENGTH), (0, 0), (0, 0))
    index = select(*(jnp.pad(x, padding) for x in (q, k)))
    entry = attention._options(entry_of(kind, options))
    entry.dense_suffix_tokens = options.get("dense_suffix_tokens", 0)
    turned = (torch.tensor(x).transpose(1, 2) for x in (q, k))
    kept, columns = attention._select(*turned, 16**-0.5, entry)
    rows = torch.arange(LENGTH)
    seen = kept[:, :, rows // 128][..., rows // 128]
    if columns is not None:
        seen |= columns[:, :, None]
    seen &= rows[:, None] >= rows
    every = jnp.arange(LENGTH, dtype=jnp.int32)
    computed = np.asarray(index.computes(every, blocks))
    computed = np.broadcast_to(computed, (*computed.shape[:4], 128)).reshape(2, 4, LENGTH, padded)
    expected = np.tril(computed[..., :LENGTH])
    # Room for two blocks with equal mass up to rounding.
    assert (seen.numpy() != expected).mean() <= 0.005
    assert expected.mean() < 0.45  # of 0.5


@pytest.fixture
def load(attention, torch, tmp_path, folder):
    """Loads the model with a pattern in transformers, and as an engine."""
    transformers = pytest.importorskip("transformers")

    def both(kind, options, answers="dense", **changes):
        entry = entry_of(kind, options) | changes
        path = save_hf(
            tmp_path / "hf", SPEC, drawn(SPEC)[1], dtype="float32", replace=True, sparsity=entry
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation=NAME)
        fields = {"kind": kind, **options, "devices_per_node": 1}
        overrides = {
            f"{'parallel' if x == 'devices_per_node' else 'sparsity'}.{x}": value
            for x, value in fields.items()
        }
        how = {"dtype": "float32", "overrides": overrides, "answers": answers}
        return model.eval(), Engine.load(path, attention="sparse", **how)

    return both


def answer(torch, model, ids, **more):
    """Generates six tokens greedily: their ids and log-probabilities."""
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, **more}
    out = model.generate(torch.tensor(ids[None]), return_dict_in_generate=True, **how)
    new = out.sequences[0, len(ids) :]
    found = torch.log_softmax(torch.cat(out.logits), -1).gather(1, new[:, None])
    return new.numpy(), found[:, 0].numpy()


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_losses_and_generated_tokens_are_the_same(load, torch, kind, options):
    suffix = {} if kind == "vertical_slash" else {"dense_suffix_tokens": 140}
    model, engine = load(kind, options | suffix, dense_new_tokens=True)
    ids = np.random.default_rng(1).integers(0, SPEC.vocab_size, LENGTH + 1)
    with torch.no_grad():
        logits = model(torch.tensor(ids[None, :-1])).logits[0]
        dense = model.set_attn_implementation("sdpa")
        dense = model(torch.tensor(ids[None, :-1])).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    np.testing.assert_allclose(losses.numpy(), engine.token_losses(ids), atol=2e-4, rtol=1e-4)
    assert (logits - dense).abs().max() > 0.1  # the pattern matters

    # Prefill is sparse and each new token sees all earlier ones, as the engine's do.
    model.set_attn_implementation(NAME)
    found = engine.generate(ids[:-1], GenerateOptions(max_new_tokens=6))
    new, log_probs = answer(torch, model, ids[:-1])
    assert tuple(new) == found.tokens
    np.testing.assert_allclose(log_probs, engine.forced(ids[:-1], new).log_probs, atol=2e-4)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert (answer(torch, model, ids[:-1], **static)[0] == new).all()


def new_token(torch, length, heads=(6, 2), dim=16):
    """A query [B, Hq, D], and keys and values [B, S, Hk, D]; few keys have most of the mass."""
    rng = np.random.default_rng(length)
    q = rng.normal(size=(2, heads[0], dim)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, heads[1], dim)).astype(np.float32)
    return 2 * q, k, v


def layer_with(**options):
    """A layer with the pattern, as the attention function sees it."""
    entry = entry_of("sampled_rows", {"min_sparse_tokens": 0}) | options
    return SimpleNamespace(
        config=SimpleNamespace(sparse_attention=entry), num_key_value_groups=3, is_causal=True
    )


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (1, {"tau": 0.5}),
        (640, {"tau": 0.8, "sink_blocks": 2, "local_blocks": 1}),
        (1000, {"tau": 0.8, "local_blocks": 1}),
        (1000, {"tau": 0.5, "min_sparse_tokens": 1000}),  # the shorter sequence is dense
        (2049, {"tau": 0.8}),
        (2049, {"tau": 0.9, "min_block_mass": 0.06}),
    ],
)
def test_a_new_token_attends_to_the_blocks_with_much_of_its_mass(attention, torch, length, options):
    q, k, v = new_token(torch, length)
    padding, room = 131, 200  # the second sequence is shorter, and the cache has room
    mask = torch.zeros(2, 1, 1, length + room, dtype=torch.bool)
    first = min(padding, length - 1)
    mask[0, ..., :length], mask[1, ..., first:length] = True, True
    q_, *cached = (torch.tensor(x) for x in (q[:, :, None], k, v))
    cached = [torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, room), value=9) for x in cached]
    out, _ = attention.sparse_attention(layer_with(**options), q_, *cached, mask, 0.3)
    unmasked, _ = attention.sparse_attention(
        layer_with(**options), q_[:1], *(x[:1, :, :length] for x in cached), None, 0.3
    )
    torch.testing.assert_close(out[:1], unmasked)
    kept = []
    for row, begin in enumerate((0, first)):
        own = q[row], k[row, begin:], v[row, begin:]
        kept.append(selected_blocks(*own[:2], 0.3, **options))
        expected = attended(*own, kept[-1], 0.3)
        np.testing.assert_allclose(out[row, 0].numpy(), expected, atol=2e-5)
    counts = np.concatenate([x.sum(-1) for x in kept])
    assert length < 700 or (3 < counts.min() and counts.max() < kept[0].shape[1])


def test_new_tokens_see_all_with_tau_1_and_in_short_sequences(attention, torch):
    q, *cached = (torch.tensor(x) for x in new_token(torch, 1000))
    arguments = q[:, :, None], *(x.transpose(1, 2) for x in cached), None
    dense, _ = attention.sparse_attention(layer_with(dense_new_tokens=True), *arguments)
    all_mass, _ = attention.sparse_attention(layer_with(tau=1.0), *arguments)
    torch.testing.assert_close(all_mass, dense, atol=1e-6, rtol=1e-5)
    short, _ = attention.sparse_attention(layer_with(tau=0.8, min_sparse_tokens=1001), *arguments)
    torch.testing.assert_close(short, dense, atol=1e-6, rtol=1e-5)
    sparse, _ = attention.sparse_attention(layer_with(tau=0.8, min_sparse_tokens=1000), *arguments)
    assert (sparse - dense).abs().max() > 0.01


@pytest.mark.parametrize("options", [NEW_TOKENS, NEW_TOKENS | {"min_block_mass": 0.14}])
def test_new_tokens_select_as_in_an_engine_with_exact_scores(load, torch, monkeypatch, options):
    """The engine scores keys by codes of 4 bits, for which the keys stand here."""

    def code(_, keys):
        return keys.astype(jnp.float32)

    def coded(keys, low, high):
        return KeyCodes(code(None, keys), jnp.zeros(low.shape), jnp.ones(high.shape))

    monkeypatch.setattr(KeyCodes, "of", coded)
    monkeypatch.setattr(KeyCodes, "code", code)
    monkeypatch.setattr(key_codes, "unpack", lambda keys: keys)
    model, engine = load("sampled_rows", options, "sparse")
    ids = np.random.default_rng(4).integers(0, SPEC.vocab_size, LENGTH)
    new, log_probs = answer(torch, model, ids)
    np.testing.assert_allclose(log_probs, engine.forced(ids, new).log_probs, atol=2e-4)
    model.config.sparse_attention["dense_new_tokens"] = True
    assert np.abs(answer(torch, model, ids)[1] - log_probs)[1:].min() > 1e-3


def test_generated_tokens_are_those_of_each_sequence_alone(load, torch):
    """Of two prompts, read densely as one batch with padding, and with two kinds of caches."""
    model, _ = load("sampled_rows", NEW_TOKENS)
    ids = torch.tensor(np.random.default_rng(3).integers(0, SPEC.vocab_size, (2, LENGTH)))
    mask = torch.ones_like(ids)
    mask[1, :131] = 0

    def last_logits(ids, mask, new):
        """Of three tokens after a dense prompt."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        found, cache, first = [], None, 0
        for end in range(ids.shape[1] - 3, ids.shape[1] + 1):
            model.set_attn_implementation(new if first else "sdpa")
            how = {"attention_mask": mask[:, :end], "position_ids": positions[:, first:end]}
            out = model(ids[:, first:end], cache=cache, use_cache=True, **how)
            cache, first = out.past_key_values, end
            found.append(out.logits[:, -1])
        return torch.stack(found[1:], 1)

    with torch.no_grad():
        together = last_logits(ids, mask, NAME)
        alone = [
            last_logits(ids[i : i + 1, n:], mask[i : i + 1, n:], NAME)
            for i, n in ((0, 0), (1, 131))
        ]
        torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)
        assert (together - last_logits(ids, mask, "sdpa")).abs().max() > 0.1

        model.set_attn_implementation(NAME)
        how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        expected = model.generate(ids, **how)
        static = {"cache_implementation": "static", "disable_compile": True}
        assert model.generate(ids, **static, **how).equal(expected)


@pytest.mark.parametrize(
    ("window", "types", "is_sparse"),
    [
        (None, None, True),
        (2047, None, False),
        (2048, None, True),
        (262144, ["sliding_attention"] * 2, True),
        (262144, ["sliding_attention", "full_attention"], False),
    ],
)
def test_of_equal_layers_a_window_as_long_as_the_context_is_none(
    attention, torch, window, types, is_sparse
):
    q, k = (torch.tensor(x).transpose(1, 2) for x in some_queries_and_keys())
    layer, how = layer_with(**ROWS), {"scaling": 0.25, "sliding_window": window}
    layer.num_key_value_groups = 2
    layer.config.max_position_embeddings, layer.config.layer_types = 2048, types
    with torch.no_grad():
        found, _ = attention.sparse_attention(layer, q, k, k, None, **how)
        dense, _ = attention.sdpa_attention_forward(layer, q, k, k, None, scaling=0.25)
    assert ((found - dense).abs().max() > 0.01) == is_sparse


def test_unsupported_cases_are_errors(load, torch):
    model, _ = load("sampled_rows", ROWS)
    ids = torch.zeros(2, 300, dtype=torch.long)
    padding = torch.ones_like(ids)
    padding[0, :5] = 0
    with pytest.raises(ValueError, match="^mtraining_sparse: gradients are not computed; use tor"):
        model(ids)
    with torch.no_grad():
        for case in (
            {"attention_mask": padding},
            {"cache": model(ids, use_cache=True).past_key_values},
            {"position_ids": torch.arange(300)[None] % 128},
        ):
            with pytest.raises(ValueError, match="must be a whole prompt without padding, packed"):
                model(ids, **case)
        cache = model(ids, use_cache=True).past_key_values
        for layer in cache.layers:  # as caches that drop keys
            layer.keys, layer.values = (x[:, :, 1:] for x in (layer.keys, layer.values))
        how = {"cache": cache, "position_ids": torch.full((1, 1), 300)}
        with pytest.raises(ValueError, match="a new token has 299 cached keys and another pos"):
            model(ids[:, :1], **how)
        additive = torch.zeros(2, 1, 1, 300)
        with pytest.raises(ValueError, match=r"torch.float32 \[2, 1, 1, 300\] and must be bool"):
            model(ids[:, :1], attention_mask=additive, **how)
        entry = model.config.sparse_attention
        for name, value, message in (
            ("dense_new_tokens", None, "has dense_new_tokens = None, which is not supported"),
            ("kind", "moba", "is .*'moba'.*kind must be one of sampled_rows, xattention"),
            ("columns", 128, "has columns = 128, which is not supported"),
            ("newer", 1, "has options of another version, such as newer; use the sparse_attention"),
        ):
            model.config.sparse_attention = entry | {name: value}
            with pytest.raises(ValueError, match=f'the entry "sparse_attention" of .*{message}'):
                model(ids)
        del model.config.sparse_attention
        with pytest.raises(ValueError, match="of config.json is missing; kind must be one of"):
            model(ids)


def selected_at_random(torch, length):
    """Queries, keys, values, blocks and columns; some rows have none."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 32) for heads in (4, 2, 2))
    blocks = (torch.rand(2, 4, -(-length // 128), -(-length // 128)) < 0.4).tril()
    columns = torch.rand(2, 4, length) < 0.05
    columns[0, 1], columns[1, 3] = False, True
    return q, k, v, blocks, columns


@pytest.mark.parametrize("length", [600, 640])
def test_flex_attention_computes_the_same(attention, torch, monkeypatch, length):
    q, k, v, blocks, columns = selected_at_random(torch, length)
    expected = attention._attend(q, k, v, blocks, None, 0.2, 128)
    found = attention._attend_on_gpu(q, k, v, blocks, None, 0.2, 128)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    def by_lists(q, k, v, mask, scale):
        """PyTorch on a CPU compiles no log-sum-exp: attends to the pairs of a block mask."""
        at = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing="ij")
        seen, tile = torch.zeros(at[0].shape, dtype=torch.bool), 128
        for full in (False, True):
            counts = mask.full_kv_num_blocks if full else mask.kv_num_blocks
            listed = mask.full_kv_indices if full else mask.kv_indices
            if counts is not None:
                in_list = torch.arange(listed.shape[3]) < counts[..., None]
                tiles = torch.zeros(in_list.shape).scatter_add_(3, listed.long(), in_list.float())
                tiles = tiles > 0
                tiles = tiles.repeat_interleave(tile, 2).repeat_interleave(tile, 3)
                tiles = tiles[:, :, : q.shape[2], : k.shape[2]]
                seen |= tiles if full else tiles & mask.mask_mod(*at)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
        return torch.softmax(logits, -1).nan_to_num(0) @ v, logits.logsumexp(-1)

    monkeypatch.setattr(attention, "_flex_with_lse", by_lists)
    expected = attention._attend(q, k, v, blocks, columns, 0.2, 128)
    found = attention._attend_on_gpu(q, k, v, blocks, columns, 0.2, 128)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_scores_in_memory_are_limited(attention, torch, monkeypatch):
    """To those of two of five rows of blocks."""
    q, k = (torch.tensor(x).transpose(1, 2) for x in some_queries_and_keys(length=600))
    options = attention._options(entry_of("sampled_rows", {}))
    expected, sizes, masses = attention._select(q, k, 0.25, options)[0], [], attention._block_masses

    def recorded(rows, *others):
        sizes.append(rows.shape[2])
        return masses(rows, *others)

    monkeypatch.setattr(attention, "_block_masses", recorded)
    of_row = 2 * 4 * options.probe_queries_per_block * 4 * 640
    monkeypatch.setattr(attention, "_STEP_SIZE", 3 * of_row - 1)
    assert (attention._select(q, k, 0.25, options)[0] == expected).all()
    assert sizes == [2, 2, 1]


def test_masks_in_memory_are_limited(attention, torch, monkeypatch):
    inputs = selected_at_random(torch, 600)
    expected, sizes = attention._attend(*inputs, 0.2, 128), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recorded(*arrays, attn_mask, **how):
        sizes.append(attn_mask.shape[2])
        return attend(*arrays, attn_mask=attn_mask, **how)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(attention, "_STEP_SIZE", 2 * 128 * (2 * 4 * 600) * 8)
    torch.testing.assert_close(attention._attend(*inputs, 0.2, 128), expected)
    assert sizes == [256, 256, 88]


_KERNEL = """
import torch
import sparse_attention
torch.manual_seed(0)
sparse_attention._CHUNK = 2  # of five blocks
rows, keys = torch.randn(2, 4, 56, 5, 24), torch.randn(2, 2, 640, 24)
positions = torch.randint(-1, 640, (56 * 5,)).sort()[0].view(56, 5)
positions[:2] = -1
arguments = rows, keys, positions, 128, 0.3
expected = sparse_attention._block_masses(*arguments)
found = sparse_attention._block_masses_on_gpu(*arguments)
torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
print("compared", found.numel())
"""


def test_the_triton_kernels_compute_the_same(torch):
    """In Triton's interpreter, which must be chosen before the first import."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(FILE.parent)}
    command = sys.executable, "-c", _KERNEL
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr  # of a comparison in the process
    assert run.stdout.split() == ["compared", str(2 * 4 * 56 * 5)]
