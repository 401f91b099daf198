// The online softmax of e4m3 weights, for a thread that holds two rows of an accumulator: that of common/softmax.hpp
// with factors per block and limits of its own.
//
// With x = unit (q . k) and fold = log2(descale_v / the largest descale_v of the head), a weight is
// P = 2^(x + fold - reference). So factors of V cost no product; `row_sum` is of P times 2^-fold, before rounding.
//
// e4m3 has weights from 2^-9 to 448, and keeps three bits of them down to 2^-6. Most blocks are exponentiated unseen,
// against the reference that they find. It is moved up where a lane's sum says that a weight may be past 448, and down
// where weights come out so small that they lose bits, unless they are nothing beside what the row has already. Both
// moves are whole powers of two by which everything is multiplied: only where the weights' own type (weights.hpp) has
// lost them too are the scores computed again.
#pragma once

#include "sm90/fp8/weights.hpp"

namespace hattn::sm90 {

template <class Weights>
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

  CUTE_DEVICE static bool all(bool first, bool second) {
    return __all_sync(0xffffffffU, static_cast<int>(first) & static_cast<int>(second)) != 0;
  }

  // A tile's first block where keys are masked: against the true maximum.
  template <class Scores>
  CUTE_DEVICE void first_masked_block(Scores& scores, BlockFactors const& factors) {
    reference[0] = reference[1] = -INFINITY;
    float rescale[2];
    exact_block(scores, factors, {true, true}, rescale, row_sum);
  }

  // A tile's first block otherwise: against 0.
  template <class Scores, class Recompute>
  CUTE_DEVICE void first_block(Scores& scores, BlockFactors const& factors, Recompute const& recompute) {
    reference[0] = reference[1] = 0.0F;
    float weights[2];
    Weights::exponentiate(scores, factors, reference, weights, row_sum);
    auto const suits = [&](float sum) { return (sum >= 4.0F * kLeast) & (sum < 0.5F * kMost); };
    if (all(suits(weights[0]), suits(weights[1]))) {
      return;
    }
    float const total[2] = {quad_sum(weights[0]), quad_sum(weights[1])};
    if (!all(kept(total[0]), kept(total[1]))) {
      recompute();
      first_masked_block(scores, factors);
      return;
    }
    float const factor[2] = {move(0, total[0]), move(1, total[1])};
    Weights::multiply(scores, factor);
    row_sum[0] *= factor[0];
    row_sum[1] *= factor[1];
  }

  // A later block in which keys are masked, so that a row may have had none before: its maximum is looked at first.
  // `rescale_output` multiplies the rows of O, which share the reference.
  template <class Scores, class RescaleOutput>
  CUTE_DEVICE void masked_block(Scores& scores, BlockFactors const& factors, RescaleOutput const& rescale_output) {
    float max[2];
    Weights::block_max(scores, factors, max);
    bool const moves[2] = {max[0] > reference[0] + kPeakLog2 + kHeadroom,
                           max[1] > reference[1] + kPeakLog2 + kHeadroom};
    if (__any_sync(0xffffffffU, static_cast<int>(moves[0]) | static_cast<int>(moves[1])) != 0) {
      float rescale[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const moved = moves[r] ? Weights::reference_above(max[r] - kPeakLog2) : reference[r];
        rescale[r] = moves[r] ? exp2_approx(reference[r] - moved) : 1.0F;
        reference[r] = moved;
        row_sum[r] *= rescale[r];
      }
      rescale_output(rescale);
    }
    float const shift[2] = {shift_of(0), shift_of(1)};
    float weights[2];
    float exact[2];
    Weights::exponentiate(scores, factors, shift, weights, exact);
    row_sum[0] += exact[0];
    row_sum[1] += exact[1];
  }

  // Any other later block, against the references that it finds. Where those do not suit it, `move_block` follows.
  struct Unseen {
    float weights[2];
    float exact[2];
  };
  template <class Scores>
  CUTE_DEVICE Unseen unseen_block(Scores& scores, BlockFactors const& factors) {
    Unseen block;
    Weights::exponentiate(scores, factors, reference, block.weights, block.exact);
    return block;
  }
  // A NaN does not suit, nor what a reference of -inf makes.
  CUTE_DEVICE bool suits(Unseen const& block) const {
    auto const row = [&](int r) {
      return static_cast<bool>(
          static_cast<int>(block.weights[r] < kMost) &
          (static_cast<int>(block.weights[r] >= kLeast) | static_cast<int>(block.weights[r] <= row_sum[r] * kNothing)));
    };
    return all(row(0), row(1));
  }
  CUTE_DEVICE void add(Unseen const& block) {
    row_sum[0] += block.exact[0];
    row_sum[1] += block.exact[1];
  }

  // `recompute` brings back the scores.
  template <class Scores, class Recompute, class RescaleOutput>
  CUTE_DEVICE void move_block(Scores& scores, BlockFactors const& factors, Unseen& block, Recompute const& recompute,
                              RescaleOutput const& rescale_output) {
    cute::array<bool, 2> moves;
    float total[2];
    float factor[2] = {1.0F, 1.0F};
    bool suffices = true;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      total[r] = quad_sum(block.weights[r]);
      float const nothing = quad_sum(row_sum[r]) * kNothing;
      moves[r] = !(total[r] < kMost) | ((total[r] < 4.0F * kLeast) & (total[r] > nothing));  // a NaN, too
      suffices = suffices & (!moves[r] | kept(total[r]));
    }
    if (!all(suffices, true)) {
      recompute();
      exact_block(scores, factors, moves, factor, block.exact);
    } else {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (moves[r]) {
          factor[r] = move(r, total[r]);
        }
        block.exact[r] *= factor[r];
      }
      Weights::multiply(scores, factor);
    }
    row_sum[0] *= factor[0];
    row_sum[1] *= factor[1];
    rescale_output(factor);
  }

  // The whole rows' sums.
  CUTE_DEVICE void finish(float (&sums)[2]) const {
    sums[0] = quad_sum(row_sum[0]);
    sums[1] = quad_sum(row_sum[1]);
  }

 private:
  CUTE_DEVICE static bool kept(float sum) { return (sum > Weights::kLeastKept) & (sum < Weights::kMostKept); }

  CUTE_DEVICE float shift_of(int r) const { return reference[r] == -INFINITY ? 0.0F : reference[r]; }

  // Rows that move take the true maximum of this block for their reference; `rescale` is what that makes of the old sum
  // and O. A row still without a key is taken against 0, so that its weights are 0 and not NaN.
  template <class Scores>
  CUTE_DEVICE void exact_block(Scores& scores, BlockFactors const& factors, cute::array<bool, 2> const& moves,
                               float (&rescale)[2], float (&exact)[2]) {
    float max[2];
    Weights::block_max(scores, factors, max);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const before = reference[r];
      reference[r] = moves[r] ? Weights::reference_above(max[r] - kPeakLog2) : before;
      rescale[r] = moves[r] ? exp2_approx(before - shift_of(r)) : 1.0F;
    }
    float const shift[2] = {shift_of(0), shift_of(1)};
    float weights[2];
    Weights::exponentiate(scores, factors, shift, weights, exact);
  }

  // Moves a row's reference by the power of two that `total` calls for, and returns what that makes of 1.
  CUTE_DEVICE float move(int r, float total) {
    int const wanted = (__float_as_int(total) >> 23) - 127 - kTotalLog2;
    float const moved = Weights::reference_above(reference[r] + static_cast<float>(wanted));
    int const exponent = __float2int_rn(moved - reference[r]);
    reference[r] = moved;
    return __int_as_float((127 - exponent) << 23);
  }
};

}  // namespace hattn::sm90
