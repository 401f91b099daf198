// The warpgroup that draws dropout's numbers (common/dropout.hpp), for the consumers of a backward.
//
// A consumer that drew its own would do nothing else meanwhile: between the scores of a block and their dP it has no
// product in flight. Here the numbers of a block are drawn while the blocks before it are computed.
//
// Warp 0 of the producers says in block[] which block a stage is for. Its numbers go to where the block's dS goes
// later, as bits of the pairs that stay. So they wait until dQ of the block that had the stage before has read its dS:
// the consumers report that. Each warp's bits lie in its own rows of dS, which it overwrites itself.
#pragma once

#include "common/dropout.hpp"
#include "common/softcap.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

// Of the words of a call: whether the pairs of their halves stay. In each half of the result, bit 12 + i is of word i.
CUTE_DEVICE std::uint32_t kept_halves(uint4 const& words, int dropped) {
  std::uint32_t const limits = dropout_limits(dropped);
  std::uint32_t kept = 0;
  for (std::uint32_t const word : {words.x, words.y, words.z, words.w}) {
    kept = kept >> 1 | (((word & 0x7fff7fffU) + limits) & 0x80008000U);  // (kept_of says how.)
  }
  return kept;
}

// A word of the bits, as a consumer lane reads it.
struct DrawnBits {
  std::uint32_t word;

  CUTE_DEVICE static DrawnBits read(std::uint32_t from) {
    DrawnBits bits;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits.word) : "r"(from) : "memory");
    return bits;
  }

  // Of pair k of the word: all bits of a half that stays, none of one that is dropped.
  CUTE_DEVICE std::uint32_t mask(int k) const {
    std::uint32_t kept;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(kept) : "r"(word << (15 - k)));
    return kept;
  }
  // Whether neighbour c of that pair stays.
  CUTE_DEVICE bool keeps(int k, int c) const { return (word >> (16 * c + k) & 1) != 0; }
};

template <class Traits>
struct BwdDraw {
  using Storage = typename Traits::SharedStorage;
  static_assert(Traits::kTileN == 128, "a warp draws for 32 keys, which are those of two consumer warps");

  // Where a consumer lane's first word of a block is: `row` is its warp's first key in the tile. A word has the bits of
  // 64 queries: of the pair of neighbouring queries whose packed weights are number k of these, bits k and 16 + k. The
  // next word is 128 bytes further on.
  CUTE_DEVICE static std::uint32_t place(Storage& storage, int stage, int row, int lane) {
    return cute::cast_smem_ptr_to_uint(storage.d_s[stage]) + row * kSlabRowBytes + lane * 4;
  }

  // Little is kept from one call to the next: 24 registers must do.
  CUTE_DEVICE static void run(BwdParams const& params, Storage& storage) {
    RingPosition<Traits::kStages> ring;
    CUTE_NO_UNROLL
    for (;; ring.advance()) {
      storage.drawing.wanted[ring.stage].wait(ring.parity);
      if (storage.drawing.block[ring.stage].n_block < 0) {
        break;
      }
      // Of a lane of the warp with the first 16 keys, and of the same lane of the other one.
      std::uint32_t bits[2] = {0, 0};
      CUTE_NO_UNROLL
      for (int begin = 0; begin < Traits::kTileM; begin += 16) {
        // The call for query `begin` or its neighbour, of each of the lane's pairs of columns.
        // (Nothing that both calls need is computed once.)
        auto const call = [&](std::uint32_t before, int neighbour) __attribute__((always_inline)) {
          DrawnBlock const block = read(storage.drawing.block[ring.stage]);
          int const thread = own_thread(before);
          auto const head = DropoutOfHead::of(params.dropout, block.head);
          return kept_halves(head.words(block.n_block * (Traits::kTileN / 4) + thread / 32 * 8 + thread % 32 / 4,
                                        (block.m_block * Traits::kTileM + begin) / 2 + thread % 4 * 2 + neighbour),
                             params.dropout.dropped);
        };
        std::uint32_t const first = call(bits[0], 0);
        std::uint32_t const second = call(first, 1);
        CUTE_UNROLL
        for (std::uint32_t const half : {0x5410U, 0x7632U}) {  // queries 8 apart
          std::uint32_t const pairs = __byte_perm(first, second, half);
          bits[0] = bits[0] >> 2 | (pairs << 2 & 0xc000c000U);
          bits[1] = bits[1] >> 2 | (pairs & 0xc000c000U);
        }
        if (begin % 64 == 48) {
          int const thread = own_thread(bits[0]);
          std::uint32_t const to = place(storage, ring.stage, thread / 32 * 32, thread % 32) + begin / 64 * 128;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(bits[0]) : "memory");
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + 16 * kSlabRowBytes), "r"(bits[1]) : "memory");
        }
      }
      share_deltas(storage, ring);
      __syncwarp();
      if (cute::elect_one_sync()) {
        storage.drawing.full[ring.stage].arrive();
      }
    }
  }

  // Where -delta of a block's queries is, behind the words of the warp.
  CUTE_DEVICE static std::uint32_t place_of_deltas(Storage& storage, int stage, int row) {
    return place(storage, stage, row, 0) + 128 * (Traits::kTileM / 64);
  }

 private:
  // Leaves -delta of each query as one number for both consumer warps, which would put its three terms together in each
  // lane.
  CUTE_DEVICE static void share_deltas(Storage& storage, RingPosition<Traits::kStages> const& ring) {
    static_assert(Traits::kTileM == 64, "two queries a lane");
    storage.q_full[ring.stage].wait(ring.parity);
    int const thread = thread_index_anew() % 128;
    auto const* const queries = &storage.statistics[ring.stage][thread % 32 * 2];
    std::uint32_t const to = place_of_deltas(storage, ring.stage, thread / 32 * 32) + thread % 32 * 8;
    float const first = queries[0].negative_delta();
    float const second = queries[1].negative_delta();
    CUTE_UNROLL
    for (int warp = 0; warp < 2; ++warp) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + warp * 16 * kSlabRowBytes), "f"(first), "f"(second)
                   : "memory");
    }
  }

  // The thread's index in the warpgroup, once a value is there: what follows from it is not to be kept.
  CUTE_DEVICE static int own_thread(std::uint32_t value) {
    return static_cast<int>(after(value, static_cast<std::uint32_t>(thread_index_anew()))) & 127;
  }

  // Read at each call.
  CUTE_DEVICE static DrawnBlock read(DrawnBlock const& from) {
    DrawnBlock block;
    asm volatile(
        "{\n"
        ".reg .b32 unused;\n"
        "ld.shared.v4.b32 {%0, %1, %2, unused}, [%3];\n"
        "}\n"
        : "=r"(block.m_block), "=r"(block.n_block), "=r"(block.head)
        : "r"(cute::cast_smem_ptr_to_uint(&from))
        : "memory");
    return block;
  }
};

}  // namespace hattn::sm90
