// A copy of a small table of sequences in shared memory, so that tiles are found without waiting for memory twice.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/barrier.hpp"
#include "common/sequences.hpp"

namespace hattn::sm90 {

template <bool kPacked>
struct TableStorage {};
template <>
struct TableStorage<true> {
  static constexpr int kTableBytes = 8192;
  alignas(1024) unsigned char table[kTableBytes];
  Mbarrier table_full;
};

// By one lane, once: copies the table if there is room for it. Gives where to read it. `bytes`: of header, records and
// list.
CUTE_DEVICE SequenceTable copied_table(SequenceTable table, int bytes, TableStorage<true>& storage) {
  if (bytes <= TableStorage<true>::kTableBytes) {
    storage.table_full.arrive_expect_bytes(bytes);
    cute::SM90_BULK_COPY_G2S::copy(table.header(), &storage.table_full.word, storage.table, bytes);
    storage.table_full.wait(0);
    table.address = reinterpret_cast<std::uint64_t>(storage.table);
  }
  return table;
}

}  // namespace hattn::sm90
