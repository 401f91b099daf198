// The forward's softmax: as OnlineSoftmax, with keys that dominate a row weighted exactly.
//
// P is rounded to 16 bits before it is multiplied with V, and O is divided by the sum of the weights before the
// rounding. So a key that has most of a row's weight brings its rounding error into O, unless its weight is a power of
// two. Two things keep that error out:
//
// - A row *moves*: if its largest weight in a block is above 1 and above a quarter of the row sum, then P, the row sum
//   and O are divided by that weight. The weight is 1 then. Its log2 is added to the reference.
// - A warp *tracks*: each lane keeps the largest weight of a row since the row last moved. What rounding did to it is
//   added to the row sum, and O is divided by the result (`divisors`). This is for rows with several large weights,
//   which would move in every block. (Four lanes have a row, so that most of the large ones are kept.)
//
// Blocks without masked keys are exponentiated *unseen*: against the reference that there is, with no maximum taken
// (common/softmax.hpp). If a lane's sum of a block reaches `limit`, its warp *stops*: before it goes on, it looks for
// the block's largest weights and moves rows. A stop counts if fewer than 10 of the warp's 16 rows move. After 2 +
// blocks / 64 stops that count, and in tiles of up to 8 blocks after one, the warp tracks for the rest of the tile.
// From then on it stops only where weights would leave their type.
//
// A NaN is in no comparison, so a row of NaN never stops its warp, and changes no bit of another row. A row that stops
// its warp may: limits are set anew, and tracking begins for all of the warp's rows.
#pragma once

#include <cfloat>

#include "common/element.hpp"
#include "common/fragment.hpp"
#include "common/mask.hpp"
#include "common/softcap.hpp"
#include "common/softmax.hpp"

namespace hattn::sm90 {

// kMasked: whether the kernel hides keys. Then weights of bf16 stay where f16 has them, too: O is looked at again where
// a row's weights sum to 2^20 (is_large_sum), which takes longer than to move the row.
template <DType kDType, int kTileN, bool kMasked>
struct ExactSoftmax {
  using Element = typename ElementOf<kDType>::type;
  static constexpr int kSumLimitLog2 = sum_limit_log2(kMasked ? DType::F16 : kDType);
  using Base = OnlineSoftmax<kTileN, kSumLimitLog2>;

  // Below this a lane's sums fit the type, and their sums and products f32.
  static constexpr float kSumLimit = Base::kSumLimit;
  // A lane has up to 32 weights of a row in a block. If their sum is too large for the type, one of them is this or
  // more. So such rows move, whatever their sum is.
  static constexpr int kMostUnmovedLog2 = kSumLimitLog2 - 5;
  static constexpr float kMostUnmoved = static_cast<float>(1ULL << kMostUnmovedLog2);
  // The reference of a row without a key. A masked key has P = 0 against it, and any other inf, which stops its warp.
  // (Against -inf a masked key would have a NaN.)
  static constexpr float kNoKey = -FLT_MAX;
  // At this, a row's weights may have been infinite.
  static constexpr float kLost = 0x1p96F;

  float reference[2];  // in powers of two
  float row_sum[2];    // this lane's sums
  // Of this lane's sums over one block. While a warp tracks, the limit is kSumLimit, and this is the largest weight.
  float limit[2];
  bool tracks;  // the same in all lanes of a warp
  // What rounding did to the tracked weights, a bf16 for each row (`settle`). Before a warp tracks: how many of its
  // stops counted.
  std::uint32_t error;

  CUTE_DEVICE static std::uint32_t add_pair(std::uint32_t a, std::uint32_t b) {
    std::uint32_t sum;
    asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
  }
  CUTE_DEVICE static std::uint32_t multiply_pair(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  }

  // The largest of this lane's weights in a row, or of its scores where one is above 0. (Compared as integers, three at
  // a time. Else the result is any of them.)
  template <class Scores>
  CUTE_DEVICE static float largest(Scores const& scores, int row) {
    int max = __float_as_int(scores(Base::at(row, 0, 0)));
    max = cute::max(max, __float_as_int(scores(Base::at(row, 0, 1))));
    CUTE_UNROLL
    for (int i = 1; i < kTileN / 8; ++i) {
      max = __vimax3_s32(max, __float_as_int(scores(Base::at(row, i, 0))), __float_as_int(scores(Base::at(row, i, 1))));
    }
    return __int_as_float(max);
  }

  // Against the true maximum of this block and what came before.
  template <class Scores>
  CUTE_DEVICE void exact_block(Scores& scores, float scale_log2, float (&factors)[2], float (&sums)[2]) {
    float max[2];
    Base::block_max(scores, max);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const moved = fmaxf(reference[r], max[r] * scale_log2);
      factors[r] = exp2_approx(reference[r] - moved);
      reference[r] = moved;
    }
    Base::exponentiate(scores, scale_log2, reference, sums);
  }

  CUTE_DEVICE void clear() {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      reference[r] = kNoKey;
      row_sum[r] = 0.0F;
    }
    limit[0] = limit[1] = 0.0F;
    tracks = false;
    error = 0;
  }

  // A tile's first block where keys are masked. `keys`: how many a row has in it.
  template <class Scores>
  CUTE_DEVICE void first_masked_block(Scores& scores, float scale_log2, KeysOfRows const& keys) {
    clear();
    float factors[2];
    exact_block(scores, scale_log2, factors, row_sum);
    // Where all keys are alike, a whole block sums to kTileN / keys of this one. The limit is 16 times that.
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const of_block = (4.0F * kTileN) * reciprocal_approx(static_cast<float>(keys.of[r]));
      limit[r] = fminf(kSumLimit, fmaxf(1.0F, 4.0F * row_sum[r]) * of_block);
    }
  }

  // A tile's first block otherwise: against 0, or `exactly` against the maximum of rows that have a score above 0. If
  // the result is false, the scores must be computed again, for first_masked_block.
  template <class Scores>
  CUTE_DEVICE bool first_block(Scores& scores, float scale_log2, bool exactly) {
    reference[0] = reference[1] = 0.0F;
    if (exactly) {
      reference[0] = fmaxf(0.0F, quad_max(largest(scores, 0)) * scale_log2);
      reference[1] = fmaxf(0.0F, quad_max(largest(scores, 1)) * scale_log2);
    }
    tracks = false;
    error = 0;
    Base::exponentiate(scores, scale_log2, reference, row_sum);
    // Rows that are NaN suit.
    auto const suits = [&](int r) { return !(row_sum[r] < Base::kSumLeast) & !(row_sum[r] >= kSumLimit); };
    if (Base::all_rows(suits)) {
      limit[0] = fminf(kSumLimit, 16.0F * row_sum[0]);
      limit[1] = fminf(kSumLimit, 16.0F * row_sum[1]);
      return true;
    }
    float max[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      max[r] = quad_max(largest(scores, r));
    }
    // (A row of NaN is left to itself here, too.)
    if (Base::any_row([&](int r) { return max[r] <= 0x1p-96F | max[r] >= kLost; })) {
      return false;
    }
    float factors[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const by = log2_approx(max[r]);
      factors[r] = exp2_approx(-by);
      reference[r] += by;
      row_sum[r] *= factors[r];
    }
    multiply_rows(scores, factors);
    limit[0] = fminf(kSumLimit, 4.0F * quad_sum(row_sum[0]));
    limit[1] = fminf(kSumLimit, 4.0F * quad_sum(row_sum[1]));
    return true;
  }

  // A later block in which keys are masked, so that a row may have had none before: its maximum is looked at first.
  // Where a row moves, `moved` is called with what O must be multiplied by.
  template <class Scores, class Moved>
  CUTE_DEVICE void masked_block(Scores& scores, float scale_log2, Moved const& moved) {
    float max[2];
    Base::block_max(scores, max);
    bool moves[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      max[r] *= scale_log2;
      // From a quarter of the row's sum on, and before weights leave the type.
      float const most = fminf(log2_approx(quad_sum(row_sum[r])) - 2.0F, kMostUnmovedLog2);
      moves[r] = max[r] > reference[r] + fmaxf(most, 0.0F);
    }
    if (Base::any_row([&](int r) { return moves[r]; })) {
      float factors[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        factors[r] = moves[r] ? exp2_approx(reference[r] - max[r]) : 1.0F;
        reference[r] = moves[r] ? max[r] : reference[r];
      }
      row_sum[0] *= factors[0];
      row_sum[1] *= factors[1];
      // (A count of stops may be lost: no unseen block follows.)
      error = multiply_pair(error, pack_pair<cutlass::bfloat16_t>(factors[0], factors[1]));
      moved(factors);
    }
    float sums[2];
    Base::exponentiate(scores, scale_log2, reference, sums);
    add(sums);
  }

  // Any other later block, against the rows' references or what a modifier makes of them. If the result is true, the
  // warp stops. (The largest weight is looked for between the exponentials, which leave time for it. Weights are not
  // negative, so that they compare as integers do.)
  template <class Scores>
  CUTE_DEVICE bool unseen_block(Scores& scores, float scale_log2, float const (&references)[2], float (&sums)[2]) {
    bool stops;
    if (tracks) {
      int most[2] = {__float_as_int(limit[0]), __float_as_int(limit[1])};
      Base::exponentiate(scores, scale_log2, references, sums, [&](int r, float p, float q) {
        most[r] = __vimax3_s32(most[r], __float_as_int(p), __float_as_int(q));
      });
      stops = (sums[0] >= kSumLimit) | (sums[1] >= kSumLimit);
      limit[0] = __int_as_float(most[0]);
      limit[1] = __int_as_float(most[1]);
    } else {
      Base::exponentiate(scores, scale_log2, references, sums);
      stops = (sums[0] >= limit[0]) | (sums[1] >= limit[1]);
    }
    return __any_sync(0xffffffffU, stops);
  }

  // The same of products that a cap is to be put on (common/softcap.hpp): each is capped as if it were near. If one is
  // not, the sums say that the scores must be computed again.
  //
  // Multiplications take as long as the special functions here, so both must run at once. ptxas would put most
  // exponentials last. So a group of scores begins once the sums have the group before the last: its terms depend on
  // them.
  template <class Scores>
  CUTE_DEVICE bool unseen_capped_block(Scores& scores, Softcap const& softcap, float const (&references)[2],
                                       float (&sums)[2]) {
    constexpr int kGroup = 8;
    constexpr int kGroups = kTileN / 2 / kGroup;
    int most_square[2] = {};
    int most[2] = {__float_as_int(limit[0]), __float_as_int(limit[1])};
    sums[0] = sums[1] = 0.0F;
    CUTE_UNROLL
    for (int group = 0; group < kGroups + 2; ++group) {
      float fourth = softcap.in_log2[3];
      float third = softcap.in_log2[2];
      if (group >= 2) {
        CUTE_UNROLL
        for (int i = (group - 2) * kGroup; i < (group - 1) * kGroup; ++i) {
          sums[i / 2 % 2] += scores(i);
        }
        fourth = factor_after(sums[0], fourth);
        third = factor_after(sums[1], third);
      }
      if (group < kGroups) {
        CUTE_UNROLL
        for (int i = group * kGroup; i < (group + 1) * kGroup; i += 2) {
          int const r = i / 2 % 2;
          float squares[2];
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float& score = scores(i + c);
            float const square = score * score;
            float const polynomial =
                fmaf(fmaf(fmaf(fourth, square, third), square, softcap.in_log2[1]), square, softcap.in_log2[0]);
            score = exp2_approx(fmaf(score, polynomial, -references[r]));
            squares[c] = square;
          }
          most_square[r] = __vimax3_s32(most_square[r], __float_as_int(squares[0]), __float_as_int(squares[1]));
          most[r] = __vimax3_s32(most[r], __float_as_int(scores(i)), __float_as_int(scores(i + 1)));
        }
      }
    }
    bool far = false;  // (A row of NaN is not.)
    bool stops = false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      far = far | (__int_as_float(most_square[r]) > softcap.most_square);
      stops = stops | (sums[r] >= (tracks ? kSumLimit : limit[r]));
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      limit[r] = tracks & !far ? __int_as_float(most[r]) : limit[r];
    }
    sums[0] = far ? INFINITY : sums[0];
    return __any_sync(0xffffffffU, stops | far);
  }

  // Behind the last unseen block of a tile: works out what rounding did to the tracked weights.
  CUTE_DEVICE void settle() {
    if (tracks) {
      // (Only a NaN is above kSumLimit. Rows whose weights are too large for the type have moved, and are at 0.)
      float const first = fminf(limit[0], kSumLimit);
      float const second = fminf(limit[1], kSumLimit);
      float2 const rounded = unpack_pair<Element>(pack_pair<Element>(first, second));
      error = pack_pair<cutlass::bfloat16_t>(rounded.x - first, rounded.y - second);
    }
  }

  // Whether the scores must be computed again. (Votes, as all lanes of a warp agree, tell the compiler that its
  // branches do not diverge.)
  CUTE_DEVICE static bool lost(float const (&sums)[2]) {
    return __any_sync(0xffffffffU, fmaxf(sums[0], sums[1]) >= kLost);
  }

  // Moves rows: of the weights, or if `lost` of the scores. O must be multiplied by `factors`.
  template <class Scores>
  CUTE_DEVICE void move_rows(Scores& scores, float scale_log2, bool lost, int blocks, float (&sums)[2],
                             float (&factors)[2]) {
    if (lost) {
      exact_block(scores, scale_log2, factors, sums);
    } else {
      int lanes = 0;
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float const max = quad_max(largest(scores, r));
        bool const moves = max > 1.0F & ((4.0F * max > quad_sum(row_sum[r])) | (max >= kMostUnmoved));
        lanes += __popc(__ballot_sync(0xffffffffU, moves));
        float const by = log2_approx(moves ? max : 1.0F);
        factors[r] = exp2_approx(-by);
        reference[r] += by;
        sums[r] *= factors[r];
      }
      multiply_rows(scores, factors);
      // Four lanes have a row. Where ten rows and more of 16 move, the tile has just begun.
      error += !tracks && lanes < 40 ? 1 : 0;
    }
    if (tracks) {
      // Of a row that moves, the weights from before it are forgotten with those of this block.
      limit[0] = factors[0] < 1.0F ? 0.0F : limit[0];
      limit[1] = factors[1] < 1.0F ? 0.0F : limit[1];
    } else {
      tracks = __any_sync(0xffffffffU, error >= 1 + (blocks > 8) + blocks / 64);
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        limit[r] = tracks ? 0.0F : fminf(kSumLimit, 0.5F * quad_sum(row_sum[r] * factors[r] + sums[r]));
      }
    }
    row_sum[0] *= factors[0];
    row_sum[1] *= factors[1];
  }

  CUTE_DEVICE void add(float const (&sums)[2]) {
    row_sum[0] += sums[0];
    row_sum[1] += sums[1];
  }

  // The whole rows' sums, and what O must be divided by. (A count of stops is far below any sum.)
  template <bool kSettles>
  CUTE_DEVICE void finish(float (&sums)[2], float (&divisors)[2]) {
    if constexpr (kSettles) {
      settle();
    }
    std::uint32_t total = add_pair(error, __shfl_xor_sync(0xffffffffU, error, 1));
    total = add_pair(total, __shfl_xor_sync(0xffffffffU, total, 2));
    float2 const errors = unpack_pair<cutlass::bfloat16_t>(total);
    sums[0] = quad_sum(row_sum[0]);
    sums[1] = quad_sum(row_sum[1]);
    divisors[0] = sums[0] + errors.x;
    divisors[1] = sums[1] + errors.y;
  }
};

}  // namespace hattn::sm90
