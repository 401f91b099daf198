// The matrix product of one warp (mma.sync).
#pragma once

#include <cstdint>

#include "common/element.hpp"

namespace hattn {

// c += a b, of 16 x 16 by 16 x 8 elements. `at` to `at + 3` of c are a lane's elements: columns 2 (lane % 4) and the
// next of row lane / 4, and the same of row lane / 4 + 8. That is the order of 8 columns of an m64 accumulator too.
template <class Element, class Accumulator>
CUTE_DEVICE void mma_sync(Accumulator& c, int at, std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c(at)), "+f"(c(at + 1)), "+f"(c(at + 2)), "+f"(c(at + 3))
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c(at)), "+f"(c(at + 1)), "+f"(c(at + 2)), "+f"(c(at + 3))
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace hattn
