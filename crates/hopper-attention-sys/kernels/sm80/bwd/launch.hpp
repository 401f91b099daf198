// From plain parameters to started kernels: what a row of bwd.def becomes.
#pragma once

#include "common/launch.hpp"
#include "sm80/bwd/kernel.hpp"

namespace hattn::sm80 {

template <class Traits>
struct BwdLaunch {
  static Status prepare() noexcept { return prepare_backward<Traits>(bwd_kernel<Traits>); }

  static Status launch(BwdParams const& params, CUstream_st* stream) noexcept {
    return launch_backward<Traits>(params, stream, no_maps, [&](BwdScalars const& scalars) {
      bwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, scalars);
    });
  }
};

}  // namespace hattn::sm80

#define HATTN_BWD_SM80_INSTANCE(...) HATTN_INSTANCE(BwdRow, sm80_bwd, sm80::BwdTraits, sm80::BwdLaunch, __VA_ARGS__)
