// The Hadamard transform of rows. A row is in the registers of kLanes lanes: one, two at head dim 128, four at 256.
//
// A row is kHeadDim / 8 chunks of 8 elements. Lane `l` of the row's lanes has chunks 8 l to 8 l + 7. So all steps up to
// 64 elements are within a lane.
// - At head dim 128 the last step is between two lanes. There each lane takes both results of half of the pairs. So
//   only half of its elements are shuffled. Afterwards a lane has units (unit_of) of both halves of the row.
// - At head dim 256 the last two steps are. There each lane keeps its place, and all of its elements are shuffled.
#pragma once

#include "quantize/arithmetic.hpp"

namespace hattn::quantize {

constexpr int kChunk = 8;        // elements that are 16 bytes of a source
constexpr int kChunksALane = 8;  // of a row
constexpr int kValues = kChunk * kChunksALane;
constexpr int kUnit = 16;  // elements that are 16 bytes of e4m3
constexpr int kUnitsALane = kValues / kUnit;
constexpr int kLargestHeadDim = 256;

template <int kHeadDim>
constexpr int kLanes = kHeadDim / kValues;

// What is done before the conversion.
enum class Rotation : int {
  None,
  Whole,       // one transform of a row, where the head dim is kHeadDim
  PowersOfTwo  // several transforms side by side, one for each power of two in the head dim (112 = 64 + 32 + 16)
};

// Which elements of a row are negated before the rotation. bits[i] is for the 32 elements from 32 i on. Of their pair
// p, the first element has bit 15 - p and the second bit 31 - p. So one shift takes both bits to the sign bits of a
// packed pair.
struct Signs {
  std::uint32_t bits[kLargestHeadDim / 32];
};

// The signs of a lane's elements.
struct LaneSigns {
  std::uint32_t bits[2];

  // The mask that negates what is to be negated of elements 2 p and 2 p + 1, as a packed pair.
  CUTE_DEVICE std::uint32_t mask(int p) const { return bits[p / 16] << (p % 16) & 0x80008000U; }
};

// The factor of each chunk's elements at the end: 1 / sqrt(size of the chunk's transform).
struct Norms {
  float of_chunk[kLargestHeadDim / kChunk];
};

// One step of the transform, between elements that are kStep chunks apart. `chunks` is how many chunks the row has,
// from the lane's first one on. A run of 2 * kStep chunks that ends beyond them stays as it is. kWhole: there is no
// such run.
template <int kStep, bool kWhole>
CUTE_DEVICE void rotate_chunks(float (&x)[kValues], int chunks) {
  CUTE_UNROLL
  for (int j = 0; j < kChunksALane; ++j) {
    if ((j & kStep) == 0) {
      bool const within = kWhole || (j / (2 * kStep) + 1) * 2 * kStep <= chunks;
      CUTE_UNROLL
      for (int i = 0; i < kChunk; ++i) {
        float& low = x[j * kChunk + i];
        float& high = x[(j + kStep) * kChunk + i];
        float const sum = add(low, high);
        float const difference = subtract(low, high);
        low = within ? sum : low;
        high = within ? difference : high;
      }
    }
  }
}

// Whether the last step is between two lanes.
template <int kHeadDim, Rotation kRotation>
constexpr bool kCrosses = kRotation == Rotation::Whole&& kLanes<kHeadDim> == 2;

// Whether steps are between four lanes. The head dim is above 128: where it is no power of two, its first transform is
// of 128 elements, of lanes 0 and 1, and all others are within a lane (240 = 128 + 64 + 32 + 16).
template <int kHeadDim, Rotation kRotation>
constexpr bool kExchanges = kRotation != Rotation::None&& kLanes<kHeadDim> == 4;

// The unit of the row that a lane's elements from kUnit * u on are, after the rotation.
template <int kHeadDim, Rotation kRotation>
CUTE_DEVICE int unit_of(int lane, int u) {
  return kCrosses<kHeadDim, kRotation> ? 2 * lane + u % 2 + u / 2 * kUnitsALane : lane * kUnitsALane + u;
}

// a - b in the lower lane, b - a in the upper one.
CUTE_DEVICE float subtract_by_lane(int lane, float a, float b) {
  float difference;
  asm("{\n"
      ".reg .pred upper;\n"
      "setp.ne.s32 upper, %3, 0;\n"
      "sub.rn.f32 %0, %1, %2;\n"
      "@upper sub.rn.f32 %0, %2, %1;\n"
      "}\n"
      : "=&f"(difference)
      : "f"(a), "f"(b), "r"(lane));
  return difference;
}

// All steps within a lane. (Where a step between lanes follows, the last one is left out: rotate_across does it.)
// `lane` is the lane's number among those of the row.
template <int kHeadDim, Rotation kRotation>
CUTE_DEVICE void rotate_within(float (&x)[kValues], int lane, int chunks) {
  constexpr bool kWhole = kRotation == Rotation::Whole;
  CUTE_UNROLL
  for (int step = 1; step < kChunk; step *= 2) {
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) {
      if ((i & step) == 0) {
        float const sum = add(x[i], x[i + step]);
        x[i + step] = subtract(x[i], x[i + step]);
        x[i] = sum;
      }
    }
  }
  int const from_here = chunks - lane * kChunksALane;
  rotate_chunks<1, kWhole>(x, from_here);
  rotate_chunks<2, kWhole>(x, from_here);
  if constexpr (!kCrosses<kHeadDim, kRotation>) {
    rotate_chunks<4, kWhole>(x, from_here);
  }
}

// The step of 4 chunks, for pair i of a lane, with the exchange that the last step needs. The lower lane keeps the sum
// and sends the difference. The upper lane keeps the difference and sends the sum. (Both come of a product with 1 or
// -1, which is exact.)
struct Crossing {
  float stays, comes;
};

CUTE_DEVICE Crossing cross(float const (&x)[kValues], int lane, int i) {
  float const sign = lane == 0 ? 1.0F : -1.0F;
  float const goes = multiply_add(-sign, x[i + kValues / 2], x[i]);
  return {multiply_add(sign, x[i + kValues / 2], x[i]), __shfl_xor_sync(0xffffffffU, goes, 1)};
}

// A step between lanes that are kDistance apart, of lanes that take part. (The sum or difference comes of a product
// with 1 or -1, which is exact.)
template <int kDistance>
CUTE_DEVICE void exchange(float (&x)[kValues], int lane, bool takes_part) {
  float const sign = (lane & kDistance) == 0 ? 1.0F : -1.0F;
  CUTE_UNROLL
  for (float& one : x) {
    float const result = multiply_add(sign, one, __shfl_xor_sync(0xffffffffU, one, kDistance));
    one = takes_part ? result : one;
  }
}

// The steps between lanes, with the one before where kCrosses. Where there are none it does nothing.
template <int kHeadDim, Rotation kRotation>
CUTE_DEVICE void rotate_across(float (&x)[kValues], int lane) {
  if constexpr (kCrosses<kHeadDim, kRotation>) {
    CUTE_UNROLL
    for (int i = 0; i < kValues / 2; ++i) {
      auto const [stays, comes] = cross(x, lane, i);
      x[i] = add(stays, comes);
      x[i + kValues / 2] = subtract_by_lane(lane, stays, comes);
    }
  } else if constexpr (kExchanges<kHeadDim, kRotation>) {
    constexpr bool kWhole = kRotation == Rotation::Whole;
    exchange<1>(x, lane, kWhole || lane < 2);
    if constexpr (kWhole) {
      exchange<2>(x, lane, true);
    }
  }
}

// The largest magnitude of what rotate_across would give, if that is finite. The larger magnitude of a sum and a
// difference is the sum of the magnitudes.
CUTE_DEVICE float largest_across(float const (&x)[kValues], int lane) {
  return largest_of<kValues / 2>([&](int i) {
    auto const [stays, comes] = cross(x, lane, i);
    return add_magnitudes(stays, comes);
  });
}

// Everything between the signs and the norms.
template <int kHeadDim, Rotation kRotation>
CUTE_DEVICE void rotate(float (&x)[kValues], int lane, int chunks) {
  rotate_within<kHeadDim, kRotation>(x, lane, chunks);
  rotate_across<kHeadDim, kRotation>(x, lane);
}

template <int kHeadDim, Rotation kRotation>
CUTE_DEVICE void normalize(float (&x)[kValues], int lane, Norms const& norms) {
  CUTE_UNROLL
  for (int j = 0; j < kChunksALane; ++j) {
    float const norm = norms.of_chunk[kRotation == Rotation::Whole ? 0 : lane * kChunksALane + j];
    CUTE_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      x[j * kChunk + i] = multiply(x[j * kChunk + i], norm);
    }
  }
}

}  // namespace hattn::quantize
