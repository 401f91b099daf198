// What a CTA copies to shared memory: K and V once, Q with its statistics and dO block by block. Every thread copies
// its share.
#pragma once

#include "common/scalars.hpp"
#include "sm80/bwd/traits.hpp"
#include "sm80/copy.hpp"

namespace hattn::sm80 {

template <class Traits>
struct BwdLoad {
  using Storage = typename Traits::SharedStorage;

  CUTE_DEVICE static void keys(BwdParams const& params, BwdScalars const& scalars, Tile const& tile, Storage& storage) {
    int const thread = static_cast<int>(threadIdx.x);
    copy_tile<Traits::kTileN, Traits::kHeadDimQK, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.k), head_address(params.k, tile.batch, tile.head), 2 * params.k.stride_row,
        tile.block * Traits::kTileN, scalars.seqlen_kv, scalars.head_dim_qk, thread);
    copy_tile<Traits::kTileN, Traits::kHeadDimVO, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.v), head_address(params.v, tile.batch, tile.head), 2 * params.v.stride_row,
        tile.block * Traits::kTileN, scalars.seqlen_kv, scalars.head_dim_vo, thread);
  }

  // Block `m` of a query head, into a stage.
  CUTE_DEVICE static void queries(BwdParams const& params, BwdScalars const& scalars, int batch, int head, int m,
                                  int stage, Storage& storage) {
    int const thread = static_cast<int>(threadIdx.x);
    copy_tile<Traits::kTileM, Traits::kHeadDimQK, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.q[stage]), head_address(params.q, batch, head), 2 * params.q.stride_row,
        m * Traits::kTileM, scalars.seqlen_q, scalars.head_dim_qk, thread);
    copy_tile<Traits::kTileM, Traits::kHeadDimVO, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.d_o[stage]), head_address(params.d_o, batch, head),
        2 * params.d_o.stride_row, m * Traits::kTileM, scalars.seqlen_q, scalars.head_dim_vo, thread);
    constexpr int kChunks = Traits::kTileM * sizeof(Statistics) / 16;
    static_assert(kChunks <= Traits::kThreads);
    if (thread < kChunks) {
      std::int64_t const block = (static_cast<std::int64_t>(batch) * scalars.heads_q + head) * scalars.m_blocks + m;
      copy_chunk(
          cute::cast_smem_ptr_to_uint(storage.statistics[stage]) + thread * 16,
          reinterpret_cast<std::uint64_t>(static_cast<Statistics const*>(scalars.statistics) + block * Traits::kTileM) +
              thread * 16,
          16);
    }
  }
};

}  // namespace hattn::sm80
