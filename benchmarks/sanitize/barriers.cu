// Small kernels that pass numbers through shared memory like the Hopper kernels, some of them
// incorrect: they show how far reports of compute-sanitizer can be trusted.
//
//     nvcc -arch=sm_90a -o barriers barriers.cu && ./barriers bulk
//
// A producer warpgroup fills a ring of two slots, a consumer sums what other threads, or a bulk copy,
// wrote there. Correct: `threads` (each thread stores one number), `bulk` and `tensor` (a bulk copy by
// address, and by tensor map), `store` (the sums leave by a bulk copy, after a proxy fence).
// Incorrect: the same with `-unwaited` (the consumer does not wait), and `store-unfenced`.
// Prints whether the sums are right; incorrect kernels may get them right by chance.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <cuda_runtime.h>

enum Way { THREADS, BULK, TENSOR };
constexpr int TILE = 128, SLOTS = 2, STEPS = 9;

__device__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Waits at most 2 seconds: an incorrect kernel may wait forever and block the GPU.
__device__ bool wait(uint64_t* barrier, uint32_t parity) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done) : "r"(address(barrier)), "r"(parity) : "memory");
    if (done) return true;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < 2000000000);
  return false;
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address(barrier))
               : "memory");
}

template <Way way, bool waits, bool bulk_store, bool fences>
__global__ void barriers_mosaic_gpu_kernel(
    const float* in, float* out, const __grid_constant__ CUtensorMap map) {
  __shared__ alignas(128) float tile[SLOTS][TILE], sums[TILE];
  __shared__ alignas(8) uint64_t full[SLOTS], free_[SLOTS];
  const int thread = threadIdx.x % TILE;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; ++i) {
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&full[i])),
                   "r"(way == THREADS ? TILE : 1));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(&free_[i])), "r"(TILE));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= TILE) {  // the producer warpgroup
    for (int step = 0; step < STEPS; ++step) {
      const int slot = step % SLOTS;
      if (step >= SLOTS && !wait(&free_[slot], (step / SLOTS - 1) % 2)) return;
      if (way == THREADS) {
        tile[slot][thread] = in[step * TILE + thread];
        arrive(&full[slot]);
      } else if (thread == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(&full[slot])),
                     "n"(TILE * 4) : "memory");
        if (way == BULK) {
          asm volatile(
              "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
              "[%3];" ::"r"(address(tile[slot])), "l"(in + step * TILE), "n"(TILE * 4),
              "r"(address(&full[slot])) : "memory");
        } else {
          asm volatile(
              "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
              "[%1, {%2}], [%3];" ::"r"(address(tile[slot])), "l"(&map), "r"(step * TILE),
              "r"(address(&full[slot])) : "memory");
        }
      }
    }
    return;
  }
  float sum = 0;
  for (int step = 0; step < STEPS; ++step) {
    const int slot = step % SLOTS;
    if (waits && !wait(&full[slot], (step / SLOTS) % 2)) return;
    sum += tile[slot][(thread + 37) % TILE];
    arrive(&free_[slot]);
  }
  if (!bulk_store) {
    out[thread] = sum;
    return;
  }
  sums[thread] = sum;
  if (fences) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(TILE) : "memory");
  if (thread == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out),
                 "r"(address(sums)), "n"(TILE * 4) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}

static CUtensorMap tensor_map(float* in) {
  void* encode = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault,
                                   &found);
  if (!encode) {
    fprintf(stderr, "error: no driver with tensor maps\n");
    exit(1);
  }
  CUtensorMap map{};
  const cuuint64_t size = STEPS * TILE;
  const cuuint64_t stride = 0;
  const cuuint32_t box = TILE, step = 1;
  ((decltype(&cuTensorMapEncodeTiled))encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 1, in, &size, &stride, &box, &step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

int main(int count, char** arguments) {
  const char* name = count == 2 ? arguments[1] : "";
  using Kernel = void (*)(const float*, float*, const CUtensorMap);
  const struct { const char* name; Kernel kernel; } ways[] = {
      {"threads", barriers_mosaic_gpu_kernel<THREADS, true, false, true>},
      {"bulk", barriers_mosaic_gpu_kernel<BULK, true, false, true>},
      {"tensor", barriers_mosaic_gpu_kernel<TENSOR, true, false, true>},
      {"store", barriers_mosaic_gpu_kernel<TENSOR, true, true, true>},
      {"threads-unwaited", barriers_mosaic_gpu_kernel<THREADS, false, false, true>},
      {"bulk-unwaited", barriers_mosaic_gpu_kernel<BULK, false, false, true>},
      {"tensor-unwaited", barriers_mosaic_gpu_kernel<TENSOR, false, false, true>},
      {"store-unfenced", barriers_mosaic_gpu_kernel<TENSOR, true, true, false>},
  };
  Kernel kernel = nullptr;
  for (const auto& way : ways)
    if (!strcmp(way.name, name)) kernel = way.kernel;
  if (!kernel) {
    fprintf(stderr, "error: %s is not one of threads, bulk, tensor, store, and these with "
                    "-unwaited or -unfenced\n", name);
    return 2;
  }
  float numbers[STEPS * TILE], expected[TILE] = {}, sums[TILE];
  for (int i = 0; i < STEPS * TILE; ++i) {
    numbers[i] = (float)(i * 7 % 61);
    expected[(i % TILE + TILE - 37) % TILE] += numbers[i];
  }
  float *in, *out;
  cudaMalloc(&in, sizeof numbers);
  cudaMalloc(&out, sizeof sums);
  cudaMemcpy(in, numbers, sizeof numbers, cudaMemcpyHostToDevice);
  kernel<<<1, 2 * TILE>>>(in, out, tensor_map(in));
  cudaMemcpy(sums, out, sizeof sums, cudaMemcpyDeviceToHost);
  if (cudaError_t error = cudaGetLastError()) {
    fprintf(stderr, "error: %s\n", cudaGetErrorString(error));
    return 1;
  }
  printf("%s: %s\n", name, memcmp(sums, expected, sizeof sums) ? "WRONG" : "right");
  return 0;
}
