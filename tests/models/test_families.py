"""The families, each compared with a checkpoint of transformers 5.24."""

import dataclasses
import json
import math
import re
import shutil
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtraining_jax import Dense, Documents, sparse_attention
from mtraining_jax.models.families import FAMILIES
from mtraining_jax.models.huggingface.config import hf_config, read_hf_config
from mtraining_jax.models.rope import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from mtraining_jax.models.transformer import graph_definition
from mtraining_jax.utils.errors import UserError
from tests.models.common import CHECKPOINTS, forward, some_tokens, tiny_spec
from tests.models.family_contract import FamilyContract


class TestQwen2(FamilyContract):
    family = "qwen2"
    checkpoint = "qwen2_tiny"
    gradients = ("model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.down_proj.weight")


class TestQwen2WithYarn(TestQwen2):
    checkpoint = "qwen2_tiny_yarn"

    @pytest.fixture(scope="class")
    @classmethod
    def directory(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("yarn") / "model"
        shutil.copytree(CHECKPOINTS / cls.checkpoint, folder)
        # The weights are the same.
        shutil.copy(CHECKPOINTS / "qwen2_tiny/model.safetensors", folder)
        return folder


class TestQwen3(FamilyContract):
    family = "qwen3"
    checkpoint = "qwen3_tiny"
    gradients = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.1.mlp.down_proj.weight",
    )


class TestQwen3Moe(FamilyContract):
    family = "qwen3_moe"
    checkpoint = "qwen3_moe_tiny"
    gradients = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight")
    sizes: ClassVar = {"num_experts": 4, "num_experts_per_tok": 2}

    @pytest.mark.parametrize(
        ("field", "value"), [("mlp_only_layers", [1]), ("decoder_sparse_step", 2)]
    )
    def test_layers_without_experts_are_unsupported(self, directory, tmp_path, field, value):
        raw = json.loads((directory / "config.json").read_text()) | {field: value}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        message = re.escape(f"{field}={json.dumps(value)} is unsupported; it must be ")
        with pytest.raises(UserError, match=message):
            read_hf_config(tmp_path)

    def test_reads_the_field_of_transformers_4(self, directory, tmp_path, spec):
        raw = json.loads((directory / "config.json").read_text())
        raw["num_experts"] = raw.pop("num_local_experts")
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert read_hf_config(tmp_path, dtype="float32", remat="none") == spec
        del raw["num_experts"]
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(UserError, match="num_experts is missing; it must be an integer"):
            read_hf_config(tmp_path)


class TestLlama(FamilyContract):
    family = "llama"
    checkpoint = "llama3_tiny"
    gradients = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight")


class TestPhi3(FamilyContract):
    family = "phi3"
    checkpoint = "phi3_tiny_longrope"
    gradients = (
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.1.mlp.gate_up_proj.weight",
    )

    def test_packed_documents_rotate_like_separate_ones(self, spec, state):
        lengths, size = [60, 100, 13], 20  # short factors up to 64 tokens, then long ones
        total = sum(-(-n // size) * size for n in lengths)
        documents = Documents.from_lengths([lengths], total, size)
        blocks = jnp.arange(total // size)
        positions, lengths_of = documents.positions(blocks), documents.lengths(blocks)
        graphdef, tokens = graph_definition(spec), some_tokens(spec, (1, total))

        def attention(q, k, v):
            return sparse_attention(q, k, v, pattern=Dense(size), documents=documents), {}

        @jax.jit
        def packed(state, length):
            model = nnx.merge(graphdef, state)
            return model.logits(model(tokens, positions, attention, length=length)[0])

        found, start = packed(state, lengths_of), 0
        for n in lengths:
            own = slice(start, start + n)
            _, alone = forward(graphdef, state, tokens[:, own], jnp.arange(n, dtype=jnp.int32))
            np.testing.assert_allclose(found[:, own], alone, atol=2e-5)
            start += -(-n // size) * size
        # A dependence on the length of the sequence would show here.
        assert np.abs(packed(state, None) - found)[:, :60].max() > 1e-2


class TestMistral(FamilyContract):
    family = "mistral"
    checkpoint = "mistral_tiny"
    gradients = ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight")


class TestGemma3(FamilyContract):
    family = "gemma3_text"
    checkpoint = "gemma3_tiny"
    gradients = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.2.mlp.down_proj.weight",
    )


class TestGptOss(FamilyContract):
    family = "gpt_oss"
    checkpoint = "gpt_oss_tiny"
    gradients = (
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.self_attn.sinks",
        "model.layers.1.self_attn.sinks",
        "model.layers.0.mlp.router.weight",
        "model.layers.0.mlp.router.bias",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.gate_up_proj_bias",
        "model.layers.1.mlp.experts.down_proj_bias",
    )
    sizes: ClassVar = {"num_experts": 4, "num_experts_per_tok": 2}

    def test_published_weights_are_refused(self, directory, tmp_path):
        raw = json.loads((directory / "config.json").read_text())
        raw["quantization_config"] = {"quant_method": "mxfp4"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(UserError, match="MXFP4; write bf16 weights with transformers: "):
            read_hf_config(tmp_path)

    def test_the_released_fields(self, tmp_path):
        """Those of gpt-oss-20b, without its weights' format."""
        write(tmp_path, **GPT_OSS_20B)
        spec = read_hf_config(tmp_path)
        yarn = YarnScaling(32.0, 4096, truncate=False)
        assert spec.rope_scaling == yarn and spec.rope_theta == 150000
        assert spec.windows == (128, None) * 12 and spec.head_dim == 64
        write(tmp_path, **{x: y for x, y in GPT_OSS_20B.items() if x != "rope_scaling"})
        assert read_hf_config(tmp_path) == spec
        with pytest.raises(UserError, match="swiglu_limit=5.0 is unsupported; it must be 7.0"):
            read_hf_config(write(tmp_path, **GPT_OSS_20B | {"swiglu_limit": 5.0}))
        with pytest.raises(ValueError, match="norm_topk_prob = False is unsupported by gpt_oss"):
            dataclasses.replace(spec, norm_topk_prob=False)


GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip


def test_every_family_has_its_contract():
    tested = {cls.family for cls in FamilyContract.__subclasses__()}
    assert tested == set(FAMILIES.names)


# ---- config.json -------------------------------------------------------------------------------


def write(folder, name=None, **changes):
    """Writes a config.json, from a fixture or from nothing, with changes."""
    raw = {} if name is None else json.loads((CHECKPOINTS / name / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return folder


def test_smollm2_is_a_llama(tmp_path):
    # The fields of SmolLM2-135M.
    folder = write(
        tmp_path,
        architectures=["LlamaForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=0,
        eos_token_id=0,
        hidden_act="silu",
        hidden_size=576,
        initializer_range=0.041666666666666664,
        intermediate_size=1536,
        is_llama_config=True,
        max_position_embeddings=8192,
        mlp_bias=False,
        model_type="llama",
        num_attention_heads=9,
        num_hidden_layers=30,
        num_key_value_heads=3,
        pretraining_tp=1,
        rms_norm_eps=1e-05,
        rope_interleaved=False,
        rope_scaling=None,
        rope_theta=100000,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=49152,
    )
    spec = read_hf_config(folder)
    assert (spec.family, spec.head_dim, spec.rope_theta) == ("llama", 64, 100000.0)
    assert spec.rope_scaling is None and spec.tie_word_embeddings
    assert sum(x.size for x in spec.parameters.values()) == 134_515_008


def test_llama_3_1_in_the_older_spelling(tmp_path):
    folder = write(
        tmp_path,
        "llama3_tiny",
        rope_parameters=None,
        rope_theta=5e5,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    )
    assert read_hf_config(folder).rope_scaling == Llama3Scaling(8.0, 8192)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_phi_3_in_the_older_spelling(tmp_path, kind):
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    folder = write(
        tmp_path,
        "phi3_tiny_longrope",
        rope_parameters=None,
        rope_scaling=lists | {"type": kind},
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        sliding_window=262144,
    )
    expected = LongRopeScaling(32.0, 4096, None, (1.0,) * 4, (2.0,) * 4)
    assert read_hf_config(folder).rope_scaling == expected


def test_gemma_3_in_the_older_spelling(tmp_path):
    # The text model of Gemma 3 4B.
    folder = write(
        tmp_path,
        "gemma3_tiny",
        rope_parameters=None,
        rope_theta=1e6,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        rope_local_base_freq=10000.0,
        layer_types=None,
        _sliding_window_pattern=None,
        sliding_window_pattern=6,
        num_hidden_layers=34,
        sliding_window=1024,
    )
    spec = read_hf_config(folder)
    assert (spec.rope_theta, spec.rope_scaling) == (1e6, LinearScaling(8.0))
    assert (spec.sliding_window, spec.window_rope_theta) == (1024, 1e4)
    assert [i for i, window in enumerate(spec.windows) if window is None] == [5, 11, 17, 23, 29]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sliding_window": 8},
        {"sliding_window": 8, "full_attention_interval": 2, "rope_scaling": LinearScaling(4.0)},
    ],
)
def test_gemma_3_is_written_as_it_was_trained(tmp_path, fields):
    spec = tiny_spec(family="gemma3_text", **fields)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec, "float32")))
    # The default of transformers is another scale.
    expected = dataclasses.replace(spec, query_pre_attn_scalar=spec.head_dim)
    assert read_hf_config(tmp_path, dtype=spec.dtype, remat=spec.remat) == expected


@pytest.mark.parametrize(
    "fields", [{}, {"sliding_window": 8}, {"sliding_window": 8, "full_attention_interval": 2}]
)
def test_gpt_oss_is_written_as_it_was_trained(tmp_path, fields):
    spec = tiny_spec(family="gpt_oss", num_experts=4, num_experts_per_tok=2, **fields)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(spec, "float32")))
    assert read_hf_config(tmp_path, dtype=spec.dtype, remat=spec.remat) == spec


# Defaults of transformers 5.24: head width, RMS epsilon, context, RoPE's base, window, full layers.
ALL = tuple(range(12))
DEFAULTS = {
    "llama": (16, 1e-6, 2048, 1e4, None, ALL),
    "mistral": (16, 1e-6, 131072, 1e4, 4096, ()),
    "qwen2": (16, 1e-6, 32768, 1e4, None, ALL),
    "qwen3": (128, 1e-6, 32768, 1e4, None, ALL),
    "qwen3_moe": (16, 1e-6, 32768, 1e4, None, ALL),
    "gemma3_text": (256, 1e-6, 131072, 1e6, 4096, (5, 11)),
    "phi3": (16, 1e-5, 4096, 1e4, None, ALL),
    "gpt_oss": (64, 1e-5, 131072, 1.5e5, 128, (1, 3, 5, 7, 9, 11)),
}


@pytest.mark.parametrize("family", FAMILIES.names)
def test_fields_that_are_missing_have_the_defaults_of_transformers(tmp_path, family):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 12}
    sizes |= {"vocab_size": 64, "intermediate_size": 48, "num_key_value_heads": 2}
    if family in ("qwen3_moe", "gpt_oss"):
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    spec = read_hf_config(write(tmp_path, model_type=family, **sizes))
    full = tuple(i for i, window in enumerate(spec.windows) if window is None)
    found = spec.head_dim, spec.rms_norm_eps, spec.max_position_embeddings, spec.rope_theta
    assert (*found, spec.sliding_window, full) == DEFAULTS[family]
    gemma, oss = family == "gemma3_text", family == "gpt_oss"
    assert spec.tie_word_embeddings == gemma and spec.initializer_range == 0.02
    assert spec.query_pre_attn_scalar == (256 if gemma else None)
    assert spec.window_rope_theta == (1e4 if gemma else None)
    assert spec.rope_scaling == (YarnScaling(32.0, 4096, truncate=False) if oss else None)
    assert spec.norm_topk_prob == (family != "qwen3_moe")
    assert spec.router_aux_loss_coef == (0.001 if spec.num_experts else 0.0)


YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e4}
LONG = {"rope_theta": 5e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("name", "rope", "changes", "expected"),
    [
        # Outside of the section it has priority.
        ("llama3_tiny", YARN | {ORIGINAL: 64}, {ORIGINAL: 100}, YarnScaling(2.0, 100)),
        ("qwen3_tiny", YARN, {ORIGINAL: 100}, YarnScaling(2.0, 100)),
        # Phi-3 has a default outside of it.
        (
            "phi3_tiny_longrope", LONG | {"type": "yarn", ORIGINAL: 64}, {ORIGINAL: None},
            LongRopeScaling(1.0, 4096, None, (1.0,) * 4, (2.0,) * 4),
        ),
        # Without a type the divisors are not used.
        ("phi3_tiny_longrope", LONG, {}, None),
        ("phi3_tiny_longrope", LONG | {"rope_type": "default"}, {}, None),
        ("gpt_oss_tiny", {}, {}, None),
        ("gpt_oss_tiny", None, {}, YarnScaling(32.0, 4096, truncate=False)),
    ],
)  # fmt: skip
def test_rope_is_read_as_in_transformers(tmp_path, name, rope, changes, expected):
    raw = json.loads((CHECKPOINTS / name / "config.json").read_text())
    raw = raw | {"rope_parameters": rope} | changes
    raw = {x: y for x, y in raw.items() if y is not None}
    assert read_hf_config(write(tmp_path, **raw)).rope_scaling == expected


@pytest.mark.parametrize(
    ("rope", "changes", "expected"),
    [
        ({"full_attention": {}, "sliding_attention": {}}, {}, (1e6, 1e4)),
        ({"sliding_attention": {"rope_theta": 5.0}}, {"rope_theta": 7.0}, (7.0, 5.0)),
        ({}, {"rope_theta": 7.0, "rope_local_base_freq": 3.0}, (7.0, 3.0)),
    ],
)
def test_bases_of_gemma_3(tmp_path, rope, changes, expected):
    spec = read_hf_config(write(tmp_path, "gemma3_tiny", rope_parameters=rope, **changes))
    assert (spec.rope_theta, spec.window_rope_theta) == expected


def test_gemma_3_has_one_name_of_the_pattern(tmp_path):
    fields = {"layer_types": None, "num_hidden_layers": 6, "_sliding_window_pattern": 2}
    assert read_hf_config(write(tmp_path, "gemma3_tiny", **fields)).windows.count(None) == 1


def test_a_window_counts_once_the_context_is_longer(tmp_path):
    folder = write(tmp_path, "mistral_tiny", max_position_embeddings=64)
    spec = read_hf_config(folder)
    assert (spec.sliding_window, spec.windows) == (64, (None, None))
    assert read_hf_config(folder, max_position_embeddings=65).windows == (64, 64)
    for kind in ("full_attention", "sliding_attention"):
        write(tmp_path, "mistral_tiny", max_position_embeddings=64, layer_types=[kind] * 2)
        assert read_hf_config(folder) == spec


@pytest.mark.parametrize(("window", "expected"), [(128, 128), (512, None), (None, None)])
def test_a_window_shorter_than_the_context_is_kept(tmp_path, window, expected):
    for name in ("phi3_tiny_longrope", "mistral_tiny"):
        spec = read_hf_config(write(tmp_path, name, sliding_window=window))
        assert spec.windows == (expected,) * 2


@pytest.mark.parametrize(("context", "fields"), [(512, 3), (1024, 6)])
def test_phi_3_is_written_so_that_its_factor_can_be_read(tmp_path, context, fields):
    # 512 / 64 is the checkpoint's own factor, which need not be written.
    spec = read_hf_config(CHECKPOINTS / "phi3_tiny_longrope", max_position_embeddings=context)
    raw = hf_config(spec, "float32")
    assert len(raw["rope_scaling"]) == fields
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_hf_config(tmp_path) == spec


UNTRUNCATED = {"rope_type": "yarn", "factor": 2.0, "truncate": False}


@pytest.mark.parametrize("context", [256, 1024])
def test_longrope_is_written_for_transformers_4(tmp_path, context):
    """It reads the original context outside of the section, and derives the factor from it."""
    spec = tiny_spec(
        family="llama", max_position_embeddings=context,
        rope_scaling=LongRopeScaling(4.0, 64, None, (1.0,) * 4, (2.0,) * 4),
    )  # fmt: skip
    raw = hf_config(spec, "float32")
    section, original = raw["rope_scaling"], raw["original_max_position_embeddings"]
    derived = math.sqrt(1 + math.log(context / original) / math.log(original))
    found = section.get("attention_factor", derived)
    np.testing.assert_allclose((original, found), (64, math.sqrt(1 + math.log(4, 64))))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_hf_config(tmp_path, dtype=spec.dtype, remat=spec.remat) == spec


SLIDING_FIRST = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama3_tiny", {"attention_bias": True}, "attention_bias=true is unsupported"),
        ("llama3_tiny", {"mlp_bias": True}, "mlp_bias=true is unsupported; it must be false"),
        ("qwen3_tiny", {"attention_bias": True}, "attention_bias=true is unsupported"),
        (
            "gemma3_tiny", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
            r"layer_types=.* is unsupported; it must have sliding_attention in all layers but",
        ),
        ("gemma3_tiny", {"final_logit_softcapping": 30.0}, "it must be null"),
        (
            "gemma3_tiny", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters has factor outside of full_attention and sliding_attention",
        ),
        (
            "gemma3_tiny", {"rope_scaling": {"type": "linear", "factor": 2.0}},
            'rope_scaling has "type"; rename it to "rope_type"',
        ),
        (
            "gemma3_tiny",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type=linear of sliding_attention must be default",
        ),
        (
            "qwen3_tiny", {"use_sliding_window": False, "layer_types": SLIDING_FIRST},
            "layer_types=.*; all 2 layers must have full_attention",
        ),
        ("mistral_tiny", {"layer_types": SLIDING_FIRST}, "all 2 layers must have sliding_att"),
        ("qwen2_tiny", {"layer_types": ["full_attention"]}, "all 3 layers must have full_att"),
        ("qwen3_moe_tiny", {"num_experts": 4}, "num_experts and num_local_experts contradict each"),
        (
            "llama3_tiny",
            {"rope_parameters": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}},
            "high_freq_factor is missing",
        ),
        (
            "gemma3_tiny", {"rope_parameters": {"full_attention": UNTRUNCATED}},
            "truncate = False is unsupported by gemma3_text, where transformers ignores it; remov",
        ),
        (
            "gemma3_tiny", {"rope_parameters": None, "rope_local_base_freq": 0},
            "window_rope_theta = 0.0 must be more than 0",
        ),
        ("gemma3_tiny", {"sliding_window": None}, "full_attention_interval = 3 needs sliding_w"),
        (
            "phi3_tiny_longrope", {"partial_rotary_factor": 0.75, "rope_parameters": None},
            "partial_rotary_factor=0.75 is unsupported; it must be 1.0",
        ),
        (
            "llama3_tiny", {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            r"unsupported model, MambaForCausalLM \(model_type mamba\); supported model types are"
            " gemma3_text, gpt_oss, llama, mistral, phi3, qwen2, qwen3",
        ),
        (
            "llama3_tiny", {"model_type": None, "architectures": None},
            r"unsupported model, without architecture \(model_type None\); supported model types",
        ),
    ],
)  # fmt: skip
def test_unsupported_features_are_refused(tmp_path, name, changes, message):
    with pytest.raises(UserError, match=message):
        read_hf_config(write(tmp_path, name, **changes))


def test_a_missing_head_width_in_config_json(tmp_path):
    raw = json.loads((CHECKPOINTS / "qwen3_tiny/config.json").read_text())
    del raw["head_dim"]
    assert read_hf_config(write(tmp_path, **raw)).head_dim == 128
    folder = write(tmp_path, "llama3_tiny", num_key_value_heads=None, head_dim=None)
    spec = read_hf_config(folder)
    assert (spec.num_kv_heads, spec.head_dim) == (4, 8)


def test_the_architecture_alone_determines_the_family(tmp_path):
    assert read_hf_config(write(tmp_path, "llama3_tiny", model_type=None)).family == "llama"
