// The quantiser's arithmetic, one rounding at a time. Sums, products and quotients are PTX instructions by name. So no
// flag of the compiler fuses two of them, flushes a subnormal or approximates a division. The CPU backend does the same
// operations in the same order.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "common/e4m3.hpp"
#include "kernels.hpp"

namespace hattn::quantize {

CUTE_DEVICE float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}

CUTE_DEVICE float subtract(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}

CUTE_DEVICE float multiply(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}

CUTE_DEVICE float add_magnitudes(float a, float b) {
  float sum;
  asm("{\n"
      ".reg .f32 of_a, of_b;\n"
      "abs.f32 of_a, %1;\n"
      "abs.f32 of_b, %2;\n"
      "add.rn.f32 %0, of_a, of_b;\n"
      "}\n"
      : "=f"(sum)
      : "f"(a), "f"(b));
  return sum;
}

// a * b + c, rounded once.
CUTE_DEVICE float multiply_add(float a, float b, float c) {
  float sum;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
  return sum;
}

CUTE_DEVICE float divide(float a, float b) {
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}

CUTE_DEVICE float reciprocal(float a) {
  float quotient;
  asm("rcp.rn.f32 %0, %1;" : "=f"(quotient) : "f"(a));
  return quotient;
}

// The larger of a and |b|, and a where b is a NaN.
CUTE_DEVICE float larger_magnitude(float a, float b) {
  float larger;
  asm("{\n"
      ".reg .f32 magnitude;\n"
      "abs.f32 magnitude, %2;\n"
      "max.f32 %0, %1, magnitude;\n"
      "}\n"
      : "=f"(larger)
      : "f"(a), "f"(b));
  return larger;
}

// The largest magnitude of value(0) to value(kCount - 1).
template <int kCount, class Value>
CUTE_DEVICE float largest_of(Value const& value) {
  float partial[4] = {};
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    partial[i % 4] = larger_magnitude(partial[i % 4], value(i));
  }
  return larger_magnitude(larger_magnitude(partial[0], partial[1]), larger_magnitude(partial[2], partial[3]));
}

constexpr float kLargestE4m3 = 448.0F;
constexpr std::uint32_t kMagnitude = 0x7fffffffU;
constexpr std::uint32_t kInfinity = 0x7f800000U;

CUTE_DEVICE bool is_infinite(float x) { return (__float_as_uint(x) & kMagnitude) == kInfinity; }
CUTE_DEVICE bool is_nan(float x) { return (__float_as_uint(x) & kMagnitude) > kInfinity; }

// How many of a pair of 16-bit values are NaN. The sum sets a value's top bit where its magnitude is above infinity.
template <DType kSource>
CUTE_DEVICE unsigned nans_of_pair(std::uint32_t pair) {
  constexpr std::uint32_t kToTopBit = kSource == DType::F16 ? 0x03ff03ffU : 0x007f007fU;
  return __popc(((pair & 0x7fff7fffU) + kToTopBit) & 0x80008000U);
}

// The descale factor of a largest magnitude, which becomes `most`.
CUTE_DEVICE float descale_of(float amax, float most) {
  constexpr float kSmallestNormal = 0x1p-126F;
  float const quotient = divide(amax, most);
  return quotient > kSmallestNormal ? quotient : kSmallestNormal;
}

// x between -most and most; a NaN stays one.
CUTE_DEVICE float clamp(float x, float most) {
  float clamped;
  asm("{\n"
      ".reg .f32 least;\n"
      "neg.f32 least, %2;\n"
      "max.NaN.f32 %0, %1, least;\n"
      "min.NaN.f32 %0, %0, %2;\n"
      "}\n"
      : "=f"(clamped)
      : "f"(x), "f"(most));
  return clamped;
}

// 16 f32 to e4m3.
CUTE_DEVICE uint4 pack_unit(float const (&x)[16]) {
  return {pack_e4m3(x[0], x[1], x[2], x[3]), pack_e4m3(x[4], x[5], x[6], x[7]), pack_e4m3(x[8], x[9], x[10], x[11]),
          pack_e4m3(x[12], x[13], x[14], x[15])};
}

// A pair of the source type as f32, which is exact.
template <DType kSource>
CUTE_DEVICE void unpack(std::uint32_t pair, float& low, float& high) {
  if constexpr (kSource == DType::BF16) {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000U);
  } else {
    asm("{\n"
        ".reg .b16 first, second;\n"
        "mov.b32 {first, second}, %2;\n"
        "cvt.f32.f16 %0, first;\n"
        "cvt.f32.f16 %1, second;\n"
        "}\n"
        : "=f"(low), "=f"(high)
        : "r"(pair));
  }
}

}  // namespace hattn::quantize
