// From plain parameters to a started kernel: what a row of fwd.def becomes.
#pragma once

#include "common/launch.hpp"
#include "sm80/fwd/kernel.hpp"
#include "sm80/fwd/row.hpp"

namespace hattn::sm80 {

template <class Traits>
Status prepare() noexcept {
  return prepare_kernel(fwd_kernel<Traits>, Traits::kSmemBytes);
}

template <class Traits>
Status launch(FwdParams const& params, CUstream_st* stream) noexcept {
  if (params.seqlen_kv == 0) {
    return launch_fill_empty(params, stream);
  }
  fwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, fwd_scalars(params));
  return to_status(cudaGetLastError());
}

template <class Traits>
constexpr FwdRow describe() noexcept {
  return {row_info<Traits>(), prepare<Traits>, launch<Traits>};
}

}  // namespace hattn::sm80

// Defines the row that the table lists.
#define HATTN_FWD_SM80_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                 \
  namespace hattn {                                                                                            \
  FwdRow HATTN_FWD_SM80_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                        \
    return sm80::describe<sm80::FwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                            \
  }
