// The end of a tile, for one warp: its rows of O / row_sum and of the log-sum-exp go straight to memory.
#pragma once

#include "common/softmax.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct Epilogue {
  using Element = typename Traits::Element;

  // `row` is the warp's first.
  template <class Softmax, class Output>
  CUTE_DEVICE static void run(FwdParams const& params, FwdScalars const& scalars, Tile const& tile, int row,
                              Softmax const& softmax, Output const& output) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    float sums[Softmax::kRows];
    softmax.finish(sums);
    float inverse[Softmax::kRows];
    float* const lse = scalars.lse + tile.batch * params.lse.stride_batch + tile.head * params.lse.stride_head;
    CUTE_UNROLL
    for (int r = 0; r < Softmax::kRows; ++r) {
      bool const empty = sums[r] == 0.0F;  // no key at all: O = 0, LSE = -inf; a NaN stays one
      inverse[r] = empty ? 0.0F : reciprocal_approx(sums[r]);
      int const query = row + 8 * r + lane / 4;
      if (scalars.lse != nullptr && lane % 4 == 0 && query < scalars.seqlen_q) {
        lse[query] = log_sum_exp(softmax.reference[r], sums[r]);
      }
    }
    std::uint64_t const head = head_address(params.o, tile.batch, tile.head);
    CUTE_UNROLL
    for (int strip = 0; strip < Traits::kStrips; ++strip) {
      write_pairs<Traits::kHeadDimVO>(head, params.o.stride_row * 2, row + 16 * strip, scalars.seqlen_q,
                                      params.head_dim_vo, lane, [&](int i, int j) {
                                        int const at = 8 * i + 2 * j;
                                        float const factor = inverse[2 * strip + j % 2];
                                        return pack_pair<Element>(output(at, strip) * factor,
                                                                  output(at + 1, strip) * factor);
                                      });
    }
  }
};

}  // namespace hattn::sm80
