// Everything that a row of fwd.def fixes: types, tiles, register budget and the shared-memory plan.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "common/barrier.hpp"
#include "common/row.hpp"
#include "common/slab.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"
#include "sm90/element.hpp"
#include "sm90/wgmma.hpp"

namespace hattn::sm90 {

template <DType kDType, MaskClass kMask, int kHeadDimQK, int kHeadDimVO, int kTileM, int kTileN, int kStages>
struct FwdTraits : RowTraits<Arch::Sm90, kDType, kMask, kHeadDimQK, kHeadDimVO, kTileM, kTileN, kStages> {
  using Element = typename ElementOf<kDType>::type;

  // A consumer warpgroup owns 64 rows of the tile; one more warpgroup feeds them.
  static constexpr int kConsumers = kTileM / 64;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(kTileM % 64 == 0 && kConsumers >= 2 && kConsumers <= 3, "two or three consumer warpgroups");
  static_assert(kTileM - 64 <= kTileN, "a warpgroup skips at most one block at either end of a tile");
  static_assert(kTileN % 16 == 0 && kTileN >= 64 && kTileN <= 256, "the edge of a mask lies in two blocks at most");
  static_assert(kHeadDimQK % kSlabColumns == 0 && kHeadDimVO % kSlabColumns == 0, "tiles are made of slabs");
  static_assert(kHeadDimVO <= kHeadDimQK, "O is staged in the buffer of Q");

  // Q of a tile is asked for when the O of the tile this many before has left the buffer. Tiles of one or two small key
  // blocks would wait for that store and this load in a row: they get a third buffer. Elsewhere it costs more than it
  // brings (benches/LOG.md, 8 and 9).
  // Small key blocks are for few keys: a tile has little work, and the loads and stores of several must be under way.
  static constexpr int kBuffersQ = kTileN < 128 ? 4 : kConsumers == 2 && kHeadDimQK == 64 ? 3 : 2;

  // 65536 registers: 512 a lane position over the warpgroups, in steps of 8.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;
  // A CTA is never granted more registers than it was launched with.
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= 65536 / kThreads / 8 * 8 * (kConsumers + 1));

  // Whether this kernel's CTAs share tiles, and the most CTAs that may share one. A row has a second kernel for that
  // (shares.hpp). 8 is the largest cluster that every GPU can start.
  static constexpr bool kShares = false;
  static constexpr int kMostShares = kConsumers == 2 && kTileN == 128 ? 8 : 1;

  // This thread's index in the CTA. Three consumers are short of registers.
  CUTE_DEVICE static int thread_index() { return hattn::thread_index<kConsumers == 3>(); }

  using MmaQK = Wgmma<Element, float, kTileN>;
  using MmaPV = Wgmma<Element, float, kHeadDimVO>;
  using SmemQ = SmemOperand<KMajorTile<Element, kTileM, kHeadDimQK>>;
  using SmemK = SmemOperand<KMajorTile<Element, kTileN, kHeadDimQK>>;
  using SmemV = SmemOperand<MnMajorTile<Element, kTileN, kHeadDimVO>>;

  static constexpr int kElementsQ = kTileM * kHeadDimQK;
  static constexpr int kElementsK = kTileN * kHeadDimQK;
  static constexpr int kElementsV = kTileN * kHeadDimVO;
  static constexpr std::uint32_t kBytesQ = kElementsQ * sizeof(Element);
  static constexpr std::uint32_t kBytesK = kElementsK * sizeof(Element);
  static constexpr std::uint32_t kBytesV = kElementsV * sizeof(Element);

  struct SharedStorage {
    alignas(1024) Element q[kBuffersQ][kElementsQ];  // Q of this tile and of the next ones; O goes over its dead Q
    alignas(1024) Element k[kStages][kElementsK];
    alignas(1024) Element v[kStages][kElementsV];
    Tile tile[kBuffersQ];  // whose Q is in each buffer; batch < 0: there is none, and none will come
    Mbarrier tile_full[kBuffersQ];
    Mbarrier next_wanted;
    Mbarrier q_full[kBuffersQ];
    Mbarrier o_full[kBuffersQ][kConsumers];
    Mbarrier k_full[kStages];
    Mbarrier k_empty[kStages];
    Mbarrier v_full[kStages];
    Mbarrier v_empty[kStages];
  };
  static constexpr int kSmemBytes = sizeof(SharedStorage);
  static_assert(kSmemBytes <= 232448, "more shared memory than a CTA can have on sm_90");
};

// Of the second kernel of a row, in which the CTAs of a cluster share a tile.
template <class Traits>
struct SharedTraits : Traits {
  static constexpr bool kShares = true;
};

}  // namespace hattn::sm90
