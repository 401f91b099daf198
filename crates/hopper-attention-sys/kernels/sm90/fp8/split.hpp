// Splits the last tiles over all CTAs, so that the grid ends evenly (stream-K).
//
// Why. Only rows without a mask split, so all tiles take the same time. With 15.5 tiles for each CTA, half of the CTAs
// would idle in the last round.
//
// How. The last `split_tiles` tiles are laid end to end, as one run of key blocks. The run is cut into one segment for
// each CTA. All segments have the same number of units of kUnit blocks, or one more. Where a cut divides a tile, the
// tile has two pieces. It never has three, since no segment is shorter than a tile.
//
//     tiles     |      A      |      B      |      C      |
//     segments  |         0          |         1          |
//     pieces    |      A      |  B0  |  B1  |      C      |
//
// The run has a tile's blocks in the order in which a CTA visits them, from the last keys to the first. So the earlier
// piece (B0) has the tile's last keys, and the later piece (B1) its first keys.
//
// - The later piece comes first in its segment. Its CTA writes partial sums to the workspace: O, row sums, divisors
//   (sums of the rounded weights) and references (what stands for row maxima, softmax.hpp). Then it sets a flag.
// - The earlier piece comes last in its segment. Its CTA waits for the flag, adds the partial sums to its own and
//   writes O.
//
// CTAs draw segments from the last one to the first. So a CTA waits only for a CTA that has drawn before it. That CTA
// is running, so there is no deadlock.
//
// Workspace, from `tile_counter` on:
//
//     header        16 bytes, or range_check_bytes(grid) in a row with scores in f16; begins with the tile counter
//     flags         [grid][kWarps], 4 bytes each, zeroed by the launch: this warp has written its partial sums
//     partial sums  [grid][kFloats][kThreads], f32
#pragma once

#include "common/memory.hpp"
#include "common/softmax.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/fp8/shares.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/partial_sums.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Split {
  static constexpr int kThreads = 128 * Traits::kConsumers;  // of a CTA, those with sums
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kElements = Traits::kHeadDimVO / 2;  // of O, in one thread
  static constexpr int kFloats = kElements + 6;             // partial sums of one thread: O and three numbers a row
  static constexpr int kFlagBytes = 4 * kWarps;             // of one CTA
  // Workspace of one CTA, behind the header. 0: the row does not split.
  static constexpr int kBytes = Traits::kSplits ? kFlagBytes + 4 * kFloats * kThreads : 0;
  // Key blocks of a unit. A piece of fewer blocks would not hide the fetch of the next tile.
  static constexpr int kUnit = 4;

  // Units of one tile. The last unit may have fewer blocks.
  CUTE_HOST_DEVICE static constexpr int units_of(int seqlen_kv) {
    return (seqlen_kv + Traits::kTileN * kUnit - 1) / (Traits::kTileN * kUnit);
  }

  // Bytes of the workspace before the flags.
  CUTE_HOST_DEVICE static constexpr int header_bytes(int grid) {
    return static_cast<int>(Traits::kScores == Scores::F16 ? range_check_bytes(grid) : sizeof(RangeCheck));
  }

  // The next tile of this CTA. `round` is how many were drawn before. `piece` is set to what the CTA computes of the
  // tile. `segment` has what is left of the CTA's segment, and must begin with left = 0.
  CUTE_DEVICE static ListedTile next(ListedFp8KernelParams const& params, Fp8Scheduler const& scheduler, int round,
                                     Segment volatile&, Piece& piece) {
    ListedTile const tile = listed_tile(params.lists, scheduler.tile(scheduler.draw(round)));
    piece = Piece::of_list(tile);
    return tile;
  }
  CUTE_DEVICE static PackedTile next(PackedFp8KernelParams const&, PackedScheduler const& scheduler, int round,
                                     Segment volatile&, Piece& piece) {
    piece = {0, 0};
    return scheduler.tile(scheduler.draw(round));
  }
  CUTE_DEVICE static Tile next(Fp8KernelParams const& params, Fp8Scheduler const& scheduler, int round,
                               Segment volatile& segment, Piece& piece) {
    piece = {0, 0};
    if constexpr (Traits::kShares) {
      return scheduler.tile(Fp8Shares<Traits>::tile());
    }
    if (!Traits::kSplits || params.split_tiles == 0) {
      return scheduler.tile(scheduler.draw(round));
    }
    int const whole = scheduler.total() - params.split_tiles;  // tiles that are not split
    if (segment.left == 0) {
      int const index = scheduler.draw(round);
      if (index < whole) {
        return scheduler.tile(index);
      }
      int const number = static_cast<int>(gridDim.x) - 1 - (index - whole);  // of the segment, in the run
      if (number < 0) {
        return {0, 0, -1};
      }
      segment.slot = index - whole;
      segment.position = number * params.segment_units + cute::min(number, params.longer_segments);
      segment.left = params.segment_units + (number < params.longer_segments ? 1 : 0);
    }
    std::uint32_t const position = segment.position;
    std::uint32_t const left = segment.left;
    std::uint32_t const units = units_of(params.seqlen_kv);
    std::uint32_t const tile = position / units;
    std::uint32_t const first = position - tile * units;
    std::uint32_t const taken = cute::min(units - first, left);
    std::uint32_t const blocks = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN;
    if (first > 0) {
      piece = {static_cast<int>(first * kUnit - blocks), -1 - segment.slot};
    } else if (taken < units) {
      // The later piece is in the next segment, which was drawn just before: its slot is one less.
      piece = {static_cast<int>(blocks - taken * kUnit), segment.slot};
    }
    segment.position = position + taken;
    segment.left = left - taken;
    return scheduler.tile(whole + static_cast<int>(tile));
  }

  // Writes this thread's partial sums of a later piece to slot `slot`, and has the warp's flag set. `place` is the
  // thread's number among those with sums.
  template <class Output>
  CUTE_DEVICE static void write_partial(Fp8KernelParams const& params, int slot, int place, float const (&reference)[2],
                                        float const (&sums)[2], float const (&divisor)[2], Output const& output) {
    float* const to = partial_of(params, slot, place);
    CUTE_UNROLL
    for (int i = 0; i < kElements; ++i) {
      __stcg(to + i * kThreads, output(i));
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      __stcg(to + (kElements + r) * kThreads, reference[r]);
      __stcg(to + (kElements + 2 + r) * kThreads, sums[r]);
      __stcg(to + (kElements + 4 + r) * kThreads, divisor[r]);
    }
    __syncwarp();
    if (cute::elect_one_sync()) {
      set_flag(flag_of(params, slot, place));
    }
  }

  // Waits for the partial sums in slot `slot` and adds them to those of the earlier piece.
  template <class Output>
  CUTE_DEVICE static void add_partial(Fp8KernelParams const& params, int slot, int place, float (&reference)[2],
                                      float (&sums)[2], float (&divisor)[2], Output& output) {
    await_flag(flag_of(params, slot, place));
    float const* const from = partial_of(params, slot, place);
    auto const other = [&](int i) { return __ldcg(from + i * kThreads); };
    JointFactors factors[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      factors[r] = JointFactors::of(reference[r], other(kElements + r));
      sums[r] = factors[r].sum(sums[r], other(kElements + 2 + r));
      divisor[r] = factors[r].sum(divisor[r], other(kElements + 4 + r));
    }
    CUTE_UNROLL
    for (int i = 0; i < kElements; ++i) {
      // ptxas would begin with all the loads, in registers of their own.
      if (i % 32 == 0) {
        __syncwarp();
      }
      output(i) = factors[i / 2 % 2].sum(output(i), other(i));
    }
  }

 private:
  CUTE_DEVICE static int* flag_of(Fp8KernelParams const& params, int slot, int place) {
    return params.tile_counter + header_bytes(gridDim.x) / 4 + slot * kWarps + place / 32;
  }
  CUTE_DEVICE static float* partial_of(Fp8KernelParams const& params, int slot, int place) {
    auto* const first =
        reinterpret_cast<float*>(params.tile_counter) + header_bytes(gridDim.x) / 4 + gridDim.x * kWarps;
    return first + slot * (kFloats * kThreads) + place;
  }
};

}  // namespace hattn::sm90
