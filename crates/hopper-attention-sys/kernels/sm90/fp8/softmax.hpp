// The online softmax of e4m3 weights, for a thread that holds two rows of an accumulator: that of common/softmax.hpp
// with factors per block and limits of its own.
//
// With x = unit (q . k) and fold = log2(descale_v / the largest descale_v of the head), a weight is
// P = 2^(x + fold - reference). So factors of V cost no product; `row_sum` is of P times 2^-fold, before rounding.
//
// e4m3 has weights from 2^-9 to 448, and keeps three bits of them down to 2^-6. Most blocks are exponentiated unseen,
// against the reference that they find. It is moved up where a lane's sum says that a weight may be past 448, and down
// where weights come out so small that they lose bits, unless they are nothing beside what the row has already. Both
// moves are whole powers of two by which everything is multiplied: only where f32 has lost the weights too are the
// scores computed again.
#pragma once

#include "common/softmax.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

template <int kTileN, int kColumnsAhead>
struct Fp8Softmax {
  // Of a row's largest weight where the true maximum is taken: a lane's sum of 32 weights is then below kMost.
  static constexpr float kPeakLog2 = 3.0F;
  // How far above that later maxima may be.
  static constexpr float kHeadroom = 5.0F;
  // What a lane may add in one block, and what it should add.
  static constexpr float kMost = 448.0F;
  static constexpr float kLeast = 0.5F;
  // A block of a part of the row's sum as small as this may lose its bits.
  static constexpr float kNothing = 0x1p-20F;
  // A whole row's sum of a block after a move is 2 to this power, or up to twice that.
  static constexpr int kTotalLog2 = 5;

  float reference[2];  // -inf while a row has no key
  float row_sum[2];    // this lane's part of the sum; the quad's parts are added once a tile

  CUTE_DEVICE static constexpr int at(int row, int i, int c) { return 4 * i + 2 * row + c; }
  CUTE_DEVICE static bool all(bool first, bool second) {
    return __all_sync(0xffffffffU, static_cast<int>(first) & static_cast<int>(second)) != 0;
  }

  template <class Scores>
  CUTE_DEVICE static void block_max(Scores const& scores, BlockFactors const& factors, float (&max)[2]) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      max[r] = fmaxf(scores(at(r, 0, 0)), scores(at(r, 0, 1)));
      CUTE_UNROLL
      for (int i = 1; i < kTileN / 8; ++i) {
        max[r] = fmaxf(max[r], fmaxf(scores(at(r, i, 0)), scores(at(r, i, 1))));
      }
      max[r] = fmaf(quad_max(max[r]), factors.unit, factors.fold);
    }
  }

  // scores <- weights, `weights` their sums, `exact` those without V's factors.
  template <class Scores>
  CUTE_DEVICE static void exponentiate(Scores& scores, BlockFactors const& factors, float const (&shift)[2],
                                       float (&weights)[2], float (&exact)[2]) {
    float offset[2] = {factors.fold - shift[0], factors.fold - shift[1]};
    // Two partial sums a row: the chain of dependent adds is half as long.
    float partial[2][2] = {};
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 8; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        // ptxas would begin with all the multiply-adds of the block, and the exponentials' unit stand idle meanwhile:
        // so the offset waits for an earlier weight now and then. (Where that is no number, neither is the sum.)
        if constexpr (kColumnsAhead > 0) {
          if (i % kColumnsAhead == 0 && i >= 2 * kColumnsAhead) {
            offset[r] = after(factors.fold - shift[r], scores(at(r, i - 2 * kColumnsAhead, 0)));
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
      weights[r] = partial[r][0] + partial[r][1];
      exact[r] = weights[r] * factors.unfold;
    }
  }

  // A tile's first block where keys are masked: against the true maximum.
  template <class Scores>
  CUTE_DEVICE void first_masked_block(Scores& scores, BlockFactors const& factors) {
    reference[0] = reference[1] = -INFINITY;
    float rescale[2];
    exact_block(scores, factors, rescale, row_sum);
  }

  // A tile's first block otherwise: against 0.
  template <class Scores, class Recompute>
  CUTE_DEVICE void first_block(Scores& scores, BlockFactors const& factors, Recompute const& recompute) {
    reference[0] = reference[1] = 0.0F;
    float weights[2];
    exponentiate(scores, factors, reference, weights, row_sum);
    auto const suits = [&](float sum) { return (sum >= 4.0F * kLeast) & (sum < 0.5F * kMost); };
    if (all(suits(weights[0]), suits(weights[1]))) {
      return;
    }
    float const total[2] = {quad_sum(weights[0]), quad_sum(weights[1])};
    auto const kept = [&](float sum) { return (sum > 0x1p-96F) & (sum < 0x1p96F); };
    if (!all(kept(total[0]), kept(total[1]))) {
      recompute();
      first_masked_block(scores, factors);
      return;
    }
    float const factor[2] = {move(0, total[0]), move(1, total[1])};
    multiply(scores, factor);
    row_sum[0] *= factor[0];
    row_sum[1] *= factor[1];
  }

  // A later block in which keys are masked, so that a row may have had none before: its maximum is looked at first.
  // `rescale_output` multiplies the rows of O, which share the reference, in what `rarely` runs.
  template <class Scores, class Rarely, class RescaleOutput>
  CUTE_DEVICE void masked_block(Scores& scores, BlockFactors const& factors, Rarely const& rarely,
                                RescaleOutput const& rescale_output) {
    float max[2];
    block_max(scores, factors, max);
    bool const moves[2] = {max[0] > reference[0] + kPeakLog2 + kHeadroom,
                           max[1] > reference[1] + kPeakLog2 + kHeadroom};
    if (__any_sync(0xffffffffU, static_cast<int>(moves[0]) | static_cast<int>(moves[1])) != 0) {
      rarely([&]() __attribute__((always_inline)) {
        float rescale[2];
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          float const moved = moves[r] ? max[r] - kPeakLog2 : reference[r];
          rescale[r] = moves[r] ? exp2_approx(reference[r] - moved) : 1.0F;
          reference[r] = moved;
          row_sum[r] *= rescale[r];
        }
        rescale_output(rescale);
      });
    }
    float const shift[2] = {shift_of(0), shift_of(1)};
    float weights[2];
    float exact[2];
    exponentiate(scores, factors, shift, weights, exact);
    row_sum[0] += exact[0];
    row_sum[1] += exact[1];
  }

  // Any other later block. `recompute` brings back the scores.
  template <class Scores, class Rarely, class Recompute, class RescaleOutput>
  CUTE_DEVICE void next_block(Scores& scores, BlockFactors const& factors, Rarely const& rarely,
                              Recompute const& recompute, RescaleOutput const& rescale_output) {
    float weights[2];
    float exact[2];
    exponentiate(scores, factors, reference, weights, exact);
    // A NaN does not suit, nor what a reference of -inf makes.
    auto const suits = [&](int r) {
      return static_cast<bool>(
          static_cast<int>(weights[r] < kMost) &
          (static_cast<int>(weights[r] >= kLeast) | static_cast<int>(weights[r] <= row_sum[r] * kNothing)));
    };
    if (!all(suits(0), suits(1))) {
      rarely([&]() __attribute__((always_inline)) {
        move_block(scores, factors, weights, exact, recompute, rescale_output);
      });
    }
    row_sum[0] += exact[0];
    row_sum[1] += exact[1];
  }

  // The whole rows' sums.
  CUTE_DEVICE void finish(float (&sums)[2]) const {
    sums[0] = quad_sum(row_sum[0]);
    sums[1] = quad_sum(row_sum[1]);
  }

 private:
  // x, but not before y is known.
  CUTE_DEVICE static float after(float x, float y) {
    float z;
    asm("fma.rn.ftz.f32 %0, %1, 0f00000000, %2;" : "=f"(z) : "f"(y), "f"(x));
    return z;
  }

  CUTE_DEVICE float shift_of(int r) const { return reference[r] == -INFINITY ? 0.0F : reference[r]; }

  // Against the true maximum of this block, or the reference where that is larger; `rescale` is what the new reference
  // makes of the old sum and O. A row still without a key is taken against 0, so that its weights are 0 and not NaN.
  template <class Scores>
  CUTE_DEVICE void exact_block(Scores& scores, BlockFactors const& factors, float (&rescale)[2], float (&exact)[2]) {
    float max[2];
    block_max(scores, factors, max);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const before = reference[r];
      reference[r] = fmaxf(before, max[r] - kPeakLog2);
      rescale[r] = exp2_approx(before - shift_of(r));
    }
    float const shift[2] = {shift_of(0), shift_of(1)};
    float weights[2];
    exponentiate(scores, factors, shift, weights, exact);
  }

  template <class Scores, class Recompute, class RescaleOutput>
  CUTE_DEVICE void move_block(Scores& scores, BlockFactors const& factors, float const (&weights)[2], float (&exact)[2],
                              Recompute const& recompute, RescaleOutput const& rescale_output) {
    float const total[2] = {quad_sum(weights[0]), quad_sum(weights[1])};
    float const so_far[2] = {quad_sum(row_sum[0]), quad_sum(row_sum[1])};
    float factor[2];
    if (!all(total[0] < 0x1p96F, total[1] < 0x1p96F)) {
      recompute();
      exact_block(scores, factors, factor, exact);
    } else {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        bool const moves = total[r] >= kMost || (total[r] < 4.0F * kLeast && total[r] > so_far[r] * kNothing);
        factor[r] = moves ? move(r, total[r]) : 1.0F;
        exact[r] *= factor[r];
      }
      multiply(scores, factor);
    }
    if (!all(factor[0] == 1.0F, factor[1] == 1.0F)) {
      row_sum[0] *= factor[0];
      row_sum[1] *= factor[1];
      rescale_output(factor);
    }
  }

  // Moves a row's reference by the power of two that `total` calls for, and returns what that makes of 1.
  CUTE_DEVICE float move(int r, float total) {
    int const exponent = (__float_as_int(total) >> 23) - 127 - kTotalLog2;
    reference[r] += static_cast<float>(exponent);
    return __int_as_float((127 - exponent) << 23);
  }
  template <class Scores>
  CUTE_DEVICE static void multiply(Scores& scores, float const (&factor)[2]) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) *= factor[i / 2 % 2];
    }
  }
};

}  // namespace hattn::sm90
