// f32 added into a buffer that stays in L2, as a backward adds dQ: from registers, or from shared memory in bulk.
#pragma once

#include "clock.hpp"

namespace rates {

constexpr int kBufferBytes = 8 << 20;
constexpr int kMostChunkBytes = 16 << 10;
constexpr int kAddThreads = 512;
constexpr int kBulkThreads = 4 * kWarp;

}  // namespace rates

// All SMs, a block each; each thread adds 16 bytes at a time.
extern "C" __global__ void __launch_bounds__(rates::kAddThreads, 1)
    add_v4(float* buffer, rates::Span* spans, int passes) {
  __shared__ rates::Times times;
  rates::Moment const start = rates::now();
  float const value = 0.001F * static_cast<float>(threadIdx.x % 5 + 1);
  int const vectors = rates::kBufferBytes / 16;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
#pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
      asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(buffer + 4 * i), "f"(value) : "memory");
    }
  }
  // Until the adds have been done, not only sent.
  __threadfence();
  times.note(start, rates::now());
  __syncthreads();
  if (threadIdx.x == 0) {
    times.add_to(spans[blockIdx.x], 0, blockDim.x / rates::kWarp);
  }
}

// One lane of each warp sends a chunk at a time, a few of which are under way.
extern "C" __global__ void __launch_bounds__(rates::kBulkThreads, 1)
    add_bulk(float* buffer, rates::Span* spans, int passes, int chunk_bytes) {
  __shared__ alignas(128) float chunk[rates::kMostChunkBytes / 4];
  __shared__ rates::Times times;
  for (int i = threadIdx.x; i < rates::kMostChunkBytes / 4; i += blockDim.x) {
    chunk[i] = 0.001F * static_cast<float>(i % 5 + 1);
  }
  // The copies read through the async proxy.
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  rates::Moment const start = rates::now();
  if (threadIdx.x % rates::kWarp == 0) {
    auto const source = static_cast<std::uint32_t>(__cvta_generic_to_shared(chunk));
    int const warps = blockDim.x / rates::kWarp;
    int const chunks = rates::kBufferBytes / chunk_bytes;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
#pragma unroll 1
      for (int i = blockIdx.x * warps + threadIdx.x / rates::kWarp; i < chunks; i += gridDim.x * warps) {
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n\t"
            "cp.async.bulk.commit_group;\n\t"
            "cp.async.bulk.wait_group.read 7;" ::"l"(buffer + static_cast<long long>(i) * (chunk_bytes / 4)),
            "r"(source), "r"(chunk_bytes)
            : "memory");
      }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  times.note(start, rates::now());
  __syncthreads();
  if (threadIdx.x == 0) {
    times.add_to(spans[blockIdx.x], 0, blockDim.x / rates::kWarp);
  }
}
