// The tiles of sequences whose lengths the device knows and the host does not (common/sequences.hpp).
//
// A tile is up to kTileRows rows of one head of one sequence, from a multiple of kTileRows on. So where factors are per
// block, each tile has one to itself. The kernel of kernel.hpp takes the tiles. A launch does one job with all of them.
// Where tiles share factors, two launches follow each other: one measures all tiles, one converts them. So no CTA waits
// for another, and the host need not know how many tiles a factor has.
//
// The tiles of a head are those of the table's list, in its order. A CTA takes tiles that follow each other. Then the
// words that it reads of the table are mostly in the first-level cache. A CTA converts what it has measured, in the
// opposite order: so the second-level cache still holds what was measured last.
#pragma once

#include "common/sequences.hpp"
#include "quantize/schedule.hpp"

namespace hattn::quantize {

// What the kernel reads of one tensor, in place of Params. It leaves these of Params unused: `tiles`, `jobs`, `ahead`,
// `tiles_a_head`, `spans`, `seqlen`, `tile_rows`, `tiles_a_factor`, and of `shared` all but `amax`.
struct PackedParams : Params {
  static constexpr bool kPacked = true;
  Job job;       // Convert, Both or Measure: of all tiles
  bool of_keys;  // whether rows are those of keys. Else they are those of queries
  SequenceTable table;
  int const* list;   // of the table, with the record of each tile of a head
  int blocks_apart;  // kTileRows - 1 where sequences follow each other in a tensor, and so in the factors. Else 0
  unsigned heads;
  unsigned factors;  // descale factors that Job::Convert makes of what was measured, and writes. 0: none
};

// The tiles of a CTA: those from `first` to before `end`. It takes tile `next` next.
struct CtaTiles {
  unsigned first, end, next;
};

CUTE_DEVICE unsigned tiles_of_a_head(PackedParams const& params) {
  SequenceHeader const& header = *params.table.header();
  return static_cast<unsigned>(params.of_keys ? header.tiles : header.blocks);
}

// All CTAs have as many, or one more.
CUTE_DEVICE CtaTiles tiles_of_cta(PackedParams const& params) {
  unsigned const all = tiles_of_a_head(params) * params.heads;
  unsigned const each = all / gridDim.x;
  unsigned const more = all - each * gridDim.x;
  unsigned const first = each * blockIdx.x + min(blockIdx.x, more);
  return {first, first + each + (blockIdx.x < more ? 1U : 0U), first};
}

CUTE_DEVICE float measured_factor(PackedParams const& params, unsigned shared) {
  return descale_of(__uint_as_float(params.shared.amax[shared]), params.most);
}

// The Work of the CTA's next tile. Tiles are numbered as schedule.hpp says. By thread 0 alone.
CUTE_DEVICE Work next_work(PackedParams const& params, CtaTiles& own) {
  Work work{};
  work.job = Job::None;
  unsigned const number = own.next;
  if (number >= own.end) {
    return work;
  }
  own.next = number + 1;
  work.job = params.job;
  unsigned const tile = params.job == Job::Convert ? own.first + own.end - 1 - number : number;
  unsigned const rows_of_tiles = params.span.quotient(tile);
  unsigned const of_head = tiles_of_a_head(params);
  unsigned const outer = rows_of_tiles / of_head;
  unsigned const head_tile = rows_of_tiles - outer * of_head;
  unsigned const head = outer * params.span.value + tile - rows_of_tiles * params.span.value;
  unsigned const factor_head = params.group.quotient(head);

  Sequence const& sequence = params.table.records()[params.list[head_tile]];
  int const begin = params.of_keys ? sequence.kv_begin : sequence.q_begin;
  int const length = params.of_keys ? sequence.kv_len : sequence.q_len;
  int const before = params.of_keys ? sequence.first_tile : sequence.first_block;
  std::int64_t const index = sequence.index;
  int const block = static_cast<int>(head_tile) - before;  // of the sequence
  int const row = block * kTileRows;
  auto const address = [&](TensorDesc const& tensor, int bytes) {
    return tensor.address + bytes * (index * tensor.stride_batch + head * tensor.stride_head +
                                     (std::int64_t{begin} + row) * tensor.stride_row);
  };
  work.rows = min(length - row, kTileRows);
  work.values = address(params.values, 2);
  work.stored = address(params.stored, 1);
  TensorDesc const& descale = params.descale;
  std::int64_t const first_block = (begin + index * params.blocks_apart) / kTileRows;
  work.descale = reinterpret_cast<float*>(descale.address) + index * descale.stride_batch +
                 factor_head * descale.stride_head + (first_block + block) * descale.stride_row;
  bool const one = params.scaling == Scaling::PerTensor;
  work.shared = one ? 0 : static_cast<unsigned>(index) * params.factor_heads + factor_head;
  if (work.job == Job::Convert) {
    work.factor = reciprocal(params.given ? *work.descale : measured_factor(params, work.shared));
  }
  return work;
}

// Adds what was measured to the factor's largest magnitude. The next kernel reads it.
CUTE_DEVICE void publish(PackedParams const& params, Measured& measured) {
  if (measured.tiles != 0) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(params.shared.amax + measured.shared),
                 "r"(measured.largest)
                 : "memory");
    measured.largest = 0;
    measured.tiles = 0;
  }
}

// Writes the factors that tiles share: of all sequences, those without rows included. By all threads of all CTAs.
CUTE_DEVICE void write_factors(PackedParams const& params) {
  TensorDesc const& descale = params.descale;
  unsigned const threads = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < params.factors; i += threads) {
    unsigned const entry = i / params.factor_heads;
    unsigned const head = i - entry * params.factor_heads;
    reinterpret_cast<float*>(descale.address)[entry * descale.stride_batch + head * descale.stride_head] =
        measured_factor(params, i);
  }
}

// Factors `[entries, heads, blocks]` of zeros.
static __global__ void write_factors_of_zeros(TensorDesc const descale, unsigned heads, unsigned blocks,
                                              unsigned factors, float most) {
  unsigned const threads = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < factors; i += threads) {
    unsigned const row = i / blocks;
    unsigned const entry = row / heads;
    reinterpret_cast<float*>(
        descale.address)[entry * descale.stride_batch + (row - entry * heads) * descale.stride_head +
                         (i - row * blocks) * descale.stride_row] = descale_of(0.0F, most);
  }
}

}  // namespace hattn::quantize
