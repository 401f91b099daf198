// The online softmax of e4m3 weights, for a thread that holds two rows of an accumulator. It is that of
// common/softmax.hpp, with factors per block and other limits.
//
// With x = unit (q . k), a weight is P = 2^(x - reference).
//
// e4m3 holds weights from 2^-9 to 448, and keeps three bits of them down to 2^-6. Most blocks are exponentiated unseen
// (no maximum of their scores is taken first), against the reference of the block before. The reference is moved
// - up, where a lane's sum says that a weight may be past 448;
// - down, where weights come out so small that they lose bits. (Not where they are negligible beside the row's sum.)
// A move is a whole power of two, by which weights, sums and O are multiplied. The scores are computed again only where
// the weights' own type (weights.hpp) has lost bits too.
//
// A row whose reference has moved often moves again, because its scores are far apart. So after a move the warp takes
// the maximum of each later block of the tile before the exponentials, with `masked_block` (which also takes blocks
// without masked keys). The reference then moves only up, and no scores are computed twice. Only kernels with
// kLooksFirst do this; traits.hpp says why.
#pragma once

#include <climits>

#include "sm90/fp8/weights.hpp"

namespace hattn::sm90 {

// kNanLooks: whether a warp goes on looking where the first row's sum is NaN.
template <class Weights, bool kLooksFirst, bool kNanLooks>
struct Fp8Softmax {
  // Log2 of a row's largest weight where the true maximum is taken. A lane's sum of its weights, 32 at most, is then
  // below kMost.
  static constexpr float kPeakLog2 = 3.0F;
  // What a lane may add in one block, and what it should add: 2^-6 a weight.
  static constexpr float kMost = 448.0F;
  static constexpr float kLeast = Weights::kALane * 0x1p-6F;
  // If the sum of a block is at most this fraction of the row's sum, its weights may lose bits.
  static constexpr float kNegligible = 0x1p-20F;
  // After a move, a row's sum of the block is from 2^kTotalLog2 to below twice that.
  static constexpr int kTotalLog2 = 5;

  float reference[2];  // -inf while a row has no key
  typename Weights::Offset offset[2];
  // kNegligible times this lane's sum of weights before rounding. The sums of the four lanes that share a row are added
  // once a tile. The sign of the first tells whether the warp looks at maxima: there is no register left for that.
  float negligible[2];

  CUTE_DEVICE bool looks() const {
    return kLooksFirst && __any_sync(0xffffffffU, __float_as_int(negligible[0]) < 0) != 0;
  }

  CUTE_DEVICE static bool all(bool first, bool second) {
    return __all_sync(0xffffffffU, static_cast<int>(first) & static_cast<int>(second)) != 0;
  }

  // A tile's first block, against its true maximum: where that is a row's one large weight, e4m3 has it exactly.
  template <class Scores>
  CUTE_DEVICE void first_block(Scores& scores, BlockFactors const& factors) {
    reference[0] = reference[1] = -INFINITY;
    float rescale[2];
    float sums[2];
    exact_block(scores, factors, {true, true}, rescale, sums);
    negligible[0] = sums[0] * kNegligible;
    negligible[1] = sums[1] * kNegligible;
  }

  // A later block in which keys are masked, so that a row may have had none before, or of a warp that looks: against
  // its maximum where that is larger. `rescale_output` multiplies the rows of O, which share the reference.
  template <class Scores, class RescaleOutput>
  CUTE_DEVICE void masked_block(Scores& scores, BlockFactors const& factors, RescaleOutput const& rescale_output) {
    float rescale[2];
    float sums[2];
    exact_block(scores, factors, {false, false}, rescale, sums);
    if (!all(rescale[0] == 1.0F, rescale[1] == 1.0F)) {
      float const scaled = negligible[0] * rescale[0];
      negligible[0] = kNanLooks ? copysignf(scaled, negligible[0]) : scaled;
      negligible[1] *= rescale[1];
      rescale_output(rescale);
    }
    if constexpr (kLooksFirst) {
      // The sign stays. (Arithmetic gives a NaN without one.)
      int const sign = __float_as_int(negligible[0]) & INT_MIN;
      negligible[0] = fabsf(negligible[0]);
      add(sums);
      negligible[0] = __int_as_float(__float_as_int(negligible[0]) | sign);
    } else {
      add(sums);
    }
  }

  // Any other later block, against the references that it finds. Where those do not suit it, `move_block` follows.
  template <class Scores>
  CUTE_DEVICE void unseen_block(Scores& scores, BlockFactors const& factors, float (&sums)[2]) {
    Weights::exponentiate(scores, factors, reference, offset, sums);
  }
  // What a reference of a row without keys makes does not suit. Nor does a NaN, where the weights' type makes one of
  // what it cannot hold. Elsewhere a NaN comes from the row's operands, and all of the row is NaN, whatever its
  // reference: the comparisons are unordered.
  CUTE_DEVICE bool suits(float const (&sums)[2]) const {
    // Instructions that compare and combine in one. Spelt otherwise it takes one more register, for which ptxas
    // serialises the products of the row that splits tiles. (With one text for both, and "u" as an operand, it did
    // so in five kernels.)
    int rows;
    if constexpr (Weights::kNanIsOfRow) {
      asm("{\n"
          ".reg .pred a, b;\n"
          "setp.ge.f32 a, %1, %5;\n"
          "setp.ge.f32 b, %2, %5;\n"
          "setp.leu.or.f32 a, %1, %3, a;\n"
          "setp.leu.or.f32 b, %2, %4, b;\n"
          "setp.ltu.and.f32 a, %1, %6, a;\n"
          "setp.ltu.and.f32 b, %2, %6, b;\n"
          "and.pred a, a, b;\n"
          "selp.s32 %0, 1, 0, a;\n"
          "}\n"
          : "=r"(rows)
          : "f"(sums[0]), "f"(sums[1]), "f"(negligible[0]), "f"(negligible[1]), "f"(kLeast), "f"(kMost));
    } else {
      asm("{\n"
          ".reg .pred a, b;\n"
          "setp.ge.f32 a, %1, %5;\n"
          "setp.ge.f32 b, %2, %5;\n"
          "setp.le.or.f32 a, %1, %3, a;\n"
          "setp.le.or.f32 b, %2, %4, b;\n"
          "setp.lt.and.f32 a, %1, %6, a;\n"
          "setp.lt.and.f32 b, %2, %6, b;\n"
          "and.pred a, a, b;\n"
          "selp.s32 %0, 1, 0, a;\n"
          "}\n"
          : "=r"(rows)
          : "f"(sums[0]), "f"(sums[1]), "f"(negligible[0]), "f"(negligible[1]), "f"(kLeast), "f"(kMost));
    }
    return __all_sync(0xffffffffU, rows) != 0;
  }
  CUTE_DEVICE void add(float const (&sums)[2]) {
    negligible[0] = fmaf(sums[0], kNegligible, negligible[0]);
    negligible[1] = fmaf(sums[1], kNegligible, negligible[1]);
  }

  // `recompute` brings back the scores. Where the warp looks from now on, the sums are added too.
  template <class Scores, class Recompute, class RescaleOutput>
  CUTE_DEVICE void move_block(Scores& scores, BlockFactors const& factors, float (&sums)[2], Recompute const& recompute,
                              RescaleOutput const& rescale_output) {
    cute::array<bool, 2> small;
    cute::array<bool, 2> moves;
    float total[2];
    float factor[2] = {1.0F, 1.0F};
    bool suffices = true;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      total[r] = quad_sum(sums[r]);
      small[r] = (total[r] < 4.0F * kLeast) & (total[r] > quad_sum(negligible[r]));
      moves[r] = small[r] | (Weights::kNanIsOfRow ? total[r] >= kMost : !(total[r] < kMost));
      suffices = suffices & (!moves[r] | kept(total[r]));
    }
    if (!all(suffices, true)) {
      recompute();
      exact_block(scores, factors, small, factor, sums);
    } else {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (moves[r]) {
          factor[r] = move(r, total[r]);
        }
        sums[r] *= factor[r];
      }
      Weights::rescale(scores, factor);
    }
    negligible[0] *= factor[0];
    negligible[1] *= factor[1];
    if constexpr (kLooksFirst) {
      add(sums);
      negligible[0] = __int_as_float(__float_as_int(negligible[0]) | INT_MIN);
    }
    rescale_output(factor);
  }

  // The whole rows' sums.
  CUTE_DEVICE void finish(float (&sums)[2]) const {
    sums[0] = quad_sum(kLooksFirst ? fabsf(negligible[0]) : negligible[0]) * (1.0F / kNegligible);
    sums[1] = quad_sum(negligible[1]) * (1.0F / kNegligible);
  }

 private:
  CUTE_DEVICE static bool kept(float sum) { return (sum > Weights::kLeastKept) & (sum < Weights::kMostKept); }

  CUTE_DEVICE void set_reference(int r, float moved) {
    reference[r] = moved;
    offset[r] = Weights::offset_of(moved);
  }

  CUTE_DEVICE float shift_of(int r) const { return reference[r] == -INFINITY ? 0.0F : reference[r]; }

  // A row still without a key is taken against 0, so that its weights are 0 and not NaN.
  template <class Scores>
  CUTE_DEVICE void exponentiate_below(Scores& scores, BlockFactors const& factors, float const (&max)[2],
                                      float (&sums)[2]) {
    float const shift[2] = {shift_of(0), shift_of(1)};
    typename Weights::Offset const shift_offset[2] = {Weights::offset_of(shift[0]), Weights::offset_of(shift[1])};
    Weights::exponentiate_below(scores, factors, max, shift, shift_offset, sums);
  }

  // Against the true maximum of this block, or the reference where that is larger and is not to go `down`; `rescale` is
  // what that makes of the old sum and O.
  template <class Scores>
  CUTE_DEVICE void exact_block(Scores& scores, BlockFactors const& factors, cute::array<bool, 2> const& down,
                               float (&rescale)[2], float (&sums)[2]) {
    float max[2];
    Weights::block_max(scores, max);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const before = reference[r];
      float const above = Weights::reference_above(max[r] * factors.unit - kPeakLog2);
      set_reference(r, down[r] ? above : fmaxf(before, above));
      rescale[r] = exp2_approx(before - shift_of(r));
    }
    exponentiate_below(scores, factors, max, sums);
  }

  // Moves a row's reference by the power of two that `total` calls for, and returns what that makes of 1.
  CUTE_DEVICE float move(int r, float total) {
    int const exponent = (__float_as_int(total) >> 23) - 127 - kTotalLog2;
    set_reference(r, reference[r] + static_cast<float>(exponent));
    return __int_as_float((127 - exponent) << 23);
  }
};

}  // namespace hattn::sm90
