// How kernels are started that need more than <<<>>> gives: as clusters, or before the kernel before has ended.
//
// Kernels of one call whose starts overlap (programmatic dependent launch, CUDA C++ Programming Guide, section of that
// name; from sm_90 on): a kernel that is started with `overlaps` may begin when every CTA of the kernel before has
// called let_next_start, or has ended. It calls await_kernel_before before it reads or writes anything that the kernel
// before has to do with: that returns when the kernel before is complete, and its writes are visible. All CTAs call it.
// So a kernel that is complete has all kernels before it complete, too, also those of other calls in the stream.
#pragma once

#include <cuda_runtime.h>

#include <cute/config.hpp>

namespace hattn {

// Before sm_90 kernels of a stream follow each other, and both calls do nothing.
CUTE_DEVICE void await_kernel_before() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For the whole CTA, by one of its threads or more. CTAs of the next kernel take their places on multiprocessors that
// are free, and wait there: it is called when this CTA is nearly done, or the kernel is short.
CUTE_DEVICE void let_next_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// How a kernel is started.
struct Start {
  int grid;
  int threads;
  int smem_bytes;
  cudaStream_t stream;
  int cluster = 1;  // CTAs of a cluster; the grid is a multiple of it
  bool overlaps = false;
  int splits = 1;  // the grid's second dimension
};

// What goes wrong is seen by cudaGetLastError.
template <class Kernel, class... Args>
void start_kernel(Start const& start, Kernel* kernel, Args const&... args) noexcept {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (start.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[count++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(start.cluster), 1, 1};
  }
  if (start.overlaps) {
    cudaLaunchAttribute& attribute = attributes[count++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(start.grid, start.splits);
  config.blockDim = start.threads;
  config.dynamicSmemBytes = start.smem_bytes;
  config.stream = start.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace hattn
