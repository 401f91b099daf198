// From plain parameters to a started kernel: what a row of fwd.def becomes.
#pragma once

#include "common/launch.hpp"
#include "sm80/fwd/kernel.hpp"

namespace hattn::sm80 {

template <class Traits>
struct FwdLaunch {
  static Status prepare() noexcept { return prepare_kernel(fwd_kernel<Traits>, Traits::kSmemBytes); }

  static Status launch(FwdParams const& params, CUstream_st* stream) noexcept {
    return launch_forward(params, stream, no_maps, [&](FwdScalars const& scalars) {
      fwd_kernel<Traits><<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, scalars);
    });
  }
};

}  // namespace hattn::sm80

#define HATTN_FWD_SM80_INSTANCE(...) HATTN_INSTANCE(FwdRow, sm80_fwd, sm80::FwdTraits, sm80::FwdLaunch, __VA_ARGS__)
