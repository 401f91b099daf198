// One warp's scores of one key block, computed again from shared memory with mma.sync (see sm90/fwd/recompute.hpp).
#pragma once

#include "common/matrices.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/fp8/weights.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Recompute {
  // `q` is the warpgroup's first row, `k` the block. The index of a row's 16-byte chunk is xor-ed with bits of the
  // row's: three of them in rows of 128 bytes, two of every other row's in rows of 64.
  template <class Tensor, class Element>
  CUTE_DEVICE static void scores(Tensor& scores, Element const* q, Element const* k) {
    constexpr int kRowBytes = Traits::kHeadDimQK;
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    int const q_row = thread / 32 * 16 + lane % 16;
    auto const swizzle = [](int row) { return kRowBytes == 128 ? row % 8 : row / 2 % 4; };
    std::uint32_t const q_address =
        cute::cast_smem_ptr_to_uint(q) + q_row * kRowBytes + (lane / 16 ^ swizzle(lane % 16)) * 16;
    std::uint32_t const k_address =
        cute::cast_smem_ptr_to_uint(k) + lane % 8 * kRowBytes + (lane / 8 % 2 ^ swizzle(lane % 8)) * 16;
    clear(scores);
    auto& pairs = recast<std::uint32_t>(scores);
    // Where registers are short a few columns at a time: ptxas begins all products of a round before it ends one.
    constexpr int kColumns = Traits::kTileN / (Traits::kParts == 1 ? 8 : 64);
    CUTE_UNROLL
    for (int first = 0; first < Traits::kTileN / 8; first += kColumns) {
      CUTE_NO_UNROLL
      for (int bytes = 0; bytes < kRowBytes; bytes += 32) {
        std::uint32_t a[4];
        load_matrices(q_address ^ bytes, a);
        CUTE_UNROLL
        for (int i = first; i < first + kColumns; ++i) {
          std::uint32_t b[2];
          load_matrices((k_address ^ bytes) + i * (8 * kRowBytes), b);
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
        }
      }
    }
    // The copy engine may write the K buffer next: these reads come before.
    fence_proxy_async();
  }
};

}  // namespace hattn::sm90
