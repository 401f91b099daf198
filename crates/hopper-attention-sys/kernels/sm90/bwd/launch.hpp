// From plain parameters to started kernels: what a row of bwd.def becomes.
#pragma once

#include "common/launch.hpp"
#include "sm90/bwd/kernel.hpp"
#include "sm90/bwd/row.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
Status bwd_prepare_module() noexcept {
  return tensor_map_encoder() == nullptr ? Status{StatusCode::DriverTooOld, 0}
                                         : prepare_backward<Traits>(bwd_kernel<Traits>);
}

template <class Traits>
Status bwd_launch(BwdParams const& params, CUstream_st* stream) noexcept {
  if (params.seqlen_q == 0 || params.seqlen_kv == 0) {
    return launch_fill_gradients(params, stream);
  }
  CUtensorMap map_q, map_k, map_v, map_d_o;
  MapEncoder<BwdParams> encode{params, Traits::kDType};
  encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
  encode.keys(map_k, params.k, params.head_dim_qk, Traits::kTileN);
  encode.keys(map_v, params.v, params.head_dim_vo, Traits::kTileN);
  encode.queries(map_d_o, params.d_o, params.head_dim_vo, Traits::kTileM);
  if (encode.status.code != StatusCode::Ok) {
    return encode.status;
  }
  return launch_backward<Traits>(params, stream, [&](BwdScalars const& scalars) {
    bwd_kernel<Traits>
        <<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, scalars, map_q, map_k, map_v, map_d_o);
  });
}

template <class Traits>
constexpr BwdRow bwd_describe() noexcept {
  return {row_info<Traits>(), bwd_prepare_module<Traits>, bwd_launch<Traits>};
}

}  // namespace hattn::sm90

// Defines the row that table.cc lists.
#define HATTN_BWD_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                     \
  namespace hattn {                                                                                                \
  BwdRow HATTN_BWD_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                            \
    return sm90::bwd_describe<sm90::BwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                                \
  }
