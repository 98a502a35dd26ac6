"""A baseline with a stand-in for torch; its times and work are in the problem's arrays."""

import sys
from types import SimpleNamespace

torch = SimpleNamespace(__version__="9", cuda=SimpleNamespace(is_available=lambda: True))

if __name__ == "__main__":
    sys.modules["torch"] = torch
    from benchmarks.kernels.peers.child import serve

    def prepare(torch, problem):
        rows = [
            dict(zip(problem["names"].tolist(), x, strict=True)) for x in problem["values"].tolist()
        ]
        return "Triton 8", [lambda row=row: row for row in rows]

    serve(prepare)
