// The 16-bit element types, and how pairs of them are made and written to memory.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/tensor.hpp>

#include "kernels.hpp"

namespace hattn {

template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::BF16> {
  using type = cutlass::bfloat16_t;
};
template <>
struct ElementOf<DType::F16> {
  using type = cutlass::half_t;
};

// Two f32 to one packed pair, rounded to nearest even.
template <class Element>
CUTE_DEVICE std::uint32_t pack_pair(float low, float high) {
  std::uint32_t packed;
  if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Swaps the 4 x 4 words of a quad of lanes: word j of lane q becomes word q of lane j.
CUTE_DEVICE void transpose_quad(std::uint32_t (&words)[4], int quad) {
  CUTE_UNROLL
  for (int step = 1; step < 4; step *= 2) {
    bool const upper = (quad & step) != 0;
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      if ((j & step) == 0) {
        std::uint32_t const given = upper ? words[j] : words[j + step];
        std::uint32_t const taken = __shfl_xor_sync(0xffffffffU, given, step);
        words[j] = upper ? taken : words[j];
        words[j + step] = upper ? words[j + step] : taken;
      }
    }
  }
}

// Writes a warp's 16 rows of an m64 accumulator to global memory, 16 bytes a lane, without a detour through shared
// memory. `first` is column 0 of row 0 and `row` the warp's first; what lies past `rows` or `columns` is dropped.
// `pair` as for store_pairs.
template <int kColumns, class Pair>
CUTE_DEVICE void write_pairs(std::uint64_t first, std::int64_t row_bytes, int row, int rows, int columns, int lane,
                             Pair const& pair) {
  int const quad = lane % 4;
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 32; ++i) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      std::uint32_t words[4] = {pair(2 * i, r), pair(2 * i, 2 + r), pair(2 * i + 1, r), pair(2 * i + 1, 2 + r)};
      transpose_quad(words, quad);
      int const at = row + lane / 4 + 8 * r;
      int const column = 32 * i + 8 * quad;
      if (at < rows && column < columns) {
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(first + at * row_bytes + column * 2),
                     "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
      }
    }
  }
}

}  // namespace hattn
