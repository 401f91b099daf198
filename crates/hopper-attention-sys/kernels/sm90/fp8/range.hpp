// Whether scores fit f16: the check of all elements of Q and K in a row with scores in f16.
//
// Scores fit if no element of Q and K is larger than 14 in magnitude, and none is a NaN: then no sum of products leaves
// f16. Warp 1 checks each tile's Q in the shared memory of the CTA that has loaded it. It checks each block of K in one
// of the CTAs that load it. So all elements are checked about once. Each CTA reports in its word of the workspace
// (RangeCheck, kernels.hpp): not 0 where it has found an element that is too large.
//
// The fallback row, with scores in f32, is launched behind this one and reads those words. Where one is not 0, all that
// was written counts for nothing, and the fallback row computes everything again. Else its CTAs return at once.
#pragma once

#include "common/shared.hpp"
#include "common/visits.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Range {
  using Element = typename Traits::Element;
  static constexpr bool kLooks = Traits::kScores == Scores::F16;

  // Whether this launch has anything to do. A fallback row waits here for the row before it. Nothing may be written
  // before.
  CUTE_DEVICE static bool is_wanted(Fp8KernelParams const& params) {
    if constexpr (kLooks) {
      // The fallback row's CTAs may start where CTAs of this row have ended, and wait there for the others.
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    } else if (params.range_check != nullptr) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      std::uint32_t found = 0;
      for (int i = static_cast<int>(threadIdx.x); i < params.range_grid; i += Traits::kThreads) {
        found |= __ldcg(words(params) + i);
      }
      if (__syncthreads_or(static_cast<int>(found)) == 0) {
        if (params.amax != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
          *params.amax = __ldcg(&params.range_check->amax);
        }
        return false;
      }
    }
    return true;
  }

  // Decides which of the blocks of K that this tile visits are checked with it. None, unless the tile's query head is
  // the first one that reads the key head. Where all tiles visit all blocks (no mask): every `period`-th one, from the
  // tile's number on. Else: those that the tile before does not visit. (From one tile to the next, neither end of the
  // visited blocks moves back. So every visited block is checked.)
  CUTE_DEVICE void enter_tile(Fp8KernelParams const& params, Band const& band,
                              typename Traits::Scheduler const& scheduler, typename Traits::TileRecord const& tile) {
    if constexpr (kLooks) {
      bool const first = static_cast<unsigned>(tile.head) % static_cast<unsigned>(params.heads_per_kv_head) == 0;
      if constexpr (Traits::kMask == MaskClass::Full) {
        period = scheduler.blocks;
        own = first ? static_cast<unsigned>(tile.block) : period;
      } else {
        int before = 0;  // one more than the largest block that the tile before visits
        if (tile.block != 0) {
          auto const visits = KeyVisits::of<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, tile.block - 1);
          before = visits.block(visits.first()) + 1;
        }
        own = first ? before : 0x7fffffffU;
      }
    }
  }

  // By a whole warp. Checks block n of K, if it is one that is checked with this tile.
  CUTE_DEVICE void look_at_keys(Element const* keys, int n) {
    if constexpr (kLooks) {
      bool const looks =
          Traits::kMask == MaskClass::Full ? static_cast<unsigned>(n) % period == own : n >= static_cast<int>(own);
      if (looks) {
        look<Traits::kBytesK>(keys);
      }
    }
  }
  // By a whole warp. Waits for the tile's Q and checks it.
  CUTE_DEVICE void look_at_queries(Mbarrier& full, std::uint32_t parity, Element const* queries) {
    if constexpr (kLooks) {
      full.wait(parity);
      look<Traits::kBytesQ>(queries);
    }
  }

  // By a whole warp, once: writes the CTA's word. CTA 0 also zeroes the fallback row's counter of tiles.
  CUTE_DEVICE void report(Fp8KernelParams const& params) const {
    if constexpr (kLooks) {
      std::uint32_t const all = __reduce_or_sync(0xffffffffU, found);
      if (cute::elect_one_sync()) {
        __stcg(words(params) + blockIdx.x, all & 0x80808080U);
        if (blockIdx.x == 0) {
          params.range_check->tile_counter_behind = 0;
        }
      }
    }
  }

 private:
  CUTE_DEVICE static std::uint32_t* words(Fp8KernelParams const& params) {
    return reinterpret_cast<std::uint32_t*>(params.range_check + 1);
  }

  unsigned period = 1;      // no mask: tiles of a head
  unsigned own = 0;         // no mask: of each period, the block to check. Else the first block to check
  std::uint32_t found = 0;  // not 0 in the upper bit of some byte: an element beyond 14 was found

  // Codes without the sign are in the order of magnitudes. 0x56 is the code of 14. Adding 0x80 - 0x57 carries into the
  // byte's upper bit where the code is larger.
  template <int kBytes>
  CUTE_DEVICE void look(Element const* elements) {
    constexpr int kBatch = 4;
    static_assert(kBytes % (512 * kBatch) == 0);
    std::uint32_t address = cute::cast_smem_ptr_to_uint(elements) + threadIdx.x % 32 * 16;
    CUTE_NO_UNROLL
    for (int i = 0; i < kBytes; i += 512 * kBatch) {
      uint4 pieces[kBatch];
      CUTE_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        pieces[j] = load_chunk(address + i + 512 * j);
      }
      CUTE_UNROLL
      for (uint4 const& piece : pieces) {
        for (std::uint32_t const word : {piece.x, piece.y, piece.z, piece.w}) {
          found |= (word & 0x7f7f7f7fU) + (0x80U - 0x57U) * 0x01010101U;
        }
      }
    }
    __syncwarp();
  }
};

}  // namespace hattn::sm90
