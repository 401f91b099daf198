// From plain parameters to a started kernel: what a row of fwd.def becomes.
#pragma once

#include <type_traits>

#include "common/launch.hpp"
#include "common/start.hpp"
#include "sm90/cluster.hpp"
#include "sm90/fwd/kernel.hpp"
#include "sm90/fwd/rotation.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
struct FwdLaunch {
  // Of the kernel in which CTAs share tiles: some rows have no other.
  using Sharing = std::conditional_t<Traits::kShares, Traits, SharedTraits<Traits>>;
  // Of the kernel for sequences whose lengths the device knows, where the row has it.
  using Packed = typename Traits::Packed;

  static Status prepare() noexcept {
    if (tensor_map_encoder() == nullptr) {
      return {StatusCode::DriverTooOld, 0};
    }
    Status status{};  // some rows have no first kernel
    if constexpr (!Traits::kShares) {
      status = prepare_kernel(fwd_kernel<Traits>, Traits::kSmemBytes);
    }
    if constexpr (Traits::kTakesBias) {
      status = is_ok(status) ? prepare_kernel(fwd_kernel<BiasTraitsOf<Traits>>, Traits::kSmemBytes) : status;
    }
    if constexpr (Traits::kMayBeAlibi) {
      status = is_ok(status) ? prepare_kernel(fwd_kernel<AlibiTraits<Traits>>, Traits::kSmemBytes) : status;
    }
    if constexpr (Traits::kPacks) {
      status = is_ok(status) ? prepare_schedule() : status;
      status = is_ok(status) ? prepare_kernel(fwd_kernel<Packed>, Packed::kSmemBytes) : status;
      if constexpr (Packed::kMayBeAlibi) {
        status = is_ok(status) ? prepare_kernel(fwd_kernel<AlibiTraits<Packed>>, Packed::kSmemBytes) : status;
      }
      if constexpr (Packed::kTakesBias) {
        status = is_ok(status) ? prepare_kernel(fwd_kernel<BiasTraits<Packed>>, Packed::kSmemBytes) : status;
      }
    }
    if constexpr (Traits::kIsListed) {
      status = is_ok(status) ? prepare_blocks() : status;
    }
    if constexpr (Traits::kMostShares > 1) {
      status = is_ok(status) ? prepare_kernel(fwd_kernel<Sharing>, Traits::kSmemBytes) : status;
    }
    if constexpr (Traits::kMayRotate) {
      status = is_ok(status) ? FwdLaunch<RotatedTraits<Traits>>::prepare() : status;
    }
    return status;
  }

  static Status launch(FwdParams const& params, CUstream_st* stream) noexcept {
    if constexpr (Traits::kMayRotate) {
      if (params.head_dim_qk % 16 == 8 || params.head_dim_vo % 16 == 8) {
        return FwdLaunch<RotatedTraits<Traits>>::launch(params, stream);
      }
    }
    if constexpr (Traits::kPacks) {
      if (params.sequences.table != 0) {
        return launch_packed(params, stream);
      }
    }
    CUtensorMap map_q, map_k, map_v, map_o;
    auto const encode_maps = [&]() {
      MapEncoder<FwdParams> encode{params, Traits::kDType, Traits::kSlabColumns};
      encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
      encode.keys(map_k, params.k, params.head_dim_qk, Traits::kTileN);
      encode.keys(map_v, params.v, params.head_dim_vo, Traits::kTileN);
      encode.queries(map_o, params.o, params.head_dim_vo, 64);  // a consumer warpgroup's rows
      if constexpr (Traits::kIsListed) {
        return is_ok(encode.status) ? launch_blocks(params, 0, stream) : encode.status;
      }
      return encode.status;
    };
    return launch_forward(params, stream, encode_maps, [&](FwdScalars const& scalars) {
      if constexpr (Traits::kMostShares > 1) {
        if (Traits::kShares || params.shares > 1 || has_single_tiles(params)) {
          int const grid = params.grid / params.splits;
          zero(params.split_sums, Shares<Sharing>::counter_bytes(grid), stream);  // an error is seen with the kernel's
          start_kernel({grid, Traits::kThreads, Traits::kSmemBytes, stream, params.shares, false, params.splits},
                       fwd_kernel<Sharing>, params, scalars, map_q, map_k, map_v, map_o);
          return;
        }
      }
      if constexpr (Traits::kTakesBias && !Traits::kIsListed) {
        if (has_bias(params)) {
          fwd_kernel<BiasTraitsOf<Traits>><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(
              params, scalars, map_q, map_k, map_v, map_o);
          return;
        }
      }
      if constexpr (Traits::kIsListed) {
        auto* kernel = fwd_kernel<Traits>;
        if constexpr (Traits::kTakesBias) {
          kernel = has_bias(params) ? fwd_kernel<BiasTraitsOf<Traits>> : kernel;
        }
        start_kernel({params.grid, Traits::kThreads, Traits::kSmemBytes, stream, 1, true}, kernel, params,
                     ListedFwdScalars{scalars, params.blocks}, map_q, map_k, map_v, map_o);
      } else if constexpr (!Traits::kShares) {
        auto* kernel = fwd_kernel<Traits>;
        if constexpr (Traits::kMayBeAlibi) {
          kernel = Traits::is_alibi(params) ? fwd_kernel<AlibiTraits<Traits>> : kernel;
        }
        kernel<<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, scalars, map_q, map_k, map_v,
                                                                              map_o);
      }
    });
  }

 private:
  // Whether each CTA has one tile, and the row's second kernel takes such launches.
  static bool has_single_tiles(FwdParams const& params) {
    int const tiles = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
    return Traits::kTakesSingleTiles && params.grid >= std::int64_t{tiles} * params.heads_q * params.batch;
  }

  static Status launch_packed(FwdParams const& params, CUstream_st* stream) noexcept {
    CUtensorMap map_q, map_k, map_v, map_o;
    auto const encode_maps = [&]() {
      MapEncoder<FwdParams, true> encode{params, Traits::kDType, Traits::kSlabColumns};
      encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
      // Without any key, K and V may have no address; nothing is read by their maps then.
      bool const has_keys = params.seqlen_kv > 0;
      encode.keys(map_k, has_keys ? params.k : params.q, params.head_dim_qk, Traits::kTileN);
      encode.keys(map_v, has_keys ? params.v : params.q, params.head_dim_vo, Traits::kTileN);
      encode.queries(map_o, params.o, params.head_dim_vo, 64);
      return encode.status;
    };
    return launch_packed_forward<Packed>(params, stream, encode_maps, [&]() {
      auto* kernel = fwd_kernel<Packed>;
      if constexpr (Packed::kTakesBias) {
        kernel = has_bias(params) ? fwd_kernel<BiasTraits<Packed>> : kernel;
      }
      if constexpr (Packed::kMayBeAlibi) {
        kernel = Packed::is_alibi(params) ? fwd_kernel<AlibiTraits<Packed>> : kernel;
      }
      start_kernel({params.grid, Traits::kThreads, Packed::kSmemBytes, stream, 1, true}, kernel, params,
                   packed_fwd_scalars(params), map_q, map_k, map_v, map_o);
    });
  }
};

template <class Traits>
constexpr RowInfo fwd_row_info() noexcept {
  RowInfo info = row_info<Traits>();
  if constexpr (Traits::kMostShares > 1) {
    info.sums_bytes = sizeof(typename Shares<Traits>::ClusterSums);
  }
  return info;
}

}  // namespace hattn::sm90

// A row for modified scores has one column more, which says `modified`.
#define HATTN_FWD_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages, ...)                             \
  namespace hattn {                                                                                             \
  FwdRow HATTN_ROW(sm90_fwd, dtype, mask, dqk, dvo, tile_m, tile_n, stages, __VA_ARGS__)() noexcept {           \
    using TraitsOfRow = sm90::FwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages, false, \
                                        sizeof("" #__VA_ARGS__) == sizeof("modified")>;                         \
    return {sm90::fwd_row_info<TraitsOfRow>(), sm90::FwdLaunch<TraitsOfRow>::prepare,                           \
            sm90::FwdLaunch<TraitsOfRow>::launch};                                                              \
  }                                                                                                             \
  }
