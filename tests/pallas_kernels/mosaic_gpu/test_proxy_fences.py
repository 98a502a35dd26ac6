"""Stores to shared memory, and waits on global memory, are fenced before bulk copies and products.

No tool of compute-sanitizer reports missing fences.
"""

import importlib.util
import re
import shutil
import subprocess

import pytest

from tests.pallas_kernels.mosaic_gpu import hopper_ptx, proxy_fences
from tests.pallas_kernels.mosaic_gpu.proxy_fences import Fences

BARRIERS = hopper_ptx.ROOT / "benchmarks/sanitize/barriers.cu"
# The smallest set of problems with every kernel; `hopper_ptx.py` runs all of them.
PROBLEMS = (
    "columns-fused-64", "lists-64", "estimate-64", "sampled-rows-64", "strided-rows-64",
    "new-tokens-64", "selecting-tokens-64",
)  # fmt: skip
FENCE = re.compile(r"fence\.proxy\.async[\w.:]*;")
ACQUIRE = "fence.acquire.gpu;"
ORDERED = "fence.proxy.async.global;"

KERNEL = """
.visible .entry small_mosaic_gpu_kernel(
	.param .u64 small_param_0
)
{
	.reg .b32 	%r<9>;
	.shared .align 16 .b8 memory;
	mov.u32 	%r1, %tid.x;
	mov.b32 	%r2, memory;
	.loc	1 32 18
	shl.b32 	%r3, %r1, 2;
	add.s32 	%r4, %r2, %r3;
	BODY
	ret;
}
"""
STORE = "st.shared.b32 \t[%r4+4096], %r1;"
FENCED = ".loc\t1 32 18\n\tfence.proxy.async.shared::cta;"
SOME_FENCED = FENCED.replace("fence", "@%p1 fence")  # not every thread
MEET = "bar.sync \t1, 128;"
COPY = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [memory+4096], 512;"
PRODUCT = (
    "bfe.u64 %rd2, %r2, 4, 14;\n{ .reg .pred p; setp.ne.b32 p, 1, 0; "
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r5,%r6}, %rd2, %rd2, p, 1, 1, 0, 0; }"
)
BRANCH = "@%p2 bra \t$L__BB0_2;"
LABEL = "$L__BB0_2:"
WAIT = """{
	.reg .pred done;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 done, [%r2], 0;
	@done bra.uni DONE;
	bra.uni LAB_WAIT;
	DONE:
	}"""


def _read(*body: str) -> Fences:
    (found,) = proxy_fences.read(KERNEL.replace("BODY", "\n\t".join(body)))
    return found


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ((STORE, FENCED, MEET, COPY), ""),
        ((STORE, MEET, COPY), "unfenced"),
        ((STORE, MEET, FENCED, COPY), "unfenced unmet"),  # only by the thread that copies
        ((STORE, FENCED, COPY), "unmet"),
        ((STORE, SOME_FENCED, MEET, COPY), "unfenced"),
        ((STORE, BRANCH, FENCED, LABEL, MEET, COPY), "unfenced"),
        ((STORE, FENCED, BRANCH, MEET, LABEL, COPY), "unmet"),
        ((LABEL, STORE, FENCED, MEET, COPY, BRANCH), ""),
        ((STORE, FENCED, LABEL, MEET, COPY, STORE, BRANCH), "unfenced"),  # in the next iteration
        ((STORE, WAIT, FENCED, MEET, COPY), ""),
        ((STORE, "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2], 1;", COPY), "unfenced"),
        ((STORE, FENCED, MEET, PRODUCT), ""),
        ((STORE, MEET, PRODUCT), "unfenced"),
        ((STORE.replace(".shared", ""), MEET, COPY), "unfenced"),
        ((STORE.replace("[%r4+4096]", "[%rd4]").replace(".shared", ".global"), MEET, COPY), ""),
        (("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4+4096], {%r1, %r1};", MEET, COPY),
         "unfenced"),
        (("st.shared.b32 [%r4], %r1;", MEET, COPY), ""),  # below everything copied
        (("st.shared.b32 [%r4], %r1;", MEET, COPY, PRODUCT), "unfenced"),  # at its beginning
        (("st.shared.b32 [%r4+8], %r1;", MEET, COPY), "unfenced"),  # 1024 threads reach 4096
    ],
)  # fmt: skip
def test_a_store_without_a_fence_is_found(body, wrong):
    found = _read(*body)
    assert " ".join(name for name in ("unfenced", "unmet") if getattr(found, name)) == wrong
    assert not found.unordered
    assert found.kernel == "small"


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ((ACQUIRE, ORDERED, COPY), False),
        ((ACQUIRE, COPY), True),
        ((ACQUIRE, MEET, COPY), True),
        ((ACQUIRE, "fence.proxy.async;", COPY), False),
        ((ACQUIRE, FENCED, COPY), True),  # of shared memory only
        ((ACQUIRE, ORDERED.replace("fence", "@%p1 fence"), COPY), True),
        ((COPY, ACQUIRE), False),
        ((LABEL, COPY, ACQUIRE, BRANCH), True),  # in the next iteration
        ((ACQUIRE, BRANCH, ORDERED, LABEL, COPY), True),
        ((STORE, ORDERED, MEET, COPY), None),  # of global memory only
    ],
)
def test_a_wait_without_a_fence_is_found(body, wrong):
    found = _read(*body)
    assert bool(found.unordered) == bool(wrong)
    assert bool(found.unfenced) == (wrong is None)


@pytest.mark.parametrize("line", ["st.async.shared::cluster.b32 [%r4], %r1, [%r2];", ".what 3\n"])
def test_unknown_instructions_raise(line):
    with pytest.raises(NotImplementedError, match=f"small: {re.escape(line[:8])}"):
        _read(line, STORE)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_unfenced_small_kernel_is_found(tmp_path):
    path = tmp_path / "barriers.ptx"
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-ptx", "-o", str(path), str(BARRIERS)]
    subprocess.run(command, check=True)
    found = proxy_fences.read(path.read_text())
    assert len(found) == 8 and not any(x.unmet for x in found)
    (wrong,) = (x for x in found if x.unfenced)
    # Template arguments: bulk_store, but not fences.
    assert "ELb1ELb1ELb0EE" in wrong.kernel and wrong.copies == 1 and wrong.fences == 0


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of JAX"
)
def test_every_store_of_the_hopper_kernels_is_fenced():
    """And the check finds the removal of any fence."""
    from benchmarks.sanitize import small_problems

    kernels = {name for problem in small_problems.problems() for name in problem.kernels}
    ptx = hopper_ptx.compiled(PROBLEMS)
    assert set(ptx) == set(PROBLEMS)
    found = [x for text in ptx.values() for x in proxy_fences.read(text)]
    assert {x.kernel for x in found} == kernels
    # Its reductions over warps store above what copies write, which the check cannot see.
    assert {x.kernel for x in found if x.wrong} == {"code_weights"}
    assert all(x.fences for x in found if x.copies)
    # The bias of gathered columns and numbers of items, which no copy or product reads.
    # Reductions, where no copy or product reads anything.
    some = {"attention_forward", "attention_dq", "combine_decoded", "selected_blocks"}
    assert {x.kernel for x in found if x.apart} == some
    without = 0
    for text in ptx.values():
        for fence in FENCE.finditer(text):
            begin = text.rfind(".visible .entry", 0, fence.start())
            end = text.find(".visible .entry", fence.end())
            kernel = text[begin : fence.start()] + text[fence.end() : end]
            (x,) = proxy_fences.read(kernel)
            # The second fence of one only follows reads, the others have no copies or products.
            if x.kernel not in ("estimate_index", "kept_blocks", "selected_blocks"):
                assert x.wrong
                without += 1
    assert without >= 9
