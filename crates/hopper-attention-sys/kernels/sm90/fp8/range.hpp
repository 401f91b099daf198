// Whether scores fit f16: the check that rows with such scores make of all that they read of Q and K, and what the row
// with scores in f32, which is launched behind them, does with it.
//
// No element of Q and K that is larger than 14 in magnitude, no NaN: then no sum of products leaves f16. Each tile's Q
// is looked at in shared memory by the CTA that has loaded it, and each block of K by one of those that load it, so
// that all is looked at about once. A CTA leaves a sign in the workspace that it has found what is too large, or has
// not: where one has, what was written counts for nothing, and the row that follows computes all of it again; else its
// CTAs return at once.
#pragma once

#include "common/visits.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Range {
  using Element = typename Traits::Element;
  static constexpr bool kLooks = Traits::kScores == Scores::F16;

  // Whether this launch has anything to do; what it writes must wait until this is known.
  CUTE_DEVICE static bool is_wanted(Fp8KernelParams const& params) {
    if constexpr (kLooks) {
      // The row that follows may take the places of CTAs that have ended, to wait there for the others.
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    } else if (params.range_check != nullptr) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      std::uint32_t found = 0;
      for (int i = static_cast<int>(threadIdx.x); i < params.range_grid; i += Traits::kThreads) {
        found |= __ldcg(signs(params) + i);
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

  // Which blocks of K are this tile's to look at: of a head's first query head, by turns where all tiles visit all
  // blocks, and else those that the tile before does not visit. (Neither end of what tiles visit ever falls from one to
  // the next, so that what nobody looks at nobody visits.)
  CUTE_DEVICE void enter_tile(Fp8KernelParams const& params, Band const& band, Fp8Scheduler const& scheduler,
                              Tile const& tile) {
    if constexpr (kLooks) {
      bool const first = static_cast<unsigned>(tile.head) % static_cast<unsigned>(params.heads_per_kv_head) == 0;
      if constexpr (Traits::kMask == MaskClass::Full) {
        turns = scheduler.blocks;
        own = first ? static_cast<unsigned>(tile.block) : turns;
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

  // By a whole warp.
  CUTE_DEVICE void look_at_keys(Element const* keys, int n) {
    if constexpr (kLooks) {
      bool const looks =
          Traits::kMask == MaskClass::Full ? static_cast<unsigned>(n) % turns == own : n >= static_cast<int>(own);
      if (looks) {
        look<Traits::kBytesK>(keys);
      }
    }
  }
  CUTE_DEVICE void look_at_queries(Mbarrier& full, std::uint32_t parity, Element const* queries) {
    if constexpr (kLooks) {
      full.wait(parity);
      look<Traits::kBytesQ>(queries);
    }
  }

  CUTE_DEVICE void report(Fp8KernelParams const& params) const {
    if constexpr (kLooks) {
      std::uint32_t const all = __reduce_or_sync(0xffffffffU, found);
      if (cute::elect_one_sync()) {
        __stcg(signs(params) + blockIdx.x, all & 0x80808080U);
        if (blockIdx.x == 0) {
          params.range_check->tile_counter_behind = 0;
        }
      }
    }
  }

 private:
  CUTE_DEVICE static std::uint32_t* signs(Fp8KernelParams const& params) {
    return reinterpret_cast<std::uint32_t*>(params.range_check + 1);
  }

  unsigned turns = 1;
  unsigned own = 0;
  std::uint32_t found = 0;  // the upper bit of any byte: an element beyond 14

  // A magnitude is its code without the sign, and 0x56 that of 14: what is larger carries into the upper bit.
  template <int kBytes>
  CUTE_DEVICE void look(Element const* elements) {
    constexpr int kBatch = 4;
    static_assert(kBytes % (512 * kBatch) == 0);
    std::uint32_t address = cute::cast_smem_ptr_to_uint(elements) + threadIdx.x % 32 * 16;
    CUTE_NO_UNROLL
    for (int i = 0; i < kBytes; i += 512 * kBatch) {
      std::uint32_t words[4 * kBatch];
      CUTE_UNROLL
      for (int j = 0; j < kBatch; ++j) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[4 * j]), "=r"(words[4 * j + 1]), "=r"(words[4 * j + 2]), "=r"(words[4 * j + 3])
                     : "r"(address + i + 512 * j)
                     : "memory");
      }
      CUTE_UNROLL
      for (std::uint32_t const word : words) {
        found |= (word & 0x7f7f7f7fU) + (0x80U - 0x57U) * 0x01010101U;
      }
    }
    __syncwarp();
  }
};

}  // namespace hattn::sm90
