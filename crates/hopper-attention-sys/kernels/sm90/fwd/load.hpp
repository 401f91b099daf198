// The producer warpgroup of the forward. One lane of a warp works, the other lanes leave at once.
//
// - Warp 0 loads K and V, block by block, through their rings.
// - Warp 1 draws tiles, loads Q and stores O. One warp does both, because O is stored from the buffer that a later Q is
//   loaded into. Where a CTA has one tile (shares.hpp), there is nothing for it to do.
// - Warps 2 and 3 copy an additive bias, each with all its lanes, where lists say which blocks are visited. Elsewhere
//   they have nothing to do.
//
// Q and the first K of a CTA's first tile are asked for before that, by `begin`.
#pragma once

#include "common/alibi.hpp"
#include "common/scalars.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "sm90/fwd/rotation.hpp"
#include "sm90/fwd/shares.hpp"
#include "sm90/fwd/traits.hpp"
#include "sm90/tma.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Load {
  using Storage = typename Traits::SharedStorage;
  using Scalars = typename Traits::Scalars;
  using Scheduler = typename Traits::Scheduler;
  using TileRecord = typename Traits::TileRecord;
  using Rows = std::conditional_t<Traits::kIsPacked, PackedRows, DenseRows>;
  // Whether each tile says when the one after it is drawn.
  static constexpr bool kDrawsByTile = Traits::kIsPacked || Traits::kIsListed;

  // The warpgroup that the next block is for, of two that share the keys. Else 0.
  template <class Position>
  CUTE_DEVICE static int way_of(Position const& position) {
    if constexpr (Traits::kWays == 2) {
      return position.way;
    } else {
      return 0;
    }
  }

  // Asks for the Q of a tile whose record is in place `record`.
  CUTE_DEVICE static void load_q(FwdParams const& params, Scalars const& scalars, CUtensorMap const& map_q,
                                 Storage& storage, int record, TileRecord const& tile, int rows_apart) {
    storage.q_full[record].arrive_expect_bytes(Traits::kBytesQ);
    load_tile<Traits::kTileM, Traits::kHeadDimQK, Traits::kSlabColumns>(
        map_q, storage.q_full[record], kEvictFirst, storage.q[Traits::kWritesOutput ? 0 : record],
        queries_at(tile, rows_apart, tile.block * Traits::kTileM), rotation_of_queries<Traits>(params, scalars, tile));
  }

  // Asks for a block of K.
  CUTE_DEVICE static void load_k(FwdParams const& params, CUtensorMap const& map_k, Storage& storage, int stage,
                                 Mbarrier& full, TileRecord const& tile, int rows_apart, int block, int head) {
    full.arrive_expect_bytes(Traits::kBytesK);
    load_tile<Traits::kTileN, Traits::kHeadDimQK, Traits::kSlabColumns>(
        map_k, full, kEvictLast, storage.k[stage], keys_at(tile, rows_apart, block * Traits::kTileN, head),
        rotation_of<Traits>(params.k, params.head_dim_qk, head));
  }

  // Whether `begin` is called: a CTA's first tile must follow from its index alone. Rows for modified scores would
  // spill.
  static constexpr bool kBegins = !kDrawsByTile && Traits::kModifiers == Modifiers::Never;

  // Announces the CTA's first tile, and asks for its Q and its first K, before the roles part. The code of the loading
  // warps lies far behind the kernel's first, and is fetched from memory meanwhile (benches/LOG.md, entry 73).
  CUTE_DEVICE static void begin(FwdParams const& params, Scalars const& scalars, CUtensorMap const& map_q,
                                CUtensorMap const& map_k, Storage& storage) {
    int const index = Traits::kShares ? Shares<Traits>::tile() : static_cast<int>(blockIdx.x);
    TileRecord const tile = fwd_scheduler<Traits>(params, scalars, nullptr).tile(index);
    storage.tile[0] = tile;
    storage.tile_full[0].arrive();
    load_q(params, scalars, map_q, storage, 0, tile, 0);
    KeyVisits const visits = Shares<Traits>::visits(band_of(scalars), tile.block);
    int const head = tile.head / scalars.heads_per_kv_head;
    int const visit = visits.first();
    if (visits.has(visit)) {  // a share may have none
      load_k(params, map_k, storage, 0, storage.k_full[0], tile, 0, visits.block(visit), head);
    }
  }

  // Loads in the order in which the consumers read: K0, K1, V0, K2, V1, ... V of a block comes after K of the next
  // block. The order runs on from tile to tile.
  CUTE_DEVICE static void keys_and_values(FwdParams const& params, Scalars const& scalars, CUtensorMap const& map_k,
                                          CUtensorMap const& map_v, Band const& launch_band, Storage& storage) {
    bool const launch_late = !Traits::kShares && draws_late<Traits::kTileN>(scalars.tile_counter, scalars);
    typename Traits::LoadPosition k;
    typename Traits::LoadPosition v;
    bool v_pending = false;
    int v_row = 0;
    int v_head = 0;
    int v_place = 0;

    auto load_v = [&]() {
      storage.v_empty[v.stage].wait(v.parity ^ 1);
      storage.v_full[v.stage + way_of(v) * Traits::kFullsApart].arrive_expect_bytes(Traits::kBytesV);
      load_tile<Traits::kTileN, Traits::kHeadDimVO, Traits::kSlabColumns>(
          map_v, storage.v_full[v.stage + way_of(v) * Traits::kFullsApart], kEvictLast, storage.v[v.stage],
          Rows{v_row, v_head, v_place}, rotation_of<Traits>(params.v, params.head_dim_vo, v_head));
      v.advance();
    };

    int rows_apart_k = 0;
    int rows_apart_v = 0;
    if constexpr (Traits::kIsPacked) {
      rows_apart_k = scalars.rows_apart_k;
      rows_apart_v = scalars.rows_apart_v;
    }
    // Not unrolled, here and below: a lane waits most of the time, and 24 registers must do.
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kRecords> q;; q.advance()) {
      storage.tile_full[q.stage].wait(q.parity);
      TileRecord const tile = storage.tile[q.stage];
      if (!tile.valid()) {
        break;
      }
      typename Traits::TileBand band = [&]() -> typename Traits::TileBand {
        if constexpr (Traits::kIsPacked) {
          return band_of_tile(params, tile);
        } else {
          return launch_band;
        }
      }();
      bool const late = kDrawsByTile ? draws_late<Traits::kTileN>(tile, scalars) : launch_late;
      KeyVisits const visits = [&]() {
        if constexpr (Traits::kIsListed) {
          return visits_of_list<Traits::kTileN>(tile.masked, tile.total);
        } else {
          return Shares<Traits>::visits(band, tile.block);
        }
      }();
      [[maybe_unused]] ListReader<Traits::kIsListed, Traits::kTileN> entries(tile);
      int const head = tile.head / scalars.heads_per_kv_head;
      CUTE_NO_UNROLL
      for (int visit = visits.first(); visits.has(visit); visit = visits.next(visit)) {
        int block = visits.block(visit);
        [[maybe_unused]] VisitEntry<Traits::kTileN> entry{};
        if constexpr (Traits::kIsListed) {
          entry = entries.take(visit);
          block = entry.block_of_visit();
        }
        if (late && visit == visits.last_but_one()) {
          storage.next_wanted.arrive();
        }
        if (!kBegins || v_pending) {  // else it is the CTA's first, which `begin` has asked for
          storage.k_empty[k.stage].wait(k.parity ^ 1);
          if constexpr (Traits::kIsListed) {
            storage.entry[k.stage] = entry;
          }
          load_k(params, map_k, storage, k.stage, storage.k_full[k.stage + way_of(k) * Traits::kFullsApart], tile,
                 rows_apart_k, block, head);
        }
        k.advance();
        if (v_pending) {
          load_v();
        }
        v_pending = true;
        Rows const v_rows = keys_at(tile, rows_apart_v, block * Traits::kTileN, head);
        v_row = v_rows.row;
        v_head = v_rows.head;
        v_place = v_rows.place;
      }
      if constexpr (Traits::kShares) {
        break;  // There is one tile. Without this, ptxas spills here under windows.
      }
    }
    if (v_pending) {
      load_v();
    }
  }

  // Where lists say which blocks come: copies the bias of a consumer's queries, block by block. A whole warp does it.
  // (What follows from the lane and the tile is worked out anew for each block: registers are short.)
  CUTE_DEVICE static void biases(FwdParams const& params, Scalars const& scalars, Storage& storage) {
    static_assert(Traits::kTileN == kListedBlock, "an entry is a visit");
    // Twice the tiles so far, and the parity of the blocks. (The first one need not wait.)
    std::uint32_t counts = 1;
    CUTE_NO_UNROLL
    for (;; counts += 2) {
      auto const q = RingPosition<Traits::kRecords>::of(counts / 2);
      storage.tile_full[q.stage].wait(q.parity);
      TileRecord const& tile = storage.tile[q.stage];
      if (!tile.valid()) {
        return;
      }
      auto const* entries = reinterpret_cast<BlockEntry const*>(tile.entries);
      CUTE_NO_UNROLL
      for (int left = tile.total; left > 0; --left) {
        copy_bias(params, scalars, storage, tile, *entries++, counts & 1);
        counts ^= 1;
      }
    }
  }
  CUTE_DEVICE static void copy_bias(FwdParams const& params, Scalars const& scalars, Storage& storage,
                                    TileRecord const& tile, BlockEntry entry, std::uint32_t parity) {
    int const thread = thread_index_anew();
    int const consumer = thread / 32 - 2;
    storage.bias.empty[consumer].wait(parity);
    BiasOfHead const bias = BiasOfHead::of(params, tile.batch, tile.head);
    std::uint32_t to = cute::cast_smem_ptr_to_uint(&storage.bias.rows[4 * consumer][0]);
    int query = tile.block * Traits::kTileM + 64 * consumer;
    CUTE_NO_UNROLL
    for (int const end = query + 64; query < end; query += Traits::WarpBias::kRows) {
      Traits::WarpBias::template begin<true>(true, to, bias, query, scalars.seqlen_q, entry.block() * Traits::kTileN,
                                             scalars.seqlen_kv, thread_index_anew() % 32);
      to += Traits::WarpBias::kBytes;
    }
    arrive_behind_copies(storage.bias.full[consumer]);
  }

  // The record of the tile of an index.
  CUTE_DEVICE static TileRecord record_of([[maybe_unused]] Scalars const& scalars, Scheduler const& scheduler,
                                          int index) {
    if constexpr (Traits::kIsListed) {
      return listed_tile(scalars.lists, scheduler.tile(index));
    } else {
      return scheduler.tile(index);
    }
  }

  // The scheduler of a packed launch, with a copy of its table where that is small.
  CUTE_DEVICE static PackedScheduler packed_scheduler(Scalars const& scalars, Storage& storage) {
    return hattn::packed_scheduler<Traits>(scalars, copied_table(scalars.table, scalars.table_bytes, storage));
  }

  // Draws tiles, loads Q, stores O. A tile is announced to the consumers and to warp 0 when its Q is asked for. Where a
  // tile lies is worked out once, here.
  CUTE_DEVICE static void queries_and_outputs(FwdParams const& params, Scalars const& scalars, CUtensorMap const& map_q,
                                              CUtensorMap const& map_o, Scheduler const& scheduler, Storage& storage) {
    int rows_apart_q = 0;
    int rows_apart_o = 0;
    if constexpr (Traits::kIsPacked) {
      rows_apart_q = scalars.rows_apart_q;
      rows_apart_o = scalars.rows_apart_o;
    }
    if constexpr (Traits::kWritesOutput) {
      draw_for_one_buffer(params, scalars, scheduler, storage, map_q, rows_apart_q);
      return;
    }
    // Announces the tile of an index of the tile order. Whether another one may be announced before that tile is nearly
    // done.
    auto announce = [&](int buffer, int index) {
      TileRecord const tile = record_of(scalars, scheduler, index);
      if (tile.valid()) {
        load_q(params, scalars, map_q, storage, buffer, tile, rows_apart_q);
      }
      storage.tile[buffer] = tile;
      store_slope(params, scalars, tile, storage, buffer);
      storage.tile_full[buffer].arrive();
      if constexpr (kDrawsByTile) {
        return tile.valid() && !draws_late<Traits::kTileN>(tile, scalars);
      } else {
        return true;
      }
    };

    auto const store = [&](auto const& tile, RingPosition<Traits::kBuffersQ> const& q) __attribute__((always_inline)) {
      CUTE_NO_UNROLL
      for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
        storage.o_full[q.stage][consumer].wait(q.parity);
        if (stores_own_rows<Traits>(params)) {
          continue;
        }
        store_rows<Traits::kTileM, Traits::kHeadDimVO, Traits::kSlabColumns>(
            map_o, storage.q[q.stage], consumer,
            queries_at(tile, rows_apart_o, tile.block * Traits::kTileM + consumer * 64));
        cute::tma_store_arrive();
      }
      // The buffer may be written again (or the CTA may end) once the copy engine has read it.
      cute::tma_store_wait<0>();
    };
    if constexpr (kDrawsByTile) {
      draw_by_tile(scalars, scheduler, storage, announce, store);
      return;
    } else {
      draw_dense(scalars, scheduler, storage, announce, store);
    }
  }

 private:
  // The slope that goes with a tile's record.
  CUTE_DEVICE static void store_slope(FwdParams const& params, Scalars const& scalars, TileRecord const& tile,
                                      Storage& storage, int record) {
    if constexpr (Traits::kModifiers == Modifiers::Always) {
      if (has_alibi(params) && tile.valid()) {
        float const slope = alibi_slope(params.alibi, tile.batch, tile.head, scalars.scale_log2);
        storage.modifiers.slope[record] = slope;
        if constexpr (Traits::kIsAlibi) {
          storage.alibi_operands().write_slope(record, slope, scalars.scale_log2);
        }
      }
    }
  }

  // Draws tiles and loads Q, where consumers write O. The record of a tile is written before its Q can be loaded, so
  // that warp 0 and the consumers know what comes. The record that it replaces is of the tile three before, whose O is
  // written: the consumers have handed back the Q of the tile after that.
  CUTE_DEVICE static void draw_for_one_buffer(FwdParams const& params, Scalars const& scalars,
                                              Scheduler const& scheduler, Storage& storage, CUtensorMap const& map_q,
                                              int rows_apart_q) {
    bool launch_late = false;
    if constexpr (!kDrawsByTile) {
      launch_late = draws_late<Traits::kTileN>(scheduler.counter, scalars);
    }
    int round = 0;
    std::uint32_t wanted_parity = 0;
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kRecords> q;; q.advance()) {
      TileRecord tile{};
      if (kBegins && round == 0) {
        ++round;
      } else {
        if constexpr (Traits::kIsListed) {
          tile = record_of(scalars, scheduler, scheduler.draw(round));
        } else {
          tile = scheduler.tile(scheduler.draw(round));
        }
        storage.tile[q.stage] = tile;
        store_slope(params, scalars, tile, storage, q.stage);
        storage.tile_full[q.stage].arrive();
        if (!tile.valid()) {
          break;
        }
        if (round > 0) {
          storage.q_empty.wait((round + 1) & 1);
        }
        ++round;
        load_q(params, scalars, map_q, storage, q.stage, tile, rows_apart_q);
      }
      bool late = launch_late;
      if constexpr (kDrawsByTile) {
        late = draws_late<Traits::kTileN>(tile, scalars);
      }
      if (late) {
        storage.next_wanted.wait(wanted_parity);
        wanted_parity ^= 1;
      }
    }
  }

  // Draws tiles of a launch whose sequences are alike: all late, or all early.
  template <class Announce, class Store>
  CUTE_DEVICE static void draw_dense(Scalars const& scalars, Scheduler const& scheduler, Storage& storage,
                                     Announce const& announce, Store const& store) {
    bool const late = draws_late<Traits::kTileN>(scheduler.counter, scalars);
    int next = kBegins ? 1 : 0;  // `begin` has announced the first tile
    int round = next;
    auto announce_next = [&]() __attribute__((always_inline)) {
      announce(next, scheduler.draw(round));
      ++round;
      next = next + 1 == Traits::kBuffersQ ? 0 : next + 1;
    };
    CUTE_NO_UNROLL
    for (bool more = !kBegins || !late; more; more = !late && next != 0) {
      announce_next();
    }
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
      store(tile, q);
      if (!late) {
        announce_next();
      }
    }
  }

  // Draws tiles of all lengths: of packed sequences, or with lists of blocks. After a tile of few keys the next one is
  // drawn as soon as there is a buffer, after another one when it is nearly done.
  template <class Announce, class Store>
  CUTE_DEVICE static void draw_by_tile(Scalars const& scalars, Scheduler const& scheduler, Storage& storage,
                                       Announce const& announce, Store const& store) {
    RingPosition<Traits::kBuffersQ> q;
    std::uint32_t parity = 0;
    int next = 0;           // the buffer of the next tile that is announced
    int ahead = 0;          // tiles that are announced and whose O is not stored
    bool is_first = true;   // tile of this CTA
    bool may_go_on = true;  // whether another tile may be announced
    // (One place of the code announces: registers are short.)
    CUTE_NO_UNROLL
    while (true) {
      if (may_go_on && ahead < Traits::kBuffersQ) {
        may_go_on = announce(next, scheduler.draw(is_first ? 0 : 1));
        is_first = false;
        next = next + 1 == Traits::kBuffersQ ? 0 : next + 1;
        ++ahead;
        continue;
      }
      TileRecord const tile = storage.tile[q.stage];
      if (!tile.valid()) {
        break;
      }
      if (ahead == 1 && draws_late<Traits::kTileN>(tile, scalars)) {
        storage.next_wanted.wait(parity);
        parity ^= 1;
        may_go_on = true;
        continue;
      }
      store(tile, q);
      --ahead;
      q.advance();
    }
  }
};

}  // namespace hattn::sm90
