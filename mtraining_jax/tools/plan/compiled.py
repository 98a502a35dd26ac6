"""Ahead-of-time compilation of the training step for GPUs that are not present."""

import dataclasses
import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mtraining_jax.attention.inputs import AttentionInputs
from mtraining_jax.config import Config
from mtraining_jax.documents import Documents
from mtraining_jax.parallel.mesh import DOCUMENTS, OVERRIDES, TOKENS, make_mesh
from mtraining_jax.tools.plan.hardware import Gpu
from mtraining_jax.training.build import build_attention, build_layout, build_pattern
from mtraining_jax.training.guard.guard import abstract_inputs
from mtraining_jax.training.state import StateBuilder
from mtraining_jax.training.step import make_train_step


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Compiler statistics of one device's program."""

    peak: int  # bytes of GPU memory: arguments, results and temporaries
    host: int  # bytes of host memory for offloaded arrays
    seconds: float  # of tracing and compiling


def missing_plugin() -> str | None:
    """Why compiling for GPUs is impossible on this machine; None if it is possible."""
    found = importlib.util.find_spec("jax_cuda13_plugin")
    return None if found else "the CUDA plugin of JAX (extra cuda) is not installed"


def compile_step(config: Config, gpu: Gpu) -> Compiled:
    """Compiles the training step for the GPU mesh; without a device XLA cannot autotune."""
    begin = time.perf_counter()
    compiled = lower_step(config, gpu).compile()
    memory = compiled.memory_analysis()
    peak = peak_bytes(compiled)
    if memory is None or peak is None:
        raise RuntimeError("the compiler returned no memory statistics")
    host = memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes
    return Compiled(peak=peak, host=host, seconds=time.perf_counter() - begin)


def peak_bytes(compiled: jax.stages.Compiled) -> int | None:
    """GPU memory of one device, in bytes: arguments, results and temporaries; None if unknown.

    Programs from JAX's persistent cache know it too, although their `peak_memory_in_bytes` is 0.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    reserved = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    # XLA's peak includes host memory.
    host = memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes
    return max(reserved, memory.peak_memory_in_bytes - host) or None


def lower_step(config: Config, gpu: Gpu) -> jax.stages.Lowered:
    """Lowers the training step, with its kernels, for the GPU mesh of the run."""
    assert gpu.target_config is not None
    parallel = config.parallel
    target = (Path(__file__).parent / gpu.target_config).read_text(encoding="utf-8")
    for field, value in gpu.target_changes:
        target = re.sub(rf"\b{field}: .*", f"{field}: {value}", target)
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=target,
        topology=f"1x{parallel.replicas * parallel.nodes}x{parallel.devices_per_node}",
    )
    mesh = make_mesh(*config.mesh_shape, devices=topology.devices)
    layout, pattern = build_layout(config), build_pattern(config)
    # The abstract mesh selects the kernels.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        builder = StateBuilder(config, mesh)
        attention = build_attention(config, mesh, layout, pattern)
        step = make_train_step(config, builder, attention, mesh, AttentionInputs(pattern))
        guarded = (abstract_inputs(builder),) if config.guard.enabled else ()
        traced = step.trace(builder.abstract(), abstract_batch(config, mesh), *guarded)
        return traced.lower(lowering_platforms=("cuda",))


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Shapes and shardings of the batch of a step."""

    def array(shape: tuple[int, ...], spec: P, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    data = config.data
    tokens = array(config.batch_shape, TOKENS)
    batch: dict[str, Any] = {"tokens": tokens, "labels": tokens}
    if data.has_documents:
        size = config.sparsity.block_size
        blocks: Any = array((data.batch_size, data.seq_len // size), DOCUMENTS)
        batch["documents"] = Documents(blocks, blocks, blocks, size)
    if config.loss.weighting == "document":
        batch["weights"] = array(config.batch_shape, TOKENS, jnp.float32)
    if config.sparsity.tune != "none":
        shape = data.batch_size, config.model.num_layers
        names = config.sparsity.pattern.overridable()
        batch["overrides"] = {name: array(shape, OVERRIDES) for name in names}
    return batch
