// What forwards of class Blocks have beside the others: tiles with a list of the blocks of keys that they visit
// (common/blocks.hpp).
//
// The lists are of blocks of 128 keys. A visit is a block, or where tile_n is 64 a half of it: the later half first.
//
// Warp 1 of the producers looks up the list of a tile when it draws the tile. Warp 0 walks the list, and puts the entry
// of each visit beside its K. Consumers read the entries of masked blocks alone, and their bits in memory.
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

// The entry of a visit: that of the block, and which part of its keys is visited.
template <int kTileN>
struct VisitEntry : BlockEntry {
  static constexpr int kParts = kListedBlock / kTileN;
  static_assert(kParts == 1 || kParts == 2, "the part is the upper bit of an entry");

  CUTE_DEVICE static VisitEntry of(std::uint32_t entry, int part) {
    VisitEntry visit;
    visit.word = kParts == 1 ? entry : entry | static_cast<std::uint32_t>(part) << 31;
    return visit;
  }
  CUTE_DEVICE int part() const { return kParts == 1 ? 0 : static_cast<int>(word >> 31); }
  // Which block of kTileN keys is visited.
  CUTE_DEVICE int block_of_visit() const { return kParts * block() + part(); }
  // The keys of the visit that a query keeps. `bits`: as kept_keys takes them.
  CUTE_DEVICE KeptBits<kTileN / 32> kept(std::uint64_t bits, Band const& band, int query) const {
    return kept_keys<kTileN / 32>(*this, bits, band, query, part());
  }
};

// A tile's entries as visits, of which the first are masked. Their blocks stand in the list.
template <int kTileN>
CUTE_DEVICE KeyVisits visits_of_list(int masked, int total) {
  constexpr int kParts = kListedBlock / kTileN;
  return {0, kParts * total, 0, kParts * (total - masked)};
}

// Reads the entries of a tile's visits one after the other, each a block ahead.
template <bool kReads, int kTileN>
struct ListReader {
  using Entry = VisitEntry<kTileN>;
  std::uint32_t const* at;
  std::uint32_t next;
  std::uint32_t current = 0;

  CUTE_DEVICE explicit ListReader(ListedTile const& tile)
      : at(reinterpret_cast<std::uint32_t const*>(tile.entries)), next(*at) {}
  // The entry of the visit that comes next. (As visits_of_list has them, the last is 0.)
  CUTE_DEVICE Entry take(int visit) {
    int const part = visit % Entry::kParts;
    if (part == Entry::kParts - 1) {
      current = next;
      if (visit >= Entry::kParts) {
        next = *++at;
      }
    }
    return Entry::of(current, part);
  }
};
template <int kTileN>
struct ListReader<false, kTileN> {
  struct Entry {};
  template <class Tile>
  CUTE_DEVICE explicit ListReader(Tile const&) {}
  CUTE_DEVICE Entry take(int) { return {}; }
};

// The entries of the visits in the ring of K.
template <int kStages, int kTileN>
struct EntryStorage {
  VisitEntry<kTileN> entry[kStages];
};
template <int kTileN>
struct EntryStorage<0, kTileN> {};

}  // namespace sm90

// Whether the tile after this one is drawn late (tile_scheduler.hpp): not after one of few blocks.
template <int kTileN, class Scalars>
CUTE_DEVICE bool draws_late(sm90::ListedTile const& tile, Scalars const&) {
  return tile.total > 4;
}

}  // namespace hattn
