// ALiBi (common/alibi.hpp) in blocks that the forward exponentiates unseen: one instruction a score in place of two, or
// none.
//
// Of a block before the diagonal the bias falls apart: minus slope times the distance of the block's first key, which
// is the same for all keys of a row and may be part of the row's reference, and plus slope times the key's place in the
// block. That makes one instruction a score. The two parts are larger than the bias, and so are their errors: this is
// for slopes of at most 2 in powers of two, and for blocks that are exponentiated next.
//
// Kernels for ALiBi alone (AlibiTraits) leave the second part to the tensor cores: a product of one k-step more, of the
// slope in three bf16 terms (24 bits) and of the keys' places, which bf16 holds exactly. The tensor cores cut off what
// does not fit beside the largest term. So places are counted from the block's last key, and are 0 or less: a key near
// the diagonal has a small term, and a key with a large term has a small weight.
#pragma once

#include <cutlass/bfloat16.h>

#include "common/alibi.hpp"
#include "sm90/wgmma.hpp"

namespace hattn::sm90 {

CUTE_DEVICE bool alibi_falls_apart(float slope, float scale_log2) {
  return slope * scale_log2 <= 2.0F && slope <= 0x1p100F;
}
// The part of the rows, brought into the references. `distance`: of the first row to the first key.
CUTE_DEVICE void add_alibi_of_rows(float (&references)[2], float slope, float scale_log2, int distance) {
  float const slope_log2 = alibi_falls_apart(slope, scale_log2) ? slope * scale_log2 : 0.0F;
  references[0] = fmaf(static_cast<float>(distance), slope_log2, references[0]);
  references[1] = fmaf(static_cast<float>(distance + 8), slope_log2, references[1]);
}
// Both parts, or the whole bias. Element (c, r, i) is key 8 i + c. `whole`: whether scores are looked at in between.
template <int kColumns, class Scores>
CUTE_DEVICE void add_alibi_unseen(Scores& scores, float slope, float scale_log2, int distance, bool whole,
                                  float (&references)[2]) {
  if (!alibi_falls_apart(slope, scale_log2) || whole) {
    add_alibi<kColumns>(scores, slope, distance);
    return;
  }
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 2; ++i) {
    scores(i) = fmaf(static_cast<float>(i / 4 * 8 + i % 2), slope, scores(i));
  }
  add_alibi_of_rows(references, slope, scale_log2, distance);
}

// The operands of the product that adds the part of the keys, in shared memory.
template <int kKeys, int kRecords>
struct AlibiOperands {
  static_assert(kKeys <= 256, "bf16 holds their places");
  // Of a key: its place three times, 0 or less, and zeros. The 16 columns of the product are these eight, twice over.
  alignas(128) cutlass::bfloat16_t places[kKeys][8];
  using Places = SmemOperand<UnswizzledBlocks<0, 8, kKeys>>;
  // Of a tile: the slope in three terms, and a zero. All zeros where it does not fall apart.
  std::uint32_t slope[kRecords][2];

  // One key. Another thread may read it by a product after a fence and a barrier.
  CUTE_DEVICE void write_place(int key) {
    CUTE_UNROLL
    for (int column = 0; column < 8; ++column) {
      places[key][column] = cutlass::bfloat16_t{column < 3 ? static_cast<float>(key - (kKeys - 1)) : 0.0F};
    }
  }
  CUTE_DEVICE void write_slope(int record, float of_tile, float scale_log2) {
    cutlass::bfloat16_t terms[4] = {};
    if (alibi_falls_apart(of_tile, scale_log2)) {
      float rest = of_tile;
      CUTE_UNROLL
      for (int i = 0; i < 3; ++i) {
        terms[i] = cutlass::bfloat16_t{rest};
        rest -= static_cast<float>(terms[i]);
      }
    }
    slope[record][0] = static_cast<std::uint32_t>(terms[1].raw()) << 16 | terms[0].raw();
    slope[record][1] = terms[2].raw();
  }
};

}  // namespace hattn::sm90
