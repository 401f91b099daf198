// The order in which a grid walks the tiles of a launch.
//
// Tiles are listed group by group. A group is `heads_per_group` (batch, head) pairs, whose other operands are meant to
// stay in L2 together. Inside a group the tiles with the most work come first: under a causal mask the last queries
// and the first keys. The last group has all heads that are left, which may be many: the more tiles it has, the
// shorter are the tiles that the grid ends with.
//
// How a persistent grid takes tiles of that list:
// - With a counter, a CTA draws the next tile when it can take one.
// - Without, the grid takes `grid` tiles a round, in alternating direction, so that a CTA that had a long tile in one
//   round has a short one in the next. There is nothing to zero and nothing to fetch, but the work is balanced only
//   where a group is a whole number of rounds, or where there are two rounds at most.
#pragma once

#include <cute/numeric/math.hpp>

#include "common/scalars.hpp"
#include "kernels.hpp"

namespace hattn {

struct alignas(16) Tile {
  int block;  // its index in the sequence: tile_m queries each (forward) or tile_n keys (backward)
  int head;
  int batch;  // below 0: no tile

  CUTE_DEVICE bool valid() const { return batch >= 0; }
};

// The band of a tile: that of the launch, or of its sequence where that has lengths of its own.
template <class Params>
CUTE_DEVICE Band band_of_tile(Params const& params, Tile const&) {
  return band_of_launch(params);
}
// `Place`: PackedTile, Sequence, or what else has a sequence's lengths.
template <class Params, class Place>
CUTE_DEVICE Band band_of_tile(Params const& params, Place const& tile) {
  int const offset = params.diagonal_offset + (params.sequences.bottom_right ? tile.kv_len - tile.q_len : 0);
  return {offset - params.window_left, offset + params.window_right, tile.q_len, tile.kv_len, params.edges};
}

// The key at which query 0 of a tile's sequence stands.
template <class Params>
CUTE_DEVICE int diagonal_of_tile(Params const& params, Tile const&) {
  return params.diagonal_offset;
}
template <class Params, class Place>
CUTE_DEVICE int diagonal_of_tile(Params const& params, Place const& tile) {
  return params.diagonal_offset + (params.sequences.bottom_right ? tile.kv_len - tile.q_len : 0);
}

// The queries of a tile's sequence.
template <class Scalars>
CUTE_DEVICE int queries_of(Scalars const& scalars, Tile const&) {
  return scalars.seqlen_q;
}
template <class Scalars>
CUTE_DEVICE int queries_of(Scalars const&, PackedTile const& tile) {
  return tile.q_len;
}

// The same of its keys.
template <class Scalars>
CUTE_DEVICE int keys_of(Scalars const& scalars, Tile const&) {
  return scalars.seqlen_kv;
}
template <class Scalars>
CUTE_DEVICE int keys_of(Scalars const&, PackedTile const& tile) {
  return tile.kv_len;
}

// The row of a tensor that its sequence's first query is.
CUTE_DEVICE int first_row_of(Tile const&) { return 0; }
CUTE_DEVICE int first_row_of(PackedTile const& tile) { return tile.q_begin; }

// Where the LSE of a tile's head and of a query of its sequence lies, in elements.
template <class TileRecord>
CUTE_DEVICE std::int64_t lse_place(TensorDesc const& lse, TileRecord const& tile, int query) {
  return tile.batch * lse.stride_batch + tile.head * lse.stride_head + (first_row_of(tile) + query) * lse.stride_row;
}

// kDrawsFirst: a CTA's first tile is drawn too. This is needed where tiles wait for tiles before them (an ordered
// backward). Every tile before a drawn one belongs to a CTA that is running. A tile that follows from a CTA's index may
// belong to a CTA that cannot start before others end.
template <bool kDrawsFirst>
struct TileScheduler {
  int blocks;
  int heads;
  int batch;
  int heads_per_group;
  int groups;
  bool last_first;
  int* counter;

  CUTE_DEVICE int total() const { return blocks * heads * batch; }

  // The list index of this CTA's tile in a round; at or past `total()` there is none, then or later.
  CUTE_DEVICE int draw(int round) const {
    int const cta = static_cast<int>(blockIdx.x);
    int const grid = static_cast<int>(gridDim.x);
    if (counter == nullptr) {
      return round * grid + (round % 2 == 0 ? cta : grid - 1 - cta);
    }
    return round == 0 && !kDrawsFirst ? cta : (kDrawsFirst ? 0 : grid) + atomicAdd(counter, 1);
  }

  // The list index of tile `block` of a (batch, head) pair.
  CUTE_DEVICE int index_of(int block, int batch_head) const {
    int const group = cute::min(batch_head / heads_per_group, groups - 1);
    int const first_head = group * heads_per_group;
    int const group_heads = group == groups - 1 ? heads * batch - first_head : heads_per_group;
    int const rank = last_first ? blocks - 1 - block : block;
    return first_head * blocks + rank * group_heads + batch_head - first_head;
  }

  CUTE_DEVICE Tile tile(int index) const {
    if (index >= total()) {
      return {0, 0, -1};
    }
    int const group_tiles = heads_per_group * blocks;
    int const group = cute::min(index / group_tiles, groups - 1);
    int const within = index - group * group_tiles;
    int const group_heads = group == groups - 1 ? heads * batch - group * heads_per_group : heads_per_group;
    int const rank = within / group_heads;
    int const batch_head = group * heads_per_group + (within - rank * group_heads);
    Tile tile;
    tile.block = last_first ? blocks - 1 - rank : rank;
    tile.batch = batch_head / heads;
    tile.head = batch_head - tile.batch * heads;
    return tile;
  }
};

// The same where the device knows how long sequences are: tiles are listed sequence by sequence, and always drawn.
// Inside a sequence the order is that of a TileScheduler whose groups have `heads_per_group` heads.
struct PackedScheduler {
  SequenceTable table;  // or a copy of it in shared memory
  int* counter;
  int heads;
  int heads_per_group;
  bool last_first;
  int tiles;  // of all sequences

  CUTE_DEVICE int draw(int round) const {
    int const cta = static_cast<int>(blockIdx.x);
    return round == 0 ? cta : static_cast<int>(gridDim.x) + atomicAdd(counter, 1);
  }

  CUTE_DEVICE PackedTile tile(int index) const {
    if (index >= tiles) {
      return {0, 0, -1, 0, 0, 0, 0, 0};
    }
    Sequence const sequence = table.records()[table.list()[index / heads]];
    int const within = index - sequence.first_tile * heads;
    int const group_tiles = sequence.tiles * heads_per_group;
    int const group = within / group_tiles;
    int const within_group = within - group * group_tiles;
    int const group_heads = cute::min(heads_per_group, heads - group * heads_per_group);
    int const rank = within_group / group_heads;
    PackedTile tile;
    tile.block = last_first ? sequence.tiles - 1 - rank : rank;
    tile.head = group * heads_per_group + (within_group - rank * group_heads);
    tile.batch = sequence.index;
    tile.first_block = sequence.first_block;
    tile.q_begin = sequence.q_begin;
    tile.q_len = sequence.q_len;
    tile.kv_begin = sequence.kv_begin;
    tile.kv_len = sequence.kv_len;
    return tile;
  }
};

using FwdScheduler = TileScheduler<false>;
using BwdScheduler = TileScheduler<true>;

// The scheduler of a forward of 16-bit operands. Under a mask the last queries see the most keys, so their tiles come
// first.
template <class Traits>
CUTE_DEVICE FwdScheduler fwd_scheduler(FwdParams const& params, FwdScalars const& scalars, int* tile_counter) {
  int const m_tiles = (scalars.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  bool const last_first = Traits::kMask != MaskClass::Full;
  return {m_tiles, params.heads_q, params.batch, scalars.heads_per_group, scalars.groups, last_first, tile_counter};
}

// The same of a packed one, of any type. `table`: the launch's, or a copy.
template <class Traits, class Scalars>
CUTE_DEVICE PackedScheduler packed_scheduler(Scalars const& scalars, SequenceTable const& table) {
  return {table,
          &scalars.table.header()->counter,
          scalars.heads_q,
          scalars.heads_per_group,
          Traits::kMask != MaskClass::Full,
          table.header()->tiles};
}

// The scheduler of a backward. Under a causal mask the first keys are seen by the most queries, so their tiles come
// first. sm90 takes the entries of a list instead, which has shares of tiles (sm90/bwd/share.hpp). `Numbers`:
// BwdScalars or BwdParams.
template <class Numbers>
CUTE_DEVICE BwdScheduler bwd_scheduler(Numbers const& numbers, int heads, int n_tiles, int* tile_counter) {
  return {n_tiles, heads, numbers.batch, numbers.heads_per_group, numbers.groups, false, tile_counter};
}
CUTE_DEVICE BwdScheduler bwd_scheduler(BwdScalars const& scalars) {
  return bwd_scheduler(scalars, scalars.heads_kv, scalars.n_tiles, scalars.tile_counter);
}

// Whether a persistent forward draws a CTA's next tile late, while the last keys but one of a tile are on their way.
//
// A tile that is drawn is kept from the other CTAs, so that the grid ends as evenly as its draws are late. Tiles of few
// key blocks are drawn early, as soon as there is a buffer. Else the consumers would wait for Q
// (benches/LOG.md, 16).
template <int kTileN, class Scalars>
CUTE_DEVICE bool draws_late(int const* counter, Scalars const& scalars) {
  constexpr int kFew = 4 * kTileN;
  return counter != nullptr && scalars.seqlen_kv > kFew &&
         static_cast<std::int64_t>(scalars.right_offset) - scalars.left_offset > kFew;
}

// The same of a packed tile: whether the tile after it is drawn late.
template <int kTileN, class Scalars>
CUTE_DEVICE bool draws_late(PackedTile const& tile, Scalars const& scalars) {
  constexpr int kFew = 4 * kTileN;
  return tile.kv_len > kFew && static_cast<std::int64_t>(scalars.right_offset) - scalars.left_offset > kFew;
}
template <int kTileN, class Scalars>
CUTE_DEVICE bool draws_late(Tile const&, Scalars const& scalars) {
  return draws_late<kTileN>(scalars.tile_counter, scalars);
}

}  // namespace hattn
