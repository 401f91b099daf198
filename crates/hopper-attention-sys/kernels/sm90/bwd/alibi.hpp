// ALiBi alone (common/alibi.hpp) in the backward, at next to no cost.
//
// Before the diagonal the bias of a pair falls apart:
//
//     -slope (i + diagonal - j) = -slope (i - i0) + slope (j - j0) - slope (i0 + diagonal - j0)
//
// Here i0 is the block's first query, and j0 a key of the thread. The first term depends on the query alone: S begins
// with it (Statistics). The other two depend on the key. Keys are rows, of which a thread has two. So they are one
// addend a row, and what brought a score to powers of two was a multiplication: now it is a multiply-add.
//
// Behind the diagonal all terms have the other sign. There twice the first term is added to each score, and what
// remains is of the row again. In a block on the diagonal the pairs behind it get their difference one by one.
//
// The terms are larger than the bias, and so are their errors. So this is for slopes of at most 2 in powers of two: the
// query's term is below 254 then, and cut off at 24 bits. Other slopes are added score by score. In either case S
// begins with -LSE: where it is in the thousands, as of queries that are far from all keys, its own last bits count, as
// they do without ALiBi.
#pragma once

#include "common/alibi.hpp"

namespace hattn::sm90 {

// slope_log2: of a head, in powers of two.
CUTE_DEVICE bool alibi_falls_apart_by_query(float slope_log2) { return fabsf(slope_log2) <= 2.0F; }

CUTE_DEVICE float alibi_slope_log2(TensorDesc const& slopes, int batch, int head) {
  return kLog2E * __ldg(reinterpret_cast<float const*>(slopes.address) + batch * slopes.stride_batch +
                        head * slopes.stride_head);
}

// Brings transposed scores that began with the first term to what they lack of ALiBi but `addends`, in powers of two,
// of the thread's rows. `first`: how far a warpgroup's first key is before the diagonal of the block's first query.
// The thread's first element is `key` keys and `query` queries on, and element (c, r, i) 8 r and 8 i + c more.
// `slope()` is alibi_slope.
template <int kQueries, int kKeys, class Scores, class Slope>
CUTE_DEVICE void finish_alibi(Scores& scores, float slope_log2, int first, int key, int query, Slope const& slope,
                              float (&addends)[2]) {
  if (!alibi_falls_apart_by_query(slope_log2)) {
    addends[0] = addends[1] = 0.0F;
    add_alibi<kQueries>(scores, slope(), key - query - first);
    return;
  }
  if (first <= 1 - kQueries) {
    // All pairs are behind the diagonal.
    addends[0] = slope_log2 * static_cast<float>(2 * query + first - key);
    addends[1] = fmaf(-8.0F, slope_log2, addends[0]);
    float const twice = 2.0F * slope();
    CUTE_UNROLL
    for (int i = 0; i < scores.size(); ++i) {
      scores(i) = fmaf(static_cast<float>(i / 4 * 8 + i % 2), twice, scores(i));
    }
    return;
  }
  addends[0] = slope_log2 * static_cast<float>(key - first);
  addends[1] = fmaf(8.0F, slope_log2, addends[0]);
  if (first < kKeys - 1) {
    // Some are.
    float const behind[2] = {static_cast<float>(key - query - first), static_cast<float>(key - query - first + 8)};
    float const twice = -2.0F * slope();
    CUTE_UNROLL
    for (int i = 0; i < scores.size(); ++i) {
      scores(i) = fmaf(fmaxf(behind[i / 2 % 2] - static_cast<float>(i / 4 * 8 + i % 2), 0.0F), twice, scores(i));
    }
  }
}

}  // namespace hattn::sm90
