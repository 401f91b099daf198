// From plain parameters to a started kernel: what a row of fwd.def becomes.
#pragma once

#include "common/fill.hpp"
#include "common/status.hpp"
#include "sm80/fwd/kernel.hpp"
#include "sm80/fwd/row.hpp"

namespace hattn::sm80 {

template <class Traits>
Status prepare() noexcept {
  cudaError_t const error =
      cudaFuncSetAttribute(fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  if (error != cudaSuccess) {
    return to_status(error);
  }
  return prepare_fill();
}

template <class Traits>
Status launch(FwdParams const& params, CUstream_st* stream) noexcept {
  if (params.seqlen_kv == 0) {
    return launch_fill_empty(params, stream);
  }
  constexpr float kLog2E = 1.44269504088896341F;
  KernelParams const kernel_params{params.q,
                                   params.k,
                                   params.v,
                                   params.o,
                                   reinterpret_cast<float*>(params.lse_address),
                                   params.lse_stride_batch,
                                   params.lse_stride_head,
                                   params.batch,
                                   params.heads_q,
                                   params.heads_q / params.heads_kv,
                                   params.seqlen_q,
                                   params.seqlen_kv,
                                   params.head_dim_qk,
                                   params.head_dim_vo,
                                   params.diagonal_offset - params.window_left,
                                   params.diagonal_offset + params.window_right,
                                   params.heads_per_group,
                                   params.groups,
                                   params.softmax_scale * kLog2E};
  fwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(kernel_params);
  return to_status(cudaGetLastError());
}

template <class Traits>
constexpr FwdRow describe() noexcept {
  return {Arch::Sm80,     Traits::kDType,  Traits::kMask,    Traits::kHeadDimQK, Traits::kHeadDimVO, Traits::kTileM,
          Traits::kTileN, Traits::kStages, Traits::kThreads, Traits::kSmemBytes, prepare<Traits>,    launch<Traits>};
}

}  // namespace hattn::sm80

// Defines the row that the table lists.
#define HATTN_FWD_SM80_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                 \
  namespace hattn {                                                                                            \
  FwdRow HATTN_FWD_SM80_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                        \
    return sm80::describe<sm80::FwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                            \
  }
