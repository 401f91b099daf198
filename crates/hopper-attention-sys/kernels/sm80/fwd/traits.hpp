// Everything that a row of fwd.def fixes: types, tiles, and what a CTA asks of a multiprocessor.
#pragma once

#include <cstddef>
#include <cute/arch/util.hpp>
#include <type_traits>

#include "common/copy.hpp"
#include "common/element.hpp"
#include "common/max_logits.hpp"
#include "common/row.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"
#include "sm80/fwd/listed.hpp"

namespace hattn::sm80 {

// kPacked: of a row's kernel for sequences whose lengths the device knows (common/sequences.hpp).
template <DType kDType, MaskClass kMask, int kHeadDimQK, int kHeadDimVO, int kTileM, int kTileN, int kStages,
          bool kPacked = false>
struct FwdTraits : RowTraits<Arch::Sm80, kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages> {
  using Element = typename ElementOf<kDType>::type;

  // Whether lists in memory say which blocks a tile visits (listed.hpp).
  static constexpr bool kIsListed = kMask == MaskClass::Blocks;
  // Whether this is that kernel, whether the row has it, and its traits.
  static constexpr bool kIsPacked = kPacked;
  static constexpr bool kPacks = !kIsListed;
  static constexpr Modifiers kModifiers = Modifiers::Either;
  using Packed = FwdTraits<kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, true>;
  // Rows of class Window with one strip a warp have a kernel more, for an additive bias and for dropout with any mask,
  // and one more for such sequences. Those of class Blocks have the first. The others have no registers for it.
  static constexpr bool kTakesDropout =
      (kMask == MaskClass::Window && (kTileM == 64 || (kHeadDimVO == 256 && kHeadDimQK == 256 && !kPacked))) ||
      (kIsListed && kTileM == 64);
  static constexpr bool kTakesBias = kTakesDropout;
  // Columns of a bias that are read at a time.
  static constexpr int kBiasAtATime = kHeadDimVO > 128 ? 1 : 4;
  using Scalars = std::conditional_t<kPacked, PackedFwdScalars, FwdScalars>;
  using TileRecord = std::conditional_t<kPacked, PackedTile, Tile>;
  using Scheduler = std::conditional_t<kPacked, PackedScheduler, FwdScheduler>;

  // A warp has 32 rows, as two strips of 16: what it reads of K and V serves both. With one strip, shared memory is
  // read as long as the products take. But beside O of more than 128 columns there are no registers for a second strip,
  // and tiles of 64 rows are for few tiles: there one strip a warp is the sooner done.
  static constexpr int kStrips = kHeadDimVO <= 128 && kTileM > 64 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kStrips;
  static constexpr int kThreads = kTileM / kWarpRows * 32;
  // A multiprocessor's registers, 65536, are eight warps with 255 for each thread: two CTAs of four, or one of eight.
  static constexpr int kCtas = 65536 / 256 / kThreads;
  static_assert(kTileM % kWarpRows == 0 && (kThreads == 128 || kThreads == 256), "eight warps a multiprocessor");
  static_assert(kTileN % 16 == 0 && kTileN >= kWarpRows, "the edge of a mask lies in two blocks of a warp at most");
  static_assert(kHeadDimQK % 32 == 0 && kHeadDimVO % 32 == 0,
                "tiles are made of slabs, the last of them may be half full");
  static_assert(kStages == 1 || kStages == 2, "a stage is loaded while the other is used");

  // A thread's registers of O and of the scores, and of the operand Q.
  static constexpr int kOwnRegisters = kStrips * (kHeadDimVO / 2 + kTileN / 2);
  static constexpr int kOfQueries = kStrips * (kHeadDimQK / 4);
  // Where they suffice, Q is read from shared memory once.
  static constexpr bool kQueriesInRegisters = kOwnRegisters + kOfQueries <= (kStrips == 2 ? 176 : 208);
  // Where few are left, what is needed once a block waits in shared memory or is computed anew.
  static constexpr bool kRegistersShort = kOwnRegisters + (kQueriesInRegisters ? kOfQueries : 0) > 176;

  // Where each warp has one strip, Q waits in the place of a stage until it is in registers. So two stages fit 99 KB.
  static constexpr bool kQueriesInStage = kQueriesInRegisters && kStrips == 1 && kHeadDimVO > 128 && kStages == 2;

  // This thread's index in the CTA. Where registers are short it is read anew at each call, so that what follows from
  // it does not stay in them.
  CUTE_DEVICE static int thread_index() { return hattn::thread_index<kRegistersShort>(); }

  // The buffer of a visit's keys and values. (Visits are numbered one after the other.)
  CUTE_DEVICE static int stage(int visit) { return visit & (kStages - 1); }

  // What the other kernel reads from constants or keeps in registers.
  struct OfPacked {
    Band band;  // the tile's
    KeyVisits visits;
  };
  struct Nothing {};
  static constexpr int kColumnsQK = slabs(kHeadDimQK) * kSlabColumns;
  static constexpr int kQueriesSize = kTileM * kColumnsQK;  // in elements
  static constexpr int kKeysSize = kTileN * kColumnsQK;
  static constexpr int kStageSize = kKeysSize + kTileN * slabs(kHeadDimVO) * kSlabColumns;
  struct Apart {
    alignas(128) Element q[kQueriesSize];
    alignas(128) Element k[kStages][kKeysSize];
    alignas(128) Element v[kStages][kStageSize - kKeysSize];
  };
  // One stage at each end: its K, then its V. Q lies beside the stage of the first visit, over the other one.
  //
  //     | stage 0 |       | stage 1 |
  //     | stage 0 | Q               |   first visit in stage 0
  //     | Q               | stage 1 |   first visit in stage 1
  struct Overlaid {
    static_assert(!kQueriesInStage || kQueriesSize >= kStageSize, "the stages lie apart");
    alignas(128) Element all[kQueriesSize + kStageSize];
  };
  struct SharedStorage {
    std::conditional_t<kQueriesInStage, Overlaid, Apart> operands;
    TileRecord tile;
    KeyVisits own[kThreads / 32];  // the visits that each warp's rows need
    std::uint64_t k_head;          // where the tile's head of K and V begins
    std::uint64_t v_head;
    float slope;                           // of ALiBi, of the tile (common/alibi.hpp)
    LargestScores largest[kThreads / 32];  // of each warp (common/max_logits.hpp)
    std::conditional_t<kPacked, OfPacked, Nothing> packed;
    std::conditional_t<kIsListed, ListedTile<kTileM, kTileN>, Nothing> listed;
  };

  // Where Q lies. `first`: the tile's first visit.
  CUTE_DEVICE static std::uint32_t queries_at(SharedStorage& storage, int first) {
    if constexpr (kQueriesInStage) {
      return cute::cast_smem_ptr_to_uint(storage.operands.all) + (1 - stage(first)) * (2 * kStageSize);
    } else {
      return cute::cast_smem_ptr_to_uint(storage.operands.q);
    }
  }
  // Where K and V of a visit lie.
  CUTE_DEVICE static std::uint32_t keys_at(SharedStorage& storage, int visit) {
    if constexpr (kQueriesInStage) {
      return cute::cast_smem_ptr_to_uint(storage.operands.all) + stage(visit) * (2 * kQueriesSize);
    } else {
      return cute::cast_smem_ptr_to_uint(storage.operands.k[stage(visit)]);
    }
  }
  CUTE_DEVICE static std::uint32_t values_at(SharedStorage& storage, int visit) {
    if constexpr (kQueriesInStage) {
      return keys_at(storage, visit) + 2 * kKeysSize;
    } else {
      return cute::cast_smem_ptr_to_uint(storage.operands.v[stage(visit)]);
    }
  }
  // How far K of a visit lies from the beginning of shared memory.
  CUTE_DEVICE static std::uint32_t keys_from_begin(int visit) {
    if constexpr (kQueriesInStage) {
      return stage(visit) * (2 * kQueriesSize);
    } else {
      return offsetof(Apart, k) + stage(visit) * sizeof(Apart::k[0]);
    }
  }

  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 101376, "more shared memory than a CTA can have on compute capability 8.6 and 8.9");
};

}  // namespace hattn::sm80
