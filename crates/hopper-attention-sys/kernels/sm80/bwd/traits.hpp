// Everything that a row of bwd.def fixes: types, tiles, and what a CTA asks of a multiprocessor.
#pragma once

#include <type_traits>

#include "common/around.hpp"
#include "common/copy.hpp"
#include "common/element.hpp"
#include "common/row.hpp"
#include "common/softmax.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"
#include "sm80/bwd/listed.hpp"

namespace hattn::sm80 {

// What the kernel keeps of a query: -LSE log2(e) + kLift, and -delta 2^-kLift.
//
// P comes out 2^kLift times too large: it is lifted (kLift below says why). dP and delta are divided by as much, so
// that dS = P (dP - delta) is right, and dV is divided at the end. A query without keys has -inf here, so that its P is
// zero.
struct alignas(8) Statistics {
  float minus_lse;
  float minus_delta;
};

template <int kLift>
struct LiftedStatistics : Statistics {
  CUTE_DEVICE static LiftedStatistics of(float lse, float d_lse, float delta, float, bool, float) {
    constexpr float kDrop = 1.0F / (1 << kLift);
    if (lse == -INFINITY) {
      return {{-INFINITY, 0.0F}};
    }
    return {{fmaf(-lse, kLog2E, static_cast<float>(kLift)), (d_lse - delta) * kDrop}};
  }

  // P of a pair, from the product of Q and K, or from what modifiers make of it.
  CUTE_DEVICE float weight(float s, float scale_log2, bool) const {
    return exp2_approx(fmaf(s, scale_log2, this->minus_lse - static_cast<float>(kLift)));
  }
  CUTE_DEVICE float negative_delta() const { return this->minus_delta * static_cast<float>(1 << kLift); }
  // Whether the LSE is -inf (or inf): no weights.
  CUTE_DEVICE bool is_empty() const { return this->minus_lse == -INFINITY; }
  CUTE_DEVICE bool has_nan_lse() const { return isnan(this->minus_lse); }
  CUTE_DEVICE bool has_nan() const { return has_nan_lse() || isnan(this->minus_delta); }
};

// Of a backward whose sequences have lengths that the device knows (common/sequences.hpp).
struct PackedBwdScalars : BwdScalars {
  SequenceTable table;
  int sum_blocks;  // of one head, that have sums of dQ
  // Rows of the statistics from a batch entry to the next, and from a head to the next.
  int statistics_rows_apart;
  std::int64_t statistics_rows;
};

template <class Traits>
PackedBwdScalars packed_bwd_scalars(BwdParams const& params) noexcept {
  PackedBwdScalars scalars{};
  static_cast<BwdScalars&>(scalars) = bwd_scalars<Traits>(params);
  scalars.table = {params.sequences.table, params.batch};
  scalars.tile_counter = params.ordered ? &scalars.table.header()->counter : nullptr;
  scalars.sum_blocks = params.sequences.sum_blocks;
  scalars.statistics_rows_apart = statistics_rows_apart(params);
  scalars.statistics_rows = statistics_rows(params);
  return scalars;
}

// kPacked: of a row's kernel for such sequences.
template <DType kDType, MaskClass kMask, int kHeadDimQK, int kHeadDimVO, int kTileM, int kTileN, int kStages,
          bool kPacked = false>
struct BwdTraits : RowTraits<Arch::Sm80, kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages> {
  using Element = typename ElementOf<kDType>::type;
  // Whether lists in memory say which blocks a tile visits (listed.hpp).
  static constexpr bool kIsListed = kMask == MaskClass::Blocks;
  // What does not depend on the mask is taken of these. (Lists are a mask of which it depends.)
  static constexpr MaskClass kUnmasked = kIsListed ? MaskClass::Blocks : MaskClass::Full;
  using Unmasked = BwdTraits<kDType, kUnmasked, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, kPacked>;
  using Plain = BwdTraits;
  static constexpr Modifiers kModifiers = Modifiers::Either;
  CUTE_HOST_DEVICE static bool modifies_scores(BwdParams const& params) { return has_modifiers(params); }
  CUTE_DEVICE static int start_distance(BwdParams const&, int, int, int, int, int) { return 0; }

  // Whether this is that kernel, whether the row has it, and its traits.
  static constexpr bool kIsPacked = kPacked;
  static constexpr bool kPacks = !kIsListed;
  using Packed = BwdTraits<kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, true>;
  // The row of class Window that fits every GPU has a kernel more, for an additive bias and for dropout with any mask,
  // and one more for such sequences. That of class Blocks has the first. (At head dim 64 a warp has twice the keys, and
  // no registers for it.)
  static constexpr bool kMayTakeBias = kTileM == 32 && kHeadDimQK == 128;
  static constexpr bool kTakesBias = kMayTakeBias && (kMask == MaskClass::Window || kIsListed);
  static constexpr bool kTakesDropout = kTakesBias;
  static constexpr int kBiasAtATime = 2;  // columns of a bias that are read at a time
  using Scalars = std::conditional_t<kPacked, PackedBwdScalars, BwdScalars>;
  using TileRecord = std::conditional_t<kPacked, PackedTile, Tile>;

  // How far P is lifted, in powers of two, where it is an operand of dV and where the second warp of the pair reads it.
  // f16 holds nothing below 2^-24, and a key that no query weighs much has gradients, too. P is 1 at most, and f16
  // holds 4 times 2^14.
  static constexpr int kLift = kDType == DType::F16 ? 14 : 0;
  static constexpr float kDrop = 1.0F / (1 << kLift);
  using Statistics = LiftedStatistics<kLift>;
  static_assert(kHeadDimQK == kHeadDimVO, "both warps of a pair have the same products");
  static_assert(kHeadDimQK == 64 || kHeadDimQK == 128, "tiles are made of slabs");
  static_assert(kStages == 2, "a block of queries is loaded while the other is used");

  // A pair of warps has as many keys as dV, or dK, of them fills half of a warp's registers, in strips of 16. The
  // scores of them with a chunk of queries fill a quarter.
  static constexpr int kStrips = 256 / kHeadDimQK;
  static constexpr int kKeys = 16 * kStrips;
  static constexpr int kChunk = kTileM < 128 / kStrips ? kTileM : 128 / kStrips;
  static constexpr int kChunks = kTileM / kChunk;
  static constexpr int kPairs = kTileN / kKeys;
  static constexpr int kWarps = 2 * kPairs;
  static constexpr int kThreads = 32 * kWarps;
  // A multiprocessor's registers, 65536, are eight warps with 255 for each thread.
  static constexpr int kCtas = 8 / kWarps;
  static_assert(kTileN % kKeys == 0 && 8 % kWarps == 0, "four or eight warps");
  static_assert(kTileM % kChunk == 0 && kChunk % 16 == 0);

  // Whether the second warp of a pair gets P in f32, not as rounded for dV. It lies where dS then lies: a row there has
  // room for 32 queries of it, so that a chunk of 64 goes in two parts, of half of the keys. At head dim 64 a pair
  // hands over twice as much for as many products, and shared memory is what limits it: f32 took 5 to 11% longer.
  static constexpr bool kHandsF32 = kHeadDimQK == 128;
  static constexpr int kParts = kHandsF32 ? kTileM / 32 : 1;
  static_assert(!kHandsF32 || (kChunks == 1 && kParts <= 2), "a part is some strips of keys");
  static constexpr int kBarriersOfPair = kHandsF32 ? 3 : 2;

  // dQ of a block: a warp has 32 queries and some columns.
  static constexpr int kWarpsQueries = kTileM / 32;
  static constexpr int kColumnsQ = kHeadDimQK / (kWarps / kWarpsQueries);
  static constexpr int kValuesQ = kColumnsQ;  // of a lane
  static constexpr int kElementsQ = kTileM * kHeadDimQK;
  static_assert(kTileM % 32 == 0 && kWarps % kWarpsQueries == 0 && kColumnsQ % 16 == 0, "16 bytes a lane");

  // Where a mask hides a pair's keys from a whole chunk, the pair passes over it. With several chunks a block that cost
  // more than it saved (benches/LOG.md, 21).
  static constexpr bool kSkipsHidden = kMask != MaskClass::Full && !kIsListed && kChunks == 1;

  // Every tile adds to sums that begin as zeros. Ordered: the progress of a block counts the warps that have added to
  // it, and begins with the warps of the tiles before the first that visits it.
  static constexpr bool kAddsToZeros = true;
  static constexpr bool kWritesQueries = false;
  static constexpr bool kTakesShares = false;
  static constexpr bool kOverlaps = false;
  CUTE_DEVICE static int fresh(bool ordered, int first_tile) { return ordered ? kWarps * first_tile : 0; }

  // What a thread has of a block's sums, as the thread of the kernel had it.
  struct ThreadSums {
    static constexpr int kThreads = BwdTraits::kThreads;
    static constexpr int kStrips = 2;
    static constexpr int kWidth = kColumnsQ;
    float values[kValuesQ];

    CUTE_DEVICE static int row() { return static_cast<int>(threadIdx.x) / 32 % kWarpsQueries * 32; }
    CUTE_DEVICE static int column() { return static_cast<int>(threadIdx.x) / 32 / kWarpsQueries * kColumnsQ; }
    CUTE_DEVICE static int offset(int thread) { return thread / 32 * (32 * kValuesQ) + thread % 32; }
    CUTE_DEVICE void load(float const* sums, std::int64_t block) {
      CUTE_UNROLL
      for (int i = 0; i < kValuesQ; ++i) {
        values[i] = sums[block * kElementsQ + offset(static_cast<int>(threadIdx.x)) + 32 * i];
      }
    }
    CUTE_DEVICE float2 pair(int strip, int i, int j) const {
      int const at = strip * (kValuesQ / 2) + 8 * i + 2 * j;
      return {values[at], values[at + 1]};
    }
  };

  // With one chunk a block ptxas runs out of registers: what is needed once a block waits in shared memory, and this
  // thread's index in the CTA is read anew at each call, so that what follows from it does not stay in registers. With
  // several chunks, each profits from what the one before made. Kernels that pack have more to keep: which of them
  // spill with what was found by trying.
  static constexpr bool kRegistersShort = kChunks == 1 || kIsListed || (kPacked && kHeadDimQK == 128);
  // The block whose dQ is still to be made waits there, too.
  static constexpr bool kStoresBlock = kIsListed || (kPacked && (kHeadDimQK == 128 || kMask != MaskClass::Window));
  CUTE_DEVICE static int thread_index() { return hattn::thread_index<kRegistersShort>(); }

  // dS lies as keys by queries, in slabs of 64 queries whatever the block has.
  static constexpr int kSlabsS = slabs(kTileM);
  // What the other kernel reads from constants or keeps in registers.
  struct OfPacked {
    Band band;     // the tile's
    int block[2];  // the block of sums that belongs to each stage
  };
  struct Nothing {};
  struct SharedStorage {
    alignas(128) Element k[kTileN * kHeadDimQK];
    alignas(128) Element v[kTileN * kHeadDimVO];
    alignas(128) Element q[kStages][kTileM * kHeadDimQK];
    alignas(128) Element d_o[kStages][kTileM * kHeadDimVO];
    alignas(128) Element d_s[2][kTileN * kSlabsS * kSlabColumns];
    alignas(128) sm80::Statistics statistics[kStages][kTileM];
    TileRecord tile;
    QueryVisits visits;  // of that tile
    int visit[2];        // whose block of queries is in each stage
    int head[2];
    int drawn;  // the tile's place in the list
    std::conditional_t<kPacked, OfPacked, Nothing> packed;
    std::conditional_t<kIsListed, StagedSteps, Nothing> staged;

    // The block of sums that belongs to each stage (kStoresBlock).
    CUTE_DEVICE int (&sums())[2] {
      if constexpr (kIsListed) {
        return staged.block;
      } else {
        return packed.block;
      }
    }
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 166912, "more shared memory than a CTA can have on compute capability 8.0");
};

}  // namespace hattn::sm80
