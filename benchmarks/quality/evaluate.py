"""Times of reading a prompt and of each new token, with random weights.

python -m benchmarks.quality.evaluate --config qwen3b_512k --length 131072 --pattern dense replay

Reading a prompt is set against the forward pass of training over as many tokens, both without the
output layer on all of them. A new token is set against the time in which its device could read all
weights and its part of the cache, at --bandwidth.

Random weights attend to everything alike, so that a chosen index would be nearly dense: the
pattern `replay` computes a density given beforehand, and chooses an index too. Any field of the
configuration can be set, as --parallel.devices_per_node=8; for a run without a GPU,
--config tiny --length 2048 --pattern dense vertical_slash.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from mtraining_jax.config import Config, load_config
from mtraining_jax.evaluation.engine import Engine
from mtraining_jax.evaluation.load import Loaded, in_compute_dtype
from mtraining_jax.evaluation.network import Attending, Network
from mtraining_jax.evaluation.programs import Programs
from mtraining_jax.jax_platform import set_platform
from mtraining_jax.models import ModelSpec, init_model, parameter_names
from mtraining_jax.parallel.compiler import ring_compiler_options
from mtraining_jax.parallel.mesh import make_mesh
from mtraining_jax.training.build import layer_inputs

_COLUMNS = (
    "pattern", "density", "training's forward s", "prefill s", "rate over training's",
    "prompt tokens/s", "ms a new token", "ms to read weights and cache", "times that",
    "peak GiB of prefill (compiler)",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of one pattern.

    Attributes:
        density: computed over causal pairs, mean over layers.
        forward, prefill, token: seconds, medians.
        peak_bytes: memory of one device in the prefill, as the compiler reserves it; 0 where it
            does not say, as of a program from JAX's cache.
    """

    density: float
    forward: float
    prefill: float
    token: float
    peak_bytes: int


def bytes_of_a_token(
    spec: ModelSpec, parameters: dict[str, tuple[int, int]], context: int, ranks: int, width: int
) -> int:
    """What one device reads for one new token.

    Args:
        spec: the model.
        parameters: by name, how many numbers and bytes a number.
        context: tokens in the cache.
        ranks: devices that share the cache.
        width: bytes of a number in the cache.

    Returns:
        Bytes of all weights, of the embedding only if it is the output layer too, and of keys and
        values of the context that lie on the device.
    """
    untied = not spec.tie_word_embeddings
    weights = sum(
        number * size for name, (number, size) in parameters.items()
        if not (untied and name == "embed_tokens.weight")
    )  # fmt: skip
    cache = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * context * width
    return weights + cache // ranks


def row_of(name: str, timing: Timing, length: int, ideal: float) -> list[str]:
    """The cells of one pattern; `ideal` are the seconds in which a token's bytes can be read."""
    return [
        name, f"{timing.density:.3f}", f"{timing.forward:.3f}", f"{timing.prefill:.3f}",
        f"{timing.forward / timing.prefill:.1%}", f"{length / timing.prefill:,.0f}",
        f"{1e3 * timing.token:.2f}", f"{1e3 * ideal:.2f}", f"{timing.token / ideal:.2f}",
        f"{timing.peak_bytes / 2**30:.1f}" if timing.peak_bytes else "–",
    ]  # fmt: skip


def time_pattern(
    loaded: Loaded, length: int, repeats: int, tokens: int, say: Callable[[str], None]
) -> Timing:
    """Compiles and times everything with one pattern.

    Args:
        loaded: the model.
        length: tokens of the prompt.
        repeats: of each measurement, after one to warm up.
        tokens: new tokens of each measurement of these.
        say: told what has been measured.
    """
    programs = Programs(loaded)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, loaded.network.spec.vocab_size, length, np.int32)
    total = length + (repeats + 1) * tokens
    drawing = np.float32(0), np.float32(1), np.uint32(0)

    forward = _forward(loaded, programs, ids)
    forward_seconds = statistics.median(_seconds(forward, repeats))
    del forward
    say(f"training's forward: {forward_seconds:.3f} s")
    read = programs.prefill(ids, total)
    prefill_seconds = statistics.median(_seconds(read, repeats))
    say(f"prefill: {prefill_seconds:.3f} s")

    prompt = read()
    density = float(prompt.density)
    token = programs.draw(prompt.logits, "greedy", drawing)
    cache = programs.cache(prompt, length, (repeats + 1) * tokens)
    step = programs.step(cache, token, length, total, "greedy", drawing)

    def several() -> Array:
        nonlocal cache, token  # a step takes over the cache
        for _ in range(tokens):
            cache, token, _ = step(cache, token)
        return token

    token_seconds = statistics.median(_seconds(several, repeats)) / tokens
    say(f"a new token: {1e3 * token_seconds:.2f} ms")
    peak = read.func.memory_analysis().peak_memory_in_bytes
    return Timing(density, forward_seconds, prefill_seconds, token_seconds, peak)


def _forward(loaded: Loaded, programs: Programs, ids: np.ndarray) -> Callable[[], Array]:
    """The model as training runs it, up to what goes into the output layer."""
    network = loaded.network
    layout, positions = programs.deal(len(ids))
    pattern = programs.pattern(len(ids))
    tokens = programs.place(ids, layout, 0)
    attention = network.attention(layout, pattern, None)

    def forward(state: nnx.State, tokens: Array, positions: Array, inputs: Any) -> Array:
        model = nnx.merge(network.graphdef, state)
        return model(
            tokens, positions, attention, attention_inputs=inputs, mesh=network.mesh,
            fsdp=network.fsdp,
        )[0]  # fmt: skip

    options = ring_compiler_options(network.mesh.devices.flat[0].platform)
    arguments = loaded.state, tokens, positions, layer_inputs(pattern)
    compiled = jax.jit(forward, compiler_options=options).lower(*arguments).compile()
    return lambda: compiled(*arguments)


def _seconds(run: Callable[[], Any], repeats: int) -> Iterator[float]:
    """Times of `repeats` runs, after one to warm up."""
    for number in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        if number:
            yield time.perf_counter() - begin


def _load(config: Config) -> Loaded:
    spec = ModelSpec.from_config(config.model)
    parallel = config.parallel
    mesh = make_mesh(1, parallel.nodes, parallel.devices_per_node)
    backend = None if parallel.backend == "auto" else parallel.backend
    attending = Attending(config.sparsity.settings, parallel.layout, parallel.ring, backend)
    network = Network(spec, mesh, attending, parallel.fsdp)
    _, state = init_model(spec, seed=0, mesh=mesh, fsdp=parallel.fsdp)
    state = in_compute_dtype(state, spec)
    return Loaded(network, state, None, frozenset(), config.loss.chunk_size, "random weights")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--length", type=int, default=131072, help="tokens of the prompt")
    parser.add_argument("--pattern", nargs="+", default=["dense", "replay"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=16, help="new tokens a measurement")
    parser.add_argument("--bandwidth", type=float, default=4.0, help="TB/s, what memory can do")
    arguments, overrides = parser.parse_known_args()
    pairs = [tuple(text.removeprefix("--").split("=", 1)) for text in overrides]
    # A prompt is read whole, in one sequence.
    pairs += [("parallel.data", "1"), ("data.seq_len", str(arguments.length))]
    pairs += [("audit.every_steps", "0")]  # there is no training to measure
    configs = {
        name: load_config(arguments.config, [*pairs, ("sparsity.kind", name)])
        for name in arguments.pattern
    }
    config = configs[arguments.pattern[0]]
    set_platform(config.parallel.cpu_devices)
    loaded = _load(config)
    network = loaded.network
    state = jax.tree.leaves(loaded.state)
    sizes = {name: (x.size, x.dtype.itemsize) for name, x in _named(loaded).items()}
    context = arguments.length + (arguments.repeats + 1) * arguments.tokens // 2
    width = jnp.dtype(network.spec.dtype).itemsize
    read = bytes_of_a_token(network.spec, sizes, context, network.ranks, width)
    ideal = read / (arguments.bandwidth * 1e12)
    device = network.mesh.devices.flat[0].device_kind
    print(
        f"{config.run.name}: {arguments.length} tokens on {network.ranks} x {device}, jax "
        f"{jax.__version__}, {network.spec.dtype}, {sum(x.size for x in state) / 1e9:.2f} billion "
        f"parameters with random values; medians of {arguments.repeats}; {read / 1e9:.2f} GB are "
        f"read for a new token on each device, at {arguments.bandwidth:g} TB/s in "
        f"{1e3 * ideal:.2f} ms",
        flush=True,
    )
    rows = []
    for name, config in configs.items():
        engine = Engine(loaded).with_pattern(config.sparsity.settings)
        timing = time_pattern(
            engine.loaded, arguments.length, arguments.repeats, arguments.tokens,
            lambda text, name=name: print(f"{name}: {text}", flush=True),
        )  # fmt: skip
        rows.append(row_of(name, timing, arguments.length, ideal))
    print("| " + " | ".join(_COLUMNS) + " |\n|" + " --- |" * len(_COLUMNS))
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


def _named(loaded: Loaded) -> dict[str, Array]:
    names = jax.tree.leaves(parameter_names(loaded.state))
    return dict(zip(names, jax.tree.leaves(loaded.state), strict=True))


if __name__ == "__main__":
    main()
