// What all launchers do alike: load kernels ahead of their first launch, zero workspace, and start the three kernels of
// a backward.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/around.hpp"
#include "common/fill.hpp"
#include "common/scalars.hpp"
#include "common/status.hpp"
#include "kernels.hpp"

namespace hattn {

// Loads a row's kernel on the current device, and those of fill.hpp. Its limit of shared memory is raised.
template <class Kernel>
Status prepare_kernel(Kernel* kernel, int smem_bytes) noexcept {
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  return error == cudaSuccess ? prepare_fill() : to_status(error);
}

// Zeroes device memory in stream order. Address 0: there is none.
inline Status zero(std::uint64_t address, std::size_t bytes, CUstream_st* stream) noexcept {
  return address == 0 ? Status{} : to_status(cudaMemsetAsync(reinterpret_cast<void*>(address), 0, bytes, stream));
}

// Zeroes the counter that CTAs draw their tiles from, where there is one.
inline Status zero_tile_counter(std::uint64_t tile_counter, CUstream_st* stream) noexcept {
  return zero(tile_counter, sizeof(int), stream);
}

// The same for the three kernels of a backward, of which `main` is the one in the middle.
template <class Traits, class Main>
Status prepare_backward(Main* main) noexcept {
  cudaError_t error = Prepare<Traits>::load();
  error = error == cudaSuccess ? Convert<typename Traits::Unmasked>::load() : error;
  return error == cudaSuccess ? prepare_kernel(main, Traits::kSmemBytes) : to_status(error);
}

// Starts the kernels of a backward with queries and keys; `start_main` starts the one in the middle.
template <class Traits, class StartMain>
Status launch_backward(BwdParams const& params, CUstream_st* stream, StartMain const& start_main) noexcept {
  Status const zeroed = zero_tile_counter(params.tile_counter, stream);
  if (zeroed.code != StatusCode::Ok) {
    return zeroed;
  }
  Prepare<Traits>::launch(params, stream);
  start_main(bwd_scalars<Traits>(params));
  Convert<typename Traits::Unmasked>::launch(params, stream);
  return to_status(cudaGetLastError());
}

}  // namespace hattn
