// Where rows of one head lie in an operand, as coordinates of its tensor map.
#pragma once

#include <cute/config.hpp>

#include "common/tile_scheduler.hpp"

namespace hattn::sm90 {

// Of a map over [batch, heads, seqlen, head_dim].
struct DenseRows {
  int row;
  int head;
  int place;  // the batch entry
};

// Where every sequence ends in a packed map (encode_packed_map in tensor_map.hpp), as a coordinate of rows.
constexpr int kPackedEnd = 1 << 30;

// Of a packed map: loads of rows past the sequence's end give zeros, stores to them are dropped.
struct PackedRows {
  int row;  // kPackedEnd, less the rows from there to the sequence's end
  int head;
  int place;  // the row of the tensor at which the sequence ends
};

// Rows from `row` on of a packed sequence's queries, or keys, in one head. `rows_apart`: of the operand, from a batch
// entry to the next. `Place` has the sequence's place and lengths.
template <class Place>
CUTE_DEVICE PackedRows queries_of_head(Place const& tile, int rows_apart, int row, int head) {
  return {kPackedEnd - tile.q_len + row, head, tile.q_begin + tile.q_len + tile.batch * rows_apart};
}
template <class Place>
CUTE_DEVICE PackedRows keys_of_head(Place const& tile, int rows_apart, int row, int head) {
  return {kPackedEnd - tile.kv_len + row, head, tile.kv_begin + tile.kv_len + tile.batch * rows_apart};
}

// Rows of a forward tile's queries from `row` on, whether packed or not.
CUTE_DEVICE DenseRows queries_at(Tile const& tile, int, int row) { return {row, tile.head, tile.batch}; }
CUTE_DEVICE PackedRows queries_at(PackedTile const& tile, int rows_apart, int row) {
  return queries_of_head(tile, rows_apart, row, tile.head);
}
// The same of the keys that it sees, in key head `head`.
CUTE_DEVICE DenseRows keys_at(Tile const& tile, int, int row, int head) { return {row, head, tile.batch}; }
CUTE_DEVICE PackedRows keys_at(PackedTile const& tile, int rows_apart, int row, int head) {
  return keys_of_head(tile, rows_apart, row, head);
}

}  // namespace hattn::sm90
