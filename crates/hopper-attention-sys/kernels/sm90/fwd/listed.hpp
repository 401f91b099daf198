// What a forward of class Blocks has beside the others: tiles with a list of the blocks of keys that they visit
// (common/blocks.hpp).
//
// Warp 1 of the producers looks up the list of a tile when it draws the tile. Warp 0 walks the list, and puts the entry
// of each block beside its K. Consumers read the entries of masked blocks alone, and their bits in memory.
#pragma once

#include "common/barrier.hpp"
#include "common/blocks.hpp"
#include "common/scalars.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"

namespace hattn {
namespace sm90 {

struct ListedFwdScalars : FwdScalars {
  BlockLists lists;
};

// A tile, its list, and where the bits of its queries are.
struct alignas(16) ListedTile : Tile {
  int masked;  // entries, which come first
  int total;
  std::uint64_t entries;
  std::uint64_t bits;  // of the first partial block
};

CUTE_DEVICE ListedTile listed_tile(BlockLists const& lists, Tile const& tile) {
  ListedTile listed;
  listed.block = tile.block;
  listed.head = tile.head;
  listed.batch = tile.batch;
  listed.masked = listed.total = 0;
  listed.entries = listed.bits = 0;
  if (tile.valid()) {
    int const row = row_of_lists(lists, tile.batch, tile.head, tile.block);
    int2 const counts = counts_of_row(lists, row);
    listed.masked = counts.x;
    listed.total = counts.y;
    listed.entries = reinterpret_cast<std::uint64_t>(entries_of_row(lists, row));
    listed.bits = given_bits(lists, tile.batch, tile.head, tile.block);
  }
  return listed;
}

// A tile's entries as visits, of which the first are masked. Their blocks stand in the list.
CUTE_DEVICE KeyVisits visits_of_list(int masked, int total) { return {0, total, 0, total - masked}; }

// Reads the entries of a tile one after the other, each a block ahead.
template <bool kReads>
struct ListReader {
  std::uint32_t const* at;
  std::uint32_t next;

  CUTE_DEVICE explicit ListReader(ListedTile const& tile)
      : at(reinterpret_cast<std::uint32_t const*>(tile.entries)), next(*at) {}
  CUTE_DEVICE BlockEntry take(bool has_more) {
    BlockEntry const entry{next};
    if (has_more) {
      next = *++at;
    }
    return entry;
  }
};
template <>
struct ListReader<false> {
  template <class Tile>
  CUTE_DEVICE explicit ListReader(Tile const&) {}
};

// The entries of the blocks in the ring of K.
template <int kStages>
struct EntryStorage {
  BlockEntry entry[kStages];
};
template <>
struct EntryStorage<0> {};

}  // namespace sm90

// Whether the tile after this one is drawn late (tile_scheduler.hpp): not after one of few blocks.
template <int kTileN, class Scalars>
CUTE_DEVICE bool draws_late(sm90::ListedTile const& tile, Scalars const&) {
  return tile.total > 4;
}

}  // namespace hattn
