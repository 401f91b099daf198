// From plain parameters to started kernels: what a row of bwd.def becomes.
#pragma once

#include "common/around.hpp"
#include "common/fill.hpp"
#include "common/status.hpp"
#include "sm80/bwd/kernel.hpp"
#include "sm80/bwd/row.hpp"

namespace hattn::sm80 {

template <class Traits>
Status bwd_prepare_module() noexcept {
  cudaError_t const errors[] = {
      cudaFuncSetAttribute(bwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes),
      Prepare<Traits>::load(), Convert<typename Traits::Unmasked>::load()};
  for (cudaError_t const error : errors) {
    if (error != cudaSuccess) {
      return to_status(error);
    }
  }
  return prepare_fill();
}

template <class Traits>
Status bwd_launch(BwdParams const& params, CUstream_st* stream) noexcept {
  if (params.seqlen_q == 0 || params.seqlen_kv == 0) {
    return launch_fill_gradients(params, stream);
  }
  if (params.tile_counter != 0) {
    cudaError_t const error = cudaMemsetAsync(reinterpret_cast<void*>(params.tile_counter), 0, sizeof(int), stream);
    if (error != cudaSuccess) {
      return to_status(error);
    }
  }
  constexpr float kLog2E = 1.44269504088896341F;
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  BwdKernelParams const kernel_params{params.q,
                                      params.k,
                                      params.v,
                                      params.d_o,
                                      params.d_k,
                                      params.d_v,
                                      reinterpret_cast<Statistics const*>(params.statistics),
                                      reinterpret_cast<float*>(params.sums),
                                      reinterpret_cast<int*>(params.progress),
                                      params.ordered,
                                      params.batch,
                                      params.heads_q,
                                      params.heads_kv,
                                      params.heads_q / params.heads_kv,
                                      params.seqlen_q,
                                      params.seqlen_kv,
                                      m_blocks,
                                      (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN,
                                      params.diagonal_offset - params.window_left,
                                      params.diagonal_offset + params.window_right,
                                      params.heads_per_group,
                                      params.groups,
                                      reinterpret_cast<int*>(params.tile_counter),
                                      params.head_dim_qk,
                                      params.head_dim_vo,
                                      params.softmax_scale,
                                      exponent_scale(params.softmax_scale) * kLog2E};
  Prepare<Traits>::launch(params, stream);
  bwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(kernel_params);
  Convert<typename Traits::Unmasked>::launch(params, stream);
  return to_status(cudaGetLastError());
}

template <class Traits>
constexpr BwdRow bwd_describe() noexcept {
  return {Arch::Sm80,
          Traits::kDType,
          Traits::kMask,
          Traits::kHeadDimQK,
          Traits::kHeadDimVO,
          Traits::kTileM,
          Traits::kTileN,
          Traits::kStages,
          Traits::kThreads,
          Traits::kSmemBytes,
          bwd_prepare_module<Traits>,
          bwd_launch<Traits>};
}

}  // namespace hattn::sm80

// Defines the row that table.cc lists.
#define HATTN_BWD_SM80_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                     \
  namespace hattn {                                                                                                \
  BwdRow HATTN_BWD_SM80_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                            \
    return sm80::bwd_describe<sm80::BwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                                \
  }
