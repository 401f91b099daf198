// The producer warpgroup of the backward. Warp 0 streams Q with its statistics, and dO; warp 1 loads K and V and stores
// dK and dV, since these leave from the buffers that the next but one tile arrives in. One lane of each works.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/mask.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/bwd/traits.hpp"
#include "sm90/tma.hpp"

namespace hattn::sm90 {

using BwdScheduler = TileScheduler<false, true>;

template <class Traits>
struct BwdLoad {
  using Storage = typename Traits::SharedStorage;

  // The order Q0, dO0, Q1, dO1, ... runs on across heads of a group and across tiles.
  CUTE_DEVICE static void queries(BwdKernelParams const& params, CUtensorMap const& map_q, CUtensorMap const& map_d_o,
                                  Band const& band, Storage& storage) {
    int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
    RingPosition<Traits::kStages> ring;
    // Not unrolled, here and below: a lane waits most of the time, and 32 registers must do.
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersKV> kv;; kv.advance()) {
      storage.tile_full[kv.stage].wait(kv.parity);
      Tile const tile = storage.tile[kv.stage];
      if (!tile.valid()) {
        break;
      }
      BlockRange const range = query_range<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, tile.block);
      CUTE_NO_UNROLL
      for (int i = 0; i < params.heads_per_kv_head; ++i) {
        int const head = tile.head * params.heads_per_kv_head + i;
        float const* statistics =
            params.statistics +
            ((static_cast<std::int64_t>(tile.batch) * params.heads_q + head) * m_blocks + range.begin) *
                Traits::kStatistics;
        CUTE_NO_UNROLL
        for (int m = range.begin; m < range.end; ++m) {
          Mbarrier& q_full = storage.q_full[ring.stage];
          storage.q_empty[ring.stage].wait(ring.parity ^ 1);
          q_full.arrive_expect_bytes(Traits::kBytesQ);
          cute::SM90_BULK_COPY_G2S::copy(statistics, &q_full.word, storage.statistics[ring.stage],
                                         Traits::kStatistics * sizeof(float));
          load_tile<Traits::kTileM, Traits::kHeadDimQK>(map_q, q_full, kEvictLast, storage.q[ring.stage],
                                                        m * Traits::kTileM, head, tile.batch);
          Mbarrier& d_o_full = storage.d_o_full[ring.stage];
          storage.d_o_empty[ring.stage].wait(ring.parity ^ 1);
          d_o_full.arrive_expect_bytes(Traits::kBytesO);
          load_tile<Traits::kTileM, Traits::kHeadDimVO>(map_d_o, d_o_full, kEvictLast, storage.d_o[ring.stage],
                                                        m * Traits::kTileM, head, tile.batch);
          ring.advance();
          statistics += Traits::kStatistics;
        }
      }
    }
  }

  // Also draws the tiles: one is announced to the others when its K and V are asked for, a whole tile ahead.
  CUTE_DEVICE static void tiles(CUtensorMap const& map_k, CUtensorMap const& map_v, CUtensorMap const& map_d_k,
                                CUtensorMap const& map_d_v, BwdScheduler const& scheduler, Storage& storage) {
    auto announce = [&](int buffer, int index) {
      Tile const tile = scheduler.tile(index);
      if (tile.valid()) {
        Mbarrier& full = storage.kv_full[buffer];
        full.arrive_expect_bytes(Traits::kBytesKV);
        load_tile<Traits::kTileN, Traits::kHeadDimQK>(map_k, full, kEvictFirst, storage.k[buffer],
                                                      tile.block * Traits::kTileN, tile.head, tile.batch);
        load_tile<Traits::kTileN, Traits::kHeadDimVO>(map_v, full, kEvictFirst, storage.v[buffer],
                                                      tile.block * Traits::kTileN, tile.head, tile.batch);
      }
      storage.tile[buffer] = tile;
      storage.tile_full[buffer].arrive();
    };

    CUTE_NO_UNROLL
    for (int buffer = 0; buffer < Traits::kBuffersKV; ++buffer) {
      announce(buffer, scheduler.draw(buffer));
    }
    int round = Traits::kBuffersKV;
    int drawn = scheduler.draw(round);
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersKV> kv;; kv.advance()) {
      Tile const tile = storage.tile[kv.stage];
      if (!tile.valid()) {
        break;
      }
      CUTE_NO_UNROLL
      for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
        storage.d_kv_full[kv.stage][consumer].wait(kv.parity);
        int const row = tile.block * Traits::kTileN + consumer * 64;
        store_rows<Traits::kTileN, Traits::kHeadDimQK>(map_d_k, storage.k[kv.stage], consumer, row, tile.head,
                                                       tile.batch);
        store_rows<Traits::kTileN, Traits::kHeadDimVO>(map_d_v, storage.v[kv.stage], consumer, row, tile.head,
                                                       tile.batch);
        cute::tma_store_arrive();
      }
      // The buffer may be written again (or the block may end) once the copy engine has read it.
      cute::tma_store_wait<0>();
      announce(kv.stage, drawn);
      // Drawn now and needed a tile later: the counter's latency is hidden.
      if (drawn < scheduler.total()) {
        drawn = scheduler.draw(++round);
      }
    }
  }
};

}  // namespace hattn::sm90
