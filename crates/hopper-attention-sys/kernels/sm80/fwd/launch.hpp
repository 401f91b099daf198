// From plain parameters to a started kernel: what a row of fwd.def becomes.
#pragma once

#include "common/blocks.hpp"
#include "common/launch.hpp"
#include "sm80/fwd/kernel.hpp"

namespace hattn::sm80 {

template <class Traits>
struct FwdLaunch {
  // Of the kernel for sequences whose lengths the device knows.
  using Packed = typename Traits::Packed;

  static Status prepare() noexcept {
    Status status = prepare_kernel(fwd_kernel<Traits>, Traits::kSmemBytes);
    if constexpr (Traits::kTakesBias) {
      status = is_ok(status) ? prepare_kernel(fwd_kernel<BiasTraits<Traits>>, Traits::kSmemBytes) : status;
    }
    if constexpr (Traits::kIsListed) {
      status = is_ok(status) ? prepare_blocks() : status;
    }
    if constexpr (Traits::kPacks) {
      status = is_ok(status) ? prepare_schedule() : status;
      if constexpr (Packed::kTakesBias) {
        status = is_ok(status) ? prepare_kernel(fwd_kernel<BiasTraits<Packed>>, Packed::kSmemBytes) : status;
      }
      status = is_ok(status) ? prepare_kernel(fwd_kernel<Packed>, Packed::kSmemBytes) : status;
    }
    return status;
  }

  static Status launch(FwdParams const& params, CUstream_st* stream) noexcept {
    if constexpr (Traits::kPacks) {
      if (params.sequences.table != 0) {
        return launch_packed(params, stream);
      }
    }
    auto const make_lists = [&]() { return Traits::kIsListed ? launch_blocks(params, 0, stream) : Status{}; };
    return launch_forward(params, stream, make_lists, [&](FwdScalars const& scalars) {
      auto* kernel = fwd_kernel<Traits>;
      if constexpr (Traits::kTakesBias) {
        kernel = has_bias(params) || has_dropout(params) ? fwd_kernel<BiasTraits<Traits>> : kernel;
      }
      kernel<<<params.grid, Traits::kThreads, Traits::kSmemBytes, stream>>>(params, scalars);
    });
  }

 private:
  static Status launch_packed(FwdParams const& params, CUstream_st* stream) noexcept {
    return launch_packed_forward<Packed>(params, stream, no_maps, [&]() {
      auto* kernel = fwd_kernel<Packed>;
      if constexpr (Packed::kTakesBias) {
        kernel = has_bias(params) || has_dropout(params) ? fwd_kernel<BiasTraits<Packed>> : kernel;
      }
      kernel<<<params.grid, Traits::kThreads, Packed::kSmemBytes, stream>>>(params, packed_fwd_scalars(params));
    });
  }
};

}  // namespace hattn::sm80

#define HATTN_FWD_SM80_INSTANCE(...) HATTN_INSTANCE(FwdRow, sm80_fwd, sm80::FwdTraits, sm80::FwdLaunch, __VA_ARGS__)
