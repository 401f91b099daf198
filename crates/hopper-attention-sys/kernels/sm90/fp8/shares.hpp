// Shares of a tile's keys: how the CTAs of a cluster compute one tile.
//
// Where a launch has few tiles, which visit many blocks of keys, the CTAs of a cluster take the same tile. Each takes a
// share of the key blocks that the tile visits (Share in common/visits.hpp). A CTA computes one share and ends.
//
// When the products are done, the rows of a tile are put together. Each warp's rows belong to one share, whose warp of
// the same number finishes them. The warps of the other shares write their sums to shared memory, over the buffers of K
// and V^T: O before the division, and of each row the reference (softmax.hpp), the sum of weights and the divisor. The
// warp that finishes the rows reads all of them, adds them to its own in the order of the shares, and ends the tile as
// in any other kernel (epilogue.hpp). So the result does not depend on which share is done first.
//
// The 16-bit kernels do the same by columns (sm90/fwd/shares.hpp). Here a row's end needs all of its columns: the
// largest magnitude of O, and what may have leaked (leak.hpp).
#pragma once

#include "common/barrier.hpp"
#include "common/softmax.hpp"
#include "sm90/cluster.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/partial_sums.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Shares {
  static constexpr int kThreads = 128 * Traits::kConsumers;  // those with sums
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kGroups = Traits::kHeadDimVO / 8;  // of 8 columns of O, of which a thread has 2 in 2 rows

  // The sums of a share. A thread's elements lie as it has them, so that all shares are read alike.
  struct Sums {
    float4 output[kGroups][kThreads];
    float4 rows[Traits::kTileM];  // reference, sum of weights, divisor, and the largest factor of V of the head
  };

  // The index of this CTA's tile in the tile order.
  CUTE_DEVICE static int tile() { return static_cast<int>(blockIdx.x) / cluster_shares(); }

  // Whether this share finishes the rows of this warp. Then all is added to `output` and to what belongs to its rows.
  // `largest_v` is that of the head, if this share has a block of keys. (The first share has.)
  //
  // Every CTA calls await_readers later.
  template <class Output>
  CUTE_DEVICE static bool join(typename Traits::SharedStorage& storage, float (&reference)[2], float (&sums)[2],
                               float (&divisor)[2], float& largest_v, Output& output) {
    auto& own = *reinterpret_cast<Sums*>(storage.k);
    static_assert(sizeof(Sums) <= sizeof(storage.k) + sizeof(storage.vt), "the sums lie over K and V^T");
    int const place = Traits::consumer_thread_index();
    int const row = place / 32 * 16 + place % 32 / 4;
    bool const finishes = place / 32 * cluster_shares() / kWarps == cluster_share();
    // The other warpgroup's products may still read K and V^T.
    named_barrier_sync(Traits::kConsumers + 1, kThreads);
    if (!finishes) {
      CUTE_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        own.output[group][place] = {output(4 * group), output(4 * group + 1), output(4 * group + 2),
                                    output(4 * group + 3)};
      }
      if (place % 4 == 0) {
        own.rows[row] = {reference[0], sums[0], divisor[0], largest_v};
        own.rows[row + 8] = {reference[1], sums[1], divisor[1], largest_v};
      }
    }
    await_sums();
    if (!finishes) {
      return false;
    }
    int const shares = cluster_shares();
    int const number = cluster_share();
    CUTE_NO_UNROLL
    for (int share = 0; share < shares; ++share) {
      if (share == number) {
        continue;
      }
      float4 const rows[2] = {read_shared(own.rows[row], share), read_shared(own.rows[row + 8], share)};
      float4 others[kGroups];
      CUTE_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        others[group] = read_shared(own.output[group][place], share);
      }
      largest_v = share == 0 ? rows[0].w : largest_v;
      JointFactors factors[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        factors[r] = JointFactors::of(reference[r], rows[r].x);
        sums[r] = factors[r].sum(sums[r], rows[r].y);
        divisor[r] = factors[r].sum(divisor[r], rows[r].z);
      }
      CUTE_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        float const other[4] = {others[group].x, others[group].y, others[group].z, others[group].w};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) {
          output(4 * group + i) = factors[i / 2].sum(output(4 * group + i), other[i]);
        }
      }
    }
    return true;
  }
};

}  // namespace hattn::sm90
