// The producer warpgroup of the backward. One lane of each warp works:
//
// - warp 0 loads Q with its statistics, and dO, block by block;
// - warp 1 draws tiles and loads K and V;
// - warp 2 works in an ordered backward only: it reports each block whose dQ has been added;
// - warp 3 adds dQ of each block to the sums in global memory.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/alibi.hpp"
#include "common/memory.hpp"
#include "common/scalars.hpp"
#include "common/start.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "sm90/bwd/traits.hpp"
#include "sm90/tma.hpp"

namespace hattn::sm90 {

template <class Traits>
struct BwdLoad {
  using Storage = typename Traits::SharedStorage;
  using Scalars = typename Traits::Scalars;
  using TileRecord = typename Traits::TileRecord;

  // Whether a tile has dQ of its sequence to itself, and there are no sums of it.
  CUTE_DEVICE static bool is_only(TileShare const&) { return false; }
  CUTE_DEVICE static bool is_only(PackedShare const& tile) { return tile.is_only != 0; }
  CUTE_DEVICE static int blocks_of_queries(Scalars const& scalars, TileShare const&) { return scalars.m_blocks; }
  CUTE_DEVICE static int blocks_of_queries(Scalars const&, PackedShare const& tile) {
    return (tile.q_len + Traits::kTileM - 1) / Traits::kTileM;
  }

  // Whether warps 0 and 1 load before the kernel before has ended. They do where a CTA's first tile follows from its
  // index. (Not of lists and packed sequences, of which a CTA knows too little by then. Not in clusters: there it made
  // small problems slower.)
  static constexpr bool kMayStartEarly = !Traits::kIsListed && !Traits::kIsPacked && !Traits::kShares;
  CUTE_DEVICE static bool starts_early(Scalars const& scalars) {
    return kMayStartEarly && scalars.tile_counter == nullptr;
  }

  struct Nothing {
    CUTE_DEVICE void operator()() const {}
  };

  // Calls `use` for the blocks of all tiles, in the order in which the consumers take them, and `done` after the last
  // block of a tile. The ring runs on across the heads of a group and across tiles. Returns where it ends.
  //
  // kKeeps: the lane keeps a copy of a packed tile, so that tile[] need not wait for its last block. (One lane may.
  // Where those of an ordered backward did, ptxas spilled.)
  template <bool kKeeps, class Use, class Done = Nothing>
  CUTE_DEVICE static RingPosition<Traits::kStages> stream(BwdParams const& params, Scalars const& scalars,
                                                          Band const& band, Storage& storage, Use const& use,
                                                          Done const& done = {}) {
    if constexpr (Traits::kIsPacked) {
      return stream_packed<kKeeps>(params, scalars, storage, use, done);
    } else {
      return stream_dense(params, scalars, band, storage, use, done);
    }
  }

  template <class Use, class Done>
  CUTE_DEVICE static RingPosition<Traits::kStages> stream_dense(BwdParams const& params, Scalars const& scalars,
                                                                Band const& band, Storage& storage, Use const& use,
                                                                Done const& done) {
    RingPosition<Traits::kStages> ring;
    // Not unrolled, here and below: a lane waits most of the time, and 24 registers must do.
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersK> k;; k.advance()) {
      storage.tile_full[k.stage].wait(k.parity);
      TileShare const tile = storage.tile[k.stage];
      if (!tile.valid()) {
        break;
      }
      // tile[] has been read. This lane can be a tile behind the consumers where tiles have one block.
      storage.k_empty[k.stage].arrive();
      if constexpr (Traits::kIsListed) {
        walk_lists(params, scalars, tile, ring, use);
      } else {
        QueryVisits visits = QueryVisits::blocks_of<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, tile.block);
        visits.start = tile.start;
        int head = tile.head_q;
        int blocks = (tile.batch * scalars.heads_q + head) * scalars.m_blocks;
        int visit = tile.visit;
        CUTE_NO_UNROLL
        for (int left = tile.steps; left > 0; --left) {
          int const m = visits.block(visit);
          use(ring, blocks + m, m, head, tile);
          ring.advance();
          visit = visits.next(visit);
          if (visits.is_first(visit)) {
            ++head;
            blocks += scalars.m_blocks;
          }
        }
      }
      done();
      if constexpr (Traits::kShares) {
        break;  // there is one tile
      }
    }
    return ring;
  }

  // The steps of a tile, where lists have them. A tile begins further on in its lists than the tile before it: at the
  // same place, all would add to dQ of the same queries at a time. (Not where tiles take turns.)
  template <class Use>
  CUTE_DEVICE static void walk_lists(BwdParams const& params, Scalars const& scalars, TileShare const& tile,
                                     RingPosition<Traits::kStages>& ring, Use const& use) {
    int head = tile.head_q;
    int left = tile.steps;
    CUTE_NO_UNROLL
    while (left > 0) {
      int const count = key_count(params.blocks, tile.batch, head, tile.block);
      QueryEntry const* const entries = key_entries(params.blocks, tile.batch, head, tile.block);
      int place = scalars.ordered ? 0 : count * tile.block / params.blocks.k_blocks;
      CUTE_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        ListedShare const share{tile, entries[place]};
        place = place + 1 < count ? place + 1 : 0;
        int const m = share.entry.block();
        use(ring, (tile.batch * scalars.heads_q + head) * scalars.m_blocks + m, m, head, share);
        ring.advance();
      }
      left -= count;
      ++head;
    }
  }

  // The same of packed sequences. Tiles stay in shared memory until their last block: registers are short.
  template <bool kKeeps, class Use, class Done>
  CUTE_DEVICE static RingPosition<Traits::kStages> stream_packed(BwdParams const& params, Scalars const& scalars,
                                                                 Storage& storage, Use const& use, Done const& done) {
    RingPosition<Traits::kStages> ring;
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersK> k;; k.advance()) {
      storage.tile_full[k.stage].wait(k.parity);
      if (!storage.tile[k.stage].valid()) {
        break;
      }
      if constexpr (kKeeps) {
        copy_tile(storage.tile[k.stage], storage.kept);
        storage.k_empty[k.stage].arrive();  // tile[] has been read
      }
      PackedShare const& tile = kKeeps ? storage.kept : storage.tile[k.stage];
      QueryVisits visits = QueryVisits::blocks_of_any<Traits::kMask, Traits::kTileM, Traits::kTileN>(
          band_of_tile(params, tile), tile.block);
      visits.start = tile.start;
      int head = tile.head_q;
      int blocks = head * scalars.sum_blocks + tile.first_block;
      int visit = tile.visit;
      CUTE_NO_UNROLL
      for (int left = tile.steps; left > 0; --left) {
        int const m = visits.block(visit);
        use(ring, blocks + m, m, head, tile);
        ring.advance();
        visit = visits.next(visit);
        if (visits.is_first(visit)) {
          ++head;
          blocks += scalars.sum_blocks;
        }
      }
      if constexpr (!kKeeps) {
        storage.k_empty[k.stage].arrive();
      }
      done();
    }
    return ring;
  }

  // The statistics of a block of a dense problem.
  CUTE_DEVICE static void load_statistics(Scalars const& scalars, int block, Mbarrier& full, Statistics* to) {
    cute::SM90_BULK_COPY_G2S::copy(
        static_cast<Statistics const*>(scalars.statistics) + static_cast<std::int64_t>(block) * Traits::kTileM,
        &full.word, to, Traits::kBytesStatistics);
  }

  CUTE_DEVICE static void blocks(BwdParams const& params, Scalars const& scalars, CUtensorMap const& map_q,
                                 CUtensorMap const& map_d_o, Band const& band, Storage& storage) {
    bool early = starts_early(scalars);  // and this is the first block
    auto const load = [&](auto const& ring, int block, int m, int head, auto const& tile) {
      storage.block_empty[ring.stage].wait(ring.parity ^ 1);
      if constexpr (Traits::kIsListed) {
        storage.step[ring.stage] =
            listed_step<Traits::kTileM, Traits::kTileN>(params.blocks, tile.batch, head, tile.block, tile.entry);
      }
      if constexpr (Traits::kModifiers == Modifiers::Always) {
        if constexpr (Traits::kIsPacked) {
          float const slope = alibi_slope_or_zero(params, tile.batch, head, scalars.scale_log2);
          storage.modifiers.slope_or_head[ring.stage] = __float_as_uint(slope);
          storage.modifiers.head[ring.stage] = head;
        } else {
          storage.modifiers.slope_or_head[ring.stage] = head;
        }
      }
      if constexpr (Traits::kIsAlibi) {
        storage.alibi.head[ring.stage] = head;
      }
      if constexpr (Traits::kDraws) {
        storage.drawing.block[ring.stage] = {m, tile.block, tile.batch * params.heads_q + head};
        storage.drawing.wanted[ring.stage].arrive();
      }
      Mbarrier& q_full = storage.q_full[ring.stage];
      q_full.arrive_expect_bytes(Traits::kBytesQ);
      if constexpr (Traits::kIsPacked) {
        PackedRows const rows = queries_of_head(tile, scalars.rows_apart_statistics, m * Traits::kTileM, head);
        cute::SM90_TMA_LOAD_5D::copy(&scalars.map_statistics, &q_full.word, kEvictLast, storage.statistics[ring.stage],
                                     0, rows.row, rows.head, int{kPackedEnd}, rows.place);
        load_tile<Traits::kTileM, Traits::kHeadDimQK>(
            map_q, q_full, kEvictLast, storage.q[ring.stage],
            queries_of_head(tile, scalars.rows_apart_q, m * Traits::kTileM, head));
      } else {
        if (!early) {
          load_statistics(scalars, block, q_full, storage.statistics[ring.stage]);
        }
        load_tile<Traits::kTileM, Traits::kHeadDimQK>(map_q, q_full, kEvictLast, storage.q[ring.stage],
                                                      m * Traits::kTileM, head, tile.batch);
      }
      Mbarrier& d_o_full = storage.d_o_full[ring.stage];
      d_o_full.arrive_expect_bytes(Traits::kBytesO);
      if constexpr (Traits::kIsPacked) {
        load_tile<Traits::kTileM, Traits::kHeadDimVO>(
            map_d_o, d_o_full, kEvictLast, storage.d_o[ring.stage],
            queries_of_head(tile, scalars.rows_apart_d_o, m * Traits::kTileM, head));
      } else {
        load_tile<Traits::kTileM, Traits::kHeadDimVO>(map_d_o, d_o_full, kEvictLast, storage.d_o[ring.stage],
                                                      m * Traits::kTileM, head, tile.batch);
        if (early) {
          // (To ask before every block made passes of eight blocks slower.)
          await_kernel_before();
          load_statistics(scalars, block, q_full, storage.statistics[ring.stage]);
          early = false;
        }
      }
    };
    auto const end = stream<false>(params, scalars, band, storage, load, [&]() { storage.next_wanted.arrive(); });
    if constexpr (Traits::kDraws) {
      storage.block_empty[end.stage].wait(end.parity ^ 1);
      storage.drawing.block[end.stage].n_block = -1;
      storage.drawing.wanted[end.stage].arrive();
    }
  }

  // dQ of each block, from shared memory to the sums in global memory. The first tile that comes to a block stores its
  // dQ, the others add theirs. Ordered: tiles come by their number, so that the sums are the same on every run. A
  // tile waits only for tiles that run: for the one that came to the block first, or, ordered, for those drawn before
  // it.
  CUTE_DEVICE static void query_gradients(BwdParams const& params, Scalars const& scalars, Band const& band,
                                          Storage& storage) {
    RingPosition<Traits::kSlotsQ> slot;
    // Addresses are computed anew each time: registers are short.
    auto const progress = [&](int block) __attribute__((always_inline)) {
      asm volatile("" : "+r"(block));
      return scalars.progress + block;
    };
    constexpr int kHalf = Traits::kElementsQ / 2;
    auto const send_half = [&](int block, int half, bool first) __attribute__((always_inline)) {
      float* const sums = scalars.sums + static_cast<std::int64_t>(block) * Traits::kElementsQ + half * kHalf;
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
    if (!scalars.ordered) {
      stream<true>(params, scalars, band, storage, [&](auto const&, int block, int, int, auto const& tile) {
        if (is_only(tile)) {
          return;
        }
        // Asked early: the answer is there when dQ is.
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
          add_release(progress(block), kStored);
        }
      });
      return;
    }
    RingPosition<2> sent;
    int next = -1;  // a block whose progress was asked for early
    int seen = 0;
    stream<false>(params, scalars, band, storage, [&](auto const&, int block, int m, int, auto const& tile) {
      if (is_only(tile)) {
        return;
      }
      int const n = turn_of(tile);
      // Relaxed, since what comes after is only the copy engine's, which adds where the memory is coherent, and does
      // not begin before it is asked to.
      int now = block == next ? seen : load_relaxed(progress(block));
      while (now % kFresh != n) {
        now = load_relaxed(progress(block));
      }
      bool const first = now >= kFresh;
      await_half();
      send_half(block, 0, first);
      slot.advance();
      await_half();
      send_half(block, 1, first);
      next = -1;
      if (m + 1 < blocks_of_queries(scalars, tile)) {
        next = block + 1;
        seen = load_relaxed(progress(next));
      }
      free_halves();
      await_bulk_arrival<0>();
      storage.sent_empty[sent.stage].wait(sent.parity ^ 1);
      storage.sent_step[sent.stage] = first ? 1 - kFresh : 1;
      storage.sent_full[sent.stage].arrive();
      sent.advance();
    });
  }

  // Reports each block whose dQ has been added, so that the next tile may add. Only a release makes what was added
  // visible to other multiprocessors. (The copy engine's own wait does not: without the release, one run in 7000 had
  // other bits, benches/LOG.md, 17.) A release waits for the memory, which is why it has a warp of its own.
  CUTE_DEVICE static void report_sent(BwdParams const& params, Scalars const& scalars, Band const& band,
                                      Storage& storage) {
    RingPosition<2> sent;
    stream<false>(params, scalars, band, storage, [&](auto const&, int block, int, int, auto const& tile) {
      if (is_only(tile)) {
        return;
      }
      storage.sent_full[sent.stage].wait(sent.parity);
      int const step = storage.sent_step[sent.stage];
      storage.sent_empty[sent.stage].arrive();
      sent.advance();
      add_release(scalars.progress + block, step);
    });
  }

  CUTE_DEVICE static int listed(Scalars const& scalars) {
    if constexpr (Traits::kIsPacked) {
      return scalars.table.header()->tiles;
    } else {
      return scalars.listed;
    }
  }

  CUTE_DEVICE static void copy_tile(TileRecord const& from, TileRecord& to) {
    CUTE_UNROLL
    for (int i = 0; i < int{sizeof(TileRecord) / sizeof(int4)}; ++i) {
      reinterpret_cast<int4*>(&to)[i] = reinterpret_cast<int4 const*>(&from)[i];
    }
  }

  // Copies an entry of the list of shares. Past its end there is none.
  CUTE_DEVICE static void copy_share(Scalars const& scalars, int index, TileRecord& tile) {
    if (index < listed(scalars)) {
      copy_tile(static_cast<TileRecord const*>(scalars.share_list)[index], tile);
    } else {
      tile.batch = -1;
      tile.steps = 1;
    }
  }

  // Draws tiles, loads K and V. A tile is announced to the other warps when its K is asked for.
  CUTE_DEVICE static void tiles(Scalars const& scalars, CUtensorMap const& map_k, CUtensorMap const& map_v,
                                BwdScheduler const& scheduler, Storage& storage) {
    int round = 0;
    int drawn = scheduler.draw(round);
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersK> k;; k.advance()) {
      storage.k_empty[k.stage].wait(k.parity ^ 1);
      // (kernel.hpp has written the first tile of a CTA that starts early.)
      if (round > 0 || !starts_early(scalars)) {
        copy_share(scalars, drawn, storage.tile[k.stage]);
      }
      if constexpr (!Traits::kShares) {
        CUTE_NO_UNROLL
        while (storage.tile[k.stage].steps == 0) {
          await_kernel_before();
          copy_share(scalars, scheduler.draw(++round), storage.tile[k.stage]);
        }
      }
      Tile const tile{storage.tile[k.stage].block, storage.tile[k.stage].head, storage.tile[k.stage].batch};
      storage.tile_full[k.stage].arrive();
      // A CTA must not end while a copy to it is under way. Where a share is empty, nobody would wait for the copy of
      // K.
      if (!tile.valid() || (Traits::kShares && storage.tile[k.stage].steps == 0)) {
        await_kernel_before();
        let_next_start();  // the last blocks have been asked for
        break;
      }
      storage.k_full[k.stage].arrive_expect_bytes(Traits::kBytesK);
      if constexpr (Traits::kIsPacked) {
        load_tile<Traits::kTileN, Traits::kHeadDimQK>(
            map_k, storage.k_full[k.stage], kEvictFirst, storage.k[k.stage],
            keys_of_head(storage.tile[k.stage], scalars.rows_apart_k, tile.block * Traits::kTileN, tile.head));
      } else {
        load_tile<Traits::kTileN, Traits::kHeadDimQK>(map_k, storage.k_full[k.stage], kEvictFirst, storage.k[k.stage],
                                                      tile.block * Traits::kTileN, tile.head, tile.batch);
      }
      // V has one buffer, so that its laps change parity with every tile, as K's buffers alternate.
      storage.v_empty.wait(k.stage ^ 1);
      storage.v_full.arrive_expect_bytes(Traits::kBytesV);
      // Registers are short: the tile is read once more.
      TileRecord const again = storage.tile[k.stage];
      if constexpr (Traits::kIsPacked) {
        load_tile<Traits::kTileN, Traits::kHeadDimVO>(
            map_v, storage.v_full, kEvictFirst, storage.v,
            keys_of_head(again, scalars.rows_apart_v, again.block * Traits::kTileN, again.head));
      } else {
        load_tile<Traits::kTileN, Traits::kHeadDimVO>(map_v, storage.v_full, kEvictFirst, storage.v,
                                                      again.block * Traits::kTileN, again.head, again.batch);
      }
      if (round == 0) {
        await_kernel_before();  // which has made the list
      }
      // The next tile is drawn only when all blocks of this one have been asked for. A drawn tile is kept from the
      // other CTAs, so that the grid ends as evenly as its draws are late. Where tiles wait for each other, they should
      // begin in the order of the list.
      storage.next_wanted.wait(k.stage);
      if constexpr (Traits::kShares) {
        let_next_start();
        break;
      }
      drawn = scheduler.draw(++round);
    }
  }
};

}  // namespace hattn::sm90
