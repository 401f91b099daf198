// How tiles lie in shared memory.
//
// A tile of 16-bit elements is kept as slabs of 64 columns, one after the other. A slab has 128 bytes for each row of
// the tile, which are eight chunks of 16 bytes. The index of a chunk is xor-ed with the row's low three bits (the copy
// engine's 128-byte swizzle):
//
//     row 0   0 1 2 3 4 5 6 7
//     row 1   1 0 3 2 5 4 7 6
//     row 2   2 3 0 1 6 7 4 5
//     ...
//
// So the same chunk of eight consecutive rows lies in eight different groups of banks. Copies, ldmatrix, stmatrix and
// wgmma all access it without conflicts.
//
// A tile begins at a multiple of 128 bytes (sm90: 1024). So to xor an address within the tile with 16 * c is to xor the
// index of the chunk with c.
//
// Some slabs have rows of 64 bytes:
// - A tile of e4m3 elements has slabs of 128 columns, or of 64 where the head dim is no multiple of 128.
// - A tile of 16-bit elements of sm90 has slabs of 32 columns where the head dim is no multiple of 64. (In sm80 kernels
//   the last of its slabs of 64 columns is half full.)
//
// Such a row has four chunks, whose index is xor-ed with bits 1 and 2 of the row (the 64-byte swizzle). Two rows take
// 128 bytes, so the same chunk of eight consecutive rows lies in eight different groups of banks here, too.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

namespace hattn {

constexpr int kSlabColumns = 64;
constexpr int kSlabRowBytes = 128;

// How many slabs hold so many columns. The last may be half full.
CUTE_HOST_DEVICE constexpr int slabs(int columns) { return (columns + kSlabColumns - 1) / kSlabColumns; }

// What the index of a row's chunks is xor-ed with.
template <int kRowBytes = kSlabRowBytes>
CUTE_DEVICE constexpr int swizzle(int row) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  return kRowBytes == 128 ? row % 8 : row / 2 % 4;
}

// The address of a row's chunk in the slab that begins at `slab`. `low` is any number with the row's low three bits,
// for callers that know one which is made more easily.
template <int kRowBytes = kSlabRowBytes>
CUTE_DEVICE std::uint32_t slab_address(std::uint32_t slab, int row, int chunk, int low) {
  return slab + row * kRowBytes + (chunk ^ swizzle<kRowBytes>(low)) * 16;
}
template <int kRowBytes = kSlabRowBytes>
CUTE_DEVICE std::uint32_t slab_address(std::uint32_t slab, int row, int chunk) {
  return slab_address<kRowBytes>(slab, row, chunk, row);
}

// Where columns lie in a tile of slabs: in which slab, and what differs in the address of their chunk.
template <int kRowBytes>
struct ColumnsOf {
  int slab;
  int flips;

  // Of the 16 columns from 16 * step on.
  CUTE_DEVICE static ColumnsOf of_step(int step) {
    constexpr int kSteps = kRowBytes / 32;  // of a slab
    return {step / kSteps, step % kSteps * 32};
  }
  // Of what begins with this byte of a row, a multiple of 32.
  CUTE_DEVICE static ColumnsOf of_byte(int byte) { return {byte / kRowBytes, byte % kRowBytes}; }

  // Their address in a tile of kRows rows, from that of the same row's first columns.
  template <int kRows>
  CUTE_DEVICE std::uint32_t from(std::uint32_t first) const {
    return (first ^ flips) + slab * (kRows * kRowBytes);
  }
};
using Columns = ColumnsOf<kSlabRowBytes>;

// Where a lane reads, for ldmatrix, the 16 rows and 16 columns that a tile begins with: four matrices, in the order in
// which the product takes them as registers, so that none has to be moved.
// - down: down the first 8 columns before the next, for A and for B transposed;
// - along: along the first 8 rows before the next, for B and for A transposed.
// A lane's row has the low three bits of the lane. So further Columns are found from this address, and further
// rows (by multiples of 8) are an offset away.
CUTE_DEVICE std::uint32_t lane_offset_down(int lane) { return lane % 16 * kSlabRowBytes + (lane / 16 ^ lane % 8) * 16; }
CUTE_DEVICE std::uint32_t lane_offset_along(int lane) {
  return (lane / 16 * 8 + lane % 8) * kSlabRowBytes + (lane / 8 % 2 ^ lane % 8) * 16;
}

}  // namespace hattn
