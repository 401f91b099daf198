// The producer warpgroup of the backward, one lane of each warp: warp 0 streams Q with its statistics, warp 1 K and V,
// warp 2 dO; warp 3 adds each block's dQ to the sums in global memory.
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

  // The blocks of queries of all tiles, in the order in which they are used; the ring runs on across heads of a group
  // and across tiles.
  template <class Visit>
  CUTE_DEVICE static void stream(BwdKernelParams const& params, Band const& band, Storage& storage,
                                 Visit const& visit) {
    RingPosition<Traits::kStages> ring;
    // Not unrolled, here and below: a lane waits most of the time, and 24 registers must do.
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersK> k;; k.advance()) {
      storage.tile_full[k.stage].wait(k.parity);
      Tile const tile = storage.tile[k.stage];
      if (!tile.valid()) {
        break;
      }
      // Read, and may be replaced: a lane can be a tile behind the consumers where tiles have one block.
      storage.k_empty[k.stage].arrive();
      QueryRange const range = query_range<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, tile.block);
      CUTE_NO_UNROLL
      for (int i = 0; i < params.heads_per_kv_head; ++i) {
        int const head = tile.head * params.heads_per_kv_head + i;
        int block = (tile.batch * params.heads_q + head) * params.m_blocks + range.begin;
        CUTE_NO_UNROLL
        for (int m = range.begin; m < range.end; ++m) {
          visit(ring, block, m, head, tile.batch, tile.block);
          ++block;
          ring.advance();
        }
      }
    }
  }

  CUTE_DEVICE static void queries(BwdKernelParams const& params, CUtensorMap const& map_q, Band const& band,
                                  Storage& storage) {
    stream(params, band, storage, [&](auto const& ring, int block, int m, int head, int batch, int) {
      Mbarrier& full = storage.q_full[ring.stage];
      storage.q_empty[ring.stage].wait(ring.parity ^ 1);
      full.arrive_expect_bytes(Traits::kBytesQ);
      cute::SM90_BULK_COPY_G2S::copy(params.statistics + static_cast<std::int64_t>(block) * Traits::kStatistics,
                                     &full.word, storage.statistics[ring.stage], Traits::kStatistics * sizeof(float));
      load_tile<Traits::kTileM, Traits::kHeadDimQK>(map_q, full, kEvictLast, storage.q[ring.stage], m * Traits::kTileM,
                                                    head, batch);
    });
  }

  CUTE_DEVICE static void output_gradients(BwdKernelParams const& params, CUtensorMap const& map_d_o, Band const& band,
                                           Storage& storage) {
    stream(params, band, storage, [&](auto const& ring, int, int m, int head, int batch, int) {
      Mbarrier& full = storage.d_o_full[ring.stage];
      storage.d_o_empty[ring.stage].wait(ring.parity ^ 1);
      full.arrive_expect_bytes(Traits::kBytesO);
      load_tile<Traits::kTileM, Traits::kHeadDimVO>(map_d_o, full, kEvictLast, storage.d_o[ring.stage],
                                                    m * Traits::kTileM, head, batch);
    });
  }

  // In turns the tiles of keys add to a block one after the other by their number, so that the sums are the same on
  // every run.
  CUTE_DEVICE static void query_gradients(BwdKernelParams const& params, Band const& band, Storage& storage) {
    // The consumers report what they stored before a block, which is nothing before the first one; only then they get
    // the buffer.
    storage.d_q_full.wait(0);
    storage.d_q_empty.arrive();
    stream(params, band, storage, [&](auto const& ring, int block, int, int, int, int n) {
      storage.d_q_full.wait(ring.stage ^ 1);  // one buffer: its laps are as long as stages
      if (params.turns != nullptr) {
        await_turn(params.turns + block, n);
      }
      add_bulk(params.d_q + static_cast<std::int64_t>(block) * Traits::kElementsQ, storage.d_q,
               Traits::kElementsQ * sizeof(float));
      await_bulk_read();
      storage.d_q_empty.arrive();
      if (params.turns != nullptr) {
        await_bulk_arrival();
        pass_turn(params.turns + block, n);
      }
    });
  }

  CUTE_DEVICE static void await_turn(int const* turn, int tile) {
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
    } while (now != tile);
  }

  CUTE_DEVICE static void pass_turn(int* turn, int tile) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(tile + 1) : "memory");
  }

  // Also draws the tiles: one is announced to the others when its K is asked for, up to a tile ahead.
  CUTE_DEVICE static void tiles(CUtensorMap const& map_k, CUtensorMap const& map_v, BwdScheduler const& scheduler,
                                Storage& storage) {
    int round = 0;
    int drawn = scheduler.draw(round);
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersK> k;; k.advance()) {
      storage.k_empty[k.stage].wait(k.parity ^ 1);
      Tile const tile = scheduler.tile(drawn);
      storage.tile[k.stage] = tile;
      storage.tile_full[k.stage].arrive();
      if (!tile.valid()) {
        break;
      }
      storage.k_full[k.stage].arrive_expect_bytes(Traits::kBytesK);
      load_tile<Traits::kTileN, Traits::kHeadDimQK>(map_k, storage.k_full[k.stage], kEvictFirst, storage.k[k.stage],
                                                    tile.block * Traits::kTileN, tile.head, tile.batch);
      // V has one buffer, so that its laps change parity with every tile, as K's buffers alternate.
      storage.v_empty.wait(k.stage ^ 1);
      storage.v_full.arrive_expect_bytes(Traits::kBytesV);
      // Registers are short: the tile is read once more.
      Tile const again = storage.tile[k.stage];
      load_tile<Traits::kTileN, Traits::kHeadDimVO>(map_v, storage.v_full, kEvictFirst, storage.v,
                                                    again.block * Traits::kTileN, again.head, again.batch);
      // Not before: what is drawn is kept from the others, and the grid ends as evenly as its last draws are late.
      drawn = scheduler.draw(++round);
    }
  }
};

}  // namespace hattn::sm90
