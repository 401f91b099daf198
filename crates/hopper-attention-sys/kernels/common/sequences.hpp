// Sequences of a batch whose lengths the device knows and the host does not.
//
// A launch with such sequences has one more kernel, before the others (schedule.cu). It reads the caller's offsets and
// lengths, clamps them, and writes a *table* into the workspace. The other kernels read the table alone:
//
// - a header: how many tiles there are, and the counter that CTAs draw them from;
// - a record for each sequence (Sequence), longest first;
// - a list with the record of each tile of a head. So a tile is found by two reads, however many sequences there are;
// - in a backward, whose tiles are of keys, a list with the record of each block of queries of a head.
//
// Tiles are drawn sequence by sequence, so that the keys and values of one are in L2 while its tiles run. The sequences
// at the end are short, which lets all CTAs end at about the same time.
//
// A sequence's rows are addressed in one of two ways, which differ in numbers alone (SequenceRows): row `begin` of a
// tensor without batch dimension, or row 0 of batch entry `index`.
#pragma once

#include <cute/config.hpp>

#include "kernels.hpp"

namespace hattn {

// A record of the table. 48 bytes.
struct alignas(16) Sequence {
  int first_tile;   // tiles of a head in the records before
  int tiles;        // of a head
  int index;        // in the batch
  int first_block;  // blocks of queries of a head in the records before (backward)
  int q_begin;
  int q_len;
  int kv_begin;
  int kv_len;
  int q_end;  // where the rows end that the sequence has room for; those past its length are a gap
  int kv_end;
  int unused[2];
};

// 32 bytes, at the beginning of the table.
struct alignas(16) SequenceHeader {
  int tiles;    // of all heads
  int counter;  // of tiles that are drawn
  int blocks;   // of queries, of one head (backward)
  int unused;
  // Of a packed side: where the first sequence begins, and where the room of the last one ends.
  int q_begin;
  int q_end;
  int kv_begin;
  int kv_end;
};

// The table, as `SequenceHeader, Sequence[batch], int[list size]`, and in a backward the list of blocks. Where a thread
// of schedule.cu may have several sequences, their records wait after it.
struct SequenceTable {
  std::uint64_t address;
  int batch;

  CUTE_HOST_DEVICE SequenceHeader* header() const { return reinterpret_cast<SequenceHeader*>(address); }
  CUTE_HOST_DEVICE Sequence* records() const { return reinterpret_cast<Sequence*>(address + sizeof(SequenceHeader)); }
  CUTE_HOST_DEVICE int* list() const {
    return reinterpret_cast<int*>(address + sizeof(SequenceHeader) + sizeof(Sequence) * std::uint64_t(batch));
  }
  // Of header, records and list, up to the last value of an int.
  CUTE_HOST_DEVICE int bytes(int list_size) const {
    std::int64_t const bytes = sizeof(SequenceHeader) + sizeof(Sequence) * std::int64_t{batch} +
                               sizeof(int) * ((std::int64_t{list_size} + 3) / 4 * 4);
    return bytes < 0x7FFFFFFF ? static_cast<int>(bytes) : 0x7FFFFFFF;
  }
  CUTE_HOST_DEVICE int* block_list(int list_size) const { return list() + (std::int64_t{list_size} + 3) / 4 * 4; }
};

// A tile of a sequence: what Tile (tile_scheduler.hpp) is, and where its sequence lies.
struct alignas(16) PackedTile {
  int block;
  int head;
  int batch;        // the sequence's index; below 0: no tile
  int first_block;  // of its record
  int q_begin;
  int q_len;
  int kv_begin;
  int kv_len;

  CUTE_DEVICE bool valid() const { return batch >= 0; }
};

// Whether a packed backward sums up dQ of a sequence. Not where the kernel writes dQ itself: there the sequence has one
// tile, whose dQ is the whole of it.
template <class Traits>
CUTE_DEVICE bool has_sums(Sequence const& sequence) {
  return !Traits::kWritesQueries || sequence.kv_len > Traits::kTileN;
}

// What a table is made of.
struct ScheduleShape {
  int batch;
  int seqlen_q;
  int seqlen_kv;
  int tile_rows;  // of queries (forward), or of keys (backward)
  int heads;      // of a sequence, whose tiles they are
  int list_size;  // no fewer than the tiles of a head
  // Backward: rows of a block of queries, and no fewer than the blocks of a head. Else 0.
  int block_rows;
  int block_list_size;

  // Whether tiles are of keys. Then sequences of more than one tile come first.
  CUTE_HOST_DEVICE bool of_keys() const { return block_rows > 0; }
};

// Makes the table in stream order.
Status prepare_schedule() noexcept;
Status launch_schedule(Sequences const& sequences, ScheduleShape const& shape, CUstream_st* stream) noexcept;

}  // namespace hattn
