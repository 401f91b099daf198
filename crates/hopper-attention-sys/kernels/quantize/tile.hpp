// How a tile's rows come into registers and leave them.
//
// In registers, a row belongs to kLanes lanes (rotate.hpp). Global memory is fast where neighbouring lanes access
// neighbouring bytes. So rows pass through shared memory. Each warp copies and stores its own 8 to 32 rows, so that a
// __syncwarp is all that is needed. In shared memory rows lie one behind the other. Their 16-byte chunks are permuted
// by the row's low bits, so that the eight lanes that read or write together meet all banks.
#pragma once

#include "common/shared.hpp"
#include "common/thread.hpp"
#include "quantize/rotate.hpp"
#include "quantize/schedule.hpp"

namespace hattn::quantize {

// This thread's place in the CTA, as a new value at each call: the elements need the registers.
CUTE_DEVICE int thread_index() {
  int const index = thread_index_anew();
  __builtin_assume(index >= 0 && index < 1024);
  return index;
}

template <int kHeadDim>
struct WarpTile {
  static constexpr int kRows = 32 / kLanes<kHeadDim>;
  static constexpr int kRowBytes = 2 * kHeadDim;     // of the source
  static constexpr int kBytes = kRows * kRowBytes;   // 4 KB
  static constexpr int kChunks = kHeadDim / kChunk;  // of a row, 16 bytes each
  static constexpr int kRowsACopy = 32 / kChunks;
  static constexpr int kUnits = kHeadDim / kUnit;  // of a row, 16 bytes of e4m3 each
  static constexpr int kRowsAStore = 32 / kUnits;
  static constexpr int kRowsApart = 8 / kLanes<kHeadDim>;  // those with the same permutation of chunks
  static_assert(kRowsApart % kRowsACopy == 0 && kRowsAStore == kRowsApart, "a store's rows have the same one of units");

  // Flipped in a chunk's or a unit's index in the row. A lane's chunks and units have the same.
  CUTE_DEVICE static int chunk_flips(int row, int chunk) {
    return row % kRowsApart * kLanes<kHeadDim> + chunk / kChunksALane;
  }
  CUTE_DEVICE static int unit_flips(int row, int unit) {
    if constexpr (kLanes<kHeadDim> == 4) {
      return row % 2 + unit / 8 * 2;
    }
    int const flips = row * kLanes<kHeadDim> / 2 % 4;
    return kLanes<kHeadDim> == 2 ? flips | (flips & 2) * 2 : flips;  // serves both of what unit_of says
  }

  // Copies the rows that are there, and zeros for the rest. `values` is the address of the warp's first row, `rows` how
  // many there are from it on.
  CUTE_DEVICE static void copy(std::uint32_t shared, std::uint64_t values, std::uint64_t row_bytes, int rows,
                               int chunks, int lane) {
    int const chunk = lane % kChunks;
    int const row = lane / kChunks;
    std::uint64_t source = values + static_cast<unsigned>(row) * row_bytes + chunk * 16;
    std::uint32_t const target = shared + row * kRowBytes + (chunk ^ chunk_flips(row, chunk)) * 16;
    auto const target_of = [&](int i) { return (target ^ chunk_flips(i, 0) * 16) + i * kRowBytes; };
    std::uint64_t const step = kRowsACopy * row_bytes;
    if (rows >= kRows && chunks == kChunks) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; i += kRowsACopy) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target_of(i)), "l"(source) : "memory");
        source += step;
      }
    } else {
      int const there = chunk < chunks ? rows - row : 0;
      CUTE_NO_UNROLL
      for (int i = 0; i < kRows; i += kRowsACopy) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target_of(i)), "l"(source),
                     "r"(i < there ? 16 : 0)
                     : "memory");
        source += step;
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Begins to copy the calling warp's rows of a tile.
  CUTE_DEVICE static void copy(std::uint32_t shared, Params const& params, Work const& work, int thread) {
    std::uint64_t const row_bytes = 2 * params.values.stride_row;
    unsigned const first = thread / 32 * kRows;
    copy(shared, work.values + first * row_bytes, row_bytes, work.rows - static_cast<int>(first),
         static_cast<int>(params.chunks), thread % 32);
  }

  // A lane's elements as they came, in pairs.
  CUTE_DEVICE static void read(std::uint32_t (&pairs)[kValues / 2], std::uint32_t shared, int lane) {
    int const row = lane / kLanes<kHeadDim>;
    int const chunk = lane % kLanes<kHeadDim> * kChunksALane;
    std::uint32_t const first = shared + row * kRowBytes + (chunk ^ chunk_flips(row, chunk)) * 16;
    CUTE_UNROLL
    for (int j = 0; j < kChunksALane; ++j) {
      uint4 const piece = load_chunk(first ^ j * 16);
      pairs[4 * j] = piece.x;
      pairs[4 * j + 1] = piece.y;
      pairs[4 * j + 2] = piece.z;
      pairs[4 * j + 3] = piece.w;
    }
  }

  // The same as f32, with `signs` where they are rotated.
  template <DType kSource, bool kSigned>
  CUTE_DEVICE static void read(float (&x)[kValues], std::uint32_t shared, LaneSigns signs, int lane) {
    if constexpr (kSigned) {
      // Not known to be those of the tile before, or all that is made of them would stay in registers.
      asm volatile("" : "+r"(signs.bits[0]), "+r"(signs.bits[1]));
    }
    std::uint32_t pairs[kValues / 2];
    read(pairs, shared, lane);
    CUTE_UNROLL
    for (int i = 0; i < kValues / 2; ++i) {
      unpack<kSource>(pairs[i] ^ (kSigned ? signs.mask(i) : 0), x[2 * i], x[2 * i + 1]);
    }
  }

  // Where a lane writes the e4m3 bytes of its first unit, on their way out; those of its unit u come to this address
  // with 16 * unit_of(0, u) flipped.
  template <Rotation kRotation>
  CUTE_DEVICE static std::uint32_t first_unit(std::uint32_t shared, int lane) {
    int const row = lane / kLanes<kHeadDim>;
    int const unit = unit_of<kHeadDim, kRotation>(lane % kLanes<kHeadDim>, 0);
    return shared + row * kHeadDim + (unit ^ unit_flips(row, unit)) * 16;
  }

  // Whether the elements of a lane's unit u are there.
  template <Rotation kRotation>
  CUTE_DEVICE static bool has(int u, int rows, int chunks, int lane) {
    return lane / kLanes<kHeadDim> < rows && 2 * unit_of<kHeadDim, kRotation>(lane % kLanes<kHeadDim>, u) < chunks;
  }

  // Stores the rows that are there, after all lanes have written.
  CUTE_DEVICE static void store(std::uint32_t shared, std::uint64_t stored, std::uint64_t row_bytes, int rows,
                                int chunks, int lane) {
    int const row = lane / kUnits;
    int const unit = lane % kUnits ^ unit_flips(row, lane % kUnits);
    std::uint64_t target = stored + static_cast<unsigned>(row) * row_bytes + unit * 16;
    std::uint64_t const step = kRowsAStore * row_bytes;
    int const there = 2 * unit < chunks ? rows - row : 0;
    CUTE_UNROLL
    for (int i = 0; i < kRows; i += kRowsAStore) {
      uint4 const bytes = load_chunk(shared + lane * 16 + i * kHeadDim);
      if (i < there) {
        __stcs(reinterpret_cast<uint4*>(target), bytes);
      }
      target += step;
    }
  }
};

// Those of the lane's elements, before the rotation.
template <int kHeadDim>
CUTE_DEVICE LaneSigns signs_of(Signs const& signs, int lane) {
  if constexpr (kLanes<kHeadDim> == 4) {
    bool const odd = lane % 2 != 0;
    bool const high = lane % 4 >= 2;
    auto const of = [&](int i) {
      return high ? (odd ? signs.bits[6 + i] : signs.bits[4 + i]) : (odd ? signs.bits[2 + i] : signs.bits[i]);
    };
    return {{of(0), of(1)}};
  }
  bool const upper = lane % kLanes<kHeadDim> != 0;
  return {{upper ? signs.bits[2] : signs.bits[0], upper ? signs.bits[3] : signs.bits[1]}};
}

// Makes NaN of infinities, which have no place in e4m3; rare. Returns the largest magnitude of what is finite.
CUTE_DEVICE float largest_magnitude(float (&x)[kValues]) {
  auto const largest = [&] { return largest_of<kValues>([&](int i) { return x[i]; }); };
  float most = largest();
  if (is_infinite(most)) {
    CUTE_UNROLL
    for (float& one : x) {
      one = is_infinite(one) ? __uint_as_float(kMagnitude) : one;
    }
    most = largest();
  }
  return most;
}

// The largest magnitude of pairs of f16, compared two at a time. NaN is skipped.
CUTE_DEVICE float largest_of_halves(std::uint32_t const (&pairs)[kValues / 2]) {
  // Two chains, since a comparison takes a few cycles.
  std::uint32_t most[2] = {0, 0};
  CUTE_UNROLL
  for (int i = 0; i < kValues / 2; ++i) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(most[i % 2]) : "r"(pairs[i] & 0x7fff7fffU));
  }
  float low[2];
  float high[2];
  unpack<DType::F16>(most[0], low[0], high[0]);
  unpack<DType::F16>(most[1], low[1], high[1]);
  return fmaxf(fmaxf(low[0], high[0]), fmaxf(low[1], high[1]));
}

// The same of pairs of the source type.
template <DType kSource>
CUTE_DEVICE float largest_magnitude(std::uint32_t (&pairs)[kValues / 2]) {
  auto const largest = [&] {
    if constexpr (kSource == DType::F16) {
      return largest_of_halves(pairs);
    }
    return largest_of<kValues>([&](int i) {
      float low, high;
      unpack<kSource>(pairs[i / 2], low, high);
      return i % 2 == 0 ? low : high;
    });
  };
  float most = largest();
  if (is_infinite(most)) {
    CUTE_UNROLL
    for (std::uint32_t& pair : pairs) {
      float low, high;
      unpack<kSource>(pair, low, high);
      pair |= is_infinite(low) ? 0x00007fffU : 0;
      pair |= is_infinite(high) ? 0x7fff0000U : 0;
    }
    most = largest();
  }
  return most;
}

}  // namespace hattn::quantize
