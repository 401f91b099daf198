// The backward with ALiBi (common/alibi.hpp) and no other modifier. Before the diagonal no instruction of a score is
// added.
//
// There the bias of a pair is a sum of three terms:
//
//     -slope (i + diagonal - j) = -slope (i - i0) + slope (j - j0) - slope (i0 + diagonal - j0)
//
// Here i0 is the block's first query, and j0 the warpgroup's first key. S begins with the first term, which depends on
// the query alone, and with -LSE (Statistics in traits.hpp). Where all keys are far from the block, their least
// distance moves from the last term to the first (alibi_gap): so S is small there, although the LSE is large. The other
// two depend on the key. Keys are the rows of S^T, of which a thread has two. So they are one addend for each of the
// two rows. Before the exponential a score is multiplied by scale * log2(e): that multiplication becomes a
// multiply-add.
//
// Behind the diagonal all three terms have the other sign. S holds the first one already. So twice that term is
// subtracted: what is the same for the thread's whole row in the addend, the rest from each score. In a block on the
// diagonal each pair behind it gets its difference.
//
// The terms are larger than the bias, and so are their errors. So this is for heads with |slope * log2(e)| <= 2. But
// for the least distance, the query's term is below 254 in powers of two then, and has 24 bits. Of other heads the bias
// is added score by score. S begins with -LSE alone then, whose last bits count where it is in the thousands.
#pragma once

#include <cute/numeric/math.hpp>

#include "common/alibi.hpp"

namespace hattn::sm90 {

// slope_log2: a head's slope times log2(e).
CUTE_DEVICE bool alibi_falls_apart_by_query(float slope_log2) { return fabsf(slope_log2) <= 2.0F; }

CUTE_DEVICE float alibi_slope_log2(TensorDesc const& slopes, int batch, int head) {
  return kLog2E * slope_of_head(slopes, batch, head);
}

// How far all positions of a block of queries are from the nearest key, or 0. `first`: the position of the first query
// (diagonal included). It goes into the first term, so that S is small where the LSE is large.
template <int kQueries>
CUTE_DEVICE int alibi_gap(int first, int keys) {
  return cute::max(0, cute::max(first - (keys - 1), -(first + kQueries - 1)));
}

// Completes the bias in a block of S^T. `scores`, in the unit of a product q k, get what differs from score to score.
// `addends`, in powers of two, are what is the same for a row of the thread: the caller computes
// exp2(score * scale_log2 + addend).
//
// `first`: the position of the block's first query (i0 + diagonal) less the warpgroup's first key (j0). Element (c, r,
// i) of the thread is key `key + 8 r` of the warpgroup, and query `query + 8 i + c` of the block. `slope()` is
// alibi_slope.
// `gap`: alibi_gap of the block.
template <int kQueries, int kKeys, class Scores, class Slope>
CUTE_DEVICE void finish_alibi(Scores& scores, float slope_log2, int first, int key, int query, int gap,
                              Slope const& slope, float (&addends)[2]) {
  if (!alibi_falls_apart_by_query(slope_log2)) {
    addends[0] = addends[1] = 0.0F;
    add_alibi<kQueries>(scores, slope(), key - query - first);
    return;
  }
  if (first <= 1 - kQueries) {
    // All pairs are behind the diagonal.
    addends[0] = slope_log2 * static_cast<float>(2 * query + first - key + gap);
    addends[1] = fmaf(-8.0F, slope_log2, addends[0]);
    float const twice = 2.0F * slope();
    CUTE_UNROLL
    for (int i = 0; i < scores.size(); ++i) {
      scores(i) = fmaf(static_cast<float>(i / 4 * 8 + i % 2), twice, scores(i));
    }
    return;
  }
  addends[0] = slope_log2 * static_cast<float>(key - first + gap);
  addends[1] = fmaf(8.0F, slope_log2, addends[0]);
  if (first < kKeys - 1) {
    // Some pairs are.
    float const behind[2] = {static_cast<float>(key - query - first), static_cast<float>(key - query - first + 8)};
    float const twice = -2.0F * slope();
    CUTE_UNROLL
    for (int i = 0; i < scores.size(); ++i) {
      scores(i) = fmaf(fmaxf(behind[i / 2 % 2] - static_cast<float>(i / 4 * 8 + i % 2), 0.0F), twice, scores(i));
    }
  }
}

}  // namespace hattn::sm90
