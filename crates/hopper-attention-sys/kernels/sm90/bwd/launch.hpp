// From plain parameters to started kernels: what a row of bwd.def becomes.
#pragma once

#include "common/launch.hpp"
#include "common/start.hpp"
#include "sm90/bwd/kernel.hpp"
#include "sm90/cluster.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
struct BwdLaunch {
  static Status prepare() noexcept {
    if (tensor_map_encoder() == nullptr) {
      return {StatusCode::DriverTooOld, 0};
    }
    Status const status = prepare_backward<Traits>(bwd_kernel<Traits>);
    return is_ok(status) ? prepare_kernel(bwd_kernel<SharedTraits<Traits>>, Traits::kSmemBytes) : status;
  }

  static Status launch(BwdParams const& params, CUstream_st* stream) noexcept {
    CUtensorMap map_q, map_k, map_v, map_d_o;
    auto const encode_maps = [&]() {
      MapEncoder<BwdParams> encode{params, Traits::kDType};
      encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
      encode.keys(map_k, params.k, params.head_dim_qk, Traits::kTileN);
      encode.keys(map_v, params.v, params.head_dim_vo, Traits::kTileN);
      encode.queries(map_d_o, params.d_o, params.head_dim_vo, Traits::kTileM);
      return encode.status;
    };
    return launch_backward<Traits>(params, stream, encode_maps, [&](BwdScalars const& scalars) {
      auto* const kernel = params.cluster > 1 ? bwd_kernel<SharedTraits<Traits>> : bwd_kernel<Traits>;
      start_kernel({params.grid, Traits::kThreads, Traits::kSmemBytes, stream, params.cluster, Traits::kOverlaps},
                   kernel, params, scalars, map_q, map_k, map_v, map_d_o);
    });
  }
};

}  // namespace hattn::sm90

#define HATTN_BWD_SM90_INSTANCE(...) HATTN_INSTANCE(BwdRow, sm90_bwd, sm90::BwdTraits, sm90::BwdLaunch, __VA_ARGS__)
