// The end of a tile, for one consumer warpgroup.
//
// - The log-sum-exp goes straight to memory.
// - O / row_sum, in the output type, goes to the warpgroup's rows of the buffer of Q, whose Q is no longer needed.
//   Warp 1 of the producers stores it from there.
#pragma once

#include "common/mask.hpp"
#include "common/softmax.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Epilogue {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;

  // Without a branch, so that the two rows' long chains of dependent instructions run side by side.
  CUTE_DEVICE static void store_if(bool condition, float* address, float value) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.f32 [%0], %1;}" ::"l"(address), "f"(value),
                 "r"(static_cast<int>(condition))
                 : "memory");
  }

  // Writes the tile's log-sum-exp and gives what its O must be multiplied by. (`sums` and `divisors`: softmax.hpp.)
  CUTE_DEVICE static void finish_rows(FwdParams const& params, FwdScalars const& scalars, Storage const& storage,
                                      int buffer, int consumer, float const (&reference)[2], float const (&sums)[2],
                                      float const (&divisors)[2], float (&inverse)[2]) {
    Tile const tile = storage.tile[buffer];
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    int const first_query = tile.block * Traits::kTileM + consumer * 64 + (thread / 32 % 4) * 16 + lane / 4;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const sum = sums[r];
      bool const empty = sum == 0.0F;  // no key at all: O = 0, LSE = -inf; a NaN stays one
      inverse[r] = empty ? 0.0F : reciprocal_approx(divisors[r]);
      int const query = first_query + 8 * r;
      float const lse = log_sum_exp(reference[r], sum);
      store_if(scalars.lse != nullptr && lane % 4 == 0 && query < scalars.seqlen_q,
               scalars.lse + tile.batch * params.lse.stride_batch + tile.head * params.lse.stride_head + query, lse);
    }
  }

  // Hands O, multiplied by `inverse`, to the storing warp.
  template <class Output>
  CUTE_DEVICE static void stage_output(Storage& storage, int buffer, int consumer, Output const& output,
                                       float const (&inverse)[2]) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    store_accumulator<Traits::kTileM, Traits::kHeadDimVO>(storage.q[buffer], consumer * 64 + (thread / 32 % 4) * 16,
                                                          lane, output, inverse);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      storage.o_full[buffer][consumer].arrive();
    }
  }
};

}  // namespace hattn::sm90
