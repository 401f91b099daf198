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

// What consumers have to know of the block in a stage.
struct alignas(16) ListedStep {
  int m_block;
  std::uint32_t marks;  // of its entry
  std::uint64_t bits;   // where they are: of the tile's first key, from the block's first query on
};

template <class Traits>
CUTE_DEVICE ListedStep listed_step(BlockLists const& lists, ListedShare const& share, int head) {
  constexpr int kParts = kListedBlock / Traits::kTileM;
  int const m_block = share.entry.block();
  ListedStep step{m_block, share.entry.marks(), 0};
  if ((step.marks & kEntryBits) != 0) {
    int const row = row_of_lists(lists, share.batch, head, m_block / kParts);
    step.bits = key_bits(lists, row, share.entry.place()) + m_block % kParts * (Traits::kTileM / 8);
  }
  return step;
}

// Writes over the scores, transposed, of the pairs of a block that are not kept. `key` is the thread's first key in the
// tile, of tile `n_block`.
template <class Traits, class Scores>
CUTE_DEVICE void hide_listed(Scores& scores, ListedStep const& step, Band const& band, int n_block, int key, int column,
                             float fill) {
  if ((step.marks & kEntryBits) != 0) {
    KeptBits<Traits::kTileM / 32> kept[2];
    kept[0].load(step.bits + key * 16);
    kept[1].load(step.bits + (key + 8) * 16);
    hide_scores(scores, kept, column, fill);
  }
  if ((step.marks & kEntryEdges) != 0) {
    apply_mask_transposed<MaskClass::Window, Traits::kTileM>(scores, band, n_block * Traits::kTileN + key,
                                                             step.m_block * Traits::kTileM + column, fill);
  }
}

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
