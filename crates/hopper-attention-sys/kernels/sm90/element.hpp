// How pairs of 16-bit elements are stored in shared memory.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "common/element.hpp"
#include "common/slab.hpp"

namespace hattn::sm90 {

// Stores four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
CUTE_DEVICE void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Stores a warp's 16 rows of an m64 accumulator, as pairs of columns, from row `row` of a tile of kRows rows in slabs.
// `pair(i, j)` is pair j of columns 16 i to 16 i + 15, in the order of the accumulator.
template <int kRows, int kColumns, class Element, class Pair>
CUTE_DEVICE void store_pairs(Element* tile, int row, int lane, Pair const& pair) {
  std::uint32_t const address = slab_address(cute::cast_smem_ptr_to_uint(tile), row + lane % 16, lane / 16);
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 16; ++i) {
    store_matrices(Columns::of_step(i).from<kRows>(address), pair(i, 0), pair(i, 1), pair(i, 2), pair(i, 3));
  }
}

// The same from f32, in slabs of rows of kRowBytes bytes: each of a thread's two rows is multiplied by its factor and
// converted. `see(row, a, b)` is called with every two pairs of a row. `rotation`: by how many columns those of the
// accumulator are rotated, 0, 8 or -8. They are stored as they are without it.
template <int kRows, int kColumns, int kRowBytes = kSlabRowBytes, class Element, class Accumulator, class See>
CUTE_DEVICE void store_accumulator(Element* tile, int row, int lane, Accumulator const& values,
                                   float const (&factors)[2], See const& see, int rotation = 0) {
  constexpr int kSteps = kColumns / 16;
  int const half = lane / 16;
  std::uint32_t const address =
      slab_address<kRowBytes>(cute::cast_smem_ptr_to_uint(tile), row + lane % 16, rotation == 0 ? half : 1 - half);
  bool const is_earlier = rotation > 0 && half == 0;
  bool const is_later = rotation < 0 && half == 1;
  CUTE_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    int const step = is_earlier ? (i + kSteps - 1) % kSteps : is_later ? (i + 1) % kSteps : i;
    std::uint32_t words[4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      int const at = 8 * i + 2 * j;
      words[j] = pack_pair<Element>(values(at) * factors[j % 2], values(at + 1) * factors[j % 2]);
    }
    store_matrices(ColumnsOf<kRowBytes>::of_step(step).template from<kRows>(address), words[0], words[1], words[2],
                   words[3]);
    see(0, words[0], words[2]);
    see(1, words[1], words[3]);
  }
}

}  // namespace hattn::sm90
