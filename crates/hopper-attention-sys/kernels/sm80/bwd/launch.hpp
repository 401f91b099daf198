// From plain parameters to started kernels: what a row of bwd.def becomes.
#pragma once

#include "common/launch.hpp"
#include "sm80/bwd/kernel.hpp"
#include "sm80/bwd/row.hpp"

namespace hattn::sm80 {

template <class Traits>
Status bwd_prepare_module() noexcept {
  return prepare_backward<Traits>(bwd_kernel<Traits>);
}

template <class Traits>
Status bwd_launch(BwdParams const& params, CUstream_st* stream) noexcept {
  if (params.seqlen_q == 0 || params.seqlen_kv == 0) {
    return launch_fill_gradients(params, stream);
  }
  return launch_backward<Traits>(params, stream, [&](BwdScalars const& scalars) {
    bwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, scalars);
  });
}

template <class Traits>
constexpr BwdRow bwd_describe() noexcept {
  return {row_info<Traits>(), bwd_prepare_module<Traits>, bwd_launch<Traits>};
}

}  // namespace hattn::sm80

// Defines the row that table.cc lists.
#define HATTN_BWD_SM80_INSTANCE(dtype, mask, dqk, dvo, tile_m, tile_n, stages)                                     \
  namespace hattn {                                                                                                \
  BwdRow HATTN_BWD_SM80_ROW(dtype, mask, dqk, dvo, tile_m, tile_n, stages)() noexcept {                            \
    return sm80::bwd_describe<sm80::BwdTraits<DType::dtype, MaskClass::mask, dqk, dvo, tile_m, tile_n, stages>>(); \
  }                                                                                                                \
  }
