// The producer warpgroup of the forward. One lane of a warp works, the other lanes leave at once.
//
// - Warp 0 loads K and V, block by block, through their rings.
// - Warp 1 draws tiles, loads Q and stores O. One warp does both, because O is stored from the buffer that a later Q is
//   loaded into. Where the keys of a tile are shared (shares.hpp), it loads the Q of one tile and is done.
#pragma once

#include "common/scalars.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "sm90/fwd/shares.hpp"
#include "sm90/fwd/traits.hpp"
#include "sm90/tma.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Load {
  using Storage = typename Traits::SharedStorage;

  // The warpgroup that the next block is for, of two that share the keys. Else 0.
  template <class Position>
  CUTE_DEVICE static int way_of(Position const& position) {
    if constexpr (Traits::kWays == 2) {
      return position.way;
    } else {
      return 0;
    }
  }

  // Loads in the order in which the consumers read: K0, K1, V0, K2, V1, ... V of a block comes after K of the next
  // block. The order runs on from tile to tile.
  CUTE_DEVICE static void keys_and_values(FwdScalars const& scalars, CUtensorMap const& map_k, CUtensorMap const& map_v,
                                          Band const& band, Storage& storage) {
    bool const late = !Traits::kShares && draws_late<Traits::kTileN>(scalars.tile_counter, scalars);
    typename Traits::LoadPosition k;
    typename Traits::LoadPosition v;
    bool v_pending = false;
    int v_row = 0;
    int v_head = 0;
    int v_batch = 0;

    auto load_v = [&]() {
      storage.v_empty[v.stage].wait(v.parity ^ 1);
      storage.v_full[v.stage + way_of(v) * Traits::kFullsApart].arrive_expect_bytes(Traits::kBytesV);
      load_tile<Traits::kTileN, Traits::kHeadDimVO>(map_v, storage.v_full[v.stage + way_of(v) * Traits::kFullsApart],
                                                    kEvictLast, storage.v[v.stage], v_row, v_head, v_batch);
      v.advance();
    };

    // Not unrolled, here and below: a lane waits most of the time, and 24 registers must do.
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersQ> q;; q.advance()) {
      storage.tile_full[q.stage].wait(q.parity);
      Tile const tile = storage.tile[q.stage];
      if (!tile.valid()) {
        break;
      }
      KeyVisits const visits = Shares<Traits>::visits(band, tile.block);
      int const head = tile.head / scalars.heads_per_kv_head;
      CUTE_NO_UNROLL
      for (int visit = visits.first(); visits.has(visit); visit = visits.next(visit)) {
        if (late && visit == visits.last_but_one()) {
          storage.next_wanted.arrive();
        }
        storage.k_empty[k.stage].wait(k.parity ^ 1);
        storage.k_full[k.stage + way_of(k) * Traits::kFullsApart].arrive_expect_bytes(Traits::kBytesK);
        load_tile<Traits::kTileN, Traits::kHeadDimQK>(map_k, storage.k_full[k.stage + way_of(k) * Traits::kFullsApart],
                                                      kEvictLast, storage.k[k.stage],
                                                      visits.block(visit) * Traits::kTileN, head, tile.batch);
        k.advance();
        if (v_pending) {
          load_v();
        }
        v_pending = true;
        v_row = visits.block(visit) * Traits::kTileN;
        v_head = head;
        v_batch = tile.batch;
      }
      if constexpr (Traits::kShares) {
        break;  // There is one tile. Without this, ptxas spills here under windows.
      }
    }
    if (v_pending) {
      load_v();
    }
  }

  // Draws tiles, loads Q, stores O. A tile is announced to the consumers and to warp 0 when its Q is asked for. Where a
  // tile lies is worked out once, here.
  CUTE_DEVICE static void queries_and_outputs(FwdParams const& params, FwdScalars const& scalars,
                                              CUtensorMap const& map_q, CUtensorMap const& map_o,
                                              FwdScheduler const& scheduler, Storage& storage) {
    auto announce = [&](int buffer, int index) {
      Tile const tile = scheduler.tile(index);
      if (tile.valid()) {
        storage.q_full[buffer].arrive_expect_bytes(Traits::kBytesQ);
        load_tile<Traits::kTileM, Traits::kHeadDimQK>(map_q, storage.q_full[buffer], kEvictFirst, storage.q[buffer],
                                                      tile.block * Traits::kTileM, tile.head, tile.batch);
      }
      storage.tile[buffer] = tile;
      storage.tile_full[buffer].arrive();
    };

    if constexpr (Traits::kShares) {
      announce(0, Shares<Traits>::tile());
      return;
    }
    bool const late = draws_late<Traits::kTileN>(scheduler.counter, scalars);
    int next = 0;
    int round = 0;
    auto announce_next = [&]() __attribute__((always_inline)) {
      announce(next, scheduler.draw(round));
      ++round;
      next = next + 1 == Traits::kBuffersQ ? 0 : next + 1;
    };
    CUTE_NO_UNROLL
    do {
      announce_next();
    } while (!late && next != 0);
    std::uint32_t parity = 0;
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersQ> q;; q.advance()) {
      Tile const tile = storage.tile[q.stage];
      if (!tile.valid()) {
        break;
      }
      if (late) {
        storage.next_wanted.wait(parity);
        parity ^= 1;
        announce_next();
      }
      CUTE_NO_UNROLL
      for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
        storage.o_full[q.stage][consumer].wait(q.parity);
        store_rows<Traits::kTileM, Traits::kHeadDimVO>(
            map_o, storage.q[q.stage], consumer, tile.block * Traits::kTileM + consumer * 64, tile.head, tile.batch);
        cute::tma_store_arrive();
      }
      // The buffer may be written again (or the CTA may end) once the copy engine has read it.
      cute::tma_store_wait<0>();
      if (!late) {
        announce_next();
      }
    }
  }
};

}  // namespace hattn::sm90
