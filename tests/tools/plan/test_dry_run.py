"""Dry run: predicted memory, FLOP and step time."""

import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.sharded import select_index
from mtraining_jax.cli.train import main
from mtraining_jax.config import Config, available_configs
from mtraining_jax.models import embedding
from mtraining_jax.models.loss import linear_cross_entropy
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.parallel.mesh import HEADS, SEQUENCE_AXES, make_mesh
from mtraining_jax.parallel.ring import ring_attention
from mtraining_jax.patterns.moba import MoBA
from mtraining_jax.reporting.flops import audit_flops, idle_parameters, matrix_flops
from mtraining_jax.tools.plan.compiled import Compiled
from mtraining_jax.tools.plan.cost import count_flops, rates_missing, seconds
from mtraining_jax.tools.plan.dry_run import available, dry_run, ways_to_fit
from mtraining_jax.tools.plan.fitting import fastest
from mtraining_jax.tools.plan.hardware import A100_40GB, GPUS, H200
from mtraining_jax.tools.plan.kernel_times import FP8_SPEEDUP, SCORES_PER_SECOND, kernel_seconds
from mtraining_jax.tools.plan.memory import (
    attention_parts,
    estimate_memory,
    index_bytes,
    pinned_limit,
    planned_state,
)
from mtraining_jax.tools.plan.pattern_costs import query_copies
from mtraining_jax.training.build import build_layout, build_mesh, build_pattern
from mtraining_jax.training.state import StateBuilder
from pallas_kernels.index import BlockMaskIndex
from tests.models.common import equations
from tests.training.common import changed

GIB = 2**30
ON_GPUS = {"cpu_devices": None}  # the test configuration runs on virtual CPU devices


@pytest.mark.parametrize("name", available_configs())
def test_every_configuration_is_estimated_and_fits(name, capsys):
    assert main(["--config", name, "--dry-run=estimate"]) == 0
    printed = capsys.readouterr().out
    config = Config.load(name)
    for text in (
        f"dry run of {name}:",
        f"{config.data.batch_size} x {config.data.seq_len:,} tokens per step",
        "estimated by formulas",
        "kept for backward",
        "attention, dense",
        "  fits: ",
    ):
        assert text in printed
    assert ("not a measurement" in printed) == (rates_missing(config, H200) is None)


def test_times_of_a_small_step_have_digits(capsys):
    options = ["--dry-run=estimate", "--model.dtype=bfloat16"]
    assert main(["--config", "smollm2_135m_lora_2048", *options]) == 0
    printed = capsys.readouterr().out
    (total,) = re.findall(r"^  total +([\d.]+)  [\d,]+ tokens/s", printed, re.MULTILINE)
    assert 0.001 < float(total) < 0.1 and len(total) == 6
    (faster,) = re.findall(r", ([\d.]+) s per step\)", printed)
    assert 0 < float(faster) <= float(total)


def test_audits_cost_less_than_1_percent_of_a_step_at_131072_tokens(capsys):
    asked = ["--audit.interval=50", "--data.seq_len=131072"]
    main(["--config", "qwen3b_512k", "--dry-run=estimate", *asked])
    assert "  audits add 0.0" in capsys.readouterr().out
    config = Config.load("qwen3b_512k", dict(text[2:].split("=") for text in asked))
    step, rows = count_flops(config).executed, audit_flops(config)
    # 36 layers of 16 heads of 128, 64 rows: q k, p v and p' v; q k, dO v, ds k and ds' k.
    assert rows == 36 * 16 * 7 * (2 * 64 * 131072 * 128)
    assert rows < 0.01 * step  # even of an audited step
    # Of 34 layers of 8 heads of 256, 29 have a window and are not audited.
    config = Config.load("gemma3_4b_128k")
    sizes = config.data.batch_size * config.audit.num_queries * config.data.seq_len
    assert audit_flops(config) == 5 * 8 * 7 * (2 * sizes * 256)


def budgets(folder):
    """An MInference file for 2 layers of 2 heads."""
    path = folder / "budgets.json"
    path.write_text(
        json.dumps([{str(head): ["vertical_and_slash", 40, 20, 1.0] for head in range(6)}] * 2)
    )
    return str(path)


@pytest.mark.parametrize(
    "kind", ["vertical_slash", "fixed", "benchmarks.replay:Replay", "dense", "xattention"]
)
def test_index_bytes_match_the_index(config, kind, tmp_path):
    # Limits that are not multiples of 128 columns, and budgets instead of limits.
    sparsity = {"kind": kind, "max_verticals": 40, "max_slashes": 120}
    if kind == "benchmarks.replay:Replay":
        sparsity["replay_density"] = 0.3
    if kind == "fixed":
        sparsity["budget_file"] = budgets(tmp_path)
    config = changed(
        config,
        sparsity=sparsity,
        data={"seq_len": 2048, "batch_size": 1},
        model={"max_position_embeddings": 2048},
    )
    model, block_size = config.model, config.sparsity.block_size
    num_blocks = config.data.seq_len // block_size
    pattern = build_pattern(config)
    if pattern.arrays:
        pattern = jax.tree.map(lambda array: array[0], pattern)

    def select(q, k):
        ids = jnp.arange(num_blocks)
        return select_index(q, k, pattern, block_ids=ids, num_blocks=num_blocks)

    def heads(count):
        shape = 1, config.data.seq_len, count, model.head_dim
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    index = jax.eval_shape(select, heads(model.num_heads), heads(model.num_kv_heads))
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(index))
    if index.sharded_by_query:
        expected //= config.ranks
    assert index_bytes(config) == expected


@pytest.mark.parametrize(("top_k", "copies"), [(5, 4), (12, 7)])
def test_query_copies_are_counted(config, top_k, copies):
    def total(top_k):
        return estimate_memory(
            changed(
                config,
                sparsity={"kind": "moba", "chunk_size": 256, "top_k": top_k},
                data={"seq_len": 2048, "batch_size": 1},
                model={"max_position_embeddings": 2048},
            )
        ).total

    # Six fp32 arrays per copy; 2048 tokens are 8 chunks.
    queries = 4 * 2048 // config.ranks * config.model.num_heads * config.model.head_dim
    assert total(top_k) - total(1) == 6 * copies * queries
    assert query_copies(MoBA(256, top_k, 128), 2048 // 128) == copies
    assert query_copies(config.sparsity.pattern, 2048 // 128) == 0


@pytest.mark.parametrize(
    ("fsdp", "trainable", "optimizer"),
    [
        (False, (), {"mu_dtype": "bfloat16"}),
        (True, ("mlp",), {"offload": True}),
        (True, ("mlp", "norm"), {"offload": "all"}),
    ],
)
def test_memory_of_parameters_and_moments_matches_the_run(config, fsdp, trainable, optimizer):
    how = {"model": {"dtype": "bfloat16"}, "parallel": {"fsdp": fsdp}}
    config = changed(config, **how, optimizer={"trainable": trainable} | optimizer)
    builder = StateBuilder(config, build_mesh(config))
    state = builder.fresh()
    device = jax.devices()[0]

    def held(tree, kind="device"):
        leaves = (x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == kind)
        context = (s for leaf in leaves for s in leaf.addressable_shards)
        return sum(shard.data.nbytes for shard in context if shard.device == device)

    memory = estimate_memory(config)
    trained, frozen = builder.split(state.parameters)
    assert memory.parameters == held(trained)
    assert memory.frozen == held(frozen)
    assert memory.optimizer == held(state.opt_state)
    on_host = held((trained, trained, frozen, state.opt_state), "pinned_host")  # with gradients
    assert memory.host == on_host
    assert memory.gradients == held(trained)
    assert planned_state(config).count_parameters() == tuple(
        sum(x.size for x in tree.values()) for tree in (state.parameters, trained)
    )


def products(jaxpr):
    """FLOP of all matrix products in a traced program."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs = eqn.invars[0].aval.shape
            total += (
                2
                * math.prod(eqn.outvars[0].aval.shape)
                * math.prod(lhs[axis] for axis in contracted)
            )
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += times * products(inner)
    return total


@pytest.mark.parametrize(
    ("rank", "trainable"), [(0, ()), (4, ()), (0, ("self_attn", "embed")), (0, ("mlp", "norm"))]
)
@pytest.mark.parametrize(
    ("remat", "kept"), [("none", 0), ("mlp", 0), ("mlp", 3), ("attention", 0), ("full", 0)]
)
def test_flops_match_the_traced_products(config, remat, kept, rank, trainable, monkeypatch):
    # The embedding's gradient sums are not counted: on GPUs 512 FLOP per token and width.
    monkeypatch.setattr(embedding, "sum_rows", embedding._add_in_order)
    model = {"remat": remat, "mlp_chunk_size": 32, "mlp_kept_chunks": kept}
    config = changed(
        config,
        model=model,
        loss={"chunk_size": 128},
        data={"batch_size": 1},
        parallel={"replicas": 1, "nodes": 1, "devices_per_node": 1},
        lora={"rank": rank},
        optimizer={"trainable": trainable},
    )
    builder = planned_state(config)
    state = builder.abstract()
    trains_head = builder.lm_head_name in builder.trainable
    tokens = jnp.zeros((1, config.data.seq_len), jnp.int32)

    def loss(trained, frozen):
        model = nnx.merge(builder.graphdef, builder.unflatten(trained | frozen))
        # Has no matrix products but uses all three inputs.
        hidden, _ = model(tokens, tokens, lambda q, k, v: (q * jnp.repeat(k * v, 2, axis=2), {}))
        weight = model.lm_head_weight()
        return linear_cross_entropy(
            hidden, weight, tokens, chunk_size=128, trains_weight=trains_head
        )

    flops = count_flops(config)
    program = jax.make_jaxpr(jax.grad(loss))(*builder.split(state.model)).jaxpr
    # Without the gradients of frozen matrices, which nothing reads.
    program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    traced = products(program)
    assert flops.matrices + flops.recomputed == pytest.approx(traced, rel=1e-6)


def test_attention_is_counted_at_the_density(config):
    dense = count_flops(changed(config, sparsity={"kind": "dense"}))
    sparse = count_flops(config)
    # 2 sequences, 2 layers, 6 heads of 16; 4 D forward and 10 D backward per pair.
    assert dense.attention_executed == dense.attention_dense == 2 * 2 * 6 * 14 * 16 * 128 * 129 / 2
    # The density of short sequences.
    assert sparse.attention_executed == pytest.approx(0.441 * dense.attention_dense)
    again = count_flops(changed(config, model={"remat": "full"}))
    assert again.attention_recomputed == pytest.approx(0.441 * dense.attention_dense * 4 / 14)


@pytest.mark.parametrize(
    ("name", "devices", "tokens", "model", "measured"),
    [  # benchmarks/results/{step-*,rebuilt-h200}-2026-11-22.md
        ("qwen3b_512k", 8, 524288, {"remat": "mlp"}, 5.131),
        ("qwen3b_512k_dense", 8, 524288, {"remat": "mlp"}, 33.74),
        ("qwen3b_2m", 8, 2097152, {"remat": "attention"}, 51.37),
        ("qwen3b_512k", 4, 524288, {"remat": "mlp"}, 9.94),
        ("qwen3b_512k_dense", 4, 524288, {"remat": "mlp"}, 66.79),
        ("qwen3b_512k", 2, 524288, {"remat": "attention"}, 20.27),
        ("qwen3b_512k", 2, 131072, {"remat": "mlp"}, 3.31),
        ("qwen3b_512k", 2, 131072, {"remat": "mlp", "mlp_kept_chunks": 2}, 3.147),
        ("qwen3b_512k_dense", 2, 131072, {"remat": "mlp"}, 10.45),
        ("qwen0_5b_512k", 2, 131072, {"remat": "mlp"}, 0.752),
        ("qwen7b_512k", 2, 131072, {"remat": "attention"}, 6.635),
        ("qwen3b_512k", 1, 131072, {"remat": "attention"}, 6.229),
    ],
)
def test_predicted_step_times_are_near_measured_ones(name, devices, tokens, model, measured):
    config = Config.load(
        name,
        {
            "parallel.devices_per_node": devices,
            "data.seq_len": tokens,
            "sparsity.kind": "dense" if "dense" in name else "benchmarks.replay:Replay",
            **{f"model.{field}": value for field, value in model.items()},
        },
    )
    found = seconds(config, H200, estimate_memory(config), count_flops(config))
    assert sum(found.values()) == pytest.approx(measured, rel=0.05), found


def test_a_step_of_a_million_tokens_is_near_the_measured_one(capsys):
    """Qwen2.5-Coder-1.5B: benchmarks/results/density-by-length-h200-2026-11-30.md."""
    sizes = {
        "hidden_size": 1536, "num_layers": 28, "num_heads": 12, "num_kv_heads": 2,
        "intermediate_size": 8960, "max_position_embeddings": 2**20, "remat": "full_offload",
    }  # fmt: skip
    replayed = {"kind": "benchmarks.replay:Replay", "replay_of": "sampled_rows"}
    overrides = {
        "parallel.devices_per_node": 1,
        "data.seq_len": 2**20,
        "sparsity.replay_density": 0.0386,  # that of the step
        **{f"model.{field}": value for field, value in sizes.items()},
        **{f"sparsity.{field}": value for field, value in replayed.items()},
    }
    config = Config.load("qwen3b_512k", overrides)
    memory = estimate_memory(config)
    assert memory.total / GIB == pytest.approx(54.1, rel=0.05)
    assert memory.host / GIB == pytest.approx(170.6, rel=0.01)
    found = seconds(config, H200, memory, count_flops(config))
    assert sum(found.values()) == pytest.approx(58.73, rel=0.05), found
    options = [f"--{name}={value}" for name, value in overrides.items()]
    assert main(["--config=qwen3b_512k", "--dry-run=estimate", *options]) == 0
    share = re.search(r"attention +([\d.]+)  ([\d.]+) per % of the pairs", capsys.readouterr().out)
    assert float(share[1]) == pytest.approx(float(share[2]) * 3.86, rel=0.01)


def test_predicted_selection_time_is_near_the_measured_one():
    config = Config.load(
        "qwen3b_512k",
        {
            "parallel.devices_per_node": "1",
            "data.seq_len": "131072",
            "model.remat": "attention",
            "sparsity.kind": "benchmarks.replay:Replay",
            "sparsity.replay_of": "sampled_rows",
        },
    )
    found = seconds(config, H200, estimate_memory(config), count_flops(config))
    # benchmarks/results/selection-h200-2026-11-25.md
    assert sum(found.values()) == pytest.approx(6.345, rel=0.05), found
    assert found["index selection"] == pytest.approx(36 * 4.7e-3, rel=0.05)  # since then faster


def test_of_experts_memory_counts_all_and_flops_those_of_a_token(capsys):
    config = Config.load("qwen3_30b_a3b_256k")
    total, _ = planned_state(config).count_parameters()
    active, model = total - idle_parameters(config), config.model
    assert 3.3e9 < active < 3.4e9 < 30e9 < total
    norms = (2 * model.hidden_size + 2 * model.head_dim) * model.num_layers + model.hidden_size
    embedding = model.vocab_size * model.hidden_size
    assert matrix_flops(config) == 6 * (active - embedding - norms)
    sharded = 4 * (total - norms) / 8 + 4 * norms
    assert estimate_memory(config).parameters == pytest.approx(sharded, rel=1e-6)
    assert main(["--config", "qwen3_30b_a3b_256k", "--dry-run=estimate"]) == 0
    assert f"  parameters  {total:,}, {active:,} of them per token\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("remat", "dtype", "passes", "size"), [("none", "bfloat16", 2, 2), ("mlp", "float32", 3, 4)]
)
def test_windows_of_several_ranks_cost_an_exchange_of_heads(config, remat, dtype, passes, size):
    """Of queries, keys, values and outputs: forward, backward and with rematerialization."""
    model = {"family": "gemma3_text", "sliding_window": 40, "full_attention_interval": 3}
    model |= {"window_rope_theta": 1e4, "query_pre_attn_scalar": 16, "num_layers": 4}
    model |= {"remat": remat, "dtype": dtype}
    config = changed(
        config, model=model, data={"batch_size": 6}, optimizer={"accumulation_steps": 3}
    )
    every = changed(config, model={"full_attention_interval": 1})
    alone = changed(config, parallel={"nodes": 1, "devices_per_node": 1})
    found, *others = (
        seconds(x, H200, estimate_memory(x), count_flops(x)) for x in (config, every, alone)
    )
    model = config.model
    bytes_of_heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim * size
    away = config.local_tokens * 3 / 4  # of 4 ranks
    moved = 3 * 3 * passes * bytes_of_heads * away  # 3 of 4 layers, 3 micro-batches
    assert found["exchange for windows"] == pytest.approx(moved / H200.link_bytes)
    assert not any("exchange for windows" in x for x in others)


def test_copies_and_collectives_take_the_time_of_their_bytes():
    """Of Qwen2.5-3B on 8 GPUs with FSDP, 2 sequences of 524288 tokens, at the rates of an H200."""

    def parts(**fields):
        options = {name.replace("__", "."): value for name, value in fields.items()}
        config = Config.load("qwen3b_512k", {"data.batch_size": 2} | options)
        memory = estimate_memory(config)
        return memory, seconds(config, H200, memory, count_flops(config))

    tokens, layers = 2 * 524288 // 8, 36
    memory, found = parts(optimizer__accumulation_steps=2, model__mlp_kept_chunks=2)
    # Gate and up products of two chunks of 16384 tokens in bf16, read and written twice.
    kept = 2 * layers * 2 * 2 * 16384 * 11008 * 2
    assert found["MLP products kept"] == pytest.approx(4 * kept / H200.copy_bytes)
    read_and_written = 3 * memory.parameters + 4 * memory.parameters  # and two moments
    assert memory.optimizer == pytest.approx(2 * memory.parameters, rel=1e-6)
    assert found["optimizer"] == pytest.approx(read_and_written / H200.copy_bytes, rel=1e-6)
    # In each of two micro-batches, parameters twice in bf16, gradients once in fp32.
    moved = 2 * 7 * (2 * memory.parameters / 4 * 2 + memory.parameters)
    assert found["gathering parameters"] == pytest.approx(moved / H200.link_bytes)

    _, found = parts(lora__rank=32)
    # The inputs and outputs of 7 products, 4.5 times.
    sides = (2048 + 2048) * 2 + (2048 + 256) * 2 + (2048 + 11008) * 3
    moved = 4.5 * 2 * tokens * layers * sides
    assert found["adapters"] == pytest.approx(moved / H200.copy_bytes)

    # The input of every layer and both moments, to the host and back.
    of_layers = tokens * 2048 * 2 * layers
    memory, found = parts(model__remat="attention_offload", optimizer__offload=True)
    moments = 2 * memory.parameters
    assert memory.host == pytest.approx(of_layers + moments, rel=1e-3)
    assert found["offload copies"] == pytest.approx(2 * memory.host / H200.offload_bytes)
    _, found = parts(
        model__remat="attention_offload", optimizer__offload=True, optimizer__accumulation_steps=2
    )
    assert found["offload copies"] == pytest.approx(2 * memory.host / H200.offload_bytes)
    # Parameters and gradients 7 times, moments 4 times.
    memory, found = parts(model__remat="attention_offload", optimizer__offload="all")
    moved = 2 * of_layers + 11 * (memory.host - of_layers) / 4
    assert found["offload copies"] == pytest.approx(moved / H200.offload_bytes)
    # The host also keeps sums of gradients, and another micro-batch copies 6 times.
    memory, found = parts(
        model__remat="attention_offload", optimizer__offload="all", optimizer__accumulation_steps=2
    )
    moved = 2 * of_layers + (11 + 6) * (memory.host - of_layers / 2) / 5
    assert found["offload copies"] == pytest.approx(moved / H200.offload_bytes)

    _, found = parts(model__num_heads=64, model__hidden_size=8192, model__num_kv_heads=8)
    heads = tokens * 64 * 128 * 2
    assert found["copies of heads"] == pytest.approx(10 * heads * layers / H200.copy_bytes)


def test_the_host_holds_sums_of_gradients_over_micro_batches(config):
    def host(steps):
        offload = {"offload": "all", "accumulation_steps": steps}
        return estimate_memory(changed(config, optimizer=offload, data={"batch_size": 6})).host

    layer = ModelSpec.from_config(config.model).layer
    layers = config.model.num_layers * sum(x.size for x in layer.values())
    assert host(3) == host(2) == host(1) + 4 * layers


def test_one_gpu_has_no_collectives():
    def products(devices):
        config = Config.load("qwen3b_512k", {"parallel.devices_per_node": str(devices)})
        found = seconds(config, H200, estimate_memory(config), count_flops(config))
        return found["matrix products"] * devices

    assert products(2) == products(4)
    assert products(1) == pytest.approx(products(2) * 0.87 / 0.90)


def test_without_selection_only_work_lists_are_built():
    def parts(estimate):
        config = Config.load(
            "qwen3b_512k",
            {
                "sparsity.kind": "benchmarks.replay:Replay",
                "sparsity.replay_estimate": estimate,
                "sparsity.replay_of": "xattention",
            },
        )
        return seconds(config, H200, estimate_memory(config), count_flops(config))

    chosen, given = parts("true"), parts("false")
    indices = 36 * 16 * 524288 / 8
    assert given["building work lists"] == pytest.approx(indices * H200.lists_seconds)
    assert "index selection" not in given and "building work lists" not in chosen
    assert chosen["index selection"] > 4 * given["building work lists"]


def test_score_time_is_bound_by_products_or_exponentials():
    def choosing(gpu=H200, **sparsity):
        overrides = {f"sparsity.{name}": value for name, value in sparsity.items()}
        config = Config.load("qwen3b_512k", overrides)
        flops = count_flops(config)
        time = seconds(config, gpu, estimate_memory(config), flops)["index selection"]
        return time, kernel_seconds(128, 1.0, flops.attention_dense * 4 / 14, 0.0) / config.devices

    (few, forward), (strides, _) = (
        choosing(kind="vertical_slash"),
        choosing(kind="xattention", stride=4),
    )
    (exact, _), (replayed, _) = (
        choosing(kind="sampled_rows", probe_queries_per_block=128),
        choosing(kind="benchmarks.replay:Replay", replay_of="xattention", stride=4),
    )
    softmax = 36 * 16 * 524288**2 / 2 / SCORES_PER_SECOND / 8
    assert strides - few == pytest.approx(forward / 8)
    assert softmax > forward / 2  # of one product, half of a forward pass
    assert exact - few == pytest.approx(softmax / FP8_SPEEDUP, rel=1e-5)
    # Only the kernels for Hopper score keys in 8 bits.
    (exact, _), (few, _) = (
        choosing(A100_40GB, kind="sampled_rows", probe_queries_per_block=128),
        choosing(A100_40GB, kind="vertical_slash"),
    )
    assert exact - few == pytest.approx(softmax / A100_40GB.scores_share, rel=1e-5)
    assert replayed == pytest.approx(strides)


def test_dense_steps_of_a_sparse_run_are_predicted(capsys):
    name, asked = "qwen3b_512k", {"run.steps": 100, "sparsity.dense_cooldown_steps": 25}
    sparse, dense = Config.load(name, asked), Config.load(name, {"sparsity.kind": "dense"})

    def total(config):
        return sum(seconds(config, H200, estimate_memory(config), count_flops(config)).values())

    assert dry_run(sparse, "estimate") == 0
    printed = capsys.readouterr().out
    mean = 0.75 * total(sparse) + 0.25 * total(dense)
    for text in (
        "  dense       the last 25: 25 of 100 steps\n",
        "(estimated by formulas; for a sparse step, which needs the most)",
        "PFLOP per sparse step,",
        "sparse step time in seconds:",
        f"  dense step           {total(dense):6.2f}  25.0% of the steps\n",
        f"  mean of all steps    {mean:6.2f}  {524288 / mean:,.0f} tokens/s\n",
    ):
        assert text in printed
    only_dense = changed(sparse, sparsity={"dense_cooldown_steps": 100})
    assert dry_run(only_dense, "estimate") == 0
    every_step = capsys.readouterr().out
    assert dry_run(changed(sparse, sparsity={"kind": "dense"}), "estimate") == 0
    assert capsys.readouterr().out == every_step


def test_memory_is_that_of_the_larger_of_sparse_and_dense_steps(config, capsys, monkeypatch):
    def compiled(config, gpu):
        return Compiled(peak=(3 if config.sparsity.kind == "dense" else 2) * GIB, host=0, seconds=7)

    monkeypatch.setattr("mtraining_jax.tools.plan.dry_run.compile_step", compiled)
    monkeypatch.setattr("mtraining_jax.tools.plan.dry_run.missing_plugin", lambda: None)
    mixed = changed(config, parallel=ON_GPUS, sparsity={"dense_interval": 2})
    assert dry_run(mixed, "compile") == 0
    printed = capsys.readouterr().out
    assert "compiling the sparse step for 4 x" in printed
    assert "compiling the dense step for 4 x" in printed
    assert "in 14 s; for a dense step, which needs the most)" in printed
    assert "  total                 3.00  fits" in printed


def test_heads_are_divided_in_a_step_as_in_the_forecast():
    config = Config.load("qwen3_8b_1m")
    model, layout, mesh = config.model, build_layout(config), make_mesh(1, 1, 8)
    words = config.data.seq_len // config.sparsity.block_size // 32
    bits = jax.ShapeDtypeStruct((1, model.num_heads, 32 * words, words), jnp.uint32)
    q, k = (
        jax.ShapeDtypeStruct((1, config.data.seq_len, heads, model.head_dim), jnp.bfloat16)
        for heads in (model.num_heads, model.num_kv_heads)
    )
    rows = P(None, None, SEQUENCE_AXES)
    ring = jax.shard_map(
        lambda q, k, bits: ring_attention(
            q, k, k, BlockMaskIndex(bits, 32 * words, config.sparsity.block_size), layout=layout
        ),
        mesh=mesh,
        in_specs=(HEADS, HEADS, rows),
        out_specs=HEADS,
        check_vma=False,
    )
    jaxpr = jax.make_jaxpr(ring)(q, k, bits).jaxpr
    loops = [eqn.params["length"] for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    assert loops[0] == attention_parts(config) == 4


def large_run(config, **parallel):
    return changed(
        config,
        model={
            "hidden_size": 8192,
            "num_layers": 80,
            "num_heads": 64,
            "num_kv_heads": 8,
            "head_dim": 128,
            "intermediate_size": 28672,
            "max_position_embeddings": 2**20,
            "dtype": "bfloat16",
        },
        sparsity={"block_size": 128},
        data={"seq_len": 2**20},
        parallel={**ON_GPUS, **parallel},
    )


def test_frozen_matrices_have_no_gradients_in_the_workspace(config):
    whole = large_run(config, replicas=1, nodes=2)
    parts = [changed(whole, optimizer={"trainable": x}) for x in (["layers.self_attn"], ["mlp"])]
    mlp, attention = 4 * 8192 * 3 * 28672, 4 * 8192 * (2 * 8192 + 2 * 1024)
    before, *after = (estimate_memory(x).workspace for x in (whole, *parts))
    # The gradients of an MLP are summed over chunks, twice its size.
    assert [before - x for x in after] == [3 * mlp, attention]


def test_the_output_layer_of_a_large_vocabulary_takes_the_workspace(config):
    large = changed(config, model={"vocab_size": 2**16})
    # fp32 logits and their gradients of a chunk, and 4 arrays of the hidden size; 4 ranks.
    activations = 24 * 2**16 * (4 + 4) + 4 * (2 * 128 // 4) * 32 * 4
    # The weight and two copies of its gradient; a frozen weight is stored in the compute dtype.
    for trainable, copies in (((), 3), (("mlp",), 0)):
        memory = estimate_memory(changed(large, optimizer={"trainable": trainable}))
        head = copies * 4 * 2**16 * 32
        assert memory.workspace + memory.gradients == activations + head


def test_a_run_that_fits_on_no_gpus_is_told_of_other_runs(config, capsys, monkeypatch):
    large = large_run(config, replicas=1, nodes=4)
    large = changed(
        large, data={"seq_len": 2**23}, model={"num_layers": 40, "max_position_embeddings": 2**23}
    )
    monkeypatch.setattr("sys.argv", ["train.py", "--config=large", "--data.seq_len", "8388608"])
    assert dry_run(large, "estimate") == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT: JAX uses up to 128.6 of 139.8 GiB" in printed
    *_, verdict, more, about_more, shorter, about_shorter = printed.splitlines()
    assert verdict.endswith(
        "no settings with the same results fit, by formulas, but other runs do:"
    )
    assert more.startswith("  python train.py --config=large --data.seq_len 8388608 --parallel.dev")
    assert about_more.startswith("  (16 GPUs: ")
    # Options replace those of the same name, and their values.
    assert shorter.startswith("  python train.py --config=large --parallel.fsdp=true ")
    assert "--data.seq_len=" in shorter and about_shorter.endswith(" s per step)")
    on_cpu = changed(large, parallel={"cpu_devices": 8})
    assert list(ways_to_fit(on_cpu, H200, GIB)) == [
        "no settings fit: use more devices or a shorter data.seq_len"
    ]
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert available(large, H200) == H200.memory // 2


ONE_H100 = ["--config=qwen3b_512k", "--data.seq_len=131072", "--parallel.devices_per_node=1"]


def test_the_fastest_settings_that_fit_are_proposed_with_their_command(capsys, monkeypatch):
    """Qwen2.5-3B at 131072 tokens: measured on one H100, 71.0 GiB with attention_offload."""
    asked = [*ONE_H100, "--model.remat=attention"]
    on_h100 = ["--dry-run", "estimate", "--dry-run-gpu=h100-80gb"]
    monkeypatch.setattr("sys.argv", ["train.py", *on_h100, *asked])
    assert main([*asked, *on_h100]) == 1
    *_, verdict, command, about = capsys.readouterr().out.splitlines()
    assert verdict == "it fits, by formulas, with"
    start = f"  python train.py {' '.join(ONE_H100)} --model.remat=attention_offload"
    assert command.startswith(start)
    assert "18.0 GiB of host memory per device" in about
    # What is proposed fits, and nothing faster is proposed for it.
    proposed = command.removeprefix("  python train.py ").split()
    assert main([*proposed, *on_h100]) == 0
    assert "faster" not in capsys.readouterr().out


def test_faster_settings_are_named_if_memory_is_left(capsys):
    assert main(["--config=qwen3b_512k", "--dry-run=estimate"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("faster, by formulas (1")
    assert last.endswith(" --model.mlp_kept_chunks=2")


def test_proposals_take_the_least_time_and_respect_both_memories(config):
    """Against all settings; the results of a step are the same with each of them."""
    base = large_run(config, replicas=1, devices_per_node=8)
    base = changed(base, data={"batch_size": 4, "seq_len": 2**17}, model={"num_layers": 8})
    everything = fastest(base, H200, 2**60)
    assert everything.options == ("--model.remat=none",)
    all_on_gpus = fastest(base, H200, 60 * GIB, host=0)
    offloading = fastest(base, H200, all_on_gpus.memory - 1)
    for proposal in (everything, all_on_gpus, offloading):
        memory, flops = estimate_memory(proposal.config), count_flops(proposal.config)
        assert proposal.memory == memory.total
        assert proposal.cost == sum(seconds(proposal.config, H200, memory, flops).values())
    assert all_on_gpus.memory <= 60 * GIB and all_on_gpus.host == 0
    assert everything.cost < all_on_gpus.cost
    assert fastest(base, H200, GIB) is None
    # Two GPUs need all of the state in host memory, which replicas do not allow.
    pair = changed(base, parallel={"nodes": 1, "devices_per_node": 2}, data={"seq_len": 2**15})
    least = fastest(pair, H200, 30 * GIB).options
    assert {"--parallel.fsdp=true", "--optimizer.offload=all"} < {*least}
    assert fastest(changed(pair, parallel={"replicas": 2}), H200, 30 * GIB) is None


def test_a_proposal_is_compiled_if_the_run_was(config, capsys, monkeypatch):
    asked = []

    def compiled(config, gpu):
        asked.append(config.model.remat)
        peak = estimate_memory(config).total + (45 * GIB if len(asked) == 2 else 0)
        return Compiled(peak=peak, host=0, seconds=7)

    monkeypatch.setattr("mtraining_jax.tools.plan.dry_run.compile_step", compiled)
    monkeypatch.setattr("mtraining_jax.tools.plan.dry_run.missing_plugin", lambda: None)
    overrides = dict(x[2:].split("=") for x in ONE_H100[1:])
    run = Config.load("qwen3b_512k", overrides | {"model.remat": "none"})
    assert dry_run(run, "compile", H200) == 1
    printed = capsys.readouterr().out
    assert printed.count("compiling with --model.remat=") == len(asked) - 1 >= 2
    assert "it fits, as compiled, with" in printed


def test_wrong_arguments(config, capsys, monkeypatch):
    assert main(["--config=tiny", "--dry-run=maybe"]) == 2
    message = "error: argument --dry-run: invalid choice: 'maybe' (choose from "
    assert capsys.readouterr().err.startswith(message)
    assert main(["--config=tiny", "--dry-run=compile"]) == 2
    assert "--dry-run=compile is not possible: the run uses virtual" in capsys.readouterr().err
    assert main(["--config=tiny", "--dry-run", "--parallel.cpu_devices=4"]) == 2
    assert capsys.readouterr().err.endswith(
        "8 devices, more than the 4 of parallel.cpu_devices = 4 in 1 process; reduce one of these "
        "fields or set parallel.cpu_devices = 8\n"
    )
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "75%")
    assert main(["--config=tiny", "--parallel.cpu_devices=none", "--dry-run=estimate"]) == 2
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=75% in the environment" in capsys.readouterr().err
    assert main(["--config=tiny", "--dry-run", "--dry-run-gpu", "v100"]) == 2
    message = "argument --dry-run-gpu: invalid choice: 'v100' (choose from "
    assert message in capsys.readouterr().err
    assert main(["--config=tiny", "--dry-run-gpu=h200"]) == 2
    assert "--dry-run-gpu=h200 needs --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize("name", GPUS)
def test_each_gpu_says_whether_its_times_are_forecasts(name, capsys):
    main(["--config=qwen3b_512k", "--dry-run=estimate", f"--dry-run-gpu={name}"])
    printed = capsys.readouterr().out
    assert f"of 8 x {GPUS[name].kind}\n" in printed
    assert ("not a measurement" in printed) == (name == "h200")
    assert ("a FORECAST from rates that were not all measured" in printed) == (name != "h200")


def test_forecast_for_the_papers_cluster(capsys):
    """32 A100-40GB: a forecast instead of an estimate, since no rate was measured."""
    arguments = [
        "--config=qwen3b_512k",
        "--parallel.nodes=4",
        "--sparsity.kind=benchmarks.replay:Replay",
    ]
    assert main([*arguments, "--dry-run", "--dry-run-gpu=a100-40gb"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "of 32 x NVIDIA A100-SXM4-40GB",
        "estimated by formulas: there is no target description of the NVIDIA A100-SXM4-40GB",
        "JAX uses up to 36.4 of 39.6 GiB",
        "a FORECAST from rates that were not all measured:\n  the kernels have not run on an A100",
    ):
        assert text in printed
    assert "ESTIMATE" not in printed
    config = Config.load(
        "qwen3b_512k", {"parallel.nodes": "4", "sparsity.kind": "benchmarks.replay:Replay"}
    )
    memory, flops = estimate_memory(config), count_flops(config)
    times = seconds(config, A100_40GB, memory, flops)
    # 4 of 14 FLOP of attention are forward, at 155 TFLOP/s, and 10 backward, at 105.
    attention = flops.attention_executed / 14 * (4 / 155e12 + 10 / 105e12) / config.devices
    assert times["attention"] == pytest.approx(attention, rel=0.01)
    assert times["matrix products"] == pytest.approx(
        seconds(config, H200, memory, flops)["matrix products"] * 989.4 / 312
    )
    xla = changed(config, parallel={"backend": "xla"})
    assert "known for the backend triton" in rates_missing(xla, A100_40GB)


def test_xla_pins_little_more_than_a_step_offloads():
    config = Config.load("qwen3_8b_1m")
    assert pinned_limit(config) is None
    config = changed(config, model={"remat": "full_offload"})
    whole = estimate_memory(config).host / 2**30
    assert 1.05 * whole + 4 <= pinned_limit(config) < 1.05 * whole + 5
    moments = changed(config, optimizer={"offload": True})
    added = estimate_memory(moments).host / 2**30 - whole
    assert abs(pinned_limit(moments) - pinned_limit(config) - 3 * added) < 1 < added
