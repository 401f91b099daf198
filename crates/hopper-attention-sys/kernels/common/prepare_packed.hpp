// The kernel before a packed backward kernel (common/sequences.hpp): what prepare.hpp is for sequences whose lengths
// the device knows. The table of sequences is there.
//
// A CTA takes a block of queries of one head at a time. It writes the statistics of these queries and, where the block
// has sums of dQ, what their progress begins with. Where no tile of keys visits the block, its dQ is 0.
#pragma once

#include "common/around.hpp"
#include "common/dropout.hpp"
#include "common/scalars.hpp"
#include "common/sequences.hpp"
#include "common/start.hpp"
#include "common/start_bias.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"

namespace hattn {

template <class Traits>
__global__ void __launch_bounds__(256) bwd_statistics_packed(__grid_constant__ BwdParams const params) {
  if constexpr (Traits::kOverlaps) {
    let_next_start();
  }
  using Element = typename Traits::Element;
  constexpr int kTileM = Traits::kTileM;
  constexpr int kLanes = Traits::kHeadDimVO / 8;  // a lane reads 16 bytes of a row
  constexpr int kRows = 256 / kLanes;             // that a CTA reads at a time
  constexpr int kPasses = kTileM / kRows;
  static_assert(kPasses <= kLanes && kPasses * kRows == kTileM, "a CTA reads the rows of a block in whole passes");
  SequenceTable const table{params.sequences.table, params.batch};
  int const blocks = table.header()->blocks;
  int const* const list = table.block_list(params.sequences.list_size);
  int const lane = static_cast<int>(threadIdx.x) % kLanes;
  int const own = static_cast<int>(threadIdx.x) / kLanes;

  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *reinterpret_cast<int*>(params.leak_flag) = 0;
  }
  if constexpr (Traits::kTakesShares) {
    Traits::write_shares(params, Band{}, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x),
                         static_cast<int>(gridDim.x * blockDim.x));
  }

  auto const prepare_block = [&](Sequence const& sequence, int entry, int head) {
    int const m_block = entry - sequence.first_block;
    auto const row_of = [&](TensorDesc const& tensor, int query) {
      return tensor.address + 2 * (sequence.index * tensor.stride_batch + head * tensor.stride_head +
                                   (sequence.q_begin + query) * tensor.stride_row + lane * 8);
    };
    // Everything that is read is asked for before any of it is used. Lane i of a row has to do with the row of pass i.
    int const first = m_block * kTileM + own;
    uint4 o[kPasses] = {};
    uint4 d_o[kPasses] = {};
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      int const query = first + i * kRows;
      if (query < sequence.q_len && lane * 8 < params.head_dim_vo) {
        o[i] = __ldcs(reinterpret_cast<uint4 const*>(row_of(params.o, query)));
        d_o[i] = __ldg(reinterpret_cast<uint4 const*>(row_of(params.d_o, query)));
      }
    }
    int const mine = first + lane * kRows;
    bool const has_row = lane < kPasses && mine < sequence.q_len;
    auto const number = [&](TensorDesc const& tensor) {
      return reinterpret_cast<float const*>(
          tensor.address)[sequence.index * tensor.stride_batch + head * tensor.stride_head + sequence.q_begin + mine];
    };
    float const lse = has_row ? number(params.lse) : 0.0F;
    float const d_lse = has_row && params.d_lse.address != 0 ? number(params.d_lse) : 0.0F;
    float delta = 0.0F;
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      auto const* const a = reinterpret_cast<Element const*>(&o[i]);
      auto const* const b = reinterpret_cast<Element const*>(&d_o[i]);
      float sum = 0.0F;
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j) {
        sum = fmaf(static_cast<float>(a[j]), static_cast<float>(b[j]), sum);
      }
      CUTE_UNROLL
      for (int step = kLanes / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffffU, sum, step);
      }
      delta = lane == i ? sum : delta;
    }
    if (has_row) {
      float const of_delta = delta_factor(params);
      std::int64_t const at = head * statistics_rows(params) + sequence.q_begin +
                              std::int64_t{sequence.index} * statistics_rows_apart(params) + mine;
      reinterpret_cast<typename Traits::Statistics*>(params.statistics)[at] = Traits::Statistics::of(
          lse, d_lse * of_delta, delta * of_delta, params.softmax_scale, Traits::modifies_scores(params),
          start_bias<Traits>(params, sequence.index, head, mine, diagonal_of_tile(params, sequence), sequence.kv_len));
    }

    Band const band = band_of_tile(params, sequence);
    KeyTiles const tiles = KeyTiles::of<Traits::kMask, kTileM, Traits::kTileN>(band, m_block);
    std::int64_t const block = std::int64_t{head} * params.sequences.sum_blocks + entry;
    if (threadIdx.x == 0 && has_sums<Traits>(sequence)) {
      reinterpret_cast<int*>(params.progress)[block] =
          tiles.any() ? Traits::fresh(params.ordered, tiles.first()) : kUnvisited;
    }
    if constexpr (Traits::kAddsToZeros) {
      if (tiles.any()) {
        auto* const sums = reinterpret_cast<float4*>(params.sums) + block * (Traits::kElementsQ / 4);
        for (int i = static_cast<int>(threadIdx.x); i < Traits::kElementsQ / 4; i += 256) {
          sums[i] = float4{0.0F, 0.0F, 0.0F, 0.0F};
        }
      }
    }
    if (!tiles.any()) {
      int const chunks = params.head_dim_qk / 8;
      int const rows = cute::min(kTileM, sequence.q_len - m_block * kTileM);
      for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += 256) {
        std::int64_t const row = sequence.q_begin + m_block * kTileM + i / chunks;
        std::int64_t const at = sequence.index * params.d_q.stride_batch + row * params.d_q.stride_row +
                                head * params.d_q.stride_head + i % chunks * 8;
        *reinterpret_cast<uint4*>(params.d_q.address + 2 * at) = uint4{0, 0, 0, 0};
      }
    }
  };

  // An item is some heads of a block, so that the block's sequence is looked up for all of them. From the last to the
  // first, which the kernel begins with: its dO is then still in the second-level cache.
  std::int64_t const all = std::int64_t{blocks} * params.heads_q;
  int const heads = cute::min(all >= 6 * gridDim.x ? 4 : all >= 3 * gridDim.x ? 2 : 1, params.heads_q);
  int const groups = (params.heads_q + heads - 1) / heads;
  for (std::int64_t item = std::int64_t{blocks} * groups - 1 - blockIdx.x; item >= 0; item -= gridDim.x) {
    int const entry = static_cast<int>(item / groups);
    int const group = static_cast<int>(item - std::int64_t{entry} * groups);
    Sequence const sequence = table.records()[list[entry]];
    int const end = cute::min((group + 1) * heads, params.heads_q);
    CUTE_NO_UNROLL
    for (int head = group * heads; head < end; ++head) {
      prepare_block(sequence, entry, head);
    }
  }
}

}  // namespace hattn
