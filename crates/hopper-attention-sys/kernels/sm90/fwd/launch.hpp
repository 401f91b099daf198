// From plain parameters to a started kernel: what a row of fwd.def becomes.
#pragma once

#include "common/fill.hpp"
#include "sm90/fwd/kernel.hpp"
#include "sm90/fwd/row.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
Status prepare() noexcept {
  if (tensor_map_encoder() == nullptr) {
    return {StatusCode::DriverTooOld, 0};
  }
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

  CUtensorMap map_q;
  CUtensorMap map_k;
  CUtensorMap map_v;
  CUtensorMap map_o;
  DType const dtype = Traits::kDType;
  Status status = encode_tensor_map(map_q, dtype, params.q, params.batch, params.seqlen_q, params.heads_q,
                                    params.head_dim_qk, Traits::kTileM);
  if (status.code == StatusCode::Ok) {
    status = encode_tensor_map(map_k, dtype, params.k, params.batch, params.seqlen_kv, params.heads_kv,
                               params.head_dim_qk, Traits::kTileN);
  }
  if (status.code == StatusCode::Ok) {
    status = encode_tensor_map(map_v, dtype, params.v, params.batch, params.seqlen_kv, params.heads_kv,
                               params.head_dim_vo, Traits::kTileN);
  }
  if (status.code == StatusCode::Ok) {
    status = encode_tensor_map(map_o, dtype, params.o, params.batch, params.seqlen_q, params.heads_q,
                               params.head_dim_vo, 64);
  }
  if (status.code != StatusCode::Ok) {
    return status;
  }

  if (params.tile_counter != 0) {
    cudaError_t const error = cudaMemsetAsync(reinterpret_cast<void*>(params.tile_counter), 0, sizeof(int), stream);
    if (error != cudaSuccess) {
      return to_status(error);
    }
  }

  constexpr float kLog2E = 1.44269504088896341F;
  KernelParams const kernel_params{reinterpret_cast<float*>(params.lse_address),
                                   params.lse_stride_batch,
                                   params.lse_stride_head,
                                   params.batch,
                                   params.heads_q,
                                   params.heads_q / params.heads_kv,
                                   params.seqlen_q,
                                   params.seqlen_kv,
                                   params.diagonal_offset - params.window_left,
                                   params.diagonal_offset + params.window_right,
                                   params.heads_per_group,
                                   params.groups,
                                   reinterpret_cast<int*>(params.tile_counter),
                                   params.softmax_scale * kLog2E};
  fwd_kernel<Traits>
      <<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(kernel_params, map_q, map_k, map_v, map_o);
  return to_status(cudaGetLastError());
}

template <class Traits>
constexpr FwdRow describe() noexcept {
  return {Arch::Sm90,     Traits::kDType,  Traits::kMask,    Traits::kHeadDimQK, Traits::kHeadDimVO, Traits::kTileM,
          Traits::kTileN, Traits::kStages, Traits::kThreads, Traits::kSmemBytes, prepare<Traits>,    launch<Traits>};
}

}  // namespace hattn::sm90

// Defines the row that table.cc lists.
#define HATTN_FWD_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                 \
  namespace hattn {                                                                                            \
  FwdRow HATTN_FWD_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                        \
    return sm90::describe<sm90::FwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                            \
  }
