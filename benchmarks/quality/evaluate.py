r"""Times reading a prompt and generating tokens, with random weights, and prints a markdown table.

    python -m benchmarks.quality.evaluate --config qwen3b_512k --length 131072 \
        --pattern dense benchmarks.replay:Replay

Reading a prompt is compared with the forward pass of training over as many tokens, both without the
output layer on all of them. A new token is compared with the time in which its device could read
all weights and its part of the cache, at --bandwidth. Random weights have flat attention, so that
a selected index would be nearly dense: a replay computes a given density, and selects
an index too. Any configuration field can be set, as --parallel.devices_per_node=8; a run without a
GPU: --config tiny --length 2048 --pattern dense vertical_slash.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.options import make_parser, overrides
from benchmarks.report import table_head, table_line
from benchmarks.timing import log, median_ms
from mtraining_jax.config import Config
from mtraining_jax.models.sharding import parameter_names
from mtraining_jax.models.spec import ModelSpec
from mtraining_jax.models.transformer import init_model
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.tools.evaluate.engine.decode import steps_at_once
from mtraining_jax.tools.evaluate.engine.engine import Engine
from mtraining_jax.tools.evaluate.engine.network import Network
from mtraining_jax.tools.evaluate.engine.options import GenerateOptions
from mtraining_jax.tools.evaluate.engine.programs import Programs, first_token
from mtraining_jax.tools.evaluate.load import Loaded, in_compute_dtype
from mtraining_jax.tools.plan.compiled import peak_bytes
from mtraining_jax.utils.jax_platform import set_platform

_COLUMNS = (
    "pattern", "density", "training's forward s", "prefill s", "rate over training's",
    "prompt tokens/s", "ms per new token", "ms to read weights and cache", "ratio",
    "peak GiB of prefill (compiler)",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Timing:
    """Results of one pattern: density, mean over layers; median seconds; and memory of one device.

    `peak_bytes` is what the compiler reserves for the prefill, None if it does not say.
    """

    density: float
    forward: float
    prefill: float
    token: float
    peak_bytes: int | None


def bytes_of_a_token(
    spec: ModelSpec, parameters: dict[str, tuple[int, int]], context: int, ranks: int, width: int
) -> int:
    """Bytes that one device reads for one new token.

    That is all weights (the embedding only if it is also the output layer), and the keys and values
    of `context` tokens on the device, `width` bytes each. `parameters` gives size and bytes per
    element by name.
    """
    untied = not spec.tie_word_embeddings
    weights = sum(
        number * size for name, (number, size) in parameters.items()
        if not (untied and name == "embed_tokens.weight")
    )  # fmt: skip
    cache = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * context * width
    return weights + cache // ranks


def row_of(name: str, timing: Timing, length: int, ideal: float) -> list[str]:
    """The cells of one pattern; `ideal` is the time to read the bytes of a token, in seconds."""
    return [
        name, f"{timing.density:.3f}", f"{timing.forward:.3f}", f"{timing.prefill:.3f}",
        f"{timing.forward / timing.prefill:.1%}", f"{length / timing.prefill:,.0f}",
        f"{1e3 * timing.token:.2f}", f"{1e3 * ideal:.2f}", f"{timing.token / ideal:.2f}",
        f"{timing.peak_bytes / 2**30:.1f}" if timing.peak_bytes else "–",
    ]  # fmt: skip


def time_pattern(loaded: Loaded, length: int, repeats: int, tokens: int) -> Timing:
    """Compiles and times everything with one pattern; a run generates at least `tokens` tokens."""
    at_once = steps_at_once(loaded.network)
    programs, tokens = Programs(loaded), -(-tokens // at_once) * at_once
    rng = np.random.default_rng(0)
    ids = rng.integers(0, loaded.network.spec.vocab_size, length, np.int32)
    # The first new token comes with the prompt.
    new_tokens, greedy = (repeats + 1) * tokens + 1, GenerateOptions()
    forward_ms = median_ms(_forward(loaded, programs, ids), repeats)
    read = programs.prefill(ids, length)
    prefill_ms = median_ms(read, repeats)

    prompt = read()
    density = float(prompt.density)
    token = first_token(prompt.logits, greedy)
    steps = programs.decoder(prompt, token, ids[:0, None], length, new_tokens, greedy, length)

    def generate() -> Array:
        return [next(steps).tokens for _ in range(0, tokens, at_once)][-1]

    token_ms = median_ms(generate, repeats, burst=1) / tokens
    peak = peak_bytes(read.func)
    return Timing(density, forward_ms / 1e3, prefill_ms / 1e3, token_ms / 1e3, peak)


def _forward(loaded: Loaded, programs: Programs, ids: np.ndarray) -> Callable[[], Array]:
    """The model as in training, up to the input of the output layer."""
    network = loaded.network
    layout, (*arguments, inputs) = programs.inputs(ids, is_prompt=False)
    arguments.append(dataclasses.replace(inputs, documents=None))

    def forward(*arguments: Any) -> Array:
        return network.forward(layout, None, *arguments)[1]

    return functools.partial(network.jit(forward, None).lower(*arguments).compile(), *arguments)


def _load(config: Config) -> Loaded:
    spec = ModelSpec.from_config(config.model)
    parallel = config.parallel
    mesh = make_mesh(1, parallel.nodes, parallel.devices_per_node)
    backend = None if parallel.backend == "auto" else parallel.backend
    network = Network(
        spec, mesh, config.sparsity.pattern, parallel.layout, parallel.ring, backend,
        parallel.fsdp, loss_chunk_size=config.loss.chunk_size,
    )  # fmt: skip
    _, state = init_model(spec, seed=0, mesh=mesh, fsdp=parallel.fsdp)
    state = in_compute_dtype(state, spec)
    return Loaded(network, state, None, frozenset(), "random weights")


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "repeats", "config")
    parser.add_argument("--length", type=int, default=131072, help="tokens of the prompt")
    parser.add_argument("--pattern", nargs="+", default=["dense", "benchmarks.replay:Replay"])
    parser.add_argument("--tokens", type=int, default=16, help="new tokens per run")
    parser.add_argument("--bandwidth", type=float, default=4.0, help="of the memory, TB/s")
    args, fields = parser.parse_known_args()
    values = overrides(fields)
    # One sequence with the whole prompt, and no training to audit.
    values |= {"parallel.replicas": "1", "data.seq_len": str(args.length), "audit.interval": "0"}
    configs = {
        name: Config.load(args.config, values | {"sparsity.kind": name}) for name in args.pattern
    }
    config = configs[args.pattern[0]]
    set_platform(config.parallel.cpu_devices)
    loaded = _load(config)
    network = loaded.network
    weights = dict(zip(
        jax.tree.leaves(parameter_names(loaded.state)), jax.tree.leaves(loaded.state), strict=True
    ))  # fmt: skip
    sizes = {name: (x.size, x.dtype.itemsize) for name, x in weights.items()}
    context = args.length + (args.repeats + 1) * args.tokens // 2
    width = jnp.dtype(network.spec.dtype).itemsize
    read = bytes_of_a_token(network.spec, sizes, context, network.ranks, width)
    ideal = read / (args.bandwidth * 1e12)
    device = network.mesh.devices.flat[0].device_kind
    print(
        f"{config.run.name}: {args.length} tokens on {network.ranks} x {device}, jax "
        f"{jax.__version__}, {network.spec.dtype}, "
        f"{sum(x.size for x in weights.values()) / 1e9:.2f} billion random parameters; medians of "
        f"{args.repeats}; each device reads {read / 1e9:.2f} GB per new token, which takes "
        f"{1e3 * ideal:.2f} ms at {args.bandwidth:g} TB/s",
        flush=True,
    )
    rows = []
    for name, config in configs.items():
        engine = Engine(loaded).with_pattern(config.sparsity.pattern)
        timing = time_pattern(engine.loaded, args.length, args.repeats, args.tokens)
        log(f"{name}: {timing}")
        rows.append(row_of(name, timing, args.length, ideal))
    print(*table_head(_COLUMNS), *map(table_line, rows), sep="\n")


if __name__ == "__main__":
    main()
