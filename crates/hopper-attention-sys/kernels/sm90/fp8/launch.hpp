// From plain parameters to a started kernel: what a row of fp8.def becomes.
#pragma once

#include "common/blocks.hpp"
#include "common/launch.hpp"
#include "common/start.hpp"
#include "sm90/fp8/kernel.hpp"
#include "sm90/fp8/row.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
Status fp8_prepare() noexcept {
  if (tensor_map_encoder() == nullptr) {
    return {StatusCode::DriverTooOld, 0};
  }
  Status status = prepare_kernel(fp8_fwd_kernel<Traits>, Traits::kSmemBytes);
  if constexpr (Traits::kPacks) {
    using Packed = typename Traits::Packed;
    status = is_ok(status) ? prepare_schedule() : status;
    status = is_ok(status) ? prepare_kernel(fp8_fwd_kernel<Packed>, Packed::kSmemBytes) : status;
  }
  if constexpr (Traits::kIsListed) {
    status = is_ok(status) ? prepare_blocks() : status;
  }
  if constexpr (Traits::kMostShares > 1) {
    status = is_ok(status) ? prepare_kernel(fp8_fwd_kernel<Fp8SharedTraits<Traits>>, Traits::kSmemBytes) : status;
  }
  return status;
}

// The output as the filling kernels see it.
inline FwdParams with_output_of_two_bytes(FwdParams params) noexcept {
  if (params.output == DType::E4M3) {
    params.head_dim_vo /= 2;
    params.o = of_two_bytes(params.o);
  }
  return params;
}

// What both kernels of a row read.
template <class Traits>
typename Traits::Params fp8_kernel_params(FwdParams const& params) noexcept {
  auto kernel = common_scalars<typename Traits::Params>(params);
  kernel.o = params.o;
  kernel.output = params.output;
  kernel.scale_o = reinterpret_cast<float const*>(params.scale_o.address);
  kernel.lse = reinterpret_cast<float*>(params.lse.address);
  kernel.lse_stride_batch = params.lse.stride_batch;
  kernel.lse_stride_head = params.lse.stride_head;
  kernel.descale_q = params.descale_q;
  kernel.descale_k = params.descale_k;
  kernel.descale_v = params.descale_v;
  kernel.descale_q_group = params.descale_q_group;
  kernel.batch = params.batch;
  kernel.heads_q = params.heads_q;
  kernel.head_dim_vo = params.head_dim_vo;
  kernel.q = params.q;
  kernel.k = params.k;
  kernel.v = params.v;
  kernel.head_dim_qk = params.head_dim_qk;
  kernel.sinks = params.sinks;
  kernel.sinks_dtype = params.sinks_dtype;
  if constexpr (Traits::kModifiers == Modifiers::Always) {
    kernel.cap = Fp8Cap::of(params.softcap);
  }
  if constexpr (Traits::kIsListed) {
    kernel.lists = params.blocks;
  }
  return kernel;
}

// A launch in which the device knows the lengths of sequences. The workspace has their table, and nothing else.
template <class Traits>
Status fp8_launch_packed(FwdParams const& params, CUstream_st* stream) noexcept {
  using Packed = typename Traits::Packed;
  if (Status const zeroed = zero(params.amax.address, sizeof(float), stream); !is_ok(zeroed)) {
    return zeroed;
  }
  if (params.heads_q == 0 || params.seqlen_q == 0) {
    return {};  // amax was all that was wanted
  }
  CUtensorMap map_q, map_k, map_v;
  auto const encode_maps = [&]() {
    MapEncoder<FwdParams, true> encode{params, DType::E4M3, Traits::kSlabQK};
    encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
    // Without any key, K and V may have no address; nothing is read by their maps then.
    bool const has_keys = params.seqlen_kv > 0;
    encode.keys(map_k, has_keys ? params.k : params.q, params.head_dim_qk, Traits::kTileN);
    encode.box_columns = Traits::kSlabVO;
    encode.keys(map_v, has_keys ? params.v : params.q, params.head_dim_vo, Traits::kKeysRaw);
    return encode.status;
  };
  Sequences const& sequences = params.sequences;
  auto kernel = fp8_kernel_params<Packed>(params);
  kernel.amax = reinterpret_cast<unsigned*>(params.amax.address);
  kernel.table = {sequences.table, params.batch};
  kernel.table_bytes = kernel.table.bytes(sequences.list_size);
  kernel.rows_apart_q = rows_apart(params.q);
  kernel.rows_apart_k = rows_apart(params.k);
  kernel.rows_apart_v = rows_apart(params.v);
  kernel.factors_apart_q = sequences.cu_seqlens_q != 0 ? Traits::kScaleBlock - 1 : 0;
  kernel.factors_apart_kv = sequences.cu_seqlens_kv != 0 ? Traits::kScaleBlock - 1 : 0;
  kernel.diagonal_offset = params.diagonal_offset;
  kernel.window_left = params.window_left;
  kernel.window_right = params.window_right;
  kernel.sequences = sequences;
  return launch_packed_forward<Packed>(with_output_of_two_bytes(params), stream, encode_maps, [&]() {
    start_kernel({params.grid, Traits::kThreads, Packed::kSmemBytes, stream, 1, true}, fp8_fwd_kernel<Packed>, kernel,
                 map_q, map_k, map_v);
  });
}

template <class Traits>
Status fp8_launch(FwdParams const& params, CUstream_st* stream) noexcept {
  using Split = Fp8Split<Traits>;
  if constexpr (Traits::kPacks) {
    if (params.sequences.table != 0) {
      return fp8_launch_packed<Traits>(params, stream);
    }
  }
  bool const checks_range = Traits::kScores == Scores::F16;
  bool const is_fallback = !checks_range && params.range_check != 0;
  // The largest magnitude counts only once it is known that nothing was too large for f16. Until then it is kept in the
  // workspace. The fallback row publishes it or makes its own.
  bool const keeps_amax = checks_range && params.amax.address != 0;
  std::uint64_t const amax = keeps_amax ? params.range_check + offsetof(RangeCheck, amax) : params.amax.address;
  if (!is_fallback) {
    std::size_t const counter_bytes =
        params.split_tiles != 0 ? Split::header_bytes(params.grid) + std::size_t{Split::kFlagBytes} * params.grid
        : checks_range          ? sizeof(RangeCheck)
                                : sizeof(int);
    // (The kernel that makes lists of blocks zeroes the counter.)
    std::uint64_t const counter = Traits::kIsListed ? 0 : keeps_amax ? params.range_check : params.tile_counter;
    Status zeroed = zero(counter, counter_bytes, stream);
    if (is_ok(zeroed)) {
      zeroed = zero(params.amax.address, sizeof(float), stream);
    }
    if (!is_ok(zeroed)) {
      return zeroed;
    }
  }
  if (params.batch == 0 || params.heads_q == 0 || params.seqlen_q == 0) {
    return {};  // amax was all that was wanted
  }
  if (params.seqlen_kv == 0) {
    return is_fallback ? Status{} : launch_fill_empty(with_output_of_two_bytes(params), stream);
  }

  CUtensorMap map_q, map_k, map_v;
  MapEncoder<FwdParams> encode{params, DType::E4M3, Traits::kSlabQK};
  encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
  encode.keys(map_k, params.k, params.head_dim_qk, Traits::kTileN);
  encode.box_columns = Traits::kSlabVO;
  encode.keys(map_v, params.v, params.head_dim_vo, Traits::kKeysRaw);
  if (!is_ok(encode.status)) {
    return encode.status;
  }
  if constexpr (Traits::kIsListed) {
    if (Status const listed = launch_blocks(params, 0, stream); !is_ok(listed)) {
      return listed;
    }
  }

  auto kernel = fp8_kernel_params<Traits>(params);
  kernel.amax = reinterpret_cast<unsigned*>(amax);
  kernel.range_check = reinterpret_cast<RangeCheck*>(params.range_check);
  kernel.range_grid = params.range_grid;
  kernel.split_tiles = params.split_tiles;
  int const split_units = params.split_tiles * Split::units_of(params.seqlen_kv);
  kernel.segment_units = split_units / params.grid;
  kernel.longer_segments = split_units % params.grid;
  if constexpr (Traits::kMostShares > 1) {
    if (params.shares > 1) {
      start_kernel({params.grid, Traits::kThreads, Traits::kSmemBytes, stream, params.shares},
                   fp8_fwd_kernel<Fp8SharedTraits<Traits>>, kernel, map_q, map_k, map_v);
      return to_status(cudaGetLastError());
    }
  }
  // A fallback row may start while the last CTAs of the row before it run, and a row with lists while they are made.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = params.grid;
  config.blockDim = Traits::kThreads;
  config.dynamicSmemBytes = Traits::kSmemBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = is_fallback || Traits::kIsListed ? 1 : 0;
  return to_status(cudaLaunchKernelEx(&config, fp8_fwd_kernel<Traits>, kernel, map_q, map_k, map_v));
}

template <class Traits>
constexpr FwdRow fp8_describe() noexcept {
  RowInfo info = row_info<Traits>();
  info.split_bytes = Fp8Split<Traits>::kBytes;
  return {info, fp8_prepare<Traits>, fp8_launch<Traits>};
}

}  // namespace hattn::sm90

// Defines the row that the table lists. A row for modified scores has one column more, which says `modified`.
#define HATTN_FP8_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages, scores, ...)                      \
  namespace hattn {                                                                                              \
  FwdRow HATTN_FP8_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages, scores, __VA_ARGS__)() noexcept {     \
    return sm90::fp8_describe<sm90::Fp8Traits<MaskClass::mask, dqk, dvo, tile_m, tile_n, stages, Scores::scores, \
                                              sizeof("" #__VA_ARGS__) == sizeof("modified")>>();                 \
  }                                                                                                              \
  }
