// Scores computed again (sm90/recompute.hpp), of e4m3 operands.
#pragma once

#include "sm90/fp8/traits.hpp"
#include "sm90/fp8/weights.hpp"
#include "sm90/recompute.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Recompute {
  // `q` is the warpgroup's first row, `k` the block.
  template <class Tensor, class Element>
  CUTE_DEVICE static void scores(Tensor& scores, Element const* q, Element const* k) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    clear(scores);
    auto& pairs = recast<std::uint32_t>(scores);
    constexpr int kColumns = Traits::kTileN / (Traits::kParts == 1 ? 8 : 64);
    recompute_scores<Traits::kTileM, Traits::kTileN, Traits::kSlabQK, Traits::kHeadDimQK, kColumns>(
        q, k, thread / 32 * 16 + lane % 16, lane, [&](int i, std::uint32_t const(&a)[4], std::uint32_t const(&b)[2]) {
          // Where scores are of f16, sums are rounded to it after every 32 bytes, as by wgmma.
          float sums[4];
          if constexpr (Traits::kScores == Scores::F16) {
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
              sums[2 * r] = low_half(pairs(2 * i + r));
              sums[2 * r + 1] = high_half(pairs(2 * i + r));
            }
          } else {
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
              sums[j] = scores(4 * i + j);
            }
          }
          asm volatile(
              "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
              "{%0, %1, %2, %3};"
              : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
              : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
          if constexpr (Traits::kScores == Scores::F16) {
            CUTE_UNROLL
            for (int r = 0; r < 2; ++r) {
              pairs(2 * i + r) = half_pair(sums[2 * r], sums[2 * r + 1]);
            }
          } else {
            CUTE_UNROLL
            for (int j = 0; j < 4; ++j) {
              scores(4 * i + j) = sums[j];
            }
          }
        });
  }
};

}  // namespace hattn::sm90
