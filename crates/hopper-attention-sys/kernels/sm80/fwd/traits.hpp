// Everything that a row of fwd.def fixes: types, tiles, and what a CTA asks of a multiprocessor.
#pragma once

#include <type_traits>

#include "common/element.hpp"
#include "common/row.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"
#include "sm80/copy.hpp"

namespace hattn::sm80 {

// kPacked: of a row's kernel for sequences whose lengths the device knows (common/sequences.hpp).
template <DType kDType, MaskClass kMask, int kHeadDimQK, int kHeadDimVO, int kTileM, int kTileN, int kStages,
          bool kPacked = false>
struct FwdTraits : RowTraits<Arch::Sm80, kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages> {
  using Element = typename ElementOf<kDType>::type;

  // Whether this is that kernel, whether the row has it, and its traits.
  static constexpr bool kIsPacked = kPacked;
  static constexpr bool kPacks = true;
  using Packed = FwdTraits<kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, true>;
  using Scalars = std::conditional_t<kPacked, PackedFwdScalars, FwdScalars>;
  using TileRecord = std::conditional_t<kPacked, PackedTile, Tile>;
  using Scheduler = std::conditional_t<kPacked, PackedScheduler, FwdScheduler>;

  // A warp has 32 rows, as two strips of 16: what it reads of K and V serves both. With one strip, shared memory is read
  // as long as the products take. But beside O of more than 128 columns there are no registers for a second strip.
  static constexpr int kStrips = kHeadDimVO <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kStrips;
  static constexpr int kThreads = kTileM / kWarpRows * 32;
  // A multiprocessor's registers, 65536, are eight warps with 255 for each thread: two CTAs of four, or one of eight.
  static constexpr int kCtas = 65536 / 256 / kThreads;
  static_assert(kTileM % kWarpRows == 0 && (kThreads == 128 || kThreads == 256), "eight warps a multiprocessor");
  static_assert(kTileN % 16 == 0 && kTileN >= kWarpRows, "the edge of a mask lies in two blocks of a warp at most");
  static_assert(kHeadDimQK % kSlabColumns == 0 && kHeadDimVO % kSlabColumns == 0, "tiles are made of slabs");
  static_assert(kStages == 1 || kStages == 2, "a stage is loaded while the other is used");

  // A thread's registers of O, of the scores and of the operand Q.
  static constexpr int kBigRegisters = kStrips * (kHeadDimVO / 2 + kTileN / 2 + kHeadDimQK / 4);
  // Where there are so many, Q is read from shared memory once.
  static constexpr bool kQueriesInRegisters = kBigRegisters <= 208;
  // Elsewhere registers are short: what is needed once a block waits in shared memory or is computed anew.
  static constexpr bool kRegistersShort = kBigRegisters > 176;

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
  struct SharedStorage {
    alignas(128) Element q[kTileM * kHeadDimQK];
    alignas(128) Element k[kStages][kTileN * kHeadDimQK];
    alignas(128) Element v[kStages][kTileN * kHeadDimVO];
    TileRecord tile;
    KeyVisits own[kThreads / 32];  // the visits that each warp's rows need
    std::uint64_t k_head;          // where the tile's head of K and V begins
    std::uint64_t v_head;
    std::conditional_t<kPacked, OfPacked, Nothing> packed;
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 101376, "more shared memory than a CTA can have on compute capability 8.6 and 8.9");
};

}  // namespace hattn::sm80
