"""Problems of a cluster by the facts of its processes, and their table."""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from mtraining_jax.reporting.flops import PEAK_BF16_FLOPS
from mtraining_jax.utils.text import counted

_SLOW, _SLOW_CPU = 0.7, 0.01  # of the median; CPUs have other work
_SLOW_FROM_HOST = 0.4  # GPUs may hang on another socket
_LEAST_OF_PEAK = 0.4  # of matrix products
_LEAST_BETWEEN_NODES = 2e9  # bytes/s
_CLOCK_SECONDS = 2.0
_LEAST_MEMORY = 0.5  # of the median
_FILES_PER_DEVICE, _LEAST_FILES = 64, 512
_MAX_NAMED = 3  # processes in a sentence
_RATES = {
    "matmul": ("matrix products", "TFLOP/s", 1e12),
    "memory": ("copies in its memory", "GB/s", 1e9),
    "from_host": ("copies from the host", "GB/s", 1e9),
}
_LINKS = {"pair": "between GPUs of a node", "pair of nodes": "between nodes"}
Facts = Mapping[str, Any]


class Problem(NamedTuple):
    """A sentence, and the processes at fault, if that is known."""

    sentence: str
    processes: tuple[int, ...] = ()


def problems(facts: Sequence[Facts], needed: int, per_node: int) -> list[Problem]:
    """Finds what is wrong with a cluster.

    Args:
        facts: of all processes, by number; `links` are absent if they were not measured.
        needed: devices of the mesh.
        per_node: devices of a node.
    """
    return [
        *_device_problems(facts, needed),
        *_setting_problems(facts),
        *_host_problems(facts),
        *_rate_problems(facts),
        *_link_problems(facts, "pair", 1),
        *_link_problems(facts, "pair of nodes", per_node),
    ]


def hosts_at_fault(facts: Sequence[Facts], found: Iterable[Problem]) -> list[str]:
    """Names of hosts, those with most problems first."""
    hosts = Counter(facts[n]["host"] for problem in found for n in problem.processes)
    return [host for host, _ in hosts.most_common()]


def table(facts: Sequence[Facts]) -> Table:
    """A row for each process, with its slowest device and links."""
    rows = Table(box=None, pad_edge=False)
    for name in (
        "process", "host", "devices", "TFLOP/s", "memory GB/s", "from host GB/s", "pairs GB/s",
        "ring GB/s", "node pairs GB/s", "node ring GB/s", "write GB/s", "seen s", "clock s",
        "free GiB", "open files",
    ):  # fmt: skip
        rows.add_column(name, justify="left" if name == "host" else "right")
    for number, fact in enumerate(facts):
        rates = [[x.get(name) for x in fact["devices"]] for name in _RATES]
        for kind in ("pair", "ring", "pair of nodes", "ring of nodes"):
            rates.append([x[3] for x in fact.get("links", ()) if x[0] == kind])
        least = [min((x for x in kind_rates if x), default=None) for kind_rates in rates]
        pairs = zip([*least, fact.get("write")], [1e12, *[1e9] * 7], strict=True)
        cells = ["-" if value is None else f"{value / unit:.3g}" for value, unit in pairs]
        cells.append(f"{fact['seen']:.1f}" if "seen" in fact else "-")
        cells += [f"{fact['clock'] - facts[0]['clock']:+.2f}", f"{fact['memory'] / 2**30:.0f}"]
        count = f"{len(fact['devices'])} {fact['kinds'][0]}"
        rows.add_row(str(number), fact["host"], count, *cells, str(fact["open_files"]))
    return rows


def _device_problems(facts: Sequence[Facts], needed: int) -> Iterator[Problem]:
    counts = [len(fact["devices"]) for fact in facts]
    for value, usual, numbers in _different(counts):
        what = f"{_who(facts, numbers)} has {counted(value, 'device')}"
        yield Problem(f"{what}; most others have {usual}", numbers)
    if sum(counts) != needed:
        yield Problem(
            f"the mesh under [parallel] needs {counted(needed, 'device')}, but there are"
            f" {sum(counts)} in {counted(len(counts), 'process')}; start as many processes as the"
            " run will have (srun, or an indexed Job), or change [parallel]"
        )


def _setting_problems(facts: Sequence[Facts]) -> Iterator[Problem]:
    settings = [{**fact["same"], "data.paths": fact["data"]} for fact in facts]
    for name in sorted({name for process_settings in settings for name in process_settings}):
        for value, usual, numbers in _different([x.get(name) for x in settings]):
            where = f"is {value} in {_who(facts, numbers)} and {usual} in most others"
            yield Problem(f"{name} {where}; it must be the same in all processes", numbers)
    for text in dict.fromkeys(text for fact in facts for text in fact["errors"]):
        numbers = tuple(n for n, fact in enumerate(facts) if text in fact["errors"])
        yield Problem(f"{_who(facts, numbers)}: {text}", numbers)


def _host_problems(facts: Sequence[Facts]) -> Iterator[Problem]:
    clock = statistics.median_low(fact["clock"] for fact in facts)
    memory = statistics.median(fact["memory"] for fact in facts)
    files = max(_LEAST_FILES, _FILES_PER_DEVICE * sum(len(fact["devices"]) for fact in facts))
    for number, fact in enumerate(facts):
        texts, skew, free = [], fact["clock"] - clock, fact["memory"]
        if abs(skew) > _CLOCK_SECONDS:
            how = "ahead of" if skew > 0 else "behind"
            way = "synchronize the clocks (chrony, ntpd)"
            texts.append(f"its clock is {abs(skew):.0f} s {how} the others; {way}")
        if free < _LEAST_MEMORY * memory:
            what = f"{free / 2**30:.1f} GiB of host memory are free, {memory / 2**30:.1f} elsewhere"
            texts.append(f"{what}; end other programs, or raise the job's limit (--mem)")
        if 0 <= fact["open_files"] < files:  # -1: unlimited
            way = f"raise the limit with ulimit -n {files}"
            texts.append(f"only {fact['open_files']} files may be open; {way}")
        for text in texts:
            yield Problem(f"{_who(facts, [number])}: {text}", (number,))


def _rate_problems(facts: Sequence[Facts]) -> Iterator[Problem]:
    rates = {(n, i): x for n, fact in enumerate(facts) for i, x in enumerate(fact["devices"])}
    names = {at: f"device {at[1]} of {_who(facts, [at[0]])}" for at in rates}
    for at in [at for at, rate in rates.items() if "error" in rate]:
        yield Problem(f"{names[at]} fails: {rates.pop(at)['error']}", at[:1])
    yield from wrong_results(facts)
    for at, rate in rates.items():
        peak = PEAK_BF16_FLOPS.get(facts[at[0]]["kinds"][at[1]], 0.0)
        if rate["matmul"] < _LEAST_OF_PEAK * peak:
            what = f"reaches {rate['matmul'] / peak:.0%} of its peak rate in matrix products"
            way = "look for other programs, clocks and temperature with nvidia-smi -q"
            yield Problem(f"{names[at]} {what}; {way}", at[:1])
    for name, (what, unit, size) in _RATES.items():
        fraction = _SLOW_FROM_HOST if name == "from_host" else _SLOW
        values = {at: rate[name] for at, rate in rates.items()}
        for at, text in _slow(facts, values, unit, size, fraction).items():
            yield Problem(f"{names[at]} is slow in {what}: {text}", at[:1])


def wrong_results(facts: Sequence[Facts]) -> Iterator[Problem]:
    """Devices that compute wrong bits, and links that change what they move."""
    results = {(n, i): x for n, fact in enumerate(facts) for i, x in enumerate(fact["devices"])}
    counts = Counter(x for result in results.values() for x in result.get("attention", ()))
    usual = counts.most_common(2)
    agree = len(usual) < 2 or usual[0][1] > usual[1][1]
    for at, result in results.items():
        name, wrong = f"device {at[1]} of {_who(facts, at[:1])}", result.get("wrong", 0)
        if wrong:
            what = f"computes wrong products, in {wrong} of {counted(result['passes'], 'pass')}"
            yield Problem(f"{name} {what}; do not use it", at[:1])
        if len(found := result.get("attention", ())) > 1:
            what = f"has {len(found)} results of the same attention"
            yield Problem(f"{name} {what}; do not use it", at[:1])
        elif found and agree and found[0] != usual[0][0]:
            yield Problem(f"{name} computes other attention than most; do not use it", at[:1])
    if not agree:
        yield Problem(
            "devices compute different attention, and there is no majority; one of them is faulty"
        )
    process = [number for number, fact in enumerate(facts) for _ in fact["devices"]]
    links = [x for fact in facts for x in fact.get("links", ()) if x[0] == "wrong"]
    for _, a, b, _ in dict.fromkeys(map(tuple, links)):
        ends = (f"device {end} ({_who(facts, [process[end]])})" for end in (a, b))
        yield Problem(f"the link from {' to '.join(ends)} changes data; do not use it")


def _link_problems(facts: Sequence[Facts], kind: str, unit: int) -> Iterator[Problem]:
    """Problems of links between devices, or nodes of `unit` devices."""
    process = [number for number, fact in enumerate(facts) for _ in fact["devices"]]
    links: dict[tuple[int, int], float] = {}
    for name, a, b, rate in (link for fact in facts for link in fact.get("links", ())):
        if name == kind:  # both ends measure it, and the one that begins late measures less
            pair = min(a, b), max(a, b)
            links[pair] = max(rate, links.get(pair, 0.0))
    best: dict[int, float] = {}
    for pair, rate in links.items():
        for end in pair:
            best[end // unit] = max(rate, best.get(end // unit, 0.0))
    slow = _slow(facts, best, "GB/s", 1e9) if len(best) > 2 else {}
    for end, text in slow.items():
        numbers = tuple(dict.fromkeys(process[end * unit : (end + 1) * unit]))
        what = "device" if kind == "pair" else "node"
        where = f"{what} {end}, {_who(facts, numbers)}"
        yield Problem(f"all links {_LINKS[kind]} are slow at {where}: {text}", numbers)
    for pair, text in _slow(facts, links, "GB/s", 1e9).items():
        if not slow.keys() & {end // unit for end in pair}:
            a, b = (f"device {end} ({_who(facts, [process[end]])})" for end in pair)
            yield Problem(f"the link of {a} and {b} is slow: {text}")
    if kind == "pair of nodes" and links and "cpu" not in facts[0]["kinds"]:
        if (usual := statistics.median(links.values())) < _LEAST_BETWEEN_NODES:
            yield Problem(
                f"nodes exchange {usual / 1e9:.2g} GB/s per device, as over TCP; name the fast"
                " network in NCCL_IB_HCA and NCCL_SOCKET_IFNAME (NCCL_DEBUG=INFO prints it)"
            )


def _different[T](values: Sequence[T]) -> Iterator[tuple[T, T, tuple[int, ...]]]:
    """Each unusual value, the usual one, and the processes that have it."""
    (usual, _), *others = Counter(values).most_common()
    for value, _ in others:
        yield value, usual, tuple(n for n, x in enumerate(values) if x == value)


def _slow[K](
    facts: Sequence[Facts],
    rates: Mapping[K, float],
    unit: str,
    size: float,
    fraction: float = _SLOW,
) -> dict[K, str]:
    """The rates below a fraction of the median, as text."""
    if not rates:
        return {}
    usual = statistics.median(rates.values())
    limit = usual * (_SLOW_CPU if "cpu" in facts[0]["kinds"] else fraction)
    return {
        key: f"{rate / size:.3g} {unit}, {usual / size:.3g} in the median"
        for key, rate in rates.items()
        if rate < limit
    }


def _who(facts: Sequence[Facts], numbers: Sequence[int]) -> str:
    if len(numbers) == len(facts) > 1:
        return "all processes"
    names = [f"process {n} ({facts[n]['host']})" for n in numbers[:_MAX_NAMED]]
    return ", ".join([*names, *["..."][: len(numbers) - _MAX_NAMED]])
