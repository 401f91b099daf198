// The end of a tile, as one consumer warpgroup sees it: O / row_sum in the output type into this warpgroup's rows of
// the dead Q buffer (the store itself is the producer's), and the log-sum-exp straight to memory.
#pragma once

#include "common/mask.hpp"
#include "common/softmax.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Epilogue {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;

  // Stores four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
  CUTE_DEVICE static void store_matrices(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                         std::uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
  }

  // Without a branch, so that the two rows' long chains of dependent instructions run side by side.
  CUTE_DEVICE static void store_if(bool condition, float* address, float value) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.f32 [%0], %1;}" ::"l"(address), "f"(value),
                 "r"(static_cast<int>(condition))
                 : "memory");
  }

  // Writes the tile's log-sum-exp and gives what its O must be multiplied by.
  CUTE_DEVICE static void finish_rows(KernelParams const& params, Storage const& storage, int buffer, int consumer,
                                      float const (&reference)[2], float const (&sums)[2], float (&inverse)[2]) {
    Tile const tile = storage.tile[buffer];
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    int const first_query = tile.m_block * Traits::kTileM + consumer * 64 + (thread / 32 % 4) * 16 + lane / 4;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const sum = sums[r];
      bool const empty = sum == 0.0F;  // no key at all: O = 0, LSE = -inf; a NaN stays one
      inverse[r] = empty ? 0.0F : reciprocal_approx(sum);
      int const query = first_query + 8 * r;
      constexpr float kLn2 = 0.693147180559945309F;
      float const lse = empty ? -INFINITY : (reference[r] + log2_approx(sum)) * kLn2;
      store_if(params.lse != nullptr && lane % 4 == 0 && query < params.seqlen_q,
               params.lse + tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head + query, lse);
    }
  }

  // Hands O, multiplied by `inverse`, to the storing warp.
  template <class Output>
  CUTE_DEVICE static void stage_output(Storage& storage, int buffer, int consumer, Output const& output,
                                       float const (&inverse)[2]) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    int const row = consumer * 64 + (thread / 32 % 4) * 16;

    // Rows are 128 bytes, swizzled: the 16-byte chunk index is xor-ed with the row's low three bits.
    Element* const staging = storage.q[buffer];
    int const matrix_row = row + lane % 16;
    int const matrix_chunk = lane / 16;
    std::uint32_t const address = cute::cast_smem_ptr_to_uint(staging) + matrix_row * 128;
    CUTE_UNROLL
    for (int i = 0; i < Traits::kHeadDimVO / 16; ++i) {
      std::uint32_t packed[4];
      CUTE_UNROLL
      for (int j = 0; j < 4; ++j) {
        int const at = 8 * i + 2 * j;
        packed[j] = pack_pair<Element>(output(at) * inverse[j % 2], output(at + 1) * inverse[j % 2]);
      }
      int const slab = i / 4;
      int const chunk = (i % 4) * 2 + matrix_chunk;
      store_matrices(address + slab * (Traits::kTileM * 128) + ((chunk ^ (matrix_row % 8)) * 16), packed[0], packed[1],
                     packed[2], packed[3]);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      storage.o_full[buffer][consumer].arrive();
    }
  }
};

}  // namespace hattn::sm90
