// ALiBi (Press et al. 2021): a score loses slope * |i + diagonal - j|, after the cap and before the mask. Query i
// stands at key i + diagonal: that is the diagonal of the sequence, whatever the mask is. A slope may have either sign.
//
// A kernel keeps a product q k, or what a cap makes of it, and multiplies it by a factor to be in powers of two
// (forward_factor and backward_factor in scalars.hpp). Nothing of that changes: the bias is brought to the unit of
// what is kept, by alibi_slope.
//
// Distances are differences of positions, in integers. As an f32 one is exact below 2^24, and off by 2^-24 of itself
// above that. So a far key's bias is as exact as an f32 can be, and a near key's has an error that is small beside the
// near key's own score: no term that grows with the position is added to scores and taken out of the LSE again.
//
// That makes two instructions a score: a difference of floats, whose magnitude is an operand of what follows. Where the
// bias falls apart, there are fewer (sm90/fwd/alibi.hpp, sm90/bwd/alibi.hpp).
//
// A forward goes from the last key to the first, so that a tile may begin with keys that are far from the diagonal, and
// come nearer. There each block would outweigh what is there so far, and unseen blocks would stop their warps again and
// again. So blocks are compared (common/softmax.hpp) until the diagonal is behind, and with a slope below 0 always
// (first_unseen_block).
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>
#include <cute/config.hpp>

#include "common/mask.hpp"
#include "common/softmax.hpp"
#include "kernels.hpp"

namespace hattn {

template <class Params>
CUTE_DEVICE bool has_alibi(Params const& params) {
  return params.alibi.address != 0;
}

// Whether there is ALiBi and nothing else that modifies scores or weights, and the softmax scale is such that a slope
// in the unit of a product, and its parts, are neither flushed to 0 nor infinite.
template <class Params>
CUTE_HOST_DEVICE bool has_alibi_alone(Params const& params) {
  return params.alibi.address != 0 && params.softcap == 0.0F && params.dropout.dropped == 0 && !has_bias(params) &&
         params.softmax_scale >= 0x1p-90F && params.softmax_scale <= 0x1p90F;
}

CUTE_DEVICE float slope_of_head(TensorDesc const& slopes, int batch, int head) {
  return __ldg(reinterpret_cast<float const*>(slopes.address) + batch * slopes.stride_batch +
               head * slopes.stride_head);
}

// The slope of a head in the unit of what is kept of a score: `factor` brings that to powers of two. Finite if the
// slope is, so that a distance of 0 has no bias.
CUTE_DEVICE float alibi_slope(TensorDesc const& slopes, int batch, int head, float factor) {
  float const slope = slope_of_head(slopes, batch, head);
  float const in_log2 = slope * kLog2E;
  float const inverse = reciprocal_approx(factor);
  float const rough = in_log2 * inverse;
  if (fabsf(rough) <= FLT_MAX) {
    return fmaf(fmaf(-rough, factor, in_log2), inverse, rough);
  }
  return fabsf(slope) <= FLT_MAX ? copysignf(FLT_MAX, slope) : slope;
}
// The same where there may be none: 0.
template <class Params>
CUTE_DEVICE float alibi_slope_or_zero(Params const& params, int batch, int head, float factor) {
  return has_alibi(params) ? alibi_slope(params.alibi, batch, head, factor) : 0.0F;
}

// The key at which query 0 stands, of the band of a tile.
template <class Params>
CUTE_DEVICE int diagonal_of(Params const& params, Band const& band) {
  return band.right_offset - params.window_right;
}

// One score with its bias. `slope`: alibi_slope.
CUTE_DEVICE float with_alibi(float score, float slope, int distance) {
  return fmaf(fabsf(static_cast<float>(distance)), -slope, score);
}

// Adds the bias to a thread's scores of one block: element (c, r, i) has the distance `distance + 8 r - (8 i + c)`, or
// minus that (transposed scores).
template <int kColumns, class Scores>
CUTE_DEVICE void add_alibi(Scores& scores, float slope, int distance) {
  float const first[2] = {static_cast<float>(distance), static_cast<float>(distance + 8)};
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 8; ++i) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        float& score = scores(4 * i + 2 * r + c);
        score = fmaf(fabsf(first[r] - static_cast<float>(8 * i + c)), -slope, score);
      }
    }
  }
}

// Sets transposed scores of queries from `queries` on to `fill`: element (c, r, i) is query 8 i + c.
template <class Scores>
CUTE_DEVICE void hide_queries(Scores& scores, int queries, float fill) {
  CUTE_UNROLL
  for (int i = 0; i < scores.size(); ++i) {
    float& score = scores(i);
    score = i / 4 * 8 + i % 2 >= queries ? fill : score;
  }
}

// The last of the blocks of kTileN keys, from the last key to the first, that a forward may exponentiate unseen: every
// block from the one after it on is compared. Of rows from `row` on.
template <int kTileN>
CUTE_DEVICE int first_unseen_block(float slope, int row, int diagonal) {
  int const key = row + diagonal;  // the diagonal's first
  return slope < 0.0F || key < 0 ? -1 : key / kTileN - 1;
}

}  // namespace hattn
