"""Runs that train LoRA adapters: checkpoints, resuming, export and loading."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtraining_jax.config import Config, validate
from mtraining_jax.models.transformer import graph_definition
from mtraining_jax.parallel.layout import Layout
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.tools.evaluate.load import load
from mtraining_jax.training.build import build_mesh
from mtraining_jax.training.checkpoint.run_folder import checkpoint_folder
from mtraining_jax.training.checkpoint.store import read_record
from mtraining_jax.training.state import StateBuilder, TrainState
from mtraining_jax.training.step import draw_dropout
from mtraining_jax.utils.errors import UserError
from tests.models.common import forward
from tests.training.common import changed, losses, run

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
# Its checkpoint has fused projections.
BASE = CHECKPOINTS / "phi3_tiny_longrope"


def adapted(config: Config, **sections: dict) -> Config:
    """A run of adapters on 1 x 1 x 2 devices; `sections` override single fields."""
    table = config.to_dict()
    table["model"] = {"init_from": str(BASE), "remat": "mlp", "mlp_chunk_size": 16}
    base = {
        "lora": {"rank": 4, "dropout": 0.1},
        "sparsity": {"kind": "dense"},
        "parallel": {"nodes": 1, "devices_per_node": 2, "fsdp": True},
        "optimizer": {"accumulation_steps": 2},
        "checkpoint": {"interval": 2, "export_hf": True},
    }
    for changes in (base, sections):
        for section, fields in changes.items():
            table[section] = table[section] | fields
    config = Config.from_record(table, "a test")
    validate(config)
    return config


def logits_of(folder: Path, dtype: str = "float32") -> np.ndarray:
    loaded = load(folder, "dense", dtype=dtype)
    tokens = jnp.arange(24, dtype=jnp.int32)[None]
    state = jax.device_get(loaded.state)
    return np.asarray(forward(graph_definition(loaded.network.spec), state, tokens, tokens[0])[1])


def test_a_run_resumes_exactly_exports_and_loads(config):
    config = adapted(config, optimizer={"accumulation_steps": 2, "offload": "all"})
    whole = run(config)
    record = read_record(checkpoint_folder(config), 4)
    assert len(record["shapes"]) == 2 * 7 and all("lora_" in name for name in record["shapes"])
    base = StateBuilder(config, build_mesh(config)).base()
    assert base["layers.mlp.up_proj.weight"].dtype == jnp.bfloat16

    part = changed(config, run={"name": "part"}, checkpoint={"export_hf": False})
    folder = part.run.folder
    shutil.copytree(config.run.folder, folder)
    shutil.rmtree(checkpoint_folder(part) / "4")
    np.testing.assert_array_equal(losses(run(part)), losses(whole)[2:])

    folder = config.run.folder
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(BASE)
    logits = logits_of(folder / "adapter")
    np.testing.assert_array_equal(logits, logits_of(folder))
    assert np.abs(logits - logits_of(BASE)).max() > 0.1
    assert np.abs(logits - logits_of(folder / "hf")).max() < 0.2  # matrices rounded to bfloat16

    exported = load_file(folder / "hf" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    name = "layers.1.mlp.down_proj"
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.model.{name}.lora_{x}.weight"] for x in "AB")
    matrix = load_file(BASE / "model.safetensors")[f"model.{name}.weight"]
    rounded = matrix.astype(jnp.bfloat16).astype(np.float32)  # as in training
    np.testing.assert_allclose(exported.astype(np.float32), rounded + 2 * b @ a, rtol=2**-8)

    start = {"init_from": str(folder / "adapter"), "rank": 4}
    fresh = StateBuilder(adapted(config, lora=start), build_mesh(config)).fresh()
    prefix = "base_model.model.model.layers.1.self_attn.qkv_proj"
    a = np.asarray(fresh.parameters["layers.self_attn.k_proj.lora_A.weight"])[1]
    b = np.asarray(fresh.parameters["layers.self_attn.k_proj.lora_B.weight"])[1]
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_A.weight"][4:8], a)
    np.testing.assert_array_equal(tensors[f"{prefix}.lora_B.weight"][32:48, 4:8], b)
    assert not tensors[f"{prefix}.lora_B.weight"][32:48, :4].any()

    # An adapter of PEFT has one A for all parts of a fused projection.
    rng = np.random.default_rng(0)
    shapes = {n: (4, x.shape[1]) if "lora_A" in n else (len(x), 4) for n, x in tensors.items()}
    shared = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    (folder / "shared").mkdir()
    save_file(shared, folder / "shared" / "adapter_model.safetensors")
    one_rank = written | {"rank_pattern": {}, "alpha_pattern": {}}
    (folder / "shared" / "adapter_config.json").write_text(json.dumps(one_rank))
    of_shared = adapted(config, lora=start | {"init_from": str(folder / "shared")})
    fresh = StateBuilder(of_shared, build_mesh(config)).fresh()
    for part, rows in (("q_proj", slice(32)), ("v_proj", slice(48, 64))):
        for name, index in zip("AB", (slice(None), rows), strict=True):
            array = np.asarray(fresh.parameters[f"layers.self_attn.{part}.lora_{name}.weight"])
            np.testing.assert_array_equal(array[1], shared[f"{prefix}.lora_{name}.weight"][index])

    # The same shapes, but other values.
    other = shutil.copytree(BASE, folder / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"] *= 2
    save_file(tensors, other / "model.safetensors")
    message = "has adapters of another base model: .* set model.init_from to the folder"
    of_other = {"model": {"init_from": str(other)}, "run": {"steps": 6}}
    for attempt in (
        lambda: run(adapted(config, **of_other)),
        lambda: load(folder, "dense", {"model.init_from": other}),
        lambda: load(folder / "adapter", "dense", {"model.init_from": other}),
        lambda: StateBuilder(adapted(config, **of_other, lora=start), build_mesh(config)).fresh(),
    ):
        with pytest.raises(UserError, match=message):
            attempt()
    with pytest.raises(UserError, match="with other adapters: it has lora.alpha = none"):
        run(adapted(config, lora={"alpha": 32.0}, run={"steps": 6}))
    shutil.rmtree(other)
    (folder / "adapter" / "adapter_config.json").write_text(
        json.dumps(written | {"base_model_name_or_path": str(other)})
    )
    with pytest.raises(UserError, match="which is not a folder; give its folder with --model.init"):
        load(folder / "adapter", "dense")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"targets": ["o_proj", "gate"]}}, '"gate" is not a projection .* gate_proj, up_'),
        ({"lora": {"targets": []}}, "lora.targets is empty; choose from q_proj, k_proj"),
        ({"lora": {"targets": ["q_proj"]}}, "one matrix qkv_proj of q_proj, k_proj, v_"),
        ({"lora": {"rank": -1}}, "lora.rank = -1 is not allowed"),
        ({"lora": {"dropout": 1.0}}, "lora.dropout = 1.0 is not allowed"),
        ({"lora": {"rank": 0, "init_from": "x"}}, 'init_from = "x" needs lora.rank'),
        ({"lora": {"init_from": "x"}}, "cannot read x/adapter_config.json: No such file"),
        ({"optimizer": {"trainable": ["self_attn"]}}, "cannot be combined with lora.rank = 4"),
        ({"model": {"init_from": "missing"}}, "adapters always need it"),
        ({"lora": {"target_modules": ["x"]}}, "is not a field; did you mean lora.targets?"),
    ],
)  # fmt: skip
def test_bad_fields(config, sections, message):
    with pytest.raises(UserError, match=message) as error:
        adapted(config, **sections)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 8}, "has rank = 8; set lora.rank = 8"),
        ({"lora_alpha": 3}, "has alpha = 3.0; set lora.alpha = 3.0"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa" may change the base model'),
        ({"use_dora": True}, "use_dora = true must be null; merge the adapters with PEFT"),
        ({"target_modules": "all-linear"}, "adapter_model.safetensors does not exist"),
        ({"target_modules": ["o_proj"]}, 'has targets = ["o_proj"]; set lora.targets'),
        ({"r": None}, "r=None must be an integer"),
    ],
)
def test_bad_adapters(config, tmp_path, fields, message):
    usual = {"r": 4, "lora_alpha": 8, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj"]}
    usual["target_modules"].append("down_proj")
    (tmp_path / "adapter_config.json").write_text(json.dumps(usual | fields))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        adapted(config, lora={"init_from": str(tmp_path)})
    assert "\n" not in str(error.value)


def test_adapters_are_not_a_checkpoint(config, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="has adapters of PEFT; set lora.init_from = .* their base"):
        adapted(config, model={"init_from": str(tmp_path)})


def test_dropout_seeds_depend_on_the_run_and_the_step():
    """Values as they are, because a run may resume with a later version."""
    zero, mesh, layout = jnp.int32(0), make_mesh(1, 1, 1), Layout("striped", 3, 1, 1)

    @jax.jit
    def seeds(step, rng):
        return draw_dropout(TrainState(step, {}, (), zero, zero, rng), (1, 3), mesh, layout)

    for step, rng, golden in (
        (5, [1, 2], [[5876476, 13788190, 7778218]]),
        (6, [1, 2], [[9095010, 14062375, 8610586]]),
        (5, [1, 3], [[13333527, 12923810, 5267740]]),
    ):
        found = seeds(jnp.int32(step), jnp.asarray(rng, jnp.uint32))
        np.testing.assert_array_equal(found, golden)


def test_a_token_has_the_same_dropout_on_all_meshes():
    zero, rng = jnp.int32(0), jnp.asarray([1, 2], jnp.uint32)
    state, found = TrainState(zero, {}, (), zero, zero, rng), {}
    for ranks, kind in ((1, "striped"), (2, "zigzag"), (4, "striped")):
        layout = Layout(kind, 16, ranks, 2)
        drawn = draw_dropout(state, (2, 16), make_mesh(1, 1, ranks), layout)
        found[ranks] = np.asarray(drawn)[:, layout.inverse()]
    np.testing.assert_array_equal(found[2], found[1])
    np.testing.assert_array_equal(found[4], found[1])
    assert len(np.unique(found[1])) == 32
