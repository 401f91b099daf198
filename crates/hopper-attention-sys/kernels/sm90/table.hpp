// A copy of a small table of sequences in shared memory, so that tiles are found without waiting for memory twice.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/barrier.hpp"
#include "common/sequences.hpp"

namespace hattn::sm90 {

// The most bytes of a table that is copied. What is larger is read from memory.
constexpr int kMostTableBytes = 8192;

// Room for a table, of a packed kernel.
template <int kBytes>
struct TableStorage {
  static constexpr int kTableBytes = kBytes;
  alignas(16) unsigned char table[kTableBytes];
  Mbarrier table_full;
};
template <>
struct TableStorage<0> {};

// By one lane, once: copies the table if there is room for it. Gives where to read it. `bytes`: of header, records and
// list.
template <int kBytes>
CUTE_DEVICE SequenceTable copied_table(SequenceTable table, int bytes, TableStorage<kBytes>& storage) {
  if (bytes <= kBytes) {
    storage.table_full.arrive_expect_bytes(bytes);
    cute::SM90_BULK_COPY_G2S::copy(table.header(), &storage.table_full.word, storage.table, bytes);
    storage.table_full.wait(0);
    table.address = reinterpret_cast<std::uint64_t>(storage.table);
  }
  return table;
}

}  // namespace hattn::sm90
