"""Writes MDS data sets (an index and shards) for tests."""

import bz2
import gzip
import hashlib
import importlib
import json
import struct
import sys

import numpy as np


def shard_bytes(columns, samples):
    """A shard of encoded `samples`; `columns` are sorted (name, encoding, size or None)."""
    bodies = []
    for sample in samples:
        heads = [len(sample[name]) for name, _, size in columns if size is None]
        bodies.append(struct.pack(f"<{len(heads)}I", *heads))
        bodies[-1] += b"".join(sample[name] for name, _, _ in columns)
    names, encodings, sizes = map(list, zip(*columns, strict=True))
    header = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    config = json.dumps(header | {"format": "mds", "compression": None}, sort_keys=True).encode()
    offsets = 4 * (len(samples) + 2) + len(config)
    table = [offsets + sum(map(len, bodies[:i])) for i in range(len(samples) + 1)]
    head = struct.pack(f"<{len(table) + 1}I", len(samples), *table)
    return head + config + b"".join(bodies)


def packers():
    """Compresses bytes, by the name of the format."""
    module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    zstd = importlib.import_module(module).compress
    return {"gz": lambda b: gzip.compress(b, mtime=0), "bz2": bz2.compress, "zstd": zstd}


def write_mds(folder, columns, shards, compression=None, hashes=(), pack=None):
    """Writes shards and index.json; returns the paths of the shards."""
    folder.mkdir(parents=True, exist_ok=True)
    columns, entries, paths = sorted(columns), [], []
    for number, samples in enumerate(shards):
        data = shard_bytes(columns, samples)
        name = f"shard.{number:05}.mds"
        raw = {
            "basename": name,
            "bytes": len(data),
            "hashes": {kind: hashlib.new(kind, data).hexdigest() for kind in hashes},
        }
        packed = None
        if compression is None:
            path = folder / name
            path.write_bytes(data)
        else:
            content = (pack or packers()[compression])(data)
            path = folder / f"{name}.{compression}"
            path.write_bytes(content)
            packed = {"basename": path.name, "bytes": len(content), "hashes": {}}
        names, encodings, sizes = map(list, zip(*columns, strict=True))
        entries.append(
            {
                "version": 2,
                "format": "mds",
                "samples": len(samples),
                "size_limit": 2**26,
                "column_names": names,
                "column_encodings": encodings,
                "column_sizes": sizes,
                "compression": compression and f"{compression}:7",
                "hashes": list(hashes),
                "raw_data": raw,
                "zip_data": packed,
            }
        )
        paths.append(path)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return paths


def array_bytes(array, omit_dtype=False, omit_shape=False):
    """Encodes an array as `ndarray`, without the parts that the column's encoding has."""
    array = np.asarray(array)
    codes = {"uint16": 16, "int32": 33, "uint32": 32, "int64": 65, "float32": 34}
    head = b"" if omit_dtype else bytes([codes[array.dtype.name]])
    if not omit_shape:
        item = next(i for i in range(4) if max(array.shape) < 1 << 8 * (1 << i))
        head += bytes([array.ndim << 2 | item])
        head += np.array(array.shape, f"<u{1 << item}").tobytes()
    return head + array.tobytes()
