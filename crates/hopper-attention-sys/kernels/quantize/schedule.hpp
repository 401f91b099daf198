// Which tile a CTA takes next, and what it does with it.
//
// Tiles are numbered as they lie in memory: where heads are nearer than rows, those of some neighbouring heads (`span`)
// block by block, then those of the next heads. Where a tile has its factor to itself, or it is given, a CTA takes
// every gridDim-th.
//
// Where tiles share factors, a tile can be converted once all that share its factor were measured. If no more do than
// the CTAs at work can hold, every gridDim-th is still what a CTA takes, and it keeps each until it has measured one or
// two more (once.hpp).
//
// Else each tile is taken twice (kernel.hpp): measured, and converted later. Measuring runs ahead by as many tiles as
// must be measured first and as many more as CTAs are at work, so that the second reading finds them in the
// second-level cache (up to what that holds) and seldom waits. CTAs draw those jobs by number from a counter: a job
// waits for lower numbers only, and each CTA does its own in their order and tells what it has measured before it
// waits, so that of the jobs drawn the lowest never waits, however many CTAs the GPU runs at a time.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "common/memory.hpp"
#include "quantize/arithmetic.hpp"

namespace hattn::quantize {

constexpr int kTileRows = 128;  // those that share a factor where it is per block

// Division of numbers below 2^31 by one that the host knows: its reciprocal, rounded up, has 31 bits and as many more
// as make the error too small to matter (Granlund and Montgomery, Division by invariant integers using multiplication).
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

// What CTAs tell each other, all zeros at first. Tiles that are taken once use `largest` alone, those that are taken
// twice the others.
struct Shared {
  unsigned* largest;   // of each tile the bits of its largest magnitude, with kMeasured; those of a factor together
  unsigned* counter;   // jobs that were drawn
  unsigned* amax;      // of each factor the bits of the largest magnitude
  unsigned* measured;  // tiles that went into it
};

constexpr unsigned kMeasured = 0x80000000U;

struct Params {
  TensorDesc values, stored, descale;
  Scaling scaling;
  bool given;
  unsigned tiles, jobs, ahead;
  Divisor blocks, span, spans, group;  // spans: of a batch entry
  unsigned factor_heads, seqlen, chunks, tile_rows;
  unsigned tiles_a_factor;
  float most;            // the largest magnitude that is stored
  float rounds_to_most;  // the largest that rounds to it: half a step of e4m3 beyond
  Shared shared;
  unsigned long long* counts;  // two, or null
};

enum class Job : int {
  Convert,  // with a factor that is known
  Both,     // with a factor of its own values
  Measure,
  Await,  // convert, once all that share the factor were measured
  None    // there are no more
};

struct Work {
  Job job;
  int rows;
  std::uint64_t values, stored;  // addresses of the first row
  float* descale;
  float factor;     // for Convert
  unsigned shared;  // which of the shared factors
  unsigned slot;    // which of Shared::largest
  bool first;       // of the tiles that share it: writes it
};

// Where tile number `tile` is.
CUTE_DEVICE Work work_at(Params const& params, unsigned tile) {
  unsigned const rows_of_tiles = params.span.quotient(tile);
  unsigned const outer = params.blocks.quotient(rows_of_tiles);
  unsigned const entry = params.spans.quotient(outer);
  unsigned const block = rows_of_tiles - outer * params.blocks.value;
  unsigned const head =
      (outer - entry * params.spans.value) * params.span.value + tile - rows_of_tiles * params.span.value;
  unsigned const factor_head = params.group.quotient(head);
  unsigned const row = block * params.tile_rows;
  auto const address = [&](TensorDesc const& tensor, int bytes) {
    return tensor.address + bytes * (entry * tensor.stride_batch + head * tensor.stride_head + row * tensor.stride_row);
  };
  Work work{};
  work.rows = static_cast<int>(min(params.seqlen - row, params.tile_rows));
  work.values = address(params.values, 2);
  work.stored = address(params.stored, 1);
  TensorDesc const& descale = params.descale;
  work.descale = reinterpret_cast<float*>(descale.address) + entry * descale.stride_batch +
                 factor_head * descale.stride_head + block * descale.stride_row;
  bool const one = params.scaling == Scaling::PerTensor;
  work.shared = one ? 0 : entry * params.factor_heads + factor_head;
  work.slot = (entry * params.spans.value * params.span.value + head) * params.blocks.value + block;
  work.first = block == 0 && head == factor_head * params.group.value && (!one || tile == 0);
  return work;
}

// Job number `number`; thread 0 alone asks, some tiles before all need it.
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
    // The first `ahead` are measured, then one is converted and one measured in turn, then the rest is converted.
    unsigned const pairs = params.tiles - params.ahead;
    unsigned const after = number - params.ahead;
    bool const paired = after < 2 * pairs;
    if (!paired || after % 2 == 0) {
      job = Job::Await;
      tile = paired ? after / 2 : after - pairs;
      // Where all are measured first, from the last, which the cache still holds.
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

// What a CTA has measured of tiles that share a factor.
struct Measured {
  unsigned shared;
  unsigned largest;
  unsigned tiles;
};

// Adds it to the factor's, once.
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

// Waits until every tile has done so, and returns the largest.
CUTE_DEVICE float await(Params const& params, unsigned shared) {
  while (load_acquire(params.shared.measured + shared) != params.tiles_a_factor) {
    __nanosleep(64);
  }
  return __uint_as_float(load_relaxed(params.shared.amax + shared));
}

}  // namespace hattn::quantize
