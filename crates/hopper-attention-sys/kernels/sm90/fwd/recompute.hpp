// One warp's scores of one key block, computed again from shared memory with mma.sync. The softmax needs them in the
// rare block whose exponents ran away; wgmma would take the whole warpgroup's agreement in every block.
#pragma once

#include "common/matrices.hpp"
#include "common/mma_sync.hpp"
#include "common/slab.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Recompute {
  using Element = typename Traits::Element;

  // `first_row` is the warpgroup's first row in the tile.
  template <class Scores>
  CUTE_DEVICE static void scores(Scores& scores, Element const* q, Element const* k, int first_row) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    std::uint32_t const q_address =
        slab_address(cute::cast_smem_ptr_to_uint(q), first_row + (thread / 32 % 4) * 16 + lane % 16, lane / 16, lane);
    std::uint32_t const k_address = slab_address(cute::cast_smem_ptr_to_uint(k), lane % 8, lane / 8 % 2, lane);
    cute::clear(scores);
    CUTE_NO_UNROLL
    for (int step = 0; step < Traits::kHeadDimQK / 16; ++step) {
      ColumnStep const columns(step);
      std::uint32_t a[4];
      load_matrices(columns.from<Traits::kTileM>(q_address), a);
      std::uint32_t const k_step = columns.from<Traits::kTileN>(k_address);
      CUTE_UNROLL
      for (int i = 0; i < Traits::kTileN / 8; ++i) {
        std::uint32_t b[2];
        load_matrices(k_step + i * (8 * kSlabRowBytes), b);
        mma_sync<Element>(scores, 4 * i, a, b[0], b[1]);
      }
    }
    // The copy engine may write the K buffer next: these reads come before.
    fence_proxy_async();
  }
};

}  // namespace hattn::sm90
