// What all launchers do alike: load kernels ahead of their first launch, zero workspace, and start the three kernels of
// a backward.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/convert.hpp"
#include "common/fill.hpp"
#include "common/prepare.hpp"
#include "common/scalars.hpp"
#include "common/status.hpp"
#include "kernels.hpp"

namespace hattn {

// Loads a row's kernels on the current device, and those of fill.hpp. `main` gets its limit of shared memory raised.
template <class Main, class... Others>
Status prepare_kernels(Main* main, int smem_bytes, Others*... others) noexcept {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncSetAttribute(main, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  ((error = error == cudaSuccess ? cudaFuncGetAttributes(&attributes, others) : error), ...);
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

template <class Traits, class Main>
Status prepare_backward(Main* main) noexcept {
  return prepare_kernels(main, Traits::kSmemBytes, bwd_prepare<Traits>, bwd_convert<Traits>);
}

// Starts the kernels of a backward with queries and keys; `start_main` starts the one in the middle.
template <class Traits, class StartMain>
Status launch_backward(BwdParams const& params, CUstream_st* stream, StartMain const& start_main) noexcept {
  Status const zeroed = zero_tile_counter(params.tile_counter, stream);
  if (zeroed.code != StatusCode::Ok) {
    return zeroed;
  }
  BwdScalars const scalars = bwd_scalars<Traits>(params);
  int const blocks = params.batch * params.heads_q * scalars.m_blocks;
  bwd_prepare<Traits><<<132 * 4, 256, 0, stream>>>(params);  // what fits at a time
  start_main(scalars);
  bwd_convert<Traits><<<blocks, Traits::SumsPart::kThreads, 0, stream>>>(params);
  return to_status(cudaGetLastError());
}

}  // namespace hattn
