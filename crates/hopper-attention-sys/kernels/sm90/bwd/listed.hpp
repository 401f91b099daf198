// What a backward of class Blocks has beside the others: tiles of keys with lists of the blocks of queries that visit
// them (common/blocks.hpp).
//
// A tile's steps are the entries of its list in each query head of its group, one head after the other. The producers'
// warps walk the lists, each for itself. Warp 0 puts beside the Q of a block what consumers have to know of it: they
// walk nothing. A tile without entries has no steps, and is left out: the kernel before writes zeros as its dK and dV.
#pragma once

#include "common/blocks.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"
#include "sm90/bwd/share.hpp"

namespace hattn::sm90 {

// A step, as the lane that walks the lists hands it on.
struct ListedShare : TileShare {
  QueryEntry entry;
};

// When a tile may add to the sums of dQ of a block, in an ordered backward: as how many tiles have come before.
CUTE_DEVICE int turn_of(TileShare const& tile) { return tile.block; }
CUTE_DEVICE int turn_of(ListedShare const& tile) { return tile.entry.turn(); }

// Writes the list of tiles (write_shares in share.hpp).
template <class Traits>
CUTE_DEVICE void write_listed_shares(BwdParams const& params, int thread, int threads) {
  int const n_tiles = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN;
  int const group = params.heads_q / params.heads_kv;
  BwdScheduler const scheduler = bwd_scheduler(params, params.heads_kv, n_tiles, nullptr);
  for (int i = thread; i < scheduler.total(); i += threads) {
    Tile const tile = scheduler.tile(i);
    int steps = 0;
    for (int head = tile.head * group; head < (tile.head + 1) * group; ++head) {
      steps += key_count(params.blocks, tile.batch, head, tile.block);
    }
    reinterpret_cast<TileShare*>(params.share_list)[i] = {tile.block,        tile.head, tile.batch, steps,
                                                          tile.head * group, 0,         -1,         0};
  }
}

}  // namespace hattn::sm90
