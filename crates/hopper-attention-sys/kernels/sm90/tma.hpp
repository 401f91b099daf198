// Copies of tiles between global and shared memory by the copy engine. Tiles are slabs of kColumns columns
// (common/slab.hpp).
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/barrier.hpp"
#include "common/slab.hpp"
#include "sm90/rows.hpp"

namespace hattn::sm90 {

// What a kernel reads once should not push what it reads again out of L2.
constexpr std::uint64_t kEvictFirst = 0x12F0000000000000ULL;
constexpr std::uint64_t kEvictLast = 0x14F0000000000000ULL;

// Fetches tensor maps into the cache that the copy engine reads them from.
template <class... Maps>
CUTE_DEVICE void prefetch_maps(Maps const&... maps) {
  (cute::prefetch_tma_descriptor(&maps), ...);
}

// The first column of the head that a box brings to column `column` of a tile.
template <int kHeadDim, int kColumns>
CUTE_DEVICE int rotated_begin(int column, int rotation) {
  int const begin = column - rotation;
  return column + kColumns == kHeadDim && rotation < 0 ? begin - kHeadDim : begin;
}

// Copies rows [row, row + kRows) of one head into a tile; what lies beyond the tensor reads as zero. `rotation`: of
// the head's columns in the tile (fwd/rotation.hpp).
template <int kRows, int kHeadDim, int kColumns = kSlabColumns, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, Mbarrier& full, std::uint64_t hint, Element* tile, int row, int head,
                           int batch, int rotation = 0) {
  CUTE_UNROLL
  for (int column = 0; column < kHeadDim; column += kColumns) {
    cute::SM90_TMA_LOAD_4D::copy(&map, &full.word, hint, tile + column * kRows,
                                 rotated_begin<kHeadDim, kColumns>(column, rotation), row, head, batch);
  }
}

// Stores the 64 rows of one consumer of a tile of kRows rows to rows [row, row + 64) of one head; what lies beyond the
// tensor is dropped.
template <int kRows, int kHeadDim, int kColumns = kSlabColumns, class Element>
CUTE_DEVICE void store_rows(CUtensorMap const& map, Element const* tile, int consumer, int row, int head, int batch) {
  CUTE_UNROLL
  for (int column = 0; column < kHeadDim; column += kColumns) {
    cute::SM90_TMA_STORE_4D::copy(&map, tile + column * kRows + consumer * 64 * kColumns, column, row, head, batch);
  }
}

// The same of rows that are given by their coordinates.
template <int kRows, int kHeadDim, int kColumns = kSlabColumns, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, Mbarrier& full, std::uint64_t hint, Element* tile,
                           DenseRows const& rows, int rotation = 0) {
  load_tile<kRows, kHeadDim, kColumns>(map, full, hint, tile, rows.row, rows.head, rows.place, rotation);
}
template <int kRows, int kHeadDim, int kColumns = kSlabColumns, class Element>
CUTE_DEVICE void store_rows(CUtensorMap const& map, Element const* tile, int consumer, DenseRows const& rows) {
  store_rows<kRows, kHeadDim, kColumns>(map, tile, consumer, rows.row, rows.head, rows.place);
}

// The same by a packed map.
template <int kRows, int kHeadDim, int kColumns = kSlabColumns, class Element>
CUTE_DEVICE void load_tile(CUtensorMap const& map, Mbarrier& full, std::uint64_t hint, Element* tile,
                           PackedRows const& rows, int rotation = 0) {
  CUTE_UNROLL
  for (int column = 0; column < kHeadDim; column += kColumns) {
    cute::SM90_TMA_LOAD_5D::copy(&map, &full.word, hint, tile + column * kRows,
                                 rotated_begin<kHeadDim, kColumns>(column, rotation), rows.row, rows.head,
                                 int{kPackedEnd}, rows.place);
  }
}
template <int kRows, int kHeadDim, int kColumns = kSlabColumns, class Element>
CUTE_DEVICE void store_rows(CUtensorMap const& map, Element const* tile, int consumer, PackedRows const& rows) {
  CUTE_UNROLL
  for (int column = 0; column < kHeadDim; column += kColumns) {
    cute::SM90_TMA_STORE_5D::copy(&map, tile + column * kRows + consumer * 64 * kColumns, column, rows.row, rows.head,
                                  int{kPackedEnd}, rows.place);
  }
}

// Adds f32 in shared memory to as many in global memory, as one bulk group of the calling thread.
CUTE_DEVICE void add_bulk(float* global, float const* shared, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(cute::cast_smem_ptr_to_uint(shared)), "r"(bytes)
               : "memory");
  cute::tma_store_arrive();
}

// Copies instead of adding.
CUTE_DEVICE void store_bulk(float* global, float const* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(cute::cast_smem_ptr_to_uint(shared)), "r"(bytes)
               : "memory");
  cute::tma_store_arrive();
}

// Waits until all but the last kLater of the calling thread's bulk groups have read shared memory.
template <int kLater>
CUTE_DEVICE void await_bulk_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLater) : "memory");
}

// Waits until they have arrived in global memory.
template <int kLater>
CUTE_DEVICE void await_bulk_arrival() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLater) : "memory");
}

}  // namespace hattn::sm90
