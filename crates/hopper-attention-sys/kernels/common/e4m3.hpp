// Conversion to e4m3.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

namespace hattn {

// Four f32 to e4m3, the first lowest: to nearest even, 448 for what is larger, 0x7f for a NaN.
CUTE_DEVICE std::uint32_t pack_e4m3(float a, float b, float c, float d) {
  std::uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

}  // namespace hattn
