// The Hadamard transform of rows, of which a lane holds half or all.
//
// A row is kHeadDim / 8 chunks of 8 elements; lane `l` of the row's kLanes has chunks 8 l to 8 l + 7. So all steps are
// within a lane, but the last of head dim 128: a shuffle an element at most.
#pragma once

#include "quantize/arithmetic.hpp"

namespace hattn::quantize {

constexpr int kChunk = 8;        // elements that are 16 bytes of a source
constexpr int kChunksALane = 8;  // of a row
constexpr int kValues = kChunk * kChunksALane;

template <int kHeadDim>
constexpr int kLanes = kHeadDim / kValues;

// What is done before the conversion.
enum class Rotation : int {
  None,
  Whole,  // of head dims that fill kHeadDim
  Parts   // of others, which are blocks of several sizes
};

struct Signs {
  std::uint32_t bits[4];  // of element 32 i + j the j-th of bits[i]
};

// The factor at the end, of each chunk.
struct Norms {
  float of_chunk[16];
};

// Steps of kStep chunks. A run of 2 * kStep chunks that does not end within the `chunks` that are there from the lane's
// first on stays as it is; kWhole says that there is none.
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

// Everything between the signs and the norms. `lane` is the one among those of the row.
template <int kHeadDim, Rotation kRotation>
CUTE_DEVICE void rotate(float (&x)[kValues], int lane, int chunks) {
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
  rotate_chunks<4, kWhole>(x, from_here);
  if constexpr (kLanes<kHeadDim> == 2 && kWhole) {
    // The sum for the lower lane; the difference for the upper one, which is the partner's value less its own. A
    // product with 1 or -1 is exact.
    float const sign = lane == 0 ? 1.0F : -1.0F;
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i) {
      x[i] = multiply_add(sign, x[i], __shfl_xor_sync(0xffffffffU, x[i], 1));
    }
  }
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
