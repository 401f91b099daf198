// The end of a tile, for one warp: its rows of O / row_sum and of the log-sum-exp go straight to memory. What has
// leaked into them from under a mask is put right (common/leak.hpp).
#pragma once

#include "common/leak.hpp"
#include "common/softmax.hpp"
#include "sm80/fwd/softmax.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct Epilogue {
  using Element = typename Traits::Element;

  // `row` is the warp's first.
  template <class TileRecord, class Softmax, class Output>
  CUTE_DEVICE static void run(FwdParams const& params, FwdScalars const& scalars, Band const& band,
                              TileRecord const& tile, int row, Softmax const& softmax, Output const& output) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    float sums[Softmax::kRows];
    softmax.finish(sums);
    float inverse[Softmax::kRows];
    float* const lse =
        scalars.lse + tile.batch * params.lse.stride_batch + tile.head * params.lse.stride_head + first_row_of(tile);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      bool const empty = sums[r] == 0.0F;  // no key at all: O = 0, LSE = -inf; a NaN stays one
      inverse[r] = empty ? 0.0F : reciprocal_approx(sums[r]);
      int const query = row + 8 * r + lane / 4;
      if (scalars.lse != nullptr && lane % 4 == 0 && query < queries_of(scalars, tile)) {
        lse[query] = log_sum_exp(-softmax.minus_reference[r], sums[r]);
      }
    }
    auto o = HeadRows<Element>::of(params.o, tile.batch, tile.head);
    if constexpr (Traits::kIsPacked) {
      o.skip(tile.q_begin);
    }
    CUTE_UNROLL
    for (int strip = 0; strip < Traits::kStrips; ++strip) {
      bool leaked = false;
      write_pairs<Traits::kHeadDimVO>(o.address, o.row_bytes, row + 16 * strip, queries_of(scalars, tile),
                                      params.head_dim_vo, lane, [&](int i, int j) {
                                        int const at = 8 * i + 2 * j;
                                        float const factor = inverse[2 * strip + j % 2];
                                        float const a = output(at, strip) * factor;
                                        float const b = output(at + 1, strip) * factor;
                                        if constexpr (Traits::kMask != MaskClass::Full) {
                                          leaked = leaked || (isnan(a + b) && !isnan(factor));
                                        }
                                        return pack_pair<Element>(a, b);
                                      });
      if constexpr (Traits::kMask != MaskClass::Full) {
        if (__any_sync(0xffffffffU, leaked)) {
          int const first_row = row + 16 * strip;
          auto const owned = [](int) { return true; };
          __syncwarp();
          float const factors[2] = {inverse[2 * strip], inverse[2 * strip + 1]};
          Leaks<Traits>::repair(
              PlainOperands<Element>::of(params, tile), band, first_row, SoundRows::with(factors),
              GlobalWords<Element, Traits::kHeadDimVO, decltype(owned)>{o, first_row, params.head_dim_vo, owned});
        }
      }
    }
  }
};

}  // namespace hattn::sm80
