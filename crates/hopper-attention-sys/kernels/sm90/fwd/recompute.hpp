// One warp's scores of one key block, computed again from shared memory with mma.sync. The softmax needs them in the
// rare block whose exponents ran away; wgmma would take the whole warpgroup's agreement in every block.
#pragma once

#include "common/matrices.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Recompute {
  using Element = typename Traits::Element;

  // c += a b for a 16x16 (rows of Q) and 16x8 (keys as columns) fragment; c is laid out like 8 columns of an m64
  // accumulator.
  template <class Scores>
  CUTE_DEVICE static void multiply(Scores& scores, int at, std::uint32_t const (&a)[4], std::uint32_t b0,
                                   std::uint32_t b1) {
    if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(scores(at)), "+f"(scores(at + 1)), "+f"(scores(at + 2)), "+f"(scores(at + 3))
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(scores(at)), "+f"(scores(at + 1)), "+f"(scores(at + 2)), "+f"(scores(at + 3))
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  // `first_row` is the warpgroup's first row in the tile. Tiles are 64-column slabs of 128-byte rows, in which the
  // index of a 16-byte chunk is xor-ed with the row's low three bits (for both operands the lane's): so the chunks of a
  // row are its lane's first address with the chunk's own bits xor-ed in.
  template <class Scores>
  CUTE_DEVICE static void scores(Scores& scores, Element const* q, Element const* k, int first_row) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    std::uint32_t const q_address = cute::cast_smem_ptr_to_uint(q) +
                                    (first_row + (thread / 32 % 4) * 16 + lane % 16) * 128 +
                                    (((lane / 16) ^ (lane % 8)) * 16);
    std::uint32_t const k_address =
        cute::cast_smem_ptr_to_uint(k) + (lane % 8) * 128 + (((lane / 8 % 2) ^ (lane % 8)) * 16);
    clear(scores);
    CUTE_NO_UNROLL
    for (int step = 0; step < Traits::kHeadDimQK / 16; ++step) {
      int const slab = step / 4;
      int const chunk_bits = step % 4 * 32;
      std::uint32_t a[4];
      load_matrices((q_address ^ chunk_bits) + slab * (Traits::kTileM * 128), a);
      std::uint32_t const k_step = (k_address ^ chunk_bits) + slab * (Traits::kTileN * 128);
      CUTE_UNROLL
      for (int i = 0; i < Traits::kTileN / 8; ++i) {
        std::uint32_t b[2];
        load_matrices(k_step + i * (8 * 128), b);
        multiply(scores, 4 * i, a, b[0], b[1]);
      }
    }
    // The copy engine may write the K buffer next: these reads come before.
    fence_proxy_async();
  }
};

}  // namespace hattn::sm90
