// Kernels of one call whose starts overlap (programmatic dependent launch, CUDA C++ Programming Guide, section of that
// name). From sm_90 on.
//
// A kernel that is started by launch_overlapping may begin when every CTA of the kernel before has called
// let_next_start, or has ended. It calls await_kernel_before before it reads or writes anything that the kernel before
// has to do with: that returns when the kernel before is complete, and its writes are visible. All CTAs call it. So a
// kernel that is complete has all kernels before it complete, too, also those of other calls in the stream.
#pragma once

#include <cuda_runtime.h>

#include <cute/config.hpp>

namespace hattn {

CUTE_DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// For the whole CTA, by one of its threads or more. CTAs of the next kernel take their places on multiprocessors that
// are free, and wait there: it is called when this CTA is nearly done, or the kernel is short.
CUTE_DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// Starts a kernel with one attribute. What goes wrong is seen by cudaGetLastError.
template <class Kernel, class... Args>
void launch_with(cudaLaunchAttribute attribute, Kernel* kernel, int grid, int threads, int smem_bytes,
                 cudaStream_t stream, Args const&... args) noexcept {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, args...);
}

template <class Kernel, class... Args>
void launch_overlapping(Kernel* kernel, int grid, int threads, int smem_bytes, cudaStream_t stream,
                        Args const&... args) noexcept {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  launch_with(attribute, kernel, grid, threads, smem_bytes, stream, args...);
}

// Starts a kernel whose CTAs form clusters.
template <class Kernel, class... Args>
void launch_clusters(Kernel* kernel, int cluster, int grid, int threads, int smem_bytes, cudaStream_t stream,
                     Args const&... args) noexcept {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  launch_with(attribute, kernel, grid, threads, smem_bytes, stream, args...);
}

}  // namespace hattn
