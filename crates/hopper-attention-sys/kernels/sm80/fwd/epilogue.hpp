// The end of a tile, for one warp: its rows of O / row_sum and of the log-sum-exp go straight to memory. What has
// leaked into them from under a mask, or overflowed, is put right (common/leak.hpp).
#pragma once

#include "common/leak.hpp"
#include "common/leak_blocks.hpp"
#include "common/overflow.hpp"
#include "common/sinks.hpp"
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
    float const sink = sink_of_head(params, tile.head);
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      RowEnd const end = RowEnd::of(sink, -softmax.minus_reference[r], sums[r], sums[r]);
      inverse[r] = end.inverse;
      if constexpr (Traits::kDrops) {
        inverse[r] = with_factor(end.inverse, dropout_factor(params));
      }
      int const query = row + 8 * r + lane / 4;
      if (scalars.lse != nullptr && lane % 4 == 0 && query < queries_of(scalars, tile)) {
        scalars.lse[lse_place(params.lse, tile, query)] = end.lse;
      }
    }
    auto o = HeadRows<Element>::of(params.o, tile.batch, tile.head);
    if constexpr (Traits::kIsPacked) {
      o.skip(tile.q_begin);
    }
    bool found[Traits::kStrips];
    CUTE_UNROLL
    for (int strip = 0; strip < Traits::kStrips; ++strip) {
      bool leaked = false;
      OutputLooks<Traits> looks;
      std::uint32_t before = 0;  // looked at two at a time
      write_pairs<Traits::kHeadDimVO>(o.address, o.row_bytes, row + 16 * strip, queries_of(scalars, tile),
                                      params.head_dim_vo, lane, [&](int i, int j) {
                                        int const at = 8 * i + 2 * j;
                                        float const factor = inverse[2 * strip + j % 2];
                                        float const a = output(at, strip) * factor;
                                        float const b = output(at + 1, strip) * factor;
                                        if constexpr (kLooksForInfinity<Traits>) {
                                          // (A row's pairs come one after the other.)
                                          std::uint32_t const pair = pack_pair<Element>(a, b);
                                          if (j / 2 == 1) {
                                            looks.see(j % 2, before, pair);
                                          }
                                          before = pair;
                                          return pair;
                                        } else {
                                          if constexpr (kLooksAtOutput<Traits>) {
                                            leaked = leaked || (isnan(a + b) && !isnan(factor));
                                          }
                                          return pack_pair<Element>(a, b);
                                        }
                                      });
      float const factors[2] = {inverse[2 * strip], inverse[2 * strip + 1]};
      if constexpr (kLooksForInfinity<Traits>) {
        found[strip] = looks.leaked(factors);
      } else if constexpr (kLooksAtOutput<Traits>) {
        if (__any_sync(0xffffffffU, leaked)) {
          repair(params, band, tile, o, row + 16 * strip, factors);
        }
      }
    }
    if constexpr (kLooksForInfinity<Traits>) {
      // When all is written: beside O there are no registers for a call.
      CUTE_UNROLL
      for (int strip = 0; strip < Traits::kStrips; ++strip) {
        if (found[strip]) {
          repair_written(params, tile, row + 16 * strip, inverse[2 * strip], inverse[2 * strip + 1]);
        }
      }
    }
  }

 private:
  // Puts 16 rows right, which the warp has written.
  template <class TileRecord>
  CUTE_DEVICE static void repair(FwdParams const& params, Band const& band, TileRecord const& tile,
                                 HeadRows<Element> const& o, int first_row, float const (&factors)[2]) {
    auto const owned = [](int) { return true; };
    __syncwarp();
    if constexpr (Traits::kIsListed) {
      BlockLeaks<Traits>::repair(
          params.blocks, tile, OperandsOf<Traits>::of(params, tile), band, first_row,
          SoundRows::of_inverses<Traits>(factors),
          GlobalWords<Element, Traits::kHeadDimVO, decltype(owned)>{o, first_row, params.head_dim_vo, owned});
    } else {
      RepairOf<Traits>::repair(
          OperandsOf<Traits>::of(params, tile), band, first_row, SoundRows::of_inverses<Traits>(factors),
          GlobalWords<Element, Traits::kHeadDimVO, decltype(owned)>{o, first_row, params.head_dim_vo, owned});
    }
  }

  // The same as a call.
  template <class TileRecord>
  __device__ __noinline__ static void repair_written(FwdParams const& params, TileRecord const& tile, int first_row,
                                                     float first_factor, float second_factor) {
    auto o = HeadRows<Element>::of(params.o, tile.batch, tile.head);
    if constexpr (Traits::kIsPacked) {
      o.skip(tile.q_begin);
    }
    float const factors[2] = {first_factor, second_factor};
    repair(params, band_of_tile(params, tile), tile, o, first_row, factors);
  }
};

}  // namespace hattn::sm80
