"""Problems and GPUs described by shapes only, for lowering and compiling."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import DiagonalTiles, ListedTiles, SegmentedDiagonals, VerticalSlashIndex
from pallas_kernels.index import Segment

B, NQ, NK, HQ, HK, G = 2, 1024, 512, 6, 2, 128  # unequal lengths, as in a ring step


@dataclasses.dataclass(frozen=True)
class Gpu(AbstractDevice):
    compute_capability: str = "9.0"


def gpu(kind: str, capability: str, num_cores: int = 1) -> Gpu:
    return Gpu(device_kind=kind, platform="gpu", num_cores=num_cores, compute_capability=capability)


H200 = gpu("NVIDIA H200", "9.0", 132)
A100 = gpu("NVIDIA A100-SXM4-80GB", "8.0", 108)


def target(device: AbstractDevice):
    """A context in which programs are traced for a GPU."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def shaped(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return shaped(*shape, dtype=jnp.int32)


def qkv(dim: int, dtype: str, nk: int = NK) -> tuple[jax.ShapeDtypeStruct, ...]:
    return shaped(B, NQ, HQ, dim, dtype=dtype), *(2 * [shaped(B, nk, HK, dim, dtype=dtype)])


def index() -> VerticalSlashIndex:
    return VerticalSlashIndex(int32(B, HQ, 5), int32(B, HQ), int32(B, HQ, 200), int32(B, HQ), G)


def tiles_of(kind: str):
    if kind == "none":
        return None
    if kind in ("diagonals", "dense", "window"):
        lists = int32(B, HQ, 7), int32(B, HQ), int32(B, HQ), int32()
        window = 6 * G if kind == "window" else None
        return DiagonalTiles(*lists, G, dense=kind == "dense", window=window)
    if "segments" in kind:
        lists = int32(B, HQ, 7), int32(B, HQ, 3), int32(B, HQ, 3), int32(3), int32()
        return SegmentedDiagonals(*lists, 4, G, dense="dense" in kind)
    rows, columns = NQ // G, NK // G
    return ListedTiles(
        int32(B, HQ, rows, columns),
        int32(B, HQ, rows),
        int32(B, HQ, columns, rows),
        int32(B, HQ, columns),
        int32(),
        G,
    )


def columns_of(dim: int, dtype: str):
    """Columns as seen by a shard of half the query blocks of a sequence, and their keys."""

    def build(index):
        return index.columns(Segment(0, 2, NQ // G), 2 * NQ // G)

    return jax.eval_shape(build, index()), 2 * (shaped(B, 256, HQ, dim, dtype=dtype),)
