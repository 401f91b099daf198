// From plain parameters to started kernels: what a row of bwd.def becomes.
#pragma once

#include "common/blocks.hpp"
#include "common/launch.hpp"
#include "sm80/bwd/kernel.hpp"

namespace hattn::sm80 {

template <class Traits>
struct BwdLaunch {
  // Of the kernel for sequences whose lengths the device knows.
  using Packed = typename Traits::Packed;

  static Status prepare() noexcept {
    Status status = prepare_backward<Traits>(bwd_kernel<Traits>);
    if constexpr (Traits::kTakesBias) {
      status = is_ok(status) ? prepare_kernel(bwd_kernel<BiasTraits<Traits>>, Traits::kSmemBytes) : status;
    }
    if constexpr (Traits::kIsListed) {
      status = is_ok(status) ? prepare_blocks() : status;
    }
    if constexpr (Traits::kPacks) {
      status = is_ok(status) ? prepare_schedule() : status;
      if constexpr (Packed::kTakesBias) {
        status = is_ok(status) ? prepare_kernel(bwd_kernel<BiasTraits<Packed>>, Packed::kSmemBytes) : status;
      }
      status = is_ok(status) ? prepare_backward<Packed>(bwd_kernel<Packed>) : status;
    }
    return status;
  }

  static Status launch(BwdParams const& params, CUstream_st* stream) noexcept {
    if constexpr (Traits::kPacks) {
      if (params.sequences.table != 0) {
        return launch_packed(params, stream);
      }
    }
    auto const make_lists = [&]() {
      return Traits::kIsListed ? launch_blocks(params, Traits::kTileM, stream) : Status{};
    };
    return launch_backward<Traits>(params, stream, make_lists, [&](BwdScalars const& scalars) {
      auto* kernel = bwd_kernel<Traits>;
      if constexpr (Traits::kTakesBias) {
        kernel = has_bias(params) || has_dropout(params) ? bwd_kernel<BiasTraits<Traits>> : kernel;
      }
      kernel<<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, scalars);
    });
  }

 private:
  static Status launch_packed(BwdParams const& params, CUstream_st* stream) noexcept {
    return launch_packed_backward<Packed>(params, stream, no_maps, [&]() {
      auto* kernel = bwd_kernel<Packed>;
      if constexpr (Packed::kTakesBias) {
        kernel = has_bias(params) || has_dropout(params) ? bwd_kernel<BiasTraits<Packed>> : kernel;
      }
      kernel<<<params.grid, Traits::kThreads, Packed::kSmemBytes, stream>>>(params, packed_bwd_scalars<Packed>(params));
    });
  }
};

}  // namespace hattn::sm80

#define HATTN_BWD_SM80_INSTANCE(...) HATTN_INSTANCE(BwdRow, sm80_bwd, sm80::BwdTraits, sm80::BwdLaunch, __VA_ARGS__)
