// From plain parameters to a started kernel: what a row of fp8.def becomes.
#pragma once

#include "common/fill.hpp"
#include "sm90/fp8/kernel.hpp"
#include "sm90/fp8/row.hpp"
#include "sm90/tensor_map.hpp"

namespace hattn::sm90 {

template <class Traits>
Status fp8_prepare() noexcept {
  if (tensor_map_encoder() == nullptr) {
    return {StatusCode::DriverTooOld, 0};
  }
  cudaError_t const error =
      cudaFuncSetAttribute(fp8_fwd_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes);
  return error != cudaSuccess ? to_status(error) : prepare_fill();
}

template <class Traits>
Status fp8_launch(FwdParams const& params, CUstream_st* stream) noexcept {
  using Share = Fp8Share<Traits>;
  bool const looks = Traits::kScores == Scores::F16;
  bool const behind = !looks && params.range_check != 0;
  struct Zeroed {
    std::uint64_t address;
    std::size_t bytes;
  };
  Zeroed const counters = {
      looks && params.amax != 0 ? params.range_check : params.tile_counter,
      params.shared_tiles != 0 ? Share::header_bytes(params.grid) + std::size_t{Share::kSignBytes} * params.grid
      : looks                  ? sizeof(RangeCheck)
                               : sizeof(int),
  };
  for (Zeroed const zeroed : {counters, Zeroed{params.amax, sizeof(float)}}) {
    if (zeroed.address != 0 && !behind) {
      cudaError_t const error = cudaMemsetAsync(reinterpret_cast<void*>(zeroed.address), 0, zeroed.bytes, stream);
      if (error != cudaSuccess) {
        return to_status(error);
      }
    }
  }
  if (params.batch == 0 || params.heads_q == 0 || params.seqlen_q == 0) {
    return {};  // amax was all that was wanted
  }
  if (params.seqlen_kv == 0 && behind) {
    return {};
  }
  if (params.seqlen_kv == 0) {
    FwdParams empty = params;
    if (params.output == DType::E4M3) {
      // Two bytes are an element there.
      empty.head_dim_vo /= 2;
      for (std::int64_t* const stride : {&empty.o.stride_batch, &empty.o.stride_seqlen, &empty.o.stride_head}) {
        *stride /= 2;
      }
    }
    return launch_fill_empty(empty, stream);
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
  };
  for (Map& map : maps) {
    Status const status = encode_tensor_map(map.map, DType::E4M3, map.tensor, params.batch, map.seqlen, map.heads,
                                            map.head_dim, map.rows, Traits::kHeadDimQK);
    if (status.code != StatusCode::Ok) {
      return status;
    }
  }

  int const shared_units = params.shared_tiles * Share::units_of(params.seqlen_kv);
  constexpr float kLog2E = 1.44269504088896341F;
  auto* const range_check = reinterpret_cast<RangeCheck*>(params.range_check);
  auto* const amax = reinterpret_cast<unsigned*>(params.amax);
  Fp8KernelParams const kernel_params{params.o,
                                      params.output,
                                      reinterpret_cast<float const*>(params.scale_o),
                                      looks && params.amax != 0 ? &range_check->amax : amax,
                                      reinterpret_cast<float*>(params.lse_address),
                                      params.lse_stride_batch,
                                      params.lse_stride_head,
                                      params.descale_q,
                                      params.descale_k,
                                      params.descale_v,
                                      params.descale_q_group,
                                      params.batch,
                                      params.heads_q,
                                      params.heads_q / params.heads_kv,
                                      params.seqlen_q,
                                      params.seqlen_kv,
                                      params.head_dim_vo,
                                      params.diagonal_offset - params.window_left,
                                      params.diagonal_offset + params.window_right,
                                      params.heads_per_group,
                                      params.groups,
                                      reinterpret_cast<int*>(params.tile_counter),
                                      range_check,
                                      params.range_grid,
                                      params.shared_tiles,
                                      shared_units / params.grid,
                                      shared_units % params.grid,
                                      params.softmax_scale * kLog2E};
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
  return to_status(
      cudaLaunchKernelEx(&config, fp8_fwd_kernel<Traits>, kernel_params, maps[0].map, maps[1].map, maps[2].map));
}

template <class Traits>
constexpr FwdRow fp8_describe() noexcept {
  return {Arch::Sm90,          DType::E4M3,        Traits::kMask,   Traits::kHeadDimQK,      Traits::kHeadDimVO,
          Traits::kTileM,      Traits::kTileN,     Traits::kStages, Traits::kThreads,        Traits::kSmemBytes,
          fp8_prepare<Traits>, fp8_launch<Traits>, Traits::kScores, Fp8Share<Traits>::kBytes};
}

}  // namespace hattn::sm90

// Defines the row that the table lists.
#define HATTN_FP8_SM90_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages, scores)                               \
  namespace hattn {                                                                                                  \
  FwdRow HATTN_FP8_SM90_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages, scores)() noexcept {                      \
    return sm90::fp8_describe<sm90::Fp8Traits<MaskClass::mask, dqk, dvo, tile_m, tile_n, stages, Scores::scores>>(); \
  }                                                                                                                  \
  }
