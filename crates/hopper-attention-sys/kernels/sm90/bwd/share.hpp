// Shares of tiles: how several CTAs work on one tile of keys.
//
// Where a launch has too few tiles for the card, or query heads of a group that do not fit into the second-level cache
// together, a tile's work is cut into `shares`. A share is some steps of the tile (Share in common/visits.hpp). A CTA
// computes one share at a time. Either it adds its dV and dK to the sums of the tile (KeySums in traits.hpp), or the
// shares of a tile are a cluster's (cluster.hpp).
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
  int sums;    // whose sums its dV and dK are added to, where tiles have shares that are not a cluster's
  int start;   // where the visits of each query head begin (QueryVisits::start)

  CUTE_DEVICE bool valid() const { return batch >= 0; }
};
static_assert(sizeof(TileShare) == 32, "the plan counts 32 bytes a share");

// Writes the list of shares. `thread` of `threads` writes each so many-th.
template <class Traits>
CUTE_DEVICE void write_shares(BwdParams const& params, Band const& band, int thread, int threads) {
  int const n_tiles = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN;
  // Where heads of the list are shares of heads, and where its tiles are clusters.
  int const of_head = params.cluster > 1 ? 1 : params.shares;
  int const of_tile = params.cluster;
  BwdScheduler const scheduler = bwd_scheduler(params, params.heads_kv * of_head, n_tiles, nullptr);
  int const total = scheduler.total() * of_tile;
  for (int i = thread; i < total; i += threads) {
    Tile const listed = scheduler.tile(i / of_tile);
    int const head = listed.head / of_head;
    int const index = params.cluster > 1 ? i % of_tile : listed.head - head * of_head;
    int const heads_per_kv_head = params.heads_q / params.heads_kv;
    auto visits = QueryVisits::of<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, listed.block, params.ordered);
    // With more keys than queries, many tiles see the first block under a mask, too. They begin each elsewhere.
    if (Traits::kMask != MaskClass::Full && !params.ordered && listed.block * Traits::kTileN < band.right_offset) {
      visits.start = listed.block * (Traits::kTileN / Traits::kTileM) % visits.end;
    }
    Share const share = Share::of(heads_per_kv_head * visits.count(), index, params.shares);
    int const heads_before = share.first / visits.count();
    int const copy = params.ordered ? index : 0;
    reinterpret_cast<TileShare*>(params.share_list)[i] = {
        listed.block,
        head,
        listed.batch,
        share.steps,
        head * heads_per_kv_head + heads_before,
        visits.nth(share.first - heads_before * visits.count()),
        ((copy * params.batch + listed.batch) * params.heads_kv + head) * n_tiles + listed.block,
        visits.start};
  }
}

}  // namespace hattn::sm90
