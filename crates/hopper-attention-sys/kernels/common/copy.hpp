// Copies of tiles from global to shared memory without a detour through registers (cp.async). Tiles are slabs
// (common/slab.hpp).
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

#include "common/barrier.hpp"
#include "common/slab.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"

namespace hattn {

// Where a head of a tensor of 16-bit elements begins.
CUTE_DEVICE std::uint64_t head_address(TensorDesc const& tensor, int batch, int head) {
  return tensor.address + 2 * (batch * tensor.stride_batch + head * tensor.stride_head);
}

// Where the queries of a tile's sequence begin in one head of such a tensor, and its keys.
CUTE_DEVICE std::uint64_t queries_address(TensorDesc const& tensor, Tile const& tile, int head) {
  return head_address(tensor, tile.batch, head);
}
CUTE_DEVICE std::uint64_t queries_address(TensorDesc const& tensor, PackedTile const& tile, int head) {
  return head_address(tensor, tile.batch, head) + 2 * (tile.q_begin * tensor.stride_row);
}
CUTE_DEVICE std::uint64_t keys_address(TensorDesc const& tensor, Tile const& tile, int head) {
  return head_address(tensor, tile.batch, head);
}
CUTE_DEVICE std::uint64_t keys_address(TensorDesc const& tensor, PackedTile const& tile, int head) {
  return head_address(tensor, tile.batch, head) + 2 * (tile.kv_begin * tensor.stride_row);
}

// Copies `bytes` (0 to 16) and fills the rest of 16 with zeros; of 0 bytes the source is not looked at.
CUTE_DEVICE void copy_chunk(std::uint32_t shared, std::uint64_t global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

// The same of 8 bytes.
CUTE_DEVICE void copy_half_chunk(std::uint32_t shared, std::uint64_t global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Makes a group of the calling thread's copies since the last one.
CUTE_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all of its groups but the last kLater. Other threads' copies need a barrier after it.
template <int kLater>
CUTE_DEVICE void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

// Arrives at a barrier in shared memory when the calling thread's copies are there. The barrier counts each thread.
CUTE_DEVICE void arrive_behind_copies(Mbarrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(cute::cast_smem_ptr_to_uint(&barrier.word))
               : "memory");
}

// Copies rows [first, first + kRows) of one head into a tile, every one of kThreads threads its share: the same chunk
// of every kRowsAPass-th row. Columns from `columns` on become zeros; so do, where kRagged, rows from `rows` on, while
// otherwise all of them are there.
// `thread` is the calling thread's index in the CTA.
template <int kRows, int kHeadDim, int kThreads, bool kRagged>
CUTE_DEVICE void copy_tile(std::uint32_t tile, std::uint64_t head, std::int64_t row_bytes, int first, int rows,
                           int columns, int thread) {
  constexpr int kRowsAPass = kThreads / 8;
  static_assert(kRowsAPass % 8 == 0 && kRows % kRowsAPass == 0, "a thread's rows have the same low bits");
  int const chunk = thread % 8;
  int const row = thread / 8;
  std::uint32_t const target = slab_address(tile, row, chunk);
  std::uint64_t const source = head + first * row_bytes + row * row_bytes + chunk * 16;
  CUTE_UNROLL
  for (int pass = 0; pass < kRows / kRowsAPass; ++pass) {
    bool const there = !kRagged || first + row + pass * kRowsAPass < rows;
    CUTE_UNROLL
    for (int slab = 0; slab < slabs(kHeadDim); ++slab) {
      // The tile's last slab may be half full.
      if (slab == kHeadDim / kSlabColumns && chunk * 8 >= kHeadDim % kSlabColumns) {
        continue;
      }
      bool const wanted = there && slab * kSlabColumns + chunk * 8 < columns;
      copy_chunk(target + (slab * kRows + pass * kRowsAPass) * kSlabRowBytes,
                 source + pass * kRowsAPass * row_bytes + slab * kSlabRowBytes, wanted ? 16 : 0);
    }
  }
}

}  // namespace hattn
