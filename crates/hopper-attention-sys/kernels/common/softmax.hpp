// Online softmax over blocks of keys (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1), for a thread
// that holds two rows of an m64 accumulator.
//
// P, the row sum and O share one reference per row (the subtrahend of the exponents), so any reference gives the same
// quotient and only overflow, underflow and the rounding of P matter. A block in which keys are masked may be all that
// a row has: it is taken against the row's true maximum, so that P of a key that stands out is 1 and exact. Other
// blocks are exponentiated unseen, a tile's first one against 0, later ones against the reference that they find. Only
// when a block's sum shows that this does not suit (or that there is no reference yet, or a NaN) are the scores
// computed again and the maximum taken. That is rare, and saves a maximum, its shuffles and their latency in every
// other block.
#pragma once

#include <cute/tensor.hpp>

namespace hattn {

CUTE_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

CUTE_DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The four lanes that share a row.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

template <int kTileN, int kSumLimitLog2>
struct OnlineSoftmax {
  // What one lane may add to a row in one block, and with it every element of P: far below the largest value of P's
  // type, with room for the products with V.
  static constexpr float kSumLimit = static_cast<float>(1ULL << kSumLimitLog2);
  // What it must add in the first: P must not be too small for its type either.
  static constexpr float kSumLeast = kSumLimitLog2 > 15 ? 0x1p-32F : 0.25F;

  float reference[2];  // in powers of two, that is scaled by log2(e) * softmax_scale; -inf while a row has no key
  float row_sum[2];    // this lane's part of the sum; the quad's parts are added once a tile

  template <class Scores>
  CUTE_DEVICE static void block_max(Scores const& scores, float (&max)[2]) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      max[r] = fmaxf(scores(2 * r), scores(2 * r + 1));
      CUTE_UNROLL
      for (int i = 1; i < kTileN / 8; ++i) {
        max[r] = fmaxf(max[r], fmaxf(scores(4 * i + 2 * r), scores(4 * i + 2 * r + 1)));
      }
      max[r] = quad_max(max[r]);
    }
  }

  // scores <- exp2(scale_log2 * scores - shift), and their sums.
  template <class Scores>
  CUTE_DEVICE static void exponentiate(Scores& scores, float scale_log2, float const (&shift)[2], float (&sums)[2]) {
    // Two partial sums a row: the chain of dependent adds is half as long.
    float partial[2][2] = {{0.0F, 0.0F}, {0.0F, 0.0F}};
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 8; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& score = scores(4 * i + 2 * r + c);
          score = exp2_approx(fmaf(score, scale_log2, -shift[r]));
          partial[r][c] += score;
        }
      }
    }
    sums[0] = partial[0][0] + partial[0][1];
    sums[1] = partial[1][0] + partial[1][1];
  }

  // Exponentiates against the true maximum of this block and what came before; `rescale` is what the new reference
  // makes of the old sum and O. A row still without a key is taken against 0, so that its exponents are 0 and not NaN.
  template <class Scores>
  CUTE_DEVICE void exact_block(Scores& scores, float scale_log2, float (&rescale)[2], float (&sums)[2]) {
    float max[2];
    block_max(scores, max);
    float shift[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const moved = fmaxf(reference[r], max[r] * scale_log2);
      shift[r] = moved == -INFINITY ? 0.0F : moved;
      rescale[r] = exp2_approx(reference[r] - shift[r]);
      reference[r] = moved;
    }
    exponentiate(scores, scale_log2, shift, sums);
  }

  // A tile's first block where keys are masked.
  template <class Scores>
  CUTE_DEVICE void first_masked_block(Scores& scores, float scale_log2) {
    reference[0] = -INFINITY;
    reference[1] = -INFINITY;
    float rescale[2];
    exact_block(scores, scale_log2, rescale, row_sum);
  }

  // A tile's first block otherwise. Where a row's sum is too large or small for P's type, the row is multiplied by a
  // power of two, its reference from then on; only a sum near the end of f32's range costs a recomputation.
  template <class Scores, class Recompute>
  CUTE_DEVICE void first_block(Scores& scores, float scale_log2, Recompute const& recompute) {
    reference[0] = 0.0F;
    reference[1] = 0.0F;
    exponentiate(scores, scale_log2, reference, row_sum);
    auto const suits = [](float sum) { return sum >= kSumLeast && sum < kSumLimit; };
    if (__all_sync(0xffffffffU, suits(row_sum[0]) && suits(row_sum[1]))) {
      return;
    }
    float const total[2] = {quad_sum(row_sum[0]), quad_sum(row_sum[1])};
    auto const recoverable = [](float sum) { return sum > 0x1p-96F && sum < 0x1p96F; };
    if (!__all_sync(0xffffffffU, recoverable(total[0]) && recoverable(total[1]))) {
      recompute();
      first_masked_block(scores, scale_log2);
      return;
    }
    float factor[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const exponent = (__float_as_int(total[r]) >> 23) - 127;
      reference[r] = static_cast<float>(exponent);
      factor[r] = __int_as_float((127 - exponent) << 23);
      row_sum[r] *= factor[r];
    }
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) *= factor[i / 2 % 2];
    }
  }

  // The whole rows' sums.
  CUTE_DEVICE void finish(float (&sums)[2]) const {
    sums[0] = quad_sum(row_sum[0]);
    sums[1] = quad_sum(row_sum[1]);
  }

  // A later block in which keys are masked, so that a row may have had none before: its maximum is looked at first. The
  // reference moves only when it has become too small; `rescale_output` multiplies the rows of O, which share it.
  template <class Scores, class RescaleOutput>
  CUTE_DEVICE void masked_block(Scores& scores, float scale_log2, RescaleOutput const& rescale_output) {
    constexpr float kHeadroom = 8.0F;
    float max[2];
    block_max(scores, max);
    bool moves[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      max[r] *= scale_log2;
      moves[r] = max[r] > reference[r] + kHeadroom;
    }
    if (__any_sync(0xffffffffU, moves[0] || moves[1])) {
      float rescale[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        rescale[r] = moves[r] ? exp2_approx(reference[r] - max[r]) : 1.0F;
        reference[r] = moves[r] ? max[r] : reference[r];
        row_sum[r] *= rescale[r];
      }
      rescale_output(rescale);
    }
    float shift[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      shift[r] = reference[r] == -INFINITY ? 0.0F : reference[r];
    }
    float sums[2];
    exponentiate(scores, scale_log2, shift, sums);
    row_sum[0] += sums[0];
    row_sum[1] += sums[1];
  }

  // Any other later block. `recompute` brings back the scores.
  template <class Scores, class Recompute, class RescaleOutput>
  CUTE_DEVICE void next_block(Scores& scores, float scale_log2, Recompute const& recompute,
                              RescaleOutput const& rescale_output) {
    float sums[2];
    // A reference of -inf makes every exponent +inf or NaN, which the test catches like any other runaway.
    exponentiate(scores, scale_log2, reference, sums);
    bool const in_range = sums[0] < kSumLimit && sums[1] < kSumLimit;
    if (!__all_sync(0xffffffffU, in_range)) {
      float rescale[2];
      recompute();
      exact_block(scores, scale_log2, rescale, sums);
      row_sum[0] *= rescale[0];
      row_sum[1] *= rescale[1];
      rescale_output(rescale);
    }
    row_sum[0] += sums[0];
    row_sum[1] += sums[1];
  }
};

}  // namespace hattn
