// Everything that a row of fwd.def fixes: types, tiles, register budget and the shared-memory plan.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <type_traits>

#include "common/barrier.hpp"
#include "common/copied_bias.hpp"
#include "common/max_logits.hpp"
#include "common/row.hpp"
#include "common/slab.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"
#include "sm90/element.hpp"
#include "sm90/fwd/alibi.hpp"
#include "sm90/listed.hpp"
#include "sm90/table.hpp"
#include "sm90/wgmma.hpp"

namespace hattn::sm90 {

// Positions in a ring of buffers whose blocks go to two warpgroups in turn. The number of buffers is odd, so that a
// buffer goes from one warpgroup to the other at each use.
//
// A full barrier tells only whether its last phase was of this parity. So each warpgroup has full barriers of its own,
// one a buffer, and sees each of their phases. At a barrier of both, a warpgroup that is ahead could take the phase
// before, of the other's block, for its own.
//
// Of the lane that loads: `way` is whose block is next.
template <int kStages>
struct InTurn : RingPosition<kStages> {
  int way = 0;

  CUTE_DEVICE void advance() {
    RingPosition<kStages>::advance();
    way ^= 1;
  }
};

// Of a warpgroup: its blocks are every second.
template <int kStages>
struct EverySecond {
  std::uint32_t first = 0;
  std::uint32_t stage = 0;
  std::uint32_t parity = 0;

  CUTE_DEVICE void begin(int way) { first = stage = way; }

  CUTE_DEVICE void advance() {
    stage += stage + 2 < kStages ? 2 : 2 - kStages;
    parity ^= stage == first ? 1 : 0;
  }
};

// kPacked: of a row's kernel for sequences whose lengths the device knows (common/sequences.hpp). kModified: of a row
// for modified scores (fwd.def). The cap as a branch of all kernels it made tiles of 512 keys 5 to 8% slower, since the
// code no longer fitted the instruction cache.
template <DType kDType, MaskClass kMask, int kHeadDimQK, int kHeadDimVO, int kTileM, int kTileN, int kStages,
          bool kPacked = false, bool kModified = false>
struct FwdTraits : RowTraits<Arch::Sm90, kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages> {
  using Element = typename ElementOf<kDType>::type;

  // A consumer warpgroup has 64 rows of the tile; one more warpgroup feeds them. A tile of 64 rows has two warpgroups,
  // which share its keys: each visits every second block (shares.hpp).
  static constexpr int kWays = kTileM == 64 ? 2 : 1;
  static constexpr int kConsumers = kTileM / 64 * kWays;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(kTileM % 64 == 0 && kConsumers >= 2 && kConsumers <= 3, "two or three consumer warpgroups");
  static_assert(kTileN % 16 == 0 && kTileN >= 64 && kTileN <= 256, "the edge of a mask lies in two blocks at most");
  // Whether lists in memory say which blocks a tile visits (listed.hpp).
  static constexpr bool kIsListed = kMask == MaskClass::Blocks;
  static_assert(!kIsListed || (kTileM == kListedBlock && kListedBlock % kTileN == 0), "the lists are of such blocks");
  static_assert(kWays == 1 || kStages % 2 == 1, "every buffer goes from one warpgroup to the other");

  // All tiles of a row are slabs of so many columns (common/slab.hpp). A product reads whole slabs of V, so that a head
  // dim of 96 takes slabs of 32.
  static constexpr int kSlabColumns = kHeadDimQK % 64 == 0 && kHeadDimVO % 64 == 0 ? 64 : 32;
  static constexpr int kSlabRowBytes = kSlabColumns * sizeof(Element);
  static_assert(kHeadDimQK % kSlabColumns == 0 && kHeadDimVO % kSlabColumns == 0, "tiles are made of slabs");

  // Whether this is a kernel that rotates heads, and whether the row has such kernels (rotation.hpp).
  static constexpr bool kRotates = false;
  static constexpr bool kMayRotate = kHeadDimQK == 96 && !kModified;

  // Above head dim 128 two buffers of Q would leave too little for K and V. There is one. Consumers hand it back after
  // a tile's last scores, and write O to memory themselves. Elsewhere O goes over its own Q, and warp 1 stores it.
  static constexpr bool kWritesOutput = kHeadDimQK > 128 || kHeadDimVO > 128;
  static_assert(kWritesOutput || kHeadDimVO <= kHeadDimQK, "O is staged in the buffer of Q");
  // The next tile's scores beside all of O take more registers than there are: they wait until O is written.
  static constexpr bool kScoresWait = kHeadDimVO > 192;

  // Q of a tile is asked for when the O of the tile this many before has left the buffer. Tiles of one or two small key
  // blocks would wait for that store and this load in a row: they get a third buffer. Elsewhere it costs more than it
  // brings (benches/LOG.md, 8 and 9).
  // Small key blocks are for few keys: a tile has little work, and the loads and stores of several must be under way.
  // Where CTAs share tiles, a CTA has one tile.
  static constexpr int kBuffersQ = kWays == 2 || kWritesOutput           ? 1
                                   : kTileN <= 80                        ? 4
                                   : kConsumers == 2 && kHeadDimQK == 64 ? 3
                                                                         : 2;
  // Records of tiles. With one buffer of Q: of the tile that is computed, the next, whose Q is loaded as soon as it
  // may, and one whose O may not be written yet.
  static constexpr int kRecords = kWritesOutput ? 3 : kBuffersQ;

  // 65536 registers: 512 a lane position over the warpgroups, in steps of 8.
  static constexpr int kProducerRegisters = kConsumers == 2 ? (kPacked || kWritesOutput || kIsListed ? 40 : 24) : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? (kPacked || kWritesOutput || kIsListed ? 232 : 240) : 160;
  // A CTA is never granted more registers than it was launched with.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));

  // Whether capped scores are looked at (common/softcap.hpp). Above head dim 128 there are no registers for it, and a
  // block's products leave time for the special functions. Nor are there with a window above head dim 64.
  static constexpr bool kLooksForNear = !kWritesOutput && !(kMask == MaskClass::Window && kHeadDimQK > 64);
  // Scores that are capped at a time.
  static constexpr int kCapsAtATime = kScoresWait ? 4 : 8;

  // Whether this kernel's CTAs share tiles, and the most CTAs that may share one. A row has a second kernel for that
  // (shares.hpp). 8 is the largest cluster that a kernel may have without asking for more.
  static constexpr bool kShares = kWays == 2;
  static constexpr int kMostShares = kModified || kIsListed                               ? 1
                                     : kWays == 2                                         ? 4
                                     : kConsumers == 2 && kTileN == 128 && !kWritesOutput ? 8
                                                                                          : 1;

  // Whether that kernel also takes launches in which each CTA has one tile of its own: it has nothing that a next tile
  // asks for.
  static constexpr bool kTakesSingleTiles = kWays == 1 && kMostShares > 1;

  // Whether this is that kernel, whether the row has it, and its traits.
  static constexpr bool kIsPacked = kPacked;
  static constexpr bool kPacks = kWays == 1 && (kTileN == 128 || kWritesOutput) && !kIsListed;
  static constexpr Modifiers kModifiers = kModified ? Modifiers::Always : Modifiers::Never;
  // Two edges and dropout take more registers than there are above head dim 128, and of packed sequences above 64.
  static constexpr bool kTakesDropout =
      kModified && (kMask != MaskClass::Window || (!kWritesOutput && !(kPacked && kHeadDimQK > 64)));
  static constexpr bool kDrops = kTakesDropout;
  // Reading the bias takes most of the time, whatever the mask and the head dim. So few kernels do it, with any mask.
  static constexpr bool kTakesBias =
      kModified && (kMask == MaskClass::Window || kIsListed) && kHeadDimQK % 64 == 0 && kHeadDimQK != 192;
  // Whether the bias of a block may be copied ahead (common/copied_bias.hpp), and who does it. Consumers copy that of
  // their own queries. With lists they have no registers for it, and warps 2 and 3 of the producers do it. Above head
  // dim 128 too little shared memory is left for it.
  static constexpr bool kCopiesBias = kTakesBias && kHeadDimQK <= 128;
  static constexpr bool kProducersCopyBias = kCopiesBias && kIsListed;
  static_assert(!kProducersCopyBias || (kConsumers == 2 && kStages % 2 == 0),
                "a warp each, and the parity of a stage (mma.hpp)");
  // Columns of a bias that are read at a time, of eight each.
  static constexpr int kBiasAtATime = kHeadDimQK > 128 ? 1 : kHeadDimQK > 64 ? 4 : 8;
  static_assert(!kModified || kWays == 1, "tiles of modified scores are not shared");
  // Whether the row has a kernel for ALiBi alone (AlibiTraits), whether these are its traits, and whether it computes a
  // problem.
  static constexpr bool kMayBeAlibi = kModified && !kIsListed && (kHeadDimQK == 64 || kHeadDimQK == 128);
  static constexpr bool kIsAlibi = false;
  static bool is_alibi(FwdParams const& params) {
    return kMayBeAlibi && has_alibi_alone(params) && params.max_logits.address == 0;
  }
  // Above head dim 192 tiles leave little shared memory for it, and at 128 with the bias of a block beside them.
  static constexpr int kTableBytes = !kPacked                                          ? 0
                                     : kScoresWait || (kCopiesBias && kHeadDimQK > 64) ? 1024
                                                                                       : kMostTableBytes;
  using Packed = FwdTraits<kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages, true, kModified>;
  using Scalars =
      std::conditional_t<kPacked, PackedFwdScalars, std::conditional_t<kIsListed, ListedFwdScalars, FwdScalars>>;
  using TileRecord = std::conditional_t<kPacked, PackedTile, std::conditional_t<kIsListed, ListedTile, Tile>>;
  using Scheduler = std::conditional_t<kPacked, PackedScheduler, FwdScheduler>;
  using TileBand = std::conditional_t<kPacked, Band, Band const&>;  // the launch's, or a copy that changes by tile

  // Full barriers of a ring, and from those of a warpgroup to those of the next (EverySecond).
  static constexpr int kFullsApart = kWays == 2 ? kStages : 0;
  static constexpr int kFulls = kWays * kStages;
  // Positions in the rings of K and V: of the loading lane, and of a consumer.
  using LoadPosition = std::conditional_t<kWays == 2, InTurn<kStages>, RingPosition<kStages>>;
  using Position = std::conditional_t<kWays == 2, EverySecond<kStages>, RingPosition<kStages>>;

  // From the rows of a consumer to those of the next.
  static constexpr int kRowsApart = kWays == 2 ? 0 : 64;

  // This thread's index in the CTA. Three consumers are short of registers.
  CUTE_DEVICE static int thread_index() { return hattn::thread_index<(kConsumers == 3 || kModified)>(); }

  using MmaQK = Wgmma<Element, float, kTileN>;
  using MmaPV = Wgmma<Element, float, kHeadDimVO>;
  // What adds ALiBi's part of the keys (AlibiOperands).
  using MmaPlaces = Wgmma<cutlass::bfloat16_t, float, kTileN>;
  using Places = typename AlibiOperands<kTileN, kRecords>::Places;
  using SmemQ = SmemOperand<KMajorTile<Element, kTileM, kHeadDimQK, kSlabRowBytes>>;
  using SmemK = SmemOperand<KMajorTile<Element, kTileN, kHeadDimQK, kSlabRowBytes>>;
  using SmemV = SmemOperand<MnMajorTile<Element, kTileN, kHeadDimVO, kHeadDimVO, kSlabRowBytes>>;

  static constexpr int kElementsQ = kTileM * kHeadDimQK;
  static constexpr int kElementsK = kTileN * kHeadDimQK;
  static constexpr int kElementsV = kTileN * kHeadDimVO;
  static constexpr std::uint32_t kBytesQ = kElementsQ * sizeof(Element);
  static constexpr std::uint32_t kBytesK = kElementsK * sizeof(Element);
  static constexpr std::uint32_t kBytesV = kElementsV * sizeof(Element);

  struct OneBuffer {
    Mbarrier q_empty;
  };
  struct Nothing {};
  // Of rows for modified scores.
  struct OfModifiers {
    float slope[kRecords];                  // of ALiBi, of each tile (common/alibi.hpp)
    LargestScores largest[4 * kConsumers];  // of each warp (common/max_logits.hpp)
  };
  // Of the kernel that adds a bias: that of each warp's queries and the keys of its next block.
  using WarpBias = CopiedBias<kCopiesBias ? kTileN : kSlabColumns>;
  struct OfBias {
    // Where a bias is copied, the operands of the row's kernel for ALiBi alone lie here: it has no bias.
    union {
      alignas(128) char rows[4 * kConsumers][WarpBias::kBytes];
      AlibiOperands<kTileN, kRecords> alibi;
    };
  };
  struct OfProducedBias : OfBias {
    Mbarrier full[kConsumers];
    Mbarrier empty[kConsumers];
  };
  // Elsewhere. (Other memory follows: memcheck takes the places, which a product reads twice, for twice as many.)
  struct OfAlibi {
    AlibiOperands<kTileN, kRecords> alibi;
  };
  struct NoAlibi {};  // (a base of its own type, so that it takes no memory)
  struct SharedStorage : TableStorage<kTableBytes>,
                         std::conditional_t<kMayBeAlibi && !kCopiesBias, OfAlibi, NoAlibi>,
                         std::conditional_t<kWritesOutput, OneBuffer, Nothing>,
                         EntryStorage<kIsListed ? kStages : 0, kIsListed ? kTileN : kListedBlock> {
    alignas(1024) Element q[kBuffersQ][kElementsQ];  // Q of this tile and of the next ones; O goes over its dead Q
    alignas(1024) Element k[kStages][kElementsK];
    alignas(1024) Element v[kStages][kElementsV];
    std::conditional_t<kProducersCopyBias, OfProducedBias, std::conditional_t<kCopiesBias, OfBias, Nothing>> bias;
    TileRecord tile[kRecords];  // whose Q is in each buffer; batch < 0: there is none, and none will come
    Mbarrier tile_full[kRecords];
    Mbarrier next_wanted;
    Mbarrier q_full[kRecords];
    Mbarrier o_full[kBuffersQ][kConsumers];
    Mbarrier k_full[kFulls];
    Mbarrier k_empty[kStages];
    Mbarrier v_full[kFulls];
    Mbarrier v_empty[kStages];
    std::conditional_t<kModified, OfModifiers, Nothing> modifiers;

    CUTE_DEVICE auto& alibi_operands() {
      if constexpr (kCopiesBias) {
        return bias.alibi;
      } else {
        return OfAlibi::alibi;
      }
    }
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 232448, "more shared memory than a CTA can have on sm_90");
};

// Of a row's kernel for ALiBi alone (alibi.hpp).
template <class Traits>
struct AlibiTraits : Traits {
  static_assert(Traits::kMayBeAlibi);
  static constexpr bool kDrops = false;
  static constexpr bool kIsAlibi = true;
};

// Of a row's kernel for problems with an additive bias. With lists there are no registers for dropout beside it.
template <class Traits>
struct ListedBiasTraits : BiasTraits<Traits> {
  static constexpr bool kDrops = false;
};
template <class Traits>
using BiasTraitsOf = std::conditional_t<Traits::kIsListed, ListedBiasTraits<Traits>, BiasTraits<Traits>>;

}  // namespace hattn::sm90
