// The kernel before a backward kernel: the statistics of each query, and the sums, the progress and the counter of
// tiles as they begin.
//
// What differs between architectures is in the Traits: the form of the statistics (Statistics), the count that a
// block's progress begins with (fresh), whether the sums of dQ have to begin as zeros (kAddsToZeros), and whether the
// next kernel starts while this one runs (kOverlaps, common/start.hpp).
#pragma once

#include <cuda_runtime.h>

#include "common/around.hpp"
#include "common/blocks.hpp"
#include "common/dropout.hpp"
#include "common/prepare_packed.hpp"
#include "common/scalars.hpp"
#include "common/sinks_bwd.hpp"
#include "common/start.hpp"
#include "common/status.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"

namespace hattn {

// Writes zeros as dK and dV of the tiles of keys that no list has. A warp takes each so many-th tile.
template <class Traits>
CUTE_DEVICE void clear_unlisted_keys(BwdParams const& params, int warp, int warps) {
  int const n_tiles = params.blocks.k_blocks;
  int const group = params.heads_q / params.heads_kv;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  for (int tile = warp; tile < n_tiles * params.heads_kv * params.batch; tile += warps) {
    int const batch_head = tile / n_tiles;
    int const n_block = tile - batch_head * n_tiles;
    int const batch = batch_head / params.heads_kv;
    int const kv_head = batch_head - batch * params.heads_kv;
    int steps = 0;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      steps += key_count(params.blocks, batch, head, n_block);
    }
    if (steps > 0) {
      continue;
    }
    auto const clear = [&](TensorDesc const& tensor, int head_dim) {
      int const chunks = head_dim / 8;
      int const keys = cute::min(int{kListedBlock}, params.seqlen_kv - n_block * kListedBlock);
      for (int i = lane; i < keys * chunks; i += 32) {
        std::int64_t const at = batch * tensor.stride_batch + kv_head * tensor.stride_head +
                                (n_block * kListedBlock + i / chunks) * tensor.stride_row + i % chunks * 8;
        *reinterpret_cast<uint4*>(tensor.address + 2 * at) = uint4{0, 0, 0, 0};
      }
    };
    clear(params.d_k, params.head_dim_qk);
    clear(params.d_v, params.head_dim_vo);
  }
}

// Writes the Statistics of each query, where delta = rowsum(dO o O) - dLSE (Dao et al. 2022, FlashAttention,
// appendix B; a gradient of the LSE adds P dLSE to dS). A query without keys, or past the end, has an LSE of -inf.
template <class Traits>
__global__ void __launch_bounds__(256) bwd_statistics(BwdParams const params) {
  if constexpr (Traits::kOverlaps) {
    let_next_start();
  }
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kHeadDimVO / 8;  // a lane reads 16 bytes of a row
  constexpr int kTileM = Traits::kTileM;
  constexpr int kRows = 32 / kLanes;  // that a warp reads at a time
  constexpr int kPasses = 4;
  constexpr int kRowsItem = kPasses * kRows;  // and that it has in flight together
  int const m_blocks = (params.seqlen_q + kTileM - 1) / kTileM;
  int const padded = m_blocks * kTileM;
  int const warps = static_cast<int>(gridDim.x * (blockDim.x / 32));
  int const warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  int const lane = static_cast<int>(threadIdx.x) % kLanes;
  // Neighbours in memory are neighbours here: an item is heads of one query, or queries of one head.
  bool const heads_first = params.o.stride_head < params.o.stride_row;
  int const inner = heads_first ? params.heads_q : padded;
  int const outer = heads_first ? padded : params.heads_q;
  int const chunks = (inner + kRowsItem - 1) / kRowsItem;
  int const items = params.batch * outer * chunks;

  // From the last to the first, which the kernel begins with: its dO is then still in the second-level cache.
  for (int item = items - 1 - warp; item >= 0; item -= warps) {
    int const rest = item / chunks;
    int const batch = rest / outer;
    int const second = rest - batch * outer;
    int const begin = (item - rest * chunks) * kRowsItem + static_cast<int>(threadIdx.x) % 32 / kLanes;
    // The rows that are there end here; those past the last query have statistics too.
    int const end = heads_first ? (second < params.seqlen_q ? params.heads_q : 0) : params.seqlen_q;
    auto const first_row = [&](TensorDesc const& tensor) {
      std::int64_t const head = heads_first ? begin : second;
      std::int64_t const query = heads_first ? second : begin;
      return tensor.address +
             2 * (batch * tensor.stride_batch + query * tensor.stride_row + head * tensor.stride_head + lane * 8);
    };
    auto const step = [&](TensorDesc const& tensor) {
      return 2 * kRows * (heads_first ? tensor.stride_head : tensor.stride_row);
    };
    // Everything that is read is asked for before any of it is used.
    uint4 o[kPasses] = {};
    uint4 d_o[kPasses] = {};
    std::uint64_t row_o = first_row(params.o);
    std::uint64_t row_d_o = first_row(params.d_o);
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      if (begin + i * kRows < end && lane * 8 < params.head_dim_vo) {
        o[i] = __ldcs(reinterpret_cast<uint4 const*>(row_o));
        d_o[i] = __ldg(reinterpret_cast<uint4 const*>(row_d_o));
      }
      row_o += step(params.o);
      row_d_o += step(params.d_o);
    }
    // Lane i of a row has to do with the row of pass i.
    int const mine = begin + lane * kRows;
    int const head = heads_first ? mine : second;
    int const query = heads_first ? second : mine;
    float lse = -INFINITY;
    float d_lse = 0.0F;
    if (lane < kPasses && mine < end) {
      lse = reinterpret_cast<float const*>(
          params.lse.address)[batch * params.lse.stride_batch + head * params.lse.stride_head + query];
      if (params.d_lse.address != 0) {
        d_lse = reinterpret_cast<float const*>(
            params.d_lse.address)[batch * params.d_lse.stride_batch + head * params.d_lse.stride_head + query];
      }
    }
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
    if (lane < kPasses && mine < inner) {
      float const of_delta = delta_factor(params);
      auto const statistics = Traits::Statistics::of(
          lse, d_lse * of_delta, delta * of_delta, params.softmax_scale, Traits::modifies_scores(params),
          start_bias<Traits>(params, batch, head, query, params.diagonal_offset, params.seqlen_kv));
      std::int64_t const at = (static_cast<std::int64_t>(batch) * params.heads_q + head) * padded + query;
      reinterpret_cast<typename Traits::Statistics*>(params.statistics)[at] = statistics;
    }
  }

  Band const band = band_of_launch(params);
  // What CTAs draw tiles from, and where shares of tiles add dK and dV.
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *reinterpret_cast<int*>(params.leak_flag) = 0;
    if (params.tile_counter != 0) {
      *reinterpret_cast<int*>(params.tile_counter) = 0;
    }
  }
  if constexpr (Traits::kTakesShares) {
    // Last warps first: where queries are few, they have nothing else to do.
    Traits::write_shares(params, band, (warps - 1 - warp) * 32 + threadIdx.x % 32, warps * 32);
    if (params.key_sums != 0) {
      std::int64_t const copies = params.ordered ? params.shares : 1;
      std::int64_t const fours = copies * params.cut_tiles * (Traits::KeySums::kElements / 4);
      for (std::int64_t i = warp * 32 + threadIdx.x % 32; i < fours; i += warps * 32) {
        reinterpret_cast<float4*>(params.key_sums)[i] = float4{0.0F, 0.0F, 0.0F, 0.0F};
      }
    }
  }

  if constexpr (Traits::kMask == MaskClass::Blocks) {
    clear_unlisted_keys<Traits>(params, warp, warps);
  }
  // The progress of each block: nothing has been added. In an ordered backward the first tile that visits the block is
  // the first to add. A warp writes one block.
  int const blocks = params.batch * params.heads_q * m_blocks;
  for (int block = (warp + warps / 2) % warps; block < blocks; block += warps) {
    int const batch_head = block / m_blocks;
    int const m_block = block - batch_head * m_blocks;
    bool visited = false;
    int first_tile = 0;
    if constexpr (Traits::kMask == MaskClass::Blocks) {
      int const of_batch = batch_head / params.heads_q;
      int const q_block = m_block / (kListedBlock / kTileM);
      int const row = row_of_lists(params.blocks, of_batch, batch_head - of_batch * params.heads_q, q_block);
      visited = counts_of_row(params.blocks, row).y > 0;  // tiles take turns, from 0 on
    } else {
      KeyTiles const tiles = KeyTiles::of<Traits::kMask, kTileM, Traits::kTileN>(band, m_block);
      visited = tiles.any();
      first_tile = tiles.first();
    }
    if (threadIdx.x % 32 == 0) {
      reinterpret_cast<int*>(params.progress)[block] = visited ? Traits::fresh(params.ordered, first_tile) : kUnvisited;
    }
    if constexpr (Traits::kAddsToZeros) {
      if (visited) {
        auto* const sums =
            reinterpret_cast<float4*>(params.sums) + static_cast<std::int64_t>(block) * (Traits::kElementsQ / 4);
        for (int i = static_cast<int>(threadIdx.x) % 32; i < Traits::kElementsQ / 4; i += 32) {
          sums[i] = float4{0.0F, 0.0F, 0.0F, 0.0F};
        }
      }
    }
    if (!visited) {
      // No tile will write its dQ.
      int const batch = batch_head / params.heads_q;
      int const head = batch_head - batch * params.heads_q;
      int const end = cute::min((m_block + 1) * kTileM, params.seqlen_q);
      int const chunks = params.head_dim_qk / 8;
      for (int i = static_cast<int>(threadIdx.x) % 32; i < (end - m_block * kTileM) * chunks; i += 32) {
        std::int64_t const query = m_block * kTileM + i / chunks;
        std::int64_t const at = batch * params.d_q.stride_batch + query * params.d_q.stride_row +
                                head * params.d_q.stride_head + i % chunks * 8;
        *reinterpret_cast<uint4*>(params.d_q.address + 2 * at) = uint4{0, 0, 0, 0};
      }
    }
  }
}

template <class Traits>
Status BwdStatistics<Traits>::load() noexcept {
  Status const status = load_kernel(bwd_sinks<typename Traits::Statistics, Traits::kIsPacked>);
  if (!is_ok(status)) {
    return status;
  }
  if constexpr (Traits::kIsPacked) {
    return load_kernel(bwd_statistics_packed<Traits>);
  } else {
    return load_kernel(bwd_statistics<Traits>);
  }
}

template <class Traits>
void BwdStatistics<Traits>::launch(BwdParams const& params, cudaStream_t stream) noexcept {
  if constexpr (Traits::kIsPacked) {
    bwd_statistics_packed<Traits><<<132 * 4, 256, 0, stream>>>(params);
  } else {
    bwd_statistics<Traits><<<132 * 4, 256, 0, stream>>>(params);  // what fits at a time
  }
}

template <class Traits>
void BwdStatistics<Traits>::launch_sinks(BwdParams const& params, cudaStream_t stream) noexcept {
  if (params.d_sinks.address == 0) {
    return;
  }
  int const padded = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM * Traits::kTileM;
  bwd_sinks<typename Traits::Statistics, Traits::kIsPacked>
      <<<params.heads_q, kSinkThreads, 0, stream>>>(params, padded);
}

}  // namespace hattn
