// How a tile's rows come into registers and leave them.
//
// A row belongs to kLanes lanes (rotate.hpp), while memory wants neighbouring lanes on neighbouring bytes. Shared
// memory is between the two, and only within a warp: its 8 or 16 rows are copied by itself and stored by itself, so
// that a __syncwarp is all it takes. Rows lie side by side, their 16-byte chunks permuted by the row's low bits, so
// that the eight lanes that read or write together meet all banks.
#pragma once

#include "quantize/rotate.hpp"
#include "quantize/schedule.hpp"

namespace hattn::quantize {

template <int kHeadDim>
struct WarpTile {
  static constexpr int kRowsALane = 2;
  static constexpr int kRowsApart = 32 / kLanes<kHeadDim>;  // a lane's
  static constexpr int kRows = kRowsALane * kRowsApart;
  static constexpr int kRowBytes = 2 * kHeadDim;     // of the source
  static constexpr int kBytes = kRows * kRowBytes;   // 4 KB
  static constexpr int kChunks = kHeadDim / kChunk;  // of a row, 16 bytes each
  static constexpr int kRowsACopy = 32 / kChunks;
  static constexpr int kUnits = kHeadDim / 16;  // of a stored row, 16 bytes each
  static constexpr int kRowsAStore = 32 / kUnits;
  // Whose rows have the same permutation.
  static_assert(kRowsACopy % 2 == 0 && kRowsApart % 8 == 0 && kRowsAStore % 4 == 0 &&
                (kHeadDim == 128 || kRowsACopy == 4));

  // What is added to a chunk's index in the row, without carry.
  CUTE_DEVICE static int chunk_permutation(int row) { return kHeadDim == 128 ? row % 2 * 4 : row % 4 * 2; }
  CUTE_DEVICE static int unit_permutation(int row) { return kHeadDim == 128 ? row % 4 * 2 : row / 2 % 4; }

  // Copies the rows that are there, and zeros for the rest. `values` is the address of the warp's first row, `rows` how
  // many there are from it on.
  CUTE_DEVICE static void copy(std::uint32_t shared, std::uint64_t values, std::uint64_t row_bytes, int rows,
                               int chunks, int lane) {
    int const chunk = lane % kChunks;
    int const row = lane / kChunks;
    std::uint64_t source = values + static_cast<unsigned>(row) * row_bytes + chunk * 16;
    std::uint32_t const target = shared + row * kRowBytes + (chunk ^ chunk_permutation(row)) * 16;
    std::uint64_t const step = kRowsACopy * row_bytes;
    if (rows >= kRows && chunks == kChunks) {
      CUTE_UNROLL
      for (int i = 0; i < kRows / kRowsACopy; ++i) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target + i * kRowsACopy * kRowBytes),
                     "l"(source)
                     : "memory");
        source += step;
      }
    } else {
      int const there = chunk < chunks ? rows - row : 0;
      CUTE_NO_UNROLL
      for (int i = 0; i < kRows; i += kRowsACopy) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target + i * kRowBytes),
                     "l"(source), "r"(i < there ? 16 : 0)
                     : "memory");
        source += step;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Where a lane reads its chunk j is this address with j * kLanes * 16 flipped; its second row is kRowsApart later.
  CUTE_DEVICE static std::uint32_t first_chunk(std::uint32_t shared, int lane) {
    int const row = lane / kLanes<kHeadDim>;
    return shared + row * kRowBytes + ((lane % kLanes<kHeadDim>)^chunk_permutation(row)) * 16;
  }

  CUTE_DEVICE static uint4 read_chunk(std::uint32_t first, int r, int j) {
    uint4 chunk;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"((first ^ j * kLanes<kHeadDim> * 16) + r * kRowsApart * kRowBytes)
                 : "memory");
    return chunk;
  }

  // Where a lane writes the e4m3 bytes of its chunk j, on their way out, is this address with j * kLanes * 8 flipped.
  CUTE_DEVICE static std::uint32_t first_bytes(std::uint32_t shared, int lane) {
    int const row = lane / kLanes<kHeadDim>;
    int const chunk = lane % kLanes<kHeadDim>;
    return shared + row * kHeadDim + (chunk / 2 ^ unit_permutation(row)) * 16 + chunk % 2 * kChunk;
  }

  CUTE_DEVICE static void write_bytes(std::uint32_t first, int r, int j, std::uint32_t low, std::uint32_t high) {
    std::uint32_t const target = (first ^ j * kLanes<kHeadDim> * kChunk) + r * kRowsApart * kHeadDim;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(target), "r"(low), "r"(high) : "memory");
  }

  // Stores the rows that are there, after all lanes have written.
  CUTE_DEVICE static void store(std::uint32_t shared, std::uint64_t stored, std::uint64_t row_bytes, int rows,
                                int chunks, int lane) {
    int const row = lane / kUnits;
    int const unit = lane % kUnits ^ unit_permutation(row);
    std::uint64_t target = stored + static_cast<unsigned>(row) * row_bytes + unit * 16;
    std::uint64_t const step = kRowsAStore * row_bytes;
    int const there = 2 * unit < chunks ? rows - row : 0;
    CUTE_UNROLL
    for (int i = 0; i < kRows; i += kRowsAStore) {
      uint4 bytes;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bytes.x), "=r"(bytes.y), "=r"(bytes.z), "=r"(bytes.w)
                   : "r"(shared + lane * 16 + i * kHeadDim)
                   : "memory");
      if (i < there) {
        __stcs(reinterpret_cast<uint4*>(target), bytes);
      }
      target += step;
    }
  }
};

}  // namespace hattn::quantize
