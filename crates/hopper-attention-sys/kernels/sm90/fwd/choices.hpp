// What the consumer warpgroups of a row do in one way or another (mma.hpp), by its traits.
#pragma once

#include "common/alibi.hpp"
#include "common/mask.hpp"
#include "kernels.hpp"

namespace hattn::sm90 {

template <class Traits>
struct MmaChoices {
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr bool kModified = Traits::kModifiers == Modifiers::Always;
  static constexpr bool kAddsBias = Traits::kAddsBias;
  static constexpr bool kIsListed = Traits::kIsListed;

  static constexpr int kShort = 8;  // blocks of a short tile
  // Whether the bias of a block is copied ahead, and by whom.
  static constexpr bool kCopiesBias = kAddsBias && Traits::kCopiesBias;
  static constexpr bool kProducersCopyBias = kAddsBias && Traits::kProducersCopyBias;
  static constexpr bool kConsumersCopyBias = kCopiesBias && !kProducersCopyBias;
  // Whether the warpgroup's number is read anew behind a tile's first block: registers are short before it.
  static constexpr bool kRenews =
      kModified && ((kMask == MaskClass::Full && Traits::kHeadDimQK == 128) || (kIsListed && kAddsBias) ||
                    (kMask == MaskClass::Window && Traits::kHeadDimQK <= 128 && !Traits::kIsPacked));
  // Whether the band of a packed tile is worked out where it is needed, for the same reason.
  static constexpr bool kReadsBand = kAddsBias && Traits::kIsPacked;
  // Whether a warpgroup may pass over visits of its tile.
  static constexpr bool kSkips = kMask != MaskClass::Full && !kIsListed && Traits::kWays == 1;
  // The most visits that it passes over at a tile's end: as many as the left edge of a window takes from its rows to
  // the tile's first. It waits for the K of each of them before it gives back their V, which must not fill the ring.
  // The edge of chunks moves by whole chunks: there it visits the others, too, hidden as they are.
  static constexpr int kMostSkipped = (Traits::kTileM - 64 + Traits::kTileN - 1) / Traits::kTileN;
  static constexpr bool kSettlesEarly = kMask == MaskClass::Window && !kAddsBias;  // before blocks that are compared
  // Whether the code of a tile's first block stands once, at the top of the loop over tiles. A second tile waited for a
  // copy of it. In the other kernels the loop over blocks gets longer so, or registers spill (benches/LOG.md, 84).
  static constexpr bool kBeginsAtTop = kMask == MaskClass::Window && !kModified && !kAddsBias && !Traits::kIsPacked;
  // Two warpgroups keep the turn between two tiles until both products are issued. Three pass it on between the two:
  // each is faster so. Where blocks may be skipped, turns are passed in those too.
  static constexpr bool kKeepsTurn =
      (kMask == MaskClass::Full || kIsListed) && Traits::kConsumers == 2 && !Traits::kScoresWait;

  // Whether the maximum of a tile's first block is always looked at first.
  CUTE_DEVICE static bool is_compared(FwdParams const& params) { return kAddsBias || (kModified && has_alibi(params)); }
};

}  // namespace hattn::sm90
