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
    status = is_ok(status) ? prepare_kernel(bwd_kernel<SharedTraits<Traits>>, Traits::kSmemBytes) : status;
    status = is_ok(status) ? prepare_schedule() : status;
    return is_ok(status) ? prepare_backward<Packed>(bwd_kernel<Packed>) : status;
  }

  static Status launch(BwdParams const& params, CUstream_st* stream) noexcept {
    if (params.sequences.table != 0) {
      return launch_packed(params, stream);
    }
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

 private:
  static Status launch_packed(BwdParams const& params, CUstream_st* stream) noexcept {
    Sequences const& sequences = params.sequences;
    PackedBwdScalars scalars = packed_bwd_scalars<Packed>(params);
    CUtensorMap map_q, map_k, map_v, map_d_o;
    // Without any row, an operand may have no address; nothing is read by its map then.
    auto const some = [](bool is_there, TensorDesc const& tensor, TensorDesc const& other) {
      return is_there ? tensor : other;
    };
    bool const has_queries = params.seqlen_q > 0;
    bool const has_keys = params.seqlen_kv > 0;
    if (!has_queries && !has_keys) {
      return {};
    }
    MapEncoder<BwdParams, true> encode{params, Traits::kDType};
    encode.queries(map_q, some(has_queries, params.q, params.k), params.head_dim_qk, Traits::kTileM);
    encode.keys(map_k, some(has_keys, params.k, params.q), params.head_dim_qk, Traits::kTileN);
    encode.keys(map_v, some(has_keys, params.v, params.q), params.head_dim_vo, Traits::kTileN);
    encode.queries(map_d_o, some(has_queries, params.d_o, params.k), params.head_dim_vo, Traits::kTileM);
    encode.box_columns = sizeof(Statistics) / 2;
    TensorDesc statistics{};
    statistics.address = params.statistics;
    statistics.stride_row = encode.box_columns;
    statistics.stride_head = statistics_rows(params) * encode.box_columns;
    encode.queries(scalars.map_statistics, statistics, encode.box_columns, Traits::kTileM);
    Status status = encode.status;
    status = is_ok(status)
                 ? launch_schedule(sequences,
                                   {params.batch, params.seqlen_q, params.seqlen_kv, Traits::kTileN, params.heads_kv,
                                    sequences.list_size, Traits::kTileM, sequences.block_list_size},
                                   stream)
                 : status;
    if (!is_ok(status)) {
      return status;
    }
    BwdStatistics<Packed>::launch(params, stream);
    start_kernel({params.grid, Traits::kThreads, Packed::kSmemBytes, stream, 1, true}, bwd_kernel<Packed>, params,
                 scalars, map_q, map_k, map_v, map_d_o);
    BwdConvert<typename Packed::Unmasked>::launch(params, stream);
    status = to_status(cudaGetLastError());
    auto const fill = [&](TensorDesc const& tensor, bool of_keys) {
      int const rows = of_keys ? params.seqlen_kv : params.seqlen_q;
      if (is_ok(status) && sequences.fill_gaps && rows > 0) {
        bool const is_v = tensor.address == params.d_v.address;
        status = launch_fill_gaps(sequences, tensor, Traits::kDType, params.batch, rows,
                                  of_keys ? params.heads_kv : params.heads_q,
                                  is_v ? params.head_dim_vo : params.head_dim_qk, of_keys, TensorDesc{}, stream);
      }
    };
    fill(params.d_q, false);
    fill(params.d_k, true);
    fill(params.d_v, true);
    return status;
  }
};

}  // namespace hattn::sm90

#define HATTN_BWD_SM90_INSTANCE(...) HATTN_INSTANCE(BwdRow, sm90_bwd, sm90::BwdTraits, sm90::BwdLaunch, __VA_ARGS__)
