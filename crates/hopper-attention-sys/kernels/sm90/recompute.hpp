// The scores of one warp and one block, computed again from shared memory with mma.sync.
//
// The softmax asks for them in the rare block whose exponents overflowed. With wgmma the whole warpgroup would have to
// agree on it in every block.
#pragma once

#include "common/barrier.hpp"
#include "common/matrices.hpp"
#include "common/slab.hpp"

namespace hattn::sm90 {

// Calls `add(i, a, b)` for every 32 bytes of head dim and every eight keys 8 i to 8 i + 7 of a block: a is 16 rows of Q
// and b those keys, as operands of mma.sync, whose product belongs to their scores.
//
// `q` is a tile of kTileM queries, `k` a block of kTileN keys. A head has kBytes bytes, in slabs of kRowBytes. `q_row`
// is the lane's row of Q for ldmatrix, the warp's first + lane % 16. kColumns times eight keys are taken together:
// where registers are short few, since ptxas begins all products of a round before it ends one.
template <int kTileM, int kTileN, int kRowBytes, int kBytes, int kColumns, class Element, class Add>
CUTE_DEVICE void recompute_scores(Element const* q, Element const* k, int q_row, int lane, Add const& add) {
  std::uint32_t const q_address = slab_address<kRowBytes>(cute::cast_smem_ptr_to_uint(q), q_row, lane / 16, lane % 16);
  std::uint32_t const k_address =
      slab_address<kRowBytes>(cute::cast_smem_ptr_to_uint(k), lane % 8, lane / 8 % 2, lane % 8);
  CUTE_UNROLL
  for (int first = 0; first < kTileN / 8; first += kColumns) {
    CUTE_NO_UNROLL
    for (int byte = 0; byte < kBytes; byte += 32) {
      // A single slab: said so, since ptxas divides otherwise.
      using Columns = ColumnsOf<kRowBytes>;
      Columns const columns = kBytes <= kRowBytes ? Columns{0, byte} : Columns::of_byte(byte);
      std::uint32_t a[4];
      load_matrices(columns.template from<kTileM>(q_address), a);
      std::uint32_t const k_step = columns.template from<kTileN>(k_address);
      CUTE_UNROLL
      for (int i = first; i < first + kColumns; ++i) {
        std::uint32_t b[2];
        load_matrices(k_step + i * (8 * kRowBytes), b);
        add(i, a, b);
      }
    }
  }
  // The copy engine may write the K buffer next: these reads come before.
  fence_proxy_async();
}

}  // namespace hattn::sm90
