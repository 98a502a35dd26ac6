"""Times by kind from a trace, on a small one made by hand."""

import gzip
import json
import os

import pytest

from benchmarks.step import trace_summary as ts


def metadata(pid, process, lanes):
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    for tid, lane in lanes.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}}


def event(pid, tid, name, start, end, **arguments):
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start, "dur": end - start,
        "args": arguments,
    }  # fmt: skip


def events(pid, shift=0.0):
    """Two steps on one GPU, microseconds."""
    compute, transfer, ops = 1, 2, 9
    lanes = {compute: "Stream #14(Compute)", transfer: "Stream #15(Compute,MemcpyP2P)",
             ops: "XLA Ops"}  # fmt: skip
    yield from metadata(pid, f"/device:GPU:{pid}", lanes)
    yield event(pid, ops, "custom-call.1", 0, 5000)  # of another lane: not a stream
    for begin in (0, 4000):
        begin = begin + shift
        spans = [
            (compute, "kernel_mosaic_gpu", 0, 1000, {"hlo_op": "forward.7"}),
            (compute, "nvjet_hsh_256x128_64x4", 1000, 1500, {}),
            (compute, "gemm_fusion_dot_12", 1500, 1600, {}),
            (compute, "loop_add_fusion_3", 1600, 1700, {}),
            (compute, "MemcpyD2D", 1700, 1800, {}),
            # Half of it under the products, then 200 alone and 100 beside the copy.
            (transfer, "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1300, 2000, {}),
            (transfer, "some_kernel", 2000, 2100, {"hlo_op": "collective-permute-start.3"}),
            (compute, "MemsetD32", 3000, 3050, {}),
        ]
        for tid, name, start, end, arguments in spans:
            yield event(pid, tid, name, begin + start, begin + end, **arguments)


def host():
    yield from metadata(7, "/host:CPU", {1: "python"})
    for step in ("5", "6"):
        yield event(7, 1, "train_step", 0, 10, step_num=step)
    yield event(7, 1, "train_step", 0, 10)  # a function of that name


def write(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [*contents, {}]}, file)
    return path


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "plugins" / "profile" / "2026_11_21_10_00_00" / "host.trace.json.gz"
    return write(path, [*host(), *events(0), *events(1, shift=100.0)])


@pytest.mark.parametrize(
    "name, kind",
    [
        ("backward_keys_mosaic_gpu", ts.ATTENTION),
        ("sm90_xmma_gemm_bf16bf16", ts.GEMM),
        ("void cutlass::device_kernel<...>", ts.GEMM),
        ("ncclDevKernel_AllGather_RING_LL(x)", ts.COLLECTIVE),
        ("MemcpyP2P", ts.COLLECTIVE),
        ("MemcpyH2D", ts.COPY),
        ("wrapped_copy_2", ts.COPY),
        ("input_reduce_fusion", ts.OTHER),
    ],
)
def test_kinds(name, kind):
    assert ts.kind_of(name) == kind


def test_times_by_kind(trace):
    read = ts.read_trace(trace)
    assert read.steps == 2 and set(read.gpus) == {"/device:GPU:0", "/device:GPU:1"}
    summary = ts.summarize(read.gpus["/device:GPU:1"])
    assert summary.window == 4000 + 3050
    assert summary.busy == {
        ts.ATTENTION: 2000, ts.GEMM: 1200, ts.OTHER: 200, ts.COLLECTIVE: 1600, ts.COPY: 300,
    }  # fmt: skip
    # Kernels hide 400 of the 800 microseconds of transfers in a step; copies hide nothing.
    assert summary.exposed == {ts.COLLECTIVE: 800, ts.COPY: 300}
    # From the end of the transfers to the memset, twice, and from there to the second step.
    assert summary.idle == 2 * 900 + 950


def test_report_of_the_newest_trace_in_a_folder(trace, tmp_path, capsys):
    old = trace.parent.with_name("2026_11_20_10_00_00") / "host.trace.json.gz"
    write(old, host())
    os.utime(old)
    assert ts.main([str(tmp_path), "--top", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "2 steps on 2 GPUs; times of one step in ms"
    assert "| attention kernels | 1.00 | 1.00 | 28.4% |  | 1 |" in printed
    assert "| collectives | 0.80 | 0.80 | 22.7% | 0.40 | 2 |" in printed
    assert "| idle | 1.38 | 1.38 | 39.0% |  |  |" in printed
    assert "| step | 3.52 | 3.52 | 100.0% |  |  |" in printed
    first = "| kernel_mosaic_gpu (forward.7) | attention kernels | 1.00 | 28.4%"
    assert printed[-7].startswith(first)
    assert printed[-6].startswith("| ncclDevKernel_SendRecv")
    # 300 microseconds of the transfer in each step; after those of the second nothing comes.
    assert printed[-2] == (
        "| ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>) | collectives |"
        " kernel_mosaic_gpu (forward.7) | 0.15 | 4.3% |"
    )
    assert printed[-1] == printed[-2].replace("kernel_mosaic_gpu (forward.7)", "")
