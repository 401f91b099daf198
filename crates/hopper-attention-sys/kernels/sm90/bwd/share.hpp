// Shares of tiles: how several CTAs work on one tile of keys.
//
// Where a launch has too few tiles for the card, or query heads of a group that do not fit into the second-level cache
// together, a tile's work is cut into `shares`. A share is some steps of the tile (Share in common/visits.hpp). A CTA
// computes one share at a time. Either it adds its dV and dK to the sums of the tile (KeySums in traits.hpp), or the
// shares of a tile are a cluster's (cluster.hpp).
//
// Where tiles are many and alike, only the last `cut_tiles` of them are cut, into shares that fill the last rounds of
// the grid: with whole tiles, half of the card may have nothing to do in the last round.
//
// The kernel before makes a list of all shares (of whole tiles, where `shares` is 1), in the order in which the grid
// takes them (common/tile_scheduler.hpp). The lane that draws a share reads it there: the divisions that an entry takes
// need more registers than a producer has. Of clusters, the list has the shares of a tile side by side.
#pragma once

#include "common/mask.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"

namespace hattn::sm90 {

// A share of a tile, or a whole tile, as the lane that draws it tells the other warps.
struct alignas(16) TileShare {
  int block;   // the tile's index in the sequence
  int head;    // its key head
  int batch;   // below 0: no tile, and none will come
  int steps;   // visits in all query heads together. 0: the tile has fewer steps than shares, and none is left
  int head_q;  // the first query head that it visits
  int visit;   // the first visit there (QueryVisits)
  int sums;    // whose sums its dV and dK are added to; below 0: they are written
  int start;   // where the visits of each query head begin (QueryVisits::start)

  CUTE_DEVICE bool valid() const { return batch >= 0; }
};
static_assert(sizeof(TileShare) == 32, "the plan counts 32 bytes a share");

// A whole tile of a sequence whose length the device knows (common/sequences.hpp).
struct alignas(16) PackedShare : TileShare {
  int q_begin;
  int q_len;
  int kv_begin;
  int kv_len;
  int first_block;  // the block of sums of the sequence's first block of queries, in a head
  // Whether the sequence has no other tile. Then what the tile adds to dQ is dQ: it is written as such, and there are
  // no sums.
  int is_only;
  int unused[2];
};
static_assert(sizeof(PackedShare) == 64, "the plan counts 64 bytes an entry");

// Whether a tile has keys that the first query keeps, so that it begins with the first block of queries, as the others
// do that have such keys.
template <class Traits>
CUTE_DEVICE bool sees_first_query(Band const& band, int n_block) {
  int const first_key = n_block * Traits::kTileN;
  bool const sees = Traits::kMask == MaskClass::Full || first_key < band.right_offset;
  return Traits::kMask == MaskClass::Window ? sees || first_key <= band.edges.prefix_last : sees;
}

// Writes the list of tiles of such a launch.
template <class Traits>
CUTE_DEVICE void write_packed_shares(BwdParams const& params, int thread, int threads) {
  SequenceTable const table{params.sequences.table, params.batch};
  PackedScheduler const scheduler{
      table, nullptr, params.heads_kv, params.heads_per_group, false, table.header()->tiles};
  int const group = params.heads_q / params.heads_kv;
  for (int i = thread; i < scheduler.tiles; i += threads) {
    PackedTile const tile = scheduler.tile(i);
    Band const band = band_of_tile(params, tile);
    auto visits = QueryVisits::blocks_of_any<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, tile.block);
    // Many tiles see the first block. They begin each elsewhere, so that few add to the sums of one dQ at a time.
    if (!params.ordered && sees_first_query<Traits>(band, tile.block)) {
      visits.start = visits.begin + tile.block * (Traits::kTileN / Traits::kTileM) % visits.count();
    }
    PackedShare share;
    share.block = tile.block;
    share.head = tile.head;
    share.batch = tile.batch;
    share.steps = group * visits.count();
    share.head_q = tile.head * group;
    share.visit = visits.start;
    share.sums = -1;
    share.start = visits.start;
    share.q_begin = tile.q_begin;
    share.q_len = tile.q_len;
    share.kv_begin = tile.kv_begin;
    share.kv_len = tile.kv_len;
    share.first_block = tile.first_block;
    share.is_only = static_cast<int>(tile.kv_len <= Traits::kTileN || tile.q_len == 0);
    share.unused[0] = share.unused[1] = 0;
    reinterpret_cast<PackedShare*>(params.share_list)[i] = share;
  }
}

// The list of the shares of a launch. The kernel before writes it to memory, for CTAs that take more than one. The
// first share of a CTA that draws none follows from its index: the CTA makes that entry itself, and need not wait for
// the list.
template <class Traits>
struct ShareList {
  BwdParams const& params;
  Band const& band;
  int n_tiles;
  int whole;  // tiles that are not cut, which come first
  // Whether the shares of a tile stand side by side: where some tiles are whole, or clusters have the shares. Else
  // heads of the list are shares of heads.
  bool side_by_side;
  int of_head;
  BwdScheduler scheduler;

  CUTE_DEVICE ShareList(BwdParams const& launch, Band const& launch_band)
      : params(launch),
        band(launch_band),
        n_tiles((launch.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN),
        whole(n_tiles * launch.heads_kv * launch.batch - launch.cut_tiles),
        side_by_side(whole > 0 || launch.cluster > 1),
        of_head(side_by_side ? 1 : launch.shares),
        scheduler(bwd_scheduler(launch, launch.heads_kv * of_head, n_tiles, nullptr)) {}

  CUTE_DEVICE int size() const { return whole + params.cut_tiles * params.shares; }

  CUTE_DEVICE TileShare at(int i) const {
    bool const is_whole = i < whole;
    int const shares = is_whole ? 1 : params.shares;
    int const place = is_whole ? i : i - whole;  // among the shares
    Tile const listed = scheduler.tile(side_by_side && !is_whole ? whole + place / shares : i);
    int const head = listed.head / of_head;
    int const index = side_by_side ? place % shares : listed.head - head * of_head;
    int const heads_per_kv_head = params.heads_q / params.heads_kv;
    auto visits = QueryVisits::of<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, listed.block, params.ordered);
    // With more keys than queries, many tiles see the first block under a mask, too. They begin each elsewhere.
    if (Traits::kMask != MaskClass::Full && !params.ordered && sees_first_query<Traits>(band, listed.block)) {
      visits.start = listed.block * (Traits::kTileN / Traits::kTileM) % visits.end;
    }
    Share const share = Share::of(heads_per_kv_head * visits.count(), index, shares);
    int const heads_before = share.first / visits.count();
    int const copy = params.ordered ? index : 0;
    // Sums stand in the order of the tiles in memory, or, where some tiles are whole, in that of the list.
    int const of_tile = whole > 0 ? place / shares : (listed.batch * params.heads_kv + head) * n_tiles + listed.block;
    return {listed.block,
            head,
            listed.batch,
            share.steps,
            head * heads_per_kv_head + heads_before,
            visits.nth(share.first - heads_before * visits.count()),
            params.key_sums == 0 || is_whole ? -1 : copy * params.cut_tiles + of_tile,
            visits.start};
  }
};

// Writes that list. `thread` of `threads` writes each so many-th entry.
template <class Traits>
CUTE_DEVICE void write_shares(BwdParams const& params, Band const& band, int thread, int threads) {
  ShareList<Traits> const list{params, band};
  for (int i = thread; i < list.size(); i += threads) {
    reinterpret_cast<TileShare*>(params.share_list)[i] = list.at(i);
  }
}

}  // namespace hattn::sm90
