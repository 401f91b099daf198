// From plain parameters to a started kernel: what a row of fwd.def becomes.
#pragma once

#include "common/launch.hpp"
#include "sm90/fwd/kernel.hpp"
#include "sm90/fwd/row.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
Status prepare() noexcept {
  return tensor_map_encoder() == nullptr ? Status{StatusCode::DriverTooOld, 0}
                                         : prepare_kernel(fwd_kernel<Traits>, Traits::kSmemBytes);
}

template <class Traits>
Status launch(FwdParams const& params, CUstream_st* stream) noexcept {
  if (params.seqlen_kv == 0) {
    return launch_fill_empty(params, stream);
  }
  CUtensorMap map_q, map_k, map_v, map_o;
  MapEncoder<FwdParams> encode{params, Traits::kDType};
  encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
  encode.keys(map_k, params.k, params.head_dim_qk, Traits::kTileN);
  encode.keys(map_v, params.v, params.head_dim_vo, Traits::kTileN);
  encode.queries(map_o, params.o, params.head_dim_vo, 64);  // a consumer warpgroup's rows
  if (encode.status.code != StatusCode::Ok) {
    return encode.status;
  }
  Status const zeroed = zero_tile_counter(params.tile_counter, stream);
  if (zeroed.code != StatusCode::Ok) {
    return zeroed;
  }
  fwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, fwd_scalars(params), map_q,
                                                                                    map_k, map_v, map_o);
  return to_status(cudaGetLastError());
}

template <class Traits>
constexpr FwdRow describe() noexcept {
  return {row_info<Traits>(), prepare<Traits>, launch<Traits>};
}

}  // namespace hattn::sm90

// Defines the row that table.cc lists.
#define HATTN_FWD_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                 \
  namespace hattn {                                                                                            \
  FwdRow HATTN_FWD_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                        \
    return sm90::describe<sm90::FwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                            \
  }
