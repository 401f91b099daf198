// What a CTA copies to shared memory: K and V once, Q with its statistics and dO block by block. Every thread copies
// its share.
#pragma once

#include "common/copy.hpp"
#include "common/scalars.hpp"
#include "sm80/bwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct BwdLoad {
  using Storage = typename Traits::SharedStorage;

  using Scalars = typename Traits::Scalars;
  using TileRecord = typename Traits::TileRecord;

  CUTE_DEVICE static void keys(BwdParams const& params, Scalars const& scalars, TileRecord const& tile,
                               Storage& storage) {
    int const thread = static_cast<int>(threadIdx.x);
    copy_tile<Traits::kTileN, Traits::kHeadDimQK, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.k), keys_address(params.k, tile, tile.head), 2 * params.k.stride_row,
        tile.block * Traits::kTileN, keys_of(scalars, tile), scalars.head_dim_qk, thread);
    copy_tile<Traits::kTileN, Traits::kHeadDimVO, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.v), keys_address(params.v, tile, tile.head), 2 * params.v.stride_row,
        tile.block * Traits::kTileN, keys_of(scalars, tile), scalars.head_dim_vo, thread);
  }

  // Block `m` of a query head, into a stage.
  CUTE_DEVICE static void queries(BwdParams const& params, Scalars const& scalars, TileRecord tile, int head, int m,
                                  int stage, Storage& storage) {
    int const thread = static_cast<int>(threadIdx.x);
    copy_tile<Traits::kTileM, Traits::kHeadDimQK, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.q[stage]), queries_address(params.q, tile, head), 2 * params.q.stride_row,
        m * Traits::kTileM, queries_of(scalars, tile), scalars.head_dim_qk, thread);
    copy_tile<Traits::kTileM, Traits::kHeadDimVO, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.d_o[stage]), queries_address(params.d_o, tile, head),
        2 * params.d_o.stride_row, m * Traits::kTileM, queries_of(scalars, tile), scalars.head_dim_vo, thread);
    if constexpr (Traits::kIsPacked) {
      // Those past the last query are zeros, as Q and dO are there: P is finite then, and adds nothing to dV and dS.
      if (thread < Traits::kTileM) {
        int const query = m * Traits::kTileM + thread;
        std::int64_t const row = head * scalars.statistics_rows +
                                 std::int64_t{tile.batch} * scalars.statistics_rows_apart + tile.q_begin + query;
        static_assert(sizeof(Statistics) == 8 && Traits::kTileM <= Traits::kThreads);
        copy_half_chunk(cute::cast_smem_ptr_to_uint(storage.statistics[stage]) + thread * 8,
                        reinterpret_cast<std::uint64_t>(static_cast<Statistics const*>(scalars.statistics) + row),
                        query < tile.q_len ? 8 : 0);
      }
      return;
    }
    constexpr int kChunks = Traits::kTileM * sizeof(Statistics) / 16;
    static_assert(kChunks <= Traits::kThreads);
    if (thread < kChunks) {
      std::int64_t const block =
          (static_cast<std::int64_t>(tile.batch) * scalars.heads_q + head) * scalars.m_blocks + m;
      copy_chunk(
          cute::cast_smem_ptr_to_uint(storage.statistics[stage]) + thread * 16,
          reinterpret_cast<std::uint64_t>(static_cast<Statistics const*>(scalars.statistics) + block * Traits::kTileM) +
              thread * 16,
          16);
    }
  }
};

}  // namespace hattn::sm80
