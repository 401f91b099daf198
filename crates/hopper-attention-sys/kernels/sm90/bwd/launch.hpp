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
  using Packed = typename Traits::Packed;

  static Status prepare() noexcept {
    if (tensor_map_encoder() == nullptr) {
      return {StatusCode::DriverTooOld, 0};
    }
    Status status = prepare_backward<Traits>(bwd_kernel<Traits>);
    if constexpr (Traits::kTakesBias) {
      status = is_ok(status) ? prepare_kernel(bwd_kernel<BiasTraits<Traits>>, Traits::kSmemBytes) : status;
    }
    if constexpr (Traits::kIsListed) {
      return is_ok(status) ? prepare_blocks() : status;
    } else {
      status = is_ok(status) ? prepare_kernel(bwd_kernel<SharedTraits<Traits>>, Traits::kSmemBytes) : status;
      if constexpr (kDraws) {
        status = is_ok(status) ? prepare_kernel(bwd_kernel<Drawing>, Traits::kSmemBytes) : status;
      }
      if constexpr (kHasAlibi) {
        using PackedAlibi = AlibiTraits<typename Packed::Plain>;
        status = is_ok(status) ? prepare_kernel(bwd_kernel<Alibi>, Traits::kSmemBytes) : status;
        status = is_ok(status) ? prepare_kernel(bwd_kernel<PackedAlibi>, Packed::kSmemBytes) : status;
      }
      if constexpr (Packed::kTakesBias) {
        status = is_ok(status) ? prepare_kernel(bwd_kernel<BiasTraits<Packed>>, Packed::kSmemBytes) : status;
      }
      status = is_ok(status) ? prepare_schedule() : status;
      return is_ok(status) ? prepare_backward<Packed>(bwd_kernel<Packed>) : status;
    }
  }

  static Status launch(BwdParams const& params, CUstream_st* stream) noexcept {
    if constexpr (Traits::kPacks) {
      if (params.sequences.table != 0) {
        return launch_packed(params, stream);
      }
    }
    CUtensorMap map_q, map_k, map_v, map_d_o;
    auto const encode_maps = [&]() {
      MapEncoder<BwdParams> encode{params, Traits::kDType};
      encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
      encode.keys(map_k, params.k, params.head_dim_qk, Traits::kTileN);
      encode.keys(map_v, params.v, params.head_dim_vo, Traits::kTileN);
      encode.queries(map_d_o, params.d_o, params.head_dim_vo, Traits::kTileM);
      if constexpr (Traits::kIsListed) {
        return is_ok(encode.status) ? launch_blocks(params, Traits::kTileM, stream) : encode.status;
      }
      return encode.status;
    };
    return launch_backward<Traits>(params, stream, encode_maps, [&](BwdScalars const& scalars) {
      auto* kernel = bwd_kernel<Traits>;
      int threads = Traits::kThreads;
      if constexpr (Traits::kMostShares > 1) {
        kernel = params.cluster > 1 ? bwd_kernel<SharedTraits<Traits>> : kernel;
      }
      if constexpr (Traits::kTakesBias) {
        kernel = has_bias(params) ? bwd_kernel<BiasTraits<Traits>> : kernel;  // the plan has no clusters then
      }
      if constexpr (kDraws) {
        static_assert(Drawing::kSmemBytes == Traits::kSmemBytes, "all kernels of a row ask for what the row says");
        if (Traits::is_drawn(params)) {
          kernel = bwd_kernel<Drawing>;
          threads = Drawing::kThreads;
        }
      }
      if constexpr (kHasAlibi) {
        static_assert(Alibi::kSmemBytes == Traits::kSmemBytes, "all kernels of a row ask for what the row says");
        kernel = Traits::is_alibi(params) ? bwd_kernel<Alibi> : kernel;
      }
      start_kernel({params.grid, threads, Traits::kSmemBytes, stream, params.cluster, Traits::kOverlaps}, kernel,
                   params, scalars, map_q, map_k, map_v, map_d_o);
    });
  }

 private:
  // Whether the row has a kernel in which a warpgroup draws dropout's numbers, and its traits.
  static constexpr bool kDraws = Traits::kTakesDropout && Traits::kMayDraw;
  using Drawing = DrawingTraits<typename Traits::Plain>;
  // The same of the kernel for ALiBi alone.
  static constexpr bool kHasAlibi = Traits::kModifiers == Modifiers::Always && Traits::kMayBeAlibi;
  using Alibi = AlibiTraits<typename Traits::Plain>;

  static Status launch_packed(BwdParams const& params, CUstream_st* stream) noexcept {
    PackedBwdScalars scalars = packed_bwd_scalars<Packed>(params);
    CUtensorMap map_q, map_k, map_v, map_d_o;
    auto const encode_maps = [&]() {
      // Without any row, an operand may have no address; nothing is read by its map then.
      bool const has_queries = params.seqlen_q > 0;
      bool const has_keys = params.seqlen_kv > 0;
      MapEncoder<BwdParams, true> encode{params, Traits::kDType};
      encode.queries(map_q, has_queries ? params.q : params.k, params.head_dim_qk, Traits::kTileM);
      encode.keys(map_k, has_keys ? params.k : params.q, params.head_dim_qk, Traits::kTileN);
      encode.keys(map_v, has_keys ? params.v : params.q, params.head_dim_vo, Traits::kTileN);
      encode.queries(map_d_o, has_queries ? params.d_o : params.k, params.head_dim_vo, Traits::kTileM);
      encode.box_columns = sizeof(Statistics) / 2;
      TensorDesc statistics{};
      statistics.address = params.statistics;
      statistics.stride_row = encode.box_columns;
      statistics.stride_head = statistics_rows(params) * encode.box_columns;
      encode.queries(scalars.map_statistics, statistics, encode.box_columns, Traits::kTileM);
      return encode.status;
    };
    return launch_packed_backward<Packed>(params, stream, encode_maps, [&]() {
      auto* kernel = bwd_kernel<Packed>;
      if constexpr (Packed::kTakesBias) {
        kernel = has_bias(params) ? bwd_kernel<BiasTraits<Packed>> : kernel;
      }
      if constexpr (kHasAlibi) {
        static_assert(AlibiTraits<typename Packed::Plain>::kSmemBytes == Packed::kSmemBytes);
        kernel = Packed::is_alibi(params) ? bwd_kernel<AlibiTraits<typename Packed::Plain>> : kernel;
      }
      start_kernel({params.grid, Traits::kThreads, Packed::kSmemBytes, stream, 1, true}, kernel, params, scalars, map_q,
                   map_k, map_v, map_d_o);
    });
  }
};

}  // namespace hattn::sm90

// A row for modified scores has one column more, which says `modified`.
#define HATTN_BWD_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages, ...)                                \
  namespace hattn {                                                                                                \
  BwdRow HATTN_ROW(sm90_bwd, dtype, mask, dqk, dvo, tile_m, tile_n, stages, __VA_ARGS__)() noexcept {              \
    using TraitsOfRow = sm90::BwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages, false,    \
                                        sizeof("" #__VA_ARGS__) == sizeof("modified")>;                            \
    return {row_info<TraitsOfRow>(), sm90::BwdLaunch<TraitsOfRow>::prepare, sm90::BwdLaunch<TraitsOfRow>::launch}; \
  }                                                                                                                \
  }
