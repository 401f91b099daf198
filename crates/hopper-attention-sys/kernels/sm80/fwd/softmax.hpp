// The forward's softmax: as OnlineSoftmax, with keys that dominate a row weighted exactly.
//
// P is rounded to 16 bits before it is multiplied with V, and O is divided by the sum of the weights before the
// rounding. So a key that has most of a row's weight brings its rounding error into O, unless its weight is 1. A row
// therefore *moves* when such a key comes: the key's score becomes the reference, and what the row had is rescaled.
//
// - A block is *compared*: the maximum of its scores is taken first, and rows with a new maximum move. So are the first
//   blocks of a tile, and blocks in which keys are masked.
// - Or it is exponentiated *unseen*: against the reference that there is, with no maximum taken (common/softmax.hpp).
//   If a lane's sum of the block reaches the row's limit, the warp *stops*: before it goes on, it looks for the block's
//   largest weights and moves rows. Limits follow from what blocks of the row have summed to, so that a warp seldom
//   stops where no row is dominated.
// - After a stop the warp compares its blocks up to the next multiple of kComparedBlocks. That costs less than a stop,
//   and where one dominating key has come, others follow. So under a full mask, above head dim 64, it goes on comparing
//   where a row has moved far in the last of these blocks, or in the last of the tile's first blocks. No count of stops
//   is kept: in registers or in shared memory, it made ptxas spill.
//
// A NaN is in no comparison, so a row of NaN never stops its warp.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/element.hpp"
#include "common/mask.hpp"
#include "common/softmax.hpp"

namespace hattn::sm80 {

// What a lane's sums over one block must not reach. A pair of f16 for the two rows of each strip: in f32 they would
// take twice the registers and twice the comparisons.
template <int kStrips>
struct Limits {
  // Two NaN: there are no limits, since the warp compares its blocks.
  static constexpr std::uint32_t kNone = 0xffffffffU;

  std::uint32_t of[kStrips];

  CUTE_DEVICE bool none() const { return of[0] == kNone; }

  // Whether a sum of one of the rows has reached its limit, in any lane of the warp.
  CUTE_DEVICE bool reached(float const (&sums)[2 * kStrips]) const {
    bool any = false;
    CUTE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      any = any | reaches(pack_pair<cutlass::half_t>(sums[2 * strip], sums[2 * strip + 1]), of[strip]);
    }
    return __any_sync(0xffffffffU, any);
  }

 private:
  // Whether a >= b, in either half.
  CUTE_DEVICE static bool reaches(std::uint32_t a, std::uint32_t b) {
    int reaches;
    asm("{\n"
        ".reg .pred low, high;\n"
        "setp.ge.f16x2 low|high, %1, %2;\n"
        "or.pred low, low, high;\n"
        "selp.s32 %0, 1, 0, low;\n"
        "}\n"
        : "=r"(reaches)
        : "r"(a), "r"(b));
    return reaches != 0;
  }
};

template <int kTileN, int kStrips>
struct ExactSoftmax {
  using Base = OnlineSoftmax<kTileN, 15, kStrips>;
  static constexpr int kRows = Base::kRows;

  // After a stop blocks are compared until the number of a visit is a multiple of this.
  static constexpr int kComparedBlocks = 512 / kTileN;
  // The largest limit: f16 holds weights below it.
  static constexpr float kMostLimit = 0x1p15F;
  // A lane has a quarter of a row's weights in a block. If their sum reaches the largest limit, one of them is this or
  // more. So such rows move, whatever their sum is.
  static constexpr float kMostUnmoved = kMostLimit / (kTileN / 4);
  // A row has moved far if it was multiplied by this or less. (In N(0,1) it seldom is. By 0: it had no key before, or
  // it had moved so far that nothing of it is left.)
  static constexpr float kFar = 0x1p-4F;
  // At this, a row's weights may have been infinite.
  static constexpr float kLost = 0x1p96F;

  // Minus the reference, in powers of two: as the exponentials take it. Of a row without a key it is FLT_MAX: a masked
  // key has P = 0 against it, and any other inf, which stops the warp. (Against inf a masked key would have a NaN.)
  float minus_reference[kRows];
  float row_sum[kRows];  // this lane's sums

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      minus_reference[r] = FLT_MAX;
      row_sum[r] = 0.0F;
    }
  }

  // A compared block. Where a row moves, `moved` is called with what O must be multiplied by. The result: whether a row
  // of the warp has moved far, if that is looked at.
  template <bool kLooks, class Scores, class Moved>
  CUTE_DEVICE bool compared_block(Scores& scores, float scale_log2, Moved const& moved) {
    bool far = false;
    float max[kRows];
    Base::block_max(scores, max);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      max[r] *= scale_log2;
    }
    if (Base::any_row([&](int r) { return -max[r] < minus_reference[r]; })) {
      float factors[kRows];
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float const to = fminf(minus_reference[r], -max[r]);
        factors[r] = exp2_approx(to - minus_reference[r]);
        minus_reference[r] = to;
        row_sum[r] *= factors[r];
      }
      if constexpr (kLooks) {
        far = Base::any_row([&](int r) { return factors[r] > 0.0F & factors[r] <= kFar; });
      }
      moved(factors);
    }
    float sums[kRows];
    unseen_block(scores, scale_log2, sums);
    add(sums);
    return far;
  }

  // A block that is exponentiated unseen.
  template <class Scores>
  CUTE_DEVICE void unseen_block(Scores& scores, float scale_log2, float (&sums)[kRows]) const {
    float shift[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      shift[r] = -minus_reference[r];
    }
    Base::exponentiate(scores, scale_log2, shift, sums);
  }

  // Whether the scores must be computed again. (They are then compared: nothing of this block has been added.)
  CUTE_DEVICE static bool lost(float const (&sums)[kRows]) {
    return Base::any_row([&](int r) { return sums[r] >= kLost; });
  }

  // Adds an unseen block that has stopped the warp, and moves the rows in which a weight is above 1 and above a quarter
  // of the sum. O must be multiplied by `factors`.
  template <class Scores>
  CUTE_DEVICE void move_rows(Scores& scores, float const (&sums)[kRows], float (&factors)[kRows]) {
    float max[kRows];
    Base::block_max(scores, max);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] += sums[r];
      bool const moves = max[r] > 1.0F & ((4.0F * max[r] > quad_sum(row_sum[r])) | (max[r] >= kMostUnmoved));
      float const by = log2_approx(moves ? max[r] : 1.0F);
      factors[r] = exp2_approx(-by);
      minus_reference[r] -= by;
      row_sum[r] *= factors[r];
    }
    CUTE_UNROLL
    for (int i = 0; i < scores.size(); ++i) {
      scores(i) *= factors[Base::row_of(i)];
    }
  }

  // Limits after a tile's first blocks. `keys(strip)`: how many keys rows have had in each. Where all keys are alike, a
  // lane's part of a whole block is a 16th of the limit.
  template <class Keys>
  CUTE_DEVICE Limits<kStrips> first_limits(Keys const& keys, int blocks) const {
    Limits<kStrips> limits;
    CUTE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      KeysOfRows const of_strip = keys(strip);
      float limit[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const of_block = 4.0F / static_cast<float>(blocks) * kTileN;
        limit[r] = fmaxf(1.0F, 4.0F * row_sum[2 * strip + r]) *
                   (of_block * reciprocal_approx(static_cast<float>(of_strip.of[r])));
      }
      limits.of[strip] = limit_pair(limit[0], limit[1]);
    }
    return limits;
  }

  // Limits later on: half of a row's sum.
  CUTE_DEVICE Limits<kStrips> later_limits() const {
    Limits<kStrips> limits;
    CUTE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      limits.of[strip] = limit_pair(0.5F * quad_sum(row_sum[2 * strip]), 0.5F * quad_sum(row_sum[2 * strip + 1]));
    }
    return limits;
  }

  // Limits after a stop in that visit.
  CUTE_DEVICE Limits<kStrips> limits_after_stop(int visit) const {
    return visit % kComparedBlocks == 0 ? later_limits() : no_limits();
  }

  // None: the next block is compared.
  CUTE_DEVICE static Limits<kStrips> no_limits() {
    Limits<kStrips> limits;
    CUTE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      limits.of[strip] = Limits<kStrips>::kNone;
    }
    return limits;
  }

  // Adds what an unseen block's weights sum to.
  CUTE_DEVICE void add(float const (&sums)[kRows]) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] += sums[r];
    }
  }

  // The whole rows' sums.
  CUTE_DEVICE void finish(float (&sums)[kRows]) const {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      sums[r] = quad_sum(row_sum[r]);
    }
  }

 private:
  CUTE_DEVICE static std::uint32_t limit_pair(float first, float second) {
    return pack_pair<cutlass::half_t>(fminf(first, kMostLimit), fminf(second, kMostLimit));
  }
};

}  // namespace hattn::sm80
