// Which tile a CTA takes next, and what it does with it.
//
// A tile is some rows of one head. To measure a tile is to find its largest magnitude.
//
// Tiles are numbered as they lie in memory. Where neighbouring heads lie nearer than neighbouring rows, a span of
// `span` heads is numbered together: the first tiles of all its heads, then their second tiles, and so on. Then comes
// the next span.
//
// There are three schedules:
//
// 1. A tile has its factor to itself, or its factor is given (kernel.hpp). A CTA takes every gridDim-th tile.
// 2. Tiles share a factor, and the CTAs together can hold all tiles of one factor in registers (once.hpp). A CTA takes
//    every gridDim-th tile, keeps it in registers until it has measured one or two more, and then converts it.
// 3. Tiles share a factor, and a factor has more tiles than that (kernel.hpp). Each tile is taken twice, as two jobs:
//    it is measured, and later read again and converted. Measuring runs ahead by the tiles of one factor and as many
//    more as there are CTAs. So the second reading finds the tile in the second-level cache (up to what the cache
//    holds) and seldom waits.
//
// No deadlock in schedule 3. CTAs draw jobs by number from a counter, and a job waits for lower numbers only. A CTA
// does its jobs in the order of their numbers, and publishes what it has measured before it waits. So the lowest job
// that is not done never waits, however many CTAs the GPU runs at a time.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "common/memory.hpp"
#include "quantize/arithmetic.hpp"

namespace hattn::quantize {

constexpr int kTileRows = 128;  // of kernel.hpp; also the rows that share a factor where factors are per block

// Division of a number below 2^31 by one that the host knows, as a product with its reciprocal. The reciprocal is
// rounded up. It has 31 bits and as many more as make the error too small to matter (Granlund and Montgomery, Division
// by invariant integers using multiplication).
struct Divisor {
  unsigned value = 1;
  unsigned reciprocal = 0;
  unsigned shift = 0;

  Divisor() = default;
  explicit Divisor(unsigned divisor) : value{divisor} {
    if (divisor > 1) {
      while ((2U << shift) < divisor) {
        ++shift;
      }
      reciprocal = static_cast<unsigned>(((std::uint64_t{1} << (32 + shift)) + divisor - 1) / divisor);
    }
  }

  CUTE_DEVICE unsigned quotient(unsigned n) const { return value == 1 ? n : __umulhi(n, reciprocal) >> shift; }
};

// What CTAs tell each other, in the workspace (QuantizeTensor::state). All zeros at first. Schedule 2 uses `largest`,
// schedule 3 the others; they lie in the same memory.
struct Shared {
  unsigned* largest;   // [tiles], the tiles of a factor together: bits of a tile's largest magnitude, with kMeasured
  unsigned* counter;   // jobs that were drawn
  unsigned* amax;      // [factors]: bits of the largest magnitude
  unsigned* measured;  // [factors]: tiles that went into amax
};

// Set in a word of Shared::largest once the tile is measured.
constexpr unsigned kMeasured = 0x80000000U;

// What a kernel reads of one tensor. The host fills it (launch.hpp).
struct Params {
  static constexpr bool kPacked = false;
  TensorDesc values, stored, descale;  // as in QuantizeTensor
  Scaling scaling;
  bool given;      // whether the factors are read
  unsigned tiles;  // of the tensor
  unsigned jobs;   // 2 * tiles in schedule 3, else tiles
  unsigned ahead;  // schedule 3: tiles that are measured before the first one is converted
  Divisor tiles_a_head;
  Divisor span;           // heads that are numbered together
  Divisor spans;          // spans of a batch entry
  Divisor group;          // heads that share a head of `descale`
  unsigned factor_heads;  // heads of `descale`
  unsigned seqlen;        // rows of a batch entry
  unsigned chunks;        // of 8 elements, in a row
  unsigned tile_rows;     // rows of a tile
  unsigned tiles_a_factor;
  float most;            // largest magnitude that is stored
  float rounds_to_most;  // largest magnitude that rounds to `most`: half a step of e4m3 beyond
  Shared shared;
  unsigned long long* counts;  // saturated, not finite; or null
};

// What is done with a tile.
enum class Job : int {
  Convert,  // convert it with a given factor
  Both,     // measure it, make the factor and convert it
  Measure,  // measure it, and publish what was found
  Await,    // wait until all tiles of its factor were measured, then convert it
  None      // nothing: there are no more tiles
};

// A job: what is done, and with which tile.
struct Work {
  Job job;
  int rows;                      // of the tile that are there: 1 to tile_rows
  std::uint64_t values, stored;  // addresses of the tile's first row
  float* descale;                // the tile's descale factor
  float factor;                  // 1 / *descale, for Job::Convert
  unsigned shared;               // number of its factor, an index of Shared::amax
  unsigned slot;                 // index of the tile in Shared::largest
  bool first;                    // whether the tile is the first of its factor, and writes it
};

// The Work of tile number `tile`, but for its job.
CUTE_DEVICE Work work_at(Params const& params, unsigned tile) {
  unsigned const rows_of_tiles = params.span.quotient(tile);
  unsigned const outer = params.tiles_a_head.quotient(rows_of_tiles);
  unsigned const entry = params.spans.quotient(outer);
  unsigned const head_tile = rows_of_tiles - outer * params.tiles_a_head.value;
  unsigned const head =
      (outer - entry * params.spans.value) * params.span.value + tile - rows_of_tiles * params.span.value;
  unsigned const factor_head = params.group.quotient(head);
  unsigned const row = head_tile * params.tile_rows;
  auto const address = [&](TensorDesc const& tensor, int bytes) {
    return tensor.address + bytes * (entry * tensor.stride_batch + head * tensor.stride_head + row * tensor.stride_row);
  };
  Work work{};
  work.rows = static_cast<int>(min(params.seqlen - row, params.tile_rows));
  work.values = address(params.values, 2);
  work.stored = address(params.stored, 1);
  TensorDesc const& descale = params.descale;
  work.descale = reinterpret_cast<float*>(descale.address) + entry * descale.stride_batch +
                 factor_head * descale.stride_head + head_tile * descale.stride_row;
  bool const one = params.scaling == Scaling::PerTensor;
  work.shared = one ? 0 : entry * params.factor_heads + factor_head;
  work.slot = (entry * params.spans.value * params.span.value + head) * params.tiles_a_head.value + head_tile;
  work.first = head_tile == 0 && head == factor_head * params.group.value && (!one || tile == 0);
  return work;
}

// Job number `number`. By thread 0 alone, some tiles before all need it.
CUTE_DEVICE Work work_of(Params const& params, unsigned number) {
  if (number >= params.jobs) {
    Work work{};
    work.job = Job::None;
    return work;
  }
  unsigned tile = number;
  Job job = Job::Measure;
  if (params.jobs == params.tiles) {
    job = params.given ? Job::Convert : Job::Both;
  } else if (number >= params.ahead) {
    // The first `ahead` tiles are measured. Then one is converted and one measured, alternately. Then the rest is
    // converted.
    unsigned const pairs = params.tiles - params.ahead;
    unsigned const after = number - params.ahead;
    bool const paired = after < 2 * pairs;
    if (!paired || after % 2 == 0) {
      job = Job::Await;
      tile = paired ? after / 2 : after - pairs;
      // Where all tiles are measured first, the last one is converted first: the cache still holds it.
      tile = pairs == 0 ? params.tiles - 1 - tile : tile;
    } else {
      tile = params.ahead + after / 2;
    }
  }
  Work work = work_at(params, tile);
  work.job = job;
  if (job == Job::Convert) {
    work.factor = reciprocal(*work.descale);
  }
  return work;
}

// What a CTA has measured of one factor's tiles, and has not published.
struct Measured {
  unsigned shared;   // number of the factor
  unsigned largest;  // bits of the largest magnitude
  unsigned tiles;    // that were measured
};

// Adds what was measured to the factor's entries of Shared, once.
CUTE_DEVICE void publish(Params const& params, Measured& measured) {
  if (measured.tiles != 0) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(params.shared.amax + measured.shared),
                 "r"(measured.largest)
                 : "memory");
    add_release(params.shared.measured + measured.shared, measured.tiles);
    measured.largest = 0;
    measured.tiles = 0;
  }
}

// Waits until all tiles of a factor are published, and returns their largest magnitude.
CUTE_DEVICE float await(Params const& params, unsigned shared) {
  while (load_acquire(params.shared.measured + shared) != params.tiles_a_factor) {
    __nanosleep(64);
  }
  return __uint_as_float(load_relaxed(params.shared.amax + shared));
}

}  // namespace hattn::quantize
