// Scores computed again (sm90/recompute.hpp), of 16-bit operands.
#pragma once

#include "common/mma_sync.hpp"
#include "sm90/fwd/traits.hpp"
#include "sm90/recompute.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Recompute {
  using Element = typename Traits::Element;

  // `first_row` is the warpgroup's first row in the tile.
  template <class Scores>
  CUTE_DEVICE static void scores(Scores& scores, Element const* q, Element const* k, int first_row) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    clear(scores);
    recompute_scores<Traits::kTileM, Traits::kTileN, Traits::kSlabRowBytes, Traits::kHeadDimQK * sizeof(Element),
                     Traits::kTileN / 8>(q, k, first_row + (thread / 32 % 4) * 16 + lane % 16, lane,
                                         [&](int i, std::uint32_t const(&a)[4], std::uint32_t const(&b)[2]) {
                                           mma_sync<Element>(scores, 4 * i, a, b[0], b[1]);
                                         });
    __syncwarp();  // every lane has read K before one of them may release it
  }
};

}  // namespace hattn::sm90
