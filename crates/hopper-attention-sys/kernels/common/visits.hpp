// What a tile visits: which blocks of the other operand, in which order, and which of them need the mask.
//
// There are three types of visits. Each is computed from a band (the mask's bounds, mask.hpp) and the index of a tile
// or a block. So the loading warps and the computing warps of a tile make the same visits, without telling each other.
//
// - KeyVisits (forward): the blocks of kTileN keys that a tile of queries visits.
// - QueryVisits (backward): the blocks of kTileM queries that a tile of keys visits, in each query head of its group.
// - KeyTiles (backward): the other way round, the tiles of keys that visit a block of queries.
//
// A *visit* is a place in that order. It is an int that only these types interpret: `first()` is the first visit,
// `next(visit)` the one after a visit, `block(visit)` the index of the block that is visited. Today visits are a range
// of blocks, so that a visit and its block are the same number. To visit a list of block indices in memory
// (block-sparse attention), `of` and `block` would change, and none of the callers.
//
// A tile has at least one visit, so that all tiles take the same path through a kernel. The one block that a tile
// without keys (or without queries) visits is masked whole. (A share of a tile may have none.)
//
// Numbers are passed by reference. When they were passed by value, the compiler's code differed and ptxas spilled
// registers in an FP8 kernel.
#pragma once

#include "common/mask.hpp"

namespace hattn {

// A share of a tile's work: some of its steps, where several CTAs work on a tile. Shares differ by one step at most.
// There are none left for the last shares where a tile has fewer steps than shares.
//
// - Forward: a step is a visit of a block of keys (KeyVisits::keep_share).
// - Backward: a step is a visit in one query head. The tile's steps are the visits in the first query head of its
//   group, then those in the second, and so on.
struct Share {
  int first;
  int steps;

  CUTE_DEVICE static Share of(int total, int share, int shares) {
    int const least = total / shares;
    int const longer = total - least * shares;
    return {share * least + cute::min(share, longer), least + (share < longer ? 1 : 0)};
  }
};

// The key blocks of a tile of queries, or of some of its rows. The last keys come first. In this order there are up to
// three runs of blocks:
//
//     right edge   masked: the diagonal, or the ragged end of the keys
//     free         every row of the tile keeps every key
//     left edge    masked: the other end of a window, or the beginning of chunks
//
// The right edge of r rows lies in so few blocks as r + 1 keys can touch. The left edge of a window, too. That of
// chunks may lie in any number of blocks: it moves by whole chunks.
//
// Of the right and the left edge, and of free blocks, there may be none.
struct KeyVisits {
  // Blocks [begin, end) are visited. Those in [free_begin, free_end) are free; free_begin > free_end: none are.
  int begin;
  int end;
  int free_begin;
  int free_end;

  // Of tile `m_block` of kTileM queries.
  template <MaskClass kMask, int kTileM, int kTileN>
  CUTE_DEVICE static KeyVisits of(Band const& band, int m_block) {
    int const blocks = ceil_div(band.seqlen_kv, kTileN);
    if constexpr (kMask == MaskClass::Full) {
      return {0, blocks, 0, band.seqlen_kv / kTileN};
    } else {
      int const first_row = m_block * kTileM;
      int const last_row = cute::min(first_row + kTileM, band.seqlen_q) - 1;
      int const keys_end = cute::min(band.seqlen_kv, band.last_key<kMask>(last_row) + 1);
      int const free_keys_end = cute::min(band.seqlen_kv, band.last_key<kMask>(first_row) + 1);
      KeyVisits visits;
      visits.begin = 0;
      visits.free_begin = 0;
      if constexpr (kMask == MaskClass::Window) {
        visits.begin = cute::min(band.first_key<kMask>(first_row) / kTileN, blocks - 1);
        visits.free_begin = ceil_div(band.first_key<kMask>(last_row), kTileN);
      }
      visits.end = cute::max(ceil_div(cute::max(0, keys_end), kTileN), visits.begin + 1);
      visits.free_end = cute::max(0, free_keys_end) / kTileN;
      return visits;
    }
  }

  // Of kRows of a tile's rows, the strip `strip` of all strips of so many rows. These visits are some of the tile's,
  // and at least one.
  template <MaskClass kMask, int kRows, int kTileN>
  CUTE_DEVICE static KeyVisits of_rows(Band const& band, int strip, KeyVisits const& tile) {
    KeyVisits visits = of<kMask, kRows, kTileN>(band, strip);
    visits.end = cute::max(cute::min(visits.end, tile.end), tile.begin + 1);
    if constexpr (kMask == MaskClass::Window) {
      visits.begin = cute::max(cute::min(visits.begin, visits.end - 1), tile.begin);
    }
    return visits;
  }

  // Keeps only a share of the visits. cut > 0: those of block `cut` and after it. cut < 0: those before block -cut.
  // 0: all. Only where there is no mask.
  CUTE_DEVICE void keep_piece(int const& cut) {
    begin = cute::max(cut, 0);
    end = cut < 0 ? -cut : end;
  }

  // Keeps only share `share` of the visits. There may be none.
  CUTE_DEVICE void keep_share(int const& share, int const& shares) {
    Share const kept = Share::of(count(), share, shares);
    end -= kept.first;
    begin = end - kept.steps;
  }

  // Of a sequence whose length the device knows: without keys, too, it has one block, which is masked whole.
  CUTE_DEVICE void keep_one() {
    begin = cute::max(begin, 0);
    end = cute::max(end, 1);
  }

  CUTE_DEVICE int first() const { return end - 1; }
  // The visit kCount after one.
  template <int kCount = 1>
  CUTE_DEVICE int next(int const& visit) const {
    return visit - kCount;
  }
  CUTE_DEVICE int block(int const& visit) const { return visit; }
  CUTE_DEVICE int count() const { return end - begin; }

  // Whether a visit reached by `next` is still one. So these loops visit all:
  //     for (int visit = visits.first(); visits.has(visit); visit = visits.next(visit))
  CUTE_DEVICE bool has(int const& visit) const { return visit >= begin; }
  // Whether one of the tile's visits is one of these, which are those of some of its rows.
  CUTE_DEVICE bool contains(int const& visit) const { return visit < end && visit >= begin; }
  CUTE_DEVICE bool is_first(int const& visit) const { return visit == first(); }
  // The last visit but one, or the only visit.
  CUTE_DEVICE int last_but_one() const { return cute::min(begin + 1, end - 1); }

  // Whether `has(visit)`, and its block is on the right edge.
  CUTE_DEVICE bool on_right_edge(int const& visit) const { return visit >= cute::max(begin, free_end); }
  // Whether `has(visit)`, and its block is before the left edge: free, if the right edge is behind.
  CUTE_DEVICE bool before_left_edge(int const& visit) const { return visit >= cute::max(begin, free_begin); }
  // Whether a visit's block is on either edge.
  CUTE_DEVICE bool on_edge(int const& visit) const { return visit >= free_end || visit < free_begin; }

  // How many of a tile's visits come before the first of these, and how many after the last. These are visits of_rows
  // of that tile.
  CUTE_DEVICE int skipped_before(KeyVisits const& tile) const { return tile.end - end; }
  CUTE_DEVICE int skipped_after(KeyVisits const& tile) const { return begin - tile.begin; }
};

// The blocks of queries of a tile of keys, in one query head. They form a ring, so that a tile may begin anywhere in
// it. Whether a block needs the mask is asked of the block (is_free, is_hidden).
struct QueryVisits {
  // Blocks [begin, end) are visited, from `start` on.
  int begin;
  int end;
  int start;

  // Of tile `n_block` of kTileN keys.
  //
  // Without a mask each tile begins elsewhere, so that few tiles add to the sums of the same dQ at a time. Under a mask
  // most do anyway. `ordered`: tiles add in the order of their numbers; then all begin with the first block.
  template <MaskClass kMask, int kTileM, int kTileN>
  CUTE_DEVICE static QueryVisits of(Band const& band, int n_block, bool ordered) {
    QueryVisits visits = blocks_of<kMask, kTileM, kTileN>(band, n_block);
    if constexpr (kMask == MaskClass::Full) {
      static_assert(kTileN % kTileM == 0, "a tile's first block of queries is a whole number");
      visits.start = ordered ? visits.begin : n_block * (kTileN / kTileM) % visits.end;
    }
    return visits;
  }

  // The same of a sequence that may have no queries: then there is one block, of nobody.
  template <MaskClass kMask, int kTileM, int kTileN>
  CUTE_DEVICE static QueryVisits blocks_of_any(Band const& band, int n_block) {
    QueryVisits visits = blocks_of<kMask, kTileM, kTileN>(band, n_block);
    visits.end = cute::max(visits.end, 1);
    visits.begin = cute::max(visits.begin, 0);
    visits.start = visits.begin;
    return visits;
  }

  CUTE_DEVICE int first() const { return start; }
  // The visit that comes `count` after the first, fewer than count() after it.
  CUTE_DEVICE int nth(int const& count) const {
    return start + count < end ? start + count : start + count - (end - begin);
  }
  // After the last visit comes the first again: for the next query head of the group.
  CUTE_DEVICE int next(int const& visit) const { return visit + 1 == end ? begin : visit + 1; }
  CUTE_DEVICE bool is_first(int const& visit) const { return visit == start; }
  CUTE_DEVICE int block(int const& visit) const { return visit; }
  CUTE_DEVICE int count() const { return end - begin; }

  // Which blocks, whatever the order.
  template <MaskClass kMask, int kTileM, int kTileN>
  CUTE_DEVICE static QueryVisits blocks_of(Band const& band, int n_block) {
    int begin = 0;
    int end = ceil_div(band.seqlen_q, kTileM);
    int const first_key = n_block * kTileN;
    if constexpr (kMask != MaskClass::Full) {
      begin = cute::min(band.first_query<kMask>(first_key) / kTileM, end - 1);
    }
    if constexpr (kMask == MaskClass::Window) {
      int const last_key = cute::min(first_key + kTileN, band.seqlen_kv) - 1;
      int const queries_end = cute::min(band.seqlen_q, band.last_query(last_key) + 1);
      end = cute::max(ceil_div(cute::max(0, queries_end), kTileM), begin + 1);
    }
    return {begin, end, begin};
  }
};

// The tiles of keys that visit a block of queries. There may be none: then nothing is added to the block's dQ.
struct KeyTiles {
  // Tiles [begin, end).
  int begin;
  int end;

  // Of block `m_block` of kTileM queries.
  template <MaskClass kMask, int kTileM, int kTileN>
  CUTE_DEVICE static KeyTiles of(Band const& band, int m_block) {
    int const tiles = ceil_div(band.seqlen_kv, kTileN);
    if constexpr (kMask == MaskClass::Full) {
      return {0, tiles};
    }
    // Neither end of the tiles' visits ever falls from one tile to the next, so that each is found by bisection.
    auto const first_tile = [&](auto const& holds) {
      int low = 0;
      int high = tiles;
      while (low < high) {
        int const middle = (low + high) / 2;
        bool const found = holds(QueryVisits::blocks_of<kMask, kTileM, kTileN>(band, middle));
        high = found ? middle : high;
        low = found ? low : middle + 1;
      }
      return low;
    };
    KeyTiles visitors;
    visitors.begin = first_tile([&](QueryVisits const& visits) { return visits.end > m_block; });
    visitors.end = first_tile([&](QueryVisits const& visits) { return visits.begin > m_block; });
    return visitors;
  }

  CUTE_DEVICE bool any() const { return begin < end; }
  CUTE_DEVICE int first() const { return begin; }
};

}  // namespace hattn
