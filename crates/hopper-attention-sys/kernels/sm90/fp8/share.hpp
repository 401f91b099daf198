// How the tiles at the end of the list are shared out, where all are of one length: the grid would end with a round in
// which many CTAs have none.
//
// Those tiles, between one and two times as many as CTAs, make one stretch of key blocks, of which each CTA takes as
// many: the rest of a tile, perhaps a whole one, and the beginning of another (its last keys, since blocks are visited
// from the last). The rest comes first. Its sums are left in the workspace for the CTA that has the tile's beginning,
// as the last thing it does: so that nobody waits long. Stretches are given out from the last one on, so that who waits
// does so for a CTA that has drawn its stretch before, and runs.
//
// The workspace: the counter of tiles (in 16 bytes, or a RangeCheck and what belongs to it), a sign of each consumer
// warp of each CTA that it has left its sums, and those sums.
#pragma once

#include "common/memory.hpp"
#include "common/softmax.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Share {
  static constexpr int kThreads = 128 * Traits::kConsumers;  // that have sums
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kElements = Traits::kHeadDimVO / 2;  // of O, a thread's
  static constexpr int kFloats = kElements + 6;
  static constexpr int kSignBytes = 4 * kWarps;  // a CTA's
  static constexpr int kBytes = Traits::kShares ? kSignBytes + 4 * kFloats * kThreads : 0;
  // Stretches are whole numbers of so many blocks: a part of a tile that is shorter does not hide the look at the next.
  static constexpr int kUnit = 4;

  CUTE_HOST_DEVICE static constexpr int units_of(int seqlen_kv) {
    return (seqlen_kv + Traits::kTileN * kUnit - 1) / (Traits::kTileN * kUnit);
  }

  // What is before the signs.
  CUTE_HOST_DEVICE static constexpr int header_bytes(int grid) {
    return static_cast<int>(Traits::kScores == Scores::F16 ? range_check_bytes(grid) : sizeof(RangeCheck));
  }

  // The CTA's next tile, and the part of it. `stretch` is what is left of the one that it has drawn.
  CUTE_DEVICE static Tile next(Fp8KernelParams const& params, Fp8Scheduler const& scheduler, int round,
                               Stretch volatile& stretch, Part& part) {
    part = {0, 0};
    if (!Traits::kShares || params.shared_tiles == 0) {
      return scheduler.tile(scheduler.draw(round));
    }
    int const whole = scheduler.total() - params.shared_tiles;
    if (stretch.left == 0) {
      int const index = scheduler.draw(round);
      if (index < whole) {
        return scheduler.tile(index);
      }
      int const after = static_cast<int>(gridDim.x) - 1 - (index - whole);  // stretches
      if (after < 0) {
        return {0, 0, -1};
      }
      stretch.slot = index - whole;
      stretch.position = after * params.shared_units + cute::min(after, params.shared_longer);
      stretch.left = params.shared_units + (after < params.shared_longer ? 1 : 0);
    }
    std::uint32_t const position = stretch.position;
    std::uint32_t const left = stretch.left;
    std::uint32_t const units = units_of(params.seqlen_kv);
    std::uint32_t const tile = position / units;
    std::uint32_t const first = position - tile * units;
    std::uint32_t const taken = cute::min(units - first, left);
    std::uint32_t const blocks = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN;
    if (first > 0) {
      part = {static_cast<int>(first * kUnit - blocks), -1 - stretch.slot};
    } else if (taken < units) {
      part = {static_cast<int>(blocks - taken * kUnit),
              stretch.slot};  // 1 + the slot of the stretch that was drawn before
    }
    stretch.position = position + taken;
    stretch.left = left - taken;
    return scheduler.tile(whole + static_cast<int>(tile));
  }

  // For the CTA that has the tile's other keys; `place` is the thread's among those that have sums.
  template <class Output>
  CUTE_DEVICE static void leave(Fp8KernelParams const& params, int slot, int place, float const (&reference)[2],
                                float const (&sums)[2], float const (&divisor)[2], Output const& output) {
    float* const to = sums_of(params, slot, place);
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
      set_flag(sign_of(params, slot, place));
    }
  }

  // Adds what has been left; both are taken against the larger reference.
  template <class Output>
  CUTE_DEVICE static void join(Fp8KernelParams const& params, int slot, int place, float (&reference)[2],
                               float (&sums)[2], float (&divisor)[2], Output& output) {
    await_flag(sign_of(params, slot, place));
    float const* const from = sums_of(params, slot, place);
    auto const left = [&](int i) { return __ldcg(from + i * kThreads); };
    float own_factor[2];
    float left_factor[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const left_reference = left(kElements + r);
      float const joint = fmaxf(reference[r], left_reference);
      own_factor[r] = reference[r] == joint ? 1.0F : exp2_approx(reference[r] - joint);
      left_factor[r] = left_reference == joint ? 1.0F : exp2_approx(left_reference - joint);
      reference[r] = joint;
      sums[r] = sums[r] * own_factor[r] + left(kElements + 2 + r) * left_factor[r];
      divisor[r] = divisor[r] * own_factor[r] + left(kElements + 4 + r) * left_factor[r];
    }
    CUTE_UNROLL
    for (int i = 0; i < kElements; ++i) {
      // ptxas would begin with all the loads, in registers of their own.
      if (i % 32 == 0) {
        __syncwarp();
      }
      output(i) = output(i) * own_factor[i / 2 % 2] + left(i) * left_factor[i / 2 % 2];
    }
  }

 private:
  CUTE_DEVICE static int* sign_of(Fp8KernelParams const& params, int slot, int place) {
    return params.tile_counter + header_bytes(gridDim.x) / 4 + slot * kWarps + place / 32;
  }
  CUTE_DEVICE static float* sums_of(Fp8KernelParams const& params, int slot, int place) {
    auto* const sums = reinterpret_cast<float*>(params.tile_counter) + header_bytes(gridDim.x) / 4 + gridDim.x * kWarps;
    return sums + slot * (kFloats * kThreads) + place;
  }
};

}  // namespace hattn::sm90
