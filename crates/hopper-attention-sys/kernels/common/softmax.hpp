// Online softmax over blocks of keys (Milakov & Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1), for a thread
// that holds two rows of an accumulator, or of several of them (strips), one after the other. sm80/fwd/softmax.hpp and
// sm90/fwd/softmax.hpp build on it.
//
// The reference of a row is what is subtracted from its scores before the exponential. P, the row sum and O share it.
// So any reference gives the same quotient, and only overflow, underflow and the rounding of P matter.
//
// Which reference a block is exponentiated against:
// - A block in which keys are masked may be all that a row has. Its scores are compared first, and the row's true
//   maximum is the reference. So P of a key that stands out is 1, and exact.
// - Any other block is exponentiated unseen: no maximum of its scores is taken first. A tile's first block takes 0 as
//   the reference, a later block the reference of the block before.
//
// The sum of an unseen block shows whether its reference suited it. If not (or if there is no reference yet), the
// scores are computed again and their maximum is taken. That is rare. In all other blocks it saves the maximum, its
// shuffles and their latency.
#pragma once

#include <cute/numeric/integer_sequence.hpp>

namespace hattn {

constexpr float kLog2E = 1.44269504088896341F;

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

// What the softmax of both architectures is made of.
template <int kTileN, int kSumLimitLog2, int kStrips = 1>
struct OnlineSoftmax {
  static constexpr int kRows = 2 * kStrips;
  // Where a thread's row has its element c of 8 columns.
  CUTE_DEVICE static constexpr int at(int row, int i, int c) {
    return row / 2 * (kTileN / 2) + 4 * i + 2 * (row % 2) + c;
  }
  // Whose row an element is of.
  CUTE_DEVICE static constexpr int row_of(int i) { return i / (kTileN / 2) * 2 + i / 2 % 2; }
  template <class Holds, int... kRow>
  CUTE_DEVICE static bool all_of(Holds const& holds, cute::integer_sequence<int, kRow...>) {
    return (holds(kRow) && ...);
  }
  template <class Holds, int... kRow>
  CUTE_DEVICE static bool any_of(Holds const& holds, cute::integer_sequence<int, kRow...>) {
    return (holds(kRow) || ...);
  }
  // Whether something holds of all (one) of the rows of all (one) of the warp's lanes.
  template <class Holds>
  CUTE_DEVICE static bool all_rows(Holds const& holds) {
    return __all_sync(0xffffffffU, all_of(holds, cute::make_integer_sequence<int, kRows>{}));
  }
  template <class Holds>
  CUTE_DEVICE static bool any_row(Holds const& holds) {
    return __any_sync(0xffffffffU, any_of(holds, cute::make_integer_sequence<int, kRows>{}));
  }

  // What one lane may add to a row in one block, and with it every element of P: far below the largest value of P's
  // type, so that the products with V do not overflow.
  static constexpr float kSumLimit = static_cast<float>(1ULL << kSumLimitLog2);
  // What it must add in the first: P must not be too small for its type either.
  static constexpr float kSumLeast = kSumLimitLog2 > 15 ? 0x1p-32F : 0.25F;

  template <class Scores>
  CUTE_DEVICE static void block_max(Scores const& scores, float (&max)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      max[r] = fmaxf(scores(at(r, 0, 0)), scores(at(r, 0, 1)));
      CUTE_UNROLL
      for (int i = 1; i < kTileN / 8; ++i) {
        max[r] = fmaxf(max[r], fmaxf(scores(at(r, i, 0)), scores(at(r, i, 1))));
      }
      max[r] = quad_max(max[r]);
    }
  }

  struct Nothing {
    CUTE_DEVICE void operator()(int, float, float) const {}
  };

  // scores <- exp2(scale_log2 * scores - shift), and their sums. `also(row, p, q)` is called with the weights of each
  // two neighbouring columns.
  template <class Scores, class Also = Nothing>
  CUTE_DEVICE static void exponentiate(Scores& scores, float scale_log2, float const (&shift)[kRows],
                                       float (&sums)[kRows], Also const& also = {}) {
    // Two partial sums a row: the chain of dependent adds is half as long.
    float partial[kRows][2] = {};
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 8; ++i) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          float& score = scores(at(r, i, c));
          score = exp2_approx(fmaf(score, scale_log2, -shift[r]));
          partial[r][c] += score;
        }
        also(r, scores(at(r, i, 0)), scores(at(r, i, 1)));
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r] = partial[r][0] + partial[r][1];
    }
  }
};

}  // namespace hattn
