// From plain parameters to a started kernel: what a row of fp8.def becomes.
#pragma once

#include "common/launch.hpp"
#include "sm90/fp8/kernel.hpp"
#include "sm90/fp8/row.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
Status fp8_prepare() noexcept {
  return tensor_map_encoder() == nullptr ? Status{StatusCode::DriverTooOld, 0}
                                         : prepare_kernels(fp8_fwd_kernel<Traits>, Traits::kSmemBytes);
}

template <class Traits>
Status fp8_launch(FwdParams const& given, CUstream_st* stream) noexcept {
  using Share = Fp8Share<Traits>;
  bool const looks = Traits::kScores == Scores::F16;
  bool const behind = !looks && given.range_check != 0;
  FwdParams params = given;
  // The largest magnitude counts only once it is known that nothing was too large: until then it is kept in the
  // workspace, and the row behind publishes it or makes its own.
  bool const keeps_amax = looks && given.amax.address != 0;
  if (keeps_amax) {
    params.amax.address = given.range_check + offsetof(RangeCheck, amax);
  }
  if (!behind) {
    std::size_t const counter_bytes =
        params.shared_tiles != 0 ? Share::header_bytes(params.grid) + std::size_t{Share::kSignBytes} * params.grid
        : looks                  ? sizeof(RangeCheck)
                                 : sizeof(int);
    Status zeroed = zero(keeps_amax ? given.range_check : params.tile_counter, counter_bytes, stream);
    if (zeroed.code == StatusCode::Ok) {
      zeroed = zero(given.amax.address, sizeof(float), stream);
    }
    if (zeroed.code != StatusCode::Ok) {
      return zeroed;
    }
  }
  if (params.batch == 0 || params.heads_q == 0 || params.seqlen_q == 0) {
    return {};  // amax was all that was wanted
  }
  if (params.seqlen_kv == 0 && behind) {
    return {};
  }
  if (params.seqlen_kv == 0) {
    if (params.output == DType::E4M3) {
      // Two bytes are an element there.
      params.head_dim_vo /= 2;
      params.o.stride_batch /= 2;
      params.o.stride_row /= 2;
      params.o.stride_head /= 2;
    }
    return launch_fill_empty(params, stream);
  }

  CUtensorMap map_q, map_k, map_v;
  MapEncoder<FwdParams> encode{params, DType::E4M3, Traits::kHeadDimQK};
  encode.queries(map_q, params.q, params.head_dim_qk, Traits::kTileM);
  encode.keys(map_k, params.k, params.head_dim_qk, Traits::kTileN);
  encode.keys(map_v, params.v, params.head_dim_vo, Traits::kTileN);
  if (encode.status.code != StatusCode::Ok) {
    return encode.status;
  }

  Fp8Scalars scalars = common_scalars<Fp8Scalars>(params);
  scalars.lse = reinterpret_cast<float*>(params.lse.address);
  scalars.output = params.output;
  scalars.scale_o = reinterpret_cast<float const*>(params.scale_o.address);
  scalars.amax = reinterpret_cast<unsigned*>(params.amax.address);
  scalars.descale_q_group = params.descale_q_group;
  scalars.batch = params.batch;
  scalars.heads_q = params.heads_q;
  scalars.head_dim_vo = params.head_dim_vo;
  scalars.range_check = reinterpret_cast<RangeCheck*>(params.range_check);
  scalars.range_grid = params.range_grid;
  scalars.shared_tiles = params.shared_tiles;
  int const shared_units = params.shared_tiles * Share::units_of(params.seqlen_kv);
  scalars.shared_units = shared_units / params.grid;
  scalars.shared_longer = shared_units % params.grid;
  // A row behind another one may be started while that one's last blocks run.
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = params.grid;
  config.blockDim = Traits::kThreads;
  config.dynamicSmemBytes = Traits::kSmemBytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = behind ? 1 : 0;
  return to_status(cudaLaunchKernelEx(&config, fp8_fwd_kernel<Traits>, params, scalars, map_q, map_k, map_v));
}

template <class Traits>
constexpr FwdRow fp8_describe() noexcept {
  RowInfo info = row_info<Traits>();
  info.share_bytes = Fp8Share<Traits>::kBytes;
  return {info, fp8_prepare<Traits>, fp8_launch<Traits>};
}

}  // namespace hattn::sm90

// Defines the row that the table lists.
#define HATTN_FP8_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages, scores)                               \
  namespace hattn {                                                                                                  \
  FwdRow HATTN_FP8_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages, scores)() noexcept {                      \
    return sm90::fp8_describe<sm90::Fp8Traits<MaskClass::mask, dqk, dvo, tile_m, tile_n, stages, Scores::scores>>(); \
  }                                                                                                                  \
  }
