// From plain parameters to started kernels: what a row of bwd.def becomes.
#pragma once

#include "common/around.hpp"
#include "common/fill.hpp"
#include "sm90/bwd/kernel.hpp"
#include "sm90/bwd/row.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
Status bwd_prepare_module() noexcept {
  if (tensor_map_encoder() == nullptr) {
    return {StatusCode::DriverTooOld, 0};
  }
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

  struct Map {
    CUtensorMap map;
    TensorDesc const& tensor;
    int seqlen, heads, head_dim, rows;
  };
  Map maps[] = {
      {{}, params.q, params.seqlen_q, params.heads_q, params.head_dim_qk, Traits::kTileM},
      {{}, params.k, params.seqlen_kv, params.heads_kv, params.head_dim_qk, Traits::kTileN},
      {{}, params.v, params.seqlen_kv, params.heads_kv, params.head_dim_vo, Traits::kTileN},
      {{}, params.d_o, params.seqlen_q, params.heads_q, params.head_dim_vo, Traits::kTileM},
  };
  for (Map& map : maps) {
    Status const status = encode_tensor_map(map.map, Traits::kDType, map.tensor, params.batch, map.seqlen, map.heads,
                                            map.head_dim, map.rows);
    if (status.code != StatusCode::Ok) {
      return status;
    }
  }
  if (params.tile_counter != 0) {
    cudaError_t const error = cudaMemsetAsync(reinterpret_cast<void*>(params.tile_counter), 0, sizeof(int), stream);
    if (error != cudaSuccess) {
      return to_status(error);
    }
  }
  constexpr float kLog2E = 1.44269504088896341F;
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  BwdKernelParams const kernel_params{reinterpret_cast<Statistics const*>(params.statistics),
                                      reinterpret_cast<float*>(params.sums),
                                      reinterpret_cast<Progress*>(params.progress),
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
                                      params.d_k,
                                      params.d_v,
                                      params.head_dim_qk,
                                      params.head_dim_vo,
                                      params.softmax_scale,
                                      exponent_scale(params.softmax_scale) * kLog2E};
  Prepare<Traits>::launch(params, stream);
  bwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(
      kernel_params, maps[0].map, maps[1].map, maps[2].map, maps[3].map);
  Convert<typename Traits::Unmasked>::launch(params, stream);
  return to_status(cudaGetLastError());
}

template <class Traits>
constexpr BwdRow bwd_describe() noexcept {
  return {Arch::Sm90,
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

}  // namespace hattn::sm90

// Defines the row that table.cc lists.
#define HATTN_BWD_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                     \
  namespace hattn {                                                                                                \
  BwdRow HATTN_BWD_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                            \
    return sm90::bwd_describe<sm90::BwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                                \
  }
