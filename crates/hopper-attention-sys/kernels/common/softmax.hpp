// Online softmax over blocks of keys (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1), for a thread
// that holds two rows of an m64 accumulator.
//
// A row's reference m is the subtrahend of its exponents. It is the true maximum after the first block; later it moves
// only when a score exceeds it by more than kHeadroom (in powers of two), because P, the row sum and O share m, so that
// any m gives the same quotient and only overflow matters. Most blocks then rescale nothing.
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

// The four lanes that share a row.
CUTE_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
CUTE_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

template <int kTileN>
struct OnlineSoftmax {
  static constexpr float kHeadroom = 8.0F;

  float row_reference[2];  // m, in units of the scores
  float row_sum[2];        // this lane's part of the sum; the quad's parts are added once a tile

  // A row with no key so far has m = -inf: its exponents are taken against 0, so that they are 0 and not NaN.
  CUTE_DEVICE static float subtrahend(float m, float scale_log2) { return m == -INFINITY ? 0.0F : m * scale_log2; }

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

  // scores <- exp2(scale_log2 * (scores - m)), and their sum into row_sum.
  template <bool kFirst, class Scores>
  CUTE_DEVICE void exponentiate(Scores& scores, float scale_log2) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const shift = subtrahend(row_reference[r], scale_log2);
      // Two partial sums: the chain of dependent adds is half as long.
      float sum[2] = {0.0F, 0.0F};
      CUTE_UNROLL
      for (int i = 0; i < kTileN / 8; ++i) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& score = scores(4 * i + 2 * r + c);
          score = exp2_approx(fmaf(score, scale_log2, -shift));
          sum[c] += score;
        }
      }
      row_sum[r] = kFirst ? sum[0] + sum[1] : row_sum[r] + (sum[0] + sum[1]);
    }
  }

  template <class Scores>
  CUTE_DEVICE void first_block(Scores& scores, float scale_log2) {
    block_max(scores, row_reference);
    exponentiate<true>(scores, scale_log2);
  }

  // Returns whether O must be multiplied by `rescale` before the next product is added to it (the same in all lanes).
  template <class Scores>
  CUTE_DEVICE bool next_block(Scores& scores, float scale_log2, float headroom, float (&rescale)[2]) {
    float max[2];
    block_max(scores, max);
    bool const moved =
        __any_sync(0xffffffffU, max[0] > row_reference[0] + headroom || max[1] > row_reference[1] + headroom);
    if (moved) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const m = fmaxf(row_reference[r], max[r]);
        rescale[r] = exp2_approx(row_reference[r] * scale_log2 - subtrahend(m, scale_log2));
        row_reference[r] = m;
        row_sum[r] *= rescale[r];
      }
    }
    exponentiate<false>(scores, scale_log2);
    return moved;
  }
};

}  // namespace hattn
