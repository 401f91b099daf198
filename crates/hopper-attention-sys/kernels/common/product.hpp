// A step of a warp's product: some strips of 16 rows, by 16 columns.
#pragma once

#include <cstdint>

#include "common/mma_sync.hpp"

namespace hattn {

// sums += A B, over 16 of the dimension that is summed over.
//
// `a(strip)` is the operand of one of kStrips strips. `b` is that of 16 columns, as load_matrices or load_transposed
// leaves it. A strip has kColumns columns, of which a lane has kColumns / 2 sums; these 16 begin at column 16 * step.
template <class Element, int kStrips, int kColumns, class A, class Sums>
CUTE_DEVICE void multiply_step(A const& a, std::uint32_t const (&b)[4], int step, Sums& sums) {
  CUTE_UNROLL
  for (int strip = 0; strip < kStrips; ++strip) {
    int const at = strip * (kColumns / 2) + 8 * step;
    mma_sync<Element>(sums, at, a(strip), b[0], b[1]);
    mma_sync<Element>(sums, at + 4, a(strip), b[2], b[3]);
  }
}

}  // namespace hattn
