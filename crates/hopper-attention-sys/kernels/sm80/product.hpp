// The products of a warp (mma.sync).
#pragma once

#include <cstdint>
#include <cute/arch/mma_sm80.hpp>

#include "common/element.hpp"
#include "common/fragment.hpp"

namespace hattn::sm80 {

// c += a b: 16 rows by 16, 16 by 8 columns. Elements `at` to `at + 3` of `c` are columns 2 (lane % 4) and the next of
// row lane / 4, and the same of the row 8 further.
template <class Element, class Accumulator>
CUTE_DEVICE void multiply(Accumulator& c, int at, std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  using Atom = cute::conditional_t<cute::is_same_v<Element, cutlass::bfloat16_t>, cute::SM80_16x8x16_F32BF16BF16F32_TN,
                                   cute::SM80_16x8x16_F32F16F16F32_TN>;
  Atom::fma(c(at), c(at + 1), c(at + 2), c(at + 3), a[0], a[1], a[2], a[3], b0, b1, c(at), c(at + 1), c(at + 2),
            c(at + 3));
}

}  // namespace hattn::sm80
