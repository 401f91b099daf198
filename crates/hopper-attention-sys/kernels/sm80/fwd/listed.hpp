// What a forward of class Blocks has beside the others: a tile with a list of the blocks of keys that it visits
// (common/blocks.hpp).
//
// The lists are of blocks of 128 queries and 128 keys. A tile of 64 queries is half of such a block, and reads its
// list. A visit is a part of a block, of kTileN keys. The last part comes first, as keys do in other kernels.
#pragma once

#include "common/blocks.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"

namespace hattn::sm80 {

template <int kTileM, int kTileN>
struct ListedTile {
  static_assert(kListedBlock % kTileM == 0 && kListedBlock % kTileN == 0, "tiles and visits are parts of blocks");
  static constexpr int kParts = kListedBlock / kTileN;

  std::uint64_t entries;
  std::uint64_t bits;  // of the list's first partial block
  int masked;          // entries, which come first
  int total;

  CUTE_DEVICE static ListedTile of(BlockLists const& lists, Tile const& tile) {
    int const q_block = tile.block / (kListedBlock / kTileM);
    int const row = row_of_lists(lists, tile.batch, tile.head, q_block);
    int2 const counts = counts_of_row(lists, row);
    return {reinterpret_cast<std::uint64_t>(entries_of_row(lists, row)),
            given_bits(lists, tile.batch, tile.head, q_block), counts.x, counts.y};
  }
  CUTE_DEVICE KeyVisits visits() const { return {0, kParts * total, 0, kParts * (total - masked)}; }

  CUTE_DEVICE BlockEntry entry(int visit) const {
    return {__ldg(reinterpret_cast<std::uint32_t const*>(entries) + (total - 1 - visit / kParts))};
  }
  // Which block of kTileN keys is visited.
  CUTE_DEVICE int block(int visit) const { return entry(visit).block() * kParts + visit % kParts; }
  // The keys of a visit that a query keeps.
  CUTE_DEVICE KeptBits<kTileN / 32> kept(int visit, Band const& band, int query) const {
    return kept_keys<kTileN / 32>(entry(visit), bits + query % kListedBlock * 16, band, query, visit % kParts);
  }
};

}  // namespace hattn::sm80
