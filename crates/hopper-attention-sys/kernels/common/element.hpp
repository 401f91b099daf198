// The 16-bit element types, and how pairs of them are made and written to memory.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/util/type_traits.hpp>

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

// The limit of a lane's sum of P over one block, as a power of two: bf16 has the range of f32, f16 ends at 65504.
CUTE_HOST_DEVICE constexpr int sum_limit_log2(DType dtype) { return dtype == DType::BF16 ? 32 : 15; }

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

// All pairs of a thread's f32.
template <class Element, class Floats, class Pairs>
CUTE_DEVICE void pack_pairs(Floats const& floats, Pairs& pairs) {
  CUTE_UNROLL
  for (int i = 0; i < pairs.size(); ++i) {
    pairs(i) = pack_pair<Element>(floats(2 * i), floats(2 * i + 1));
  }
}

// A pair back.
template <class Element>
CUTE_DEVICE float2 unpack_pair(std::uint32_t packed) {
  if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000U)};
  } else {
    float2 pair;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high;\n"
        "}\n"
        : "=f"(pair.x), "=f"(pair.y)
        : "r"(packed));
    return pair;
  }
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
// `pair(i, j)` is pair j of columns 16 i to 16 i + 15, in the order of the accumulator.
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
  if constexpr (kColumns % 32 == 16) {
    // Both rows of the last 16 columns at once.
    constexpr int i = kColumns / 16 - 1;
    std::uint32_t words[4] = {pair(i, 0), pair(i, 2), pair(i, 1), pair(i, 3)};
    transpose_quad(words, quad);
    int const at = row + lane / 4 + quad / 2 * 8;
    int const column = 16 * i + quad % 2 * 8;
    if (at < rows && column < columns) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(first + at * row_bytes + column * 2), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    }
  }
}

}  // namespace hattn
