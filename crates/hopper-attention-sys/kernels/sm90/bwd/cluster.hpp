// How the CTAs of a cluster that share a tile of keys (share.hpp) sum their dV and dK.
//
// A share's sums are written to shared memory, over the buffers of K, V, Q and dO. Then each CTA reads every so many-th
// piece of the columns from all CTAs, sums it in the order of the shares, and writes it to memory. So the sums have the
// same bits on every run.
#pragma once

#include "common/key_pieces.hpp"
#include "sm90/bwd/traits.hpp"
#include "sm90/cluster.hpp"

namespace hattn::sm90 {

// `thread` counts the threads of the consumers. Both warpgroups come here from one place of the code.
template <class Traits, class SumsV, class SumsK>
CUTE_DEVICE void write_shared_tile(BwdParams const& params, typename Traits::SharedStorage& storage, int thread,
                                   SumsV const& d_v, SumsK const& d_k) {
  using Pieces = KeyPieces<Traits>;
  using KeySums = typename Traits::KeySums;
  using Storage = typename Traits::SharedStorage;
  static_assert(sizeof(float) * KeySums::kElements <= offsetof(Storage, d_s) - offsetof(Storage, k),
                "the sums lie over K, V, Q and dO");
  float* const own = reinterpret_cast<float*>(storage.k[0]);
  // The other warpgroup's products may still read.
  named_barrier_sync(5, KeySums::kThreads);
  auto const store = [&](int first, auto const& values) __attribute__((always_inline)) {
    CUTE_UNROLL
    for (int i = 0; i < values.size() / 4; ++i) {
      *reinterpret_cast<float4*>(own + first + KeySums::offset(i, thread)) = {values(4 * i), values(4 * i + 1),
                                                                              values(4 * i + 2), values(4 * i + 3)};
    }
  };
  store(0, d_v);
  store(Traits::kElementsV, d_k);
  await_sums();
  TileShare const tile = storage.tile[0];
  int const shares = cluster_shares();
  CUTE_NO_UNROLL
  for (int piece = cluster_share(); piece < Pieces::kCount; piece += shares) {
    float const* const at = own + Pieces::offset(piece, thread);
    float4 fours[Pieces::kFours] = {};
    CUTE_NO_UNROLL
    for (int share = 0; share < shares; share += 2) {
      float4 more[2][Pieces::kFours] = {};
      CUTE_UNROLL
      for (int s = 0; s < 2; ++s) {
        if (share + s < shares) {
          CUTE_UNROLL
          for (int i = 0; i < Pieces::kFours; ++i) {
            more[s][i] = read_shared(*reinterpret_cast<float4 const*>(at + KeySums::offset(i, 0)), share + s);
          }
        }
      }
      CUTE_UNROLL
      for (int s = 0; s < 2; ++s) {
        CUTE_UNROLL
        for (int i = 0; i < Pieces::kFours; ++i) {
          Pieces::add(fours, i, more[s][i]);
        }
      }
    }
    if (Pieces::write(params, tile.block, tile.head, tile.batch, piece, fours, thread)) {
      flag_leak(params);
    }
  }
  await_readers();
}

}  // namespace hattn::sm90
