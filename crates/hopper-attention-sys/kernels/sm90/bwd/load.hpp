// The producer warpgroup of the backward, one lane of each warp: warp 0 streams Q with its statistics, warp 1 K and V,
// warp 2 dO; warp 3 adds each block's dQ to the sums in global memory.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/mask.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/bwd/traits.hpp"
#include "sm90/tma.hpp"

namespace hattn::sm90 {

using BwdScheduler = TileScheduler<true>;

template <class Traits>
struct BwdLoad {
  using Storage = typename Traits::SharedStorage;

  // Where a tile begins. Without a mask each begins elsewhere, so that few add to the same sums at a time; under a mask
  // that is so anyway. The consumers need not know: what they do to a block then does not depend on its place.
  CUTE_DEVICE static int first_block(BwdKernelParams const& params, QueryRange const& range, int tile) {
    return Traits::kMask == MaskClass::Full && !params.ordered ? tile * (Traits::kTileN / Traits::kTileM) % range.end
                                                               : range.begin;
  }

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
      int const start = first_block(params, range, tile.block);
      int blocks = (tile.batch * params.heads_q + tile.head * params.heads_per_kv_head) * params.m_blocks;
      CUTE_NO_UNROLL
      for (int i = 0; i < params.heads_per_kv_head; ++i, blocks += params.m_blocks) {
        int const head = tile.head * params.heads_per_kv_head + i;
        int m = start;
        CUTE_NO_UNROLL
        do {
          visit(ring, blocks + m, m, head, tile.batch, tile.block);
          m = m + 1 == range.end ? range.begin : m + 1;
          ring.advance();
        } while (m != start);
      }
    }
  }

  CUTE_DEVICE static void queries(BwdKernelParams const& params, CUtensorMap const& map_q, Band const& band,
                                  Storage& storage) {
    stream(params, band, storage, [&](auto const& ring, int block, int m, int head, int batch, int) {
      Mbarrier& full = storage.q_full[ring.stage];
      storage.q_empty[ring.stage].wait(ring.parity ^ 1);
      full.arrive_expect_bytes(Traits::kBytesQ);
      cute::SM90_BULK_COPY_G2S::copy(params.statistics + static_cast<std::int64_t>(block) * Traits::kTileM, &full.word,
                                     storage.statistics[ring.stage], Traits::kBytesStatistics);
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

  // A block's dQ, from shared memory to the sums in global memory: the first tile to come stores its part, the others
  // add theirs. In turns tiles come by their number, the last one first, so that the sums are the same on every run.
  // Either way a tile waits only for tiles that began before it.
  CUTE_DEVICE static void query_gradients(BwdKernelParams const& params, Band const& band, Storage& storage) {
    RingPosition<Traits::kSlotsQ> slot;
    // Addresses are computed anew each time: registers are short.
    auto const progress = [&](int block) __attribute__((always_inline)) {
      asm volatile("" : "+r"(block));
      return params.progress + block;
    };
    constexpr int kHalf = Traits::kElementsQ / 2;
    auto const send_half = [&](int block, int half, bool first) __attribute__((always_inline)) {
      float* const sums = params.d_q + static_cast<std::int64_t>(block) * Traits::kElementsQ + half * kHalf;
      if (first) {
        store_bulk(sums, storage.d_q[slot.stage], kHalf * sizeof(float));
      } else {
        add_bulk(sums, storage.d_q[slot.stage], kHalf * sizeof(float));
      }
    };
    auto const await_half = [&]() __attribute__((always_inline)) { storage.d_q_full[slot.stage].wait(slot.parity); };
    auto const free_halves = [&]() __attribute__((always_inline)) {
      await_bulk_read<1>();
      storage.d_q_empty[slot.stage == 0 ? Traits::kSlotsQ - 1 : slot.stage - 1].arrive();
      await_bulk_read<0>();
      storage.d_q_empty[slot.stage].arrive();
      slot.advance();
    };
    if (!params.ordered) {
      stream(params, band, storage, [&](auto const&, int block, int, int, int, int) {
        // Asked early: the answer is there when the part is.
        int now = atomicAdd(progress(block), 1);
        await_half();
        bool const first = now == 0;
        while (!first && now < kStored) {
          now = load_acquire(progress(block));
        }
        send_half(block, 0, first);
        slot.advance();
        await_half();
        send_half(block, 1, first);
        free_halves();
        if (first) {
          await_bulk_arrival<0>();
          asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(progress(block)), "r"(kStored) : "memory");
        }
      });
      return;
    }
    // A block's turn passes on when its part has arrived, which is while the next one's is on its way.
    int before = -1;  // twice the block, and one more if it was the first to come
    auto const pass_turn = [&]() __attribute__((always_inline)) {
      if (before >= 0) {
        asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(progress(before / 2)),
                     "r"(before % 2 == 0 ? -1 : -1 - kFresh)
                     : "memory");
      }
    };
    stream(params, band, storage, [&](auto const&, int block, int, int, int, int n) {
      int now = load_acquire(progress(block));
      if (now % kFresh != n) {
        // No turn is kept from others by who waits for one.
        await_bulk_arrival<0>();
        pass_turn();
        before = -1;
        do {
          now = load_acquire(progress(block));
        } while (now % kFresh != n);
      }
      bool const first = now >= kFresh;
      await_half();
      send_half(block, 0, first);
      slot.advance();
      await_half();
      send_half(block, 1, first);
      await_bulk_arrival<2>();
      pass_turn();
      before = 2 * block + (first ? 1 : 0);
      free_halves();
    });
    await_bulk_arrival<0>();
    pass_turn();
  }

  CUTE_DEVICE static int load_acquire(int const* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
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
