// From a block's scores to weights, and from weights to P, for a thread that holds two rows of an accumulator. Scores
// are f32 (WeightsF32), or f16 in pairs of columns (WeightsF16). The reference of a row is subtracted from its
// exponents. It is in powers of two.
#pragma once

#include "common/e4m3.hpp"
#include "common/softmax.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

// A float as both halves of a pair of f16.
CUTE_DEVICE std::uint32_t half_pair(float x) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(pair) : "f"(x));
  return pair;
}

// Both halves of a pair as f32, and back.
CUTE_DEVICE float low_half(std::uint32_t pair) {
  float x;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(x) : "r"(pair));
  return x;
}
CUTE_DEVICE float high_half(std::uint32_t pair) {
  float x;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(x) : "r"(pair));
  return x;
}
CUTE_DEVICE std::uint32_t half_pair(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
  return pair;
}

template <int kTileN, int kColumnsAhead>
struct WeightsF32 {
  // The range of a row's sum in which its weights have kept their bits: they need not be computed again.
  static constexpr float kLeastKept = 0x1p-96F;
  static constexpr int kALane = kTileN / 4;  // of a row's weights, a lane's
  static constexpr float kMostKept = 0x1p96F;

  CUTE_DEVICE static constexpr int at(int row, int i, int c) { return 4 * i + 2 * row + c; }

  // What follows from a reference and is kept beside it.
  struct Offset {};
  CUTE_DEVICE static Offset offset_of(float) { return {}; }
  // The least reference from x on that there may be.
  CUTE_DEVICE static float reference_above(float x) { return x; }
  // Whether a NaN in a sum comes from the row's operands alone.
  static constexpr bool kNanIsOfRow = true;

  // Rows' largest stored scores.
  template <class Scores>
  CUTE_DEVICE static void block_max(Scores const& scores, float (&max)[2]) {
    OnlineSoftmax<kTileN, 0>::block_max(scores, max);
  }

  // scores <- weights against the references that are there, and this lane's sums of them.
  template <class Scores>
  CUTE_DEVICE static void exponentiate(Scores& scores, BlockFactors const& factors, float const (&reference)[2],
                                       Offset const (&)[2], float (&sums)[2]) {
    float offset[2] = {-reference[0], -reference[1]};
    // Two partial sums a row: the chain of dependent adds is half as long.
    float partial[2][2] = {};
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 8; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        // ptxas would begin with all the multiply-adds of the block, and the exponentials' unit stand idle meanwhile:
        // so the offset waits for an earlier weight now and then. (Where that is NaN or infinite, so is the sum.)
        if constexpr (kColumnsAhead > 0) {
          if (i % kColumnsAhead == 0 && i >= 2 * kColumnsAhead) {
            offset[r] = after(-reference[r], scores(at(r, i - 2 * kColumnsAhead, 0)));
          }
        }
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& score = scores(at(r, i, c));
          score = exp2_approx(fmaf(score, factors.unit, offset[r]));
          partial[r][c] += score;
        }
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      sums[r] = partial[r][0] + partial[r][1];
    }
  }

  // The same with the largest scores known.
  template <class Scores>
  CUTE_DEVICE static void exponentiate_below(Scores& scores, BlockFactors const& factors, float const (&)[2],
                                             float const (&reference)[2], Offset const (&offset)[2], float (&sums)[2]) {
    exponentiate(scores, factors, reference, offset, sums);
  }

  // Multiplies the weights of each row by a power of two.
  template <class Scores>
  CUTE_DEVICE static void rescale(Scores& scores, float const (&factor)[2]) {
    multiply_rows(scores, factor);
  }

  // packed <- the weights as e4m3. A step is 32 keys, in four words. A word has four keys of the upper or lower row,
  // from the first or second 16 keys.
  template <class Scores, class Packed>
  CUTE_DEVICE static void pack(Scores const& scores, Packed& packed) {
    CUTE_UNROLL
    for (int step = 0; step < kTileN / 32; ++step) {
      CUTE_UNROLL
      for (int word = 0; word < 4; ++word) {
        int const i = 16 * step + 8 * (word / 2) + 2 * (word % 2);
        packed(4 * step + word) = pack_e4m3(scores(i), scores(i + 1), scores(i + 4), scores(i + 5));
      }
    }
  }

 private:
  // x, but not before the weight y is known. (y is multiplied by 2^-126, and not by 0, which would make a NaN of an
  // infinite weight.)
  CUTE_DEVICE static float after(float x, float y) {
    float z;
    asm("fma.rn.ftz.f32 %0, %1, 0f00800000, %2;" : "=f"(z) : "f"(y), "f"(x));
    return z;
  }
};

// A pair is two columns of a row side by side. References are whole numbers, which f16 has up to kMostReference. Rows
// with larger ones, and factors that f16 does not have, make no numbers of pairs: they show in the sum, and such a
// block's weights are taken in f32, one by one. Of kPolynomialEvery times 8 columns the last 8 are exponentiated by a
// polynomial, unless all are to be by the exponentials' unit.
template <int kTileN, int kPolynomialEvery>
struct WeightsF16 {
  static constexpr float kLeastKept = 0x1p-8F;
  static constexpr int kALane = kTileN / 4;
  static constexpr float kMostKept = 0x1p16F;
  static constexpr float kMostReference = 2048.0F;

  CUTE_DEVICE static constexpr int at(int row, int i) { return 2 * i + row; }

  using Offset = std::uint32_t;
  CUTE_DEVICE static Offset offset_of(float reference) {
    return fabsf(reference) <= kMostReference ? half_pair(-reference) : kNoPair;
  }
  CUTE_DEVICE static float reference_above(float x) { return ceilf(x); }
  static constexpr bool kNanIsOfRow = false;  // see above

  template <class Scores>
  CUTE_DEVICE static void block_max(Scores const& scores, float (&max)[2]) {
    auto const& pairs = recast<std::uint32_t>(scores);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      std::uint32_t most = pairs(at(r, 0));
      CUTE_UNROLL
      for (int i = 1; i < kTileN / 8; ++i) {
        asm("max.f16x2 %0, %0, %1;" : "+r"(most) : "r"(pairs(at(r, i))));
      }
      max[r] = quad_max(fmaxf(low_half(most), high_half(most)));
    }
  }

  template <bool kAllByUnit = false, class Scores>
  CUTE_DEVICE static void exponentiate(Scores& scores, BlockFactors const& factors, float const (&)[2],
                                       Offset const (&offset)[2], float (&sums)[2]) {
    auto& pairs = recast<std::uint32_t>(scores);
    std::uint32_t partial[2] = {0, 0};
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 8; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        std::uint32_t& pair = pairs(at(r, i));
        if (!kAllByUnit && by_polynomial(i)) {
          exp2_polynomial(pair, factors.unit_pair, offset[r]);
        } else {
          exp2_unit(pair, factors.unit_pair, offset[r]);
        }
        asm("add.rn.f16x2 %0, %0, %1;" : "+r"(partial[r]) : "r"(pair));
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      // The rounding to f16 is nothing beside that of the exponentials.
      asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; add.rn.f16 l, l, h; cvt.f32.f16 %0, l;}"
          : "=f"(sums[r])
          : "r"(partial[r]));
    }
  }

  template <class Scores>
  CUTE_DEVICE static void exponentiate_below(Scores& scores, BlockFactors const& factors, float const (&max)[2],
                                             float const (&reference)[2], Offset const (&offset)[2], float (&sums)[2]) {
    int const in_f16 = static_cast<int>(offset[0] != kNoPair) & static_cast<int>(offset[1] != kNoPair) &
                       static_cast<int>(factors.unit_pair != kNoPair);
    if (__all_sync(0xffffffffU, in_f16) != 0) {
      // A polynomial makes no 0 of a masked score's -inf.
      exponentiate<true>(scores, factors, reference, offset, sums);
      return;
    }
    auto& pairs = recast<std::uint32_t>(scores);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      // Differences first: products with the factor may be far beyond what they differ by.
      float const top = max[r] == -INFINITY ? 0.0F : max[r];
      float const rest = fmaf(top, factors.unit, -reference[r]);
      sums[r] = 0.0F;
      CUTE_UNROLL
      for (int i = 0; i < kTileN / 8; ++i) {
        // No sum is: a branch now and then, or ptxas would begin with all the halves in registers of their own.
        if (i % 4 == 0 && sums[r] == -1.0F) {
          break;
        }
        std::uint32_t& pair = pairs(at(r, i));
        float const low = exp2_approx(fmaf(low_half(pair) - top, factors.unit, rest));
        float const high = exp2_approx(fmaf(high_half(pair) - top, factors.unit, rest));
        sums[r] += low + high;
        pair = half_pair(low, high);
      }
    }
  }

  template <class Scores>
  CUTE_DEVICE static void rescale(Scores& scores, float const (&factor)[2]) {
    auto& pairs = recast<std::uint32_t>(scores);
    std::uint32_t const by[2] = {half_pair(factor[0]), half_pair(factor[1])};
    CUTE_UNROLL
    for (int i = 0; i < pairs.size(); ++i) {
      asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pairs(i)) : "r"(by[i % 2]));
    }
  }

  template <class Scores, class Packed>
  CUTE_DEVICE static void pack(Scores const& scores, Packed& packed) {
    auto const& pairs = recast<std::uint32_t>(scores);
    CUTE_UNROLL
    for (int step = 0; step < kTileN / 32; ++step) {
      CUTE_UNROLL
      for (int word = 0; word < 4; ++word) {
        int const i = 8 * step + 4 * (word / 2) + word % 2;
        asm("{\n"
            ".reg .b16 low, high;\n"
            "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
            "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
            "mov.b32 %0, {low, high};\n"
            "}\n"
            : "=r"(packed(4 * step + word))
            : "r"(pairs(i)), "r"(pairs(i + 2)));
      }
    }
  }

 private:
  // Of the columns 8 i to 8 i + 7.
  CUTE_DEVICE static constexpr bool by_polynomial(int i) {
    return kPolynomialEvery > 0 && i % cute::max(kPolynomialEvery, 1) == kPolynomialEvery - 1;
  }

  // A pair of scores becomes 2^x, x = score * unit + offset, by the exponentials' unit. The halves of an ex2 of a pair
  // are put together anew for each use of it; a sum is made once. (In place: with a result of its own ptxas makes other
  // code of most rows, and serialises the products of some.)
  CUTE_DEVICE static void exp2_unit(std::uint32_t& pair, std::uint32_t unit, std::uint32_t offset) {
    asm("{\n"
        ".reg .b32 x, low, high;\n"
        ".reg .b16 first, second;\n"
        "fma.rn.f16x2 x, %0, %1, %2;\n"
        "mov.b32 {first, second}, x;\n"
        "ex2.approx.f16 first, first;\n"
        "ex2.approx.f16 second, second;\n"
        "cvt.u32.u16 low, first;\n"
        "cvt.u32.u16 high, second;\n"
        "mad.lo.u32 %0, high, 65536, low;\n"
        "}\n"
        : "+r"(pair)
        : "r"(unit), "r"(offset));
  }

  // The same by ordinary arithmetic. With n the whole number nearest to x, 2^(x - n) is a cubic of least relative
  // error, of which f16 leaves 2^-11, and 2^n is made of bits: n from -15, which makes 0, to 16, which makes inf. Where
  // bits wrap (x from -3056 to -1537) the weight is inf too, or no number, as of a NaN or what is infinite: such a
  // block does not suit, and is computed again.
  CUTE_DEVICE static void exp2_polynomial(std::uint32_t& pair, std::uint32_t unit, std::uint32_t offset) {
    constexpr std::uint32_t kWhole = 0x66006600U;  // 1536: sums with it are rounded to whole numbers
    std::uint32_t sum;
    std::uint32_t power;
    asm("{\n"
        ".reg .b32 x, n, f, y;\n"
        "fma.rn.f16x2 x, %2, %3, %4;\n"
        "add.rn.f16x2 %0, x, %5;\n"
        "sub.rn.f16x2 n, %0, %5;\n"
        "sub.rn.f16x2 f, x, n;\n"
        "fma.rn.f16x2 y, f, %6, %7;\n"
        "fma.rn.f16x2 y, y, f, %8;\n"
        "fma.rn.f16x2 %1, y, f, %9;\n"
        "}\n"
        : "=&r"(sum), "=r"(power)
        : "r"(pair), "r"(unit), "r"(offset), "r"(kWhole), "r"(0x2ae92ae9U), "r"(0x33ba33baU), "r"(0x398c398cU),
          "r"(0x3c003c00U));
    constexpr std::uint32_t kToExponent = 0x10000U - (kWhole & 0xffffU) + 15U;
    std::uint32_t const exponent = __viaddmin_s16x2_relu(sum, kToExponent * 0x10001U, 31U * 0x10001U);
    // (Where sums are far from whole numbers, beyond x of 6656, the cubic may be negative.)
    asm("{.reg .b32 y; abs.f16x2 y, %1; mul.rn.f16x2 %0, y, %2;}" : "=r"(pair) : "r"(power), "r"(exponent << 10));
  }
};

}  // namespace hattn::sm90
