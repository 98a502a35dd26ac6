"""Which kernels a profile spends its time in."""

import collections
import re
from pathlib import Path

import jax


def device_times(folder: Path, longest: int = 30) -> str:
    """Time of kernels in the newest profile under `folder`, on its first GPU.

    Kernels whose names differ in numbers only are one line.

    Args:
        folder: as given to `jax.profiler.trace`.
        longest: lines.

    Returns:
        A table: ms, calls, name.
    """
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    profile = jax.profiler.ProfileData.from_file(str(newest))
    planes = sorted((p for p in profile.planes if "GPU:" in p.name), key=lambda plane: plane.name)
    if not planes:
        return "no GPU in this profile"
    spent: dict[str, float] = collections.Counter()
    calls: dict[str, int] = collections.Counter()
    busy = collections.Counter()
    for line in planes[0].lines:
        if not line.name.startswith("Stream"):  # other lines show the same time by module or op
            continue
        for event in line.events:
            name = re.sub(r"\d+", "N", event.name)[:100]
            spent[name] += event.duration_ns / 1e6
            calls[name] += 1
            busy[line.name] += event.duration_ns / 1e6
    rows = [f"{planes[0].name}: " + ", ".join(f"{k} {v:.1f} ms" for k, v in busy.most_common())]
    for name, ms in spent.most_common(longest):
        rows.append(f"{ms:10.2f} ms {calls[name]:6d} x  {name}")
    return "\n".join(rows)
