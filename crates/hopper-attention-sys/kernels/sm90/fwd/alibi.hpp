// ALiBi (common/alibi.hpp) in blocks that the forward exponentiates unseen: one instruction a score in place of two.
//
// Of a block before the diagonal the bias falls apart: minus slope times the distance of the block's first key, which
// is the same for all keys of a row and may be part of the row's reference, and plus slope times the key's place in the
// block. That makes one instruction a score. The two parts are larger than the bias, and so are their errors: this is
// for slopes of at most 2 in powers of two, and for blocks that are exponentiated next.
#pragma once

#include "common/alibi.hpp"

namespace hattn::sm90 {

CUTE_DEVICE bool alibi_falls_apart(float slope, float scale_log2) {
  return slope * scale_log2 <= 2.0F && slope <= 0x1p100F;
}
// The part of the keys. Element (c, r, i) is key 8 i + c.
template <int kColumns, class Scores>
CUTE_DEVICE void add_alibi_of_keys(Scores& scores, float slope) {
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 2; ++i) {
    float& score = scores(i);
    score = fmaf(static_cast<float>(i / 4 * 8 + i % 2), slope, score);
  }
}
// The part of the rows, brought into the references. `distance`: of the first row to the first key.
CUTE_DEVICE void add_alibi_of_rows(float (&references)[2], float slope_log2, int distance) {
  references[0] = fmaf(static_cast<float>(distance), slope_log2, references[0]);
  references[1] = fmaf(static_cast<float>(distance + 8), slope_log2, references[1]);
}

}  // namespace hattn::sm90
