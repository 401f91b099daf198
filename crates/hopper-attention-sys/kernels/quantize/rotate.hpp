// The Hadamard transform of rows that a few lanes hold together.
//
// A row is kHeadDim / 8 chunks of 8 elements; lane `l` of the row's kLanes has chunks l, l + kLanes, .. So the steps of
// 1, 2 and 4 elements are within a chunk, the next one or two between neighbouring lanes, and the rest between a lane's
// own chunks: one or two shuffles an element, where as many lanes as a row has chunks would need three or four.
#pragma once

#include "quantize/arithmetic.hpp"

namespace hattn::quantize {

constexpr int kChunk = 8;        // elements that are 16 bytes of a source
constexpr int kChunksALane = 4;  // of a row
constexpr int kValues = kChunk * kChunksALane;

template <int kHeadDim>
constexpr int kLanes = kHeadDim / kValues;

// The factor at the end, of each chunk.
struct Norms {
  float of_chunk[16];
};

// Steps of kStep chunks, of chunks that are in one lane. A run of 2 * kStep chunks that does not end within `chunks`
// stays as it is; kWhole says that there is none.
template <int kHeadDim, int kStep, bool kWhole>
CUTE_DEVICE void rotate_chunks(float (&x)[kValues], int chunks) {
  constexpr int kApart = kStep / kLanes<kHeadDim>;
  CUTE_UNROLL
  for (int j = 0; j < kChunksALane; ++j) {
    if ((j & kApart) == 0) {
      bool const within = kWhole || (j / (2 * kApart) + 1) * 2 * kStep <= chunks;
      CUTE_UNROLL
      for (int i = 0; i < kChunk; ++i) {
        float& low = x[j * kChunk + i];
        float& high = x[(j + kApart) * kChunk + i];
        float const sum = add(low, high);
        float const difference = subtract(low, high);
        low = within ? sum : low;
        high = within ? difference : high;
      }
    }
  }
}

// Steps of kStep chunks, of chunks that are kStep lanes apart.
template <int kHeadDim, int kStep, bool kWhole>
CUTE_DEVICE void rotate_lanes(float (&x)[kValues], int lane, int chunks) {
  // The sum for the lower one; the difference for the upper one, which is the partner's value less its own. A product
  // with 1 or -1 is exact.
  float const sign = (lane & kStep) == 0 ? 1.0F : -1.0F;
  CUTE_UNROLL
  for (int j = 0; j < kChunksALane; ++j) {
    // Runs are of this many chunks, and a lane's chunk j is in run number j * kLanes / run + lane / run.
    constexpr int kRun = 2 * kStep;
    bool const within = kWhole || (j * kLanes<kHeadDim> + lane) / kRun * kRun + kRun <= chunks;
    CUTE_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      float& own = x[j * kChunk + i];
      float const other = __shfl_xor_sync(0xffffffffU, own, kStep);
      float const rotated = multiply_add(sign, own, other);
      own = within ? rotated : own;
    }
  }
}

// Everything after the signs.
template <int kHeadDim, bool kWhole>
CUTE_DEVICE void rotate(float (&x)[kValues], int lane, int chunks, Norms const& norms) {
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
  rotate_lanes<kHeadDim, 1, kWhole>(x, lane, chunks);
  if constexpr (kHeadDim == 128) {
    rotate_lanes<kHeadDim, 2, kWhole>(x, lane, chunks);
    rotate_chunks<kHeadDim, 4, kWhole>(x, chunks);
    rotate_chunks<kHeadDim, 8, kWhole>(x, chunks);
  } else {
    rotate_chunks<kHeadDim, 2, kWhole>(x, chunks);
    rotate_chunks<kHeadDim, 4, kWhole>(x, chunks);
  }
  CUTE_UNROLL
  for (int j = 0; j < kChunksALane; ++j) {
    float const norm = norms.of_chunk[kWhole ? 0 : j * kLanes<kHeadDim> + lane];
    CUTE_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      x[j * kChunk + i] = multiply(x[j * kChunk + i], norm);
    }
  }
}

}  // namespace hattn::quantize
