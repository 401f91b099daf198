// What the block copies for its warps: Q once, K and V block by block, every thread its share.
#pragma once

#include "common/tile_scheduler.hpp"
#include "sm80/copy.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct Load {
  using Storage = typename Traits::SharedStorage;

  KernelParams const& params;
  Storage& storage;
  // Where the tile's head of each operand begins.
  std::uint64_t k_head;
  std::uint64_t v_head;

  CUTE_DEVICE Load(KernelParams const& kernel_params, Storage& shared, Tile const& tile)
      : params(kernel_params),
        storage(shared),
        k_head(head_address(params.k, tile.batch, tile.head / params.heads_per_kv_head)),
        v_head(head_address(params.v, tile.batch, tile.head / params.heads_per_kv_head)) {}

  CUTE_DEVICE void queries(Tile const& tile) const {
    copy_tile<Traits::kTileM, Traits::kHeadDimQK, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.q), head_address(params.q, tile.batch, tile.head),
        2 * params.q.stride_seqlen, tile.block * Traits::kTileM, params.seqlen_q, params.head_dim_qk);
  }

  // A block of keys, or of their values, into a stage. Only a tile's first block may be ragged.
  template <bool kRagged>
  CUTE_DEVICE void keys(int n_block, int stage) const {
    copy_tile<Traits::kTileN, Traits::kHeadDimQK, Traits::kThreads, kRagged>(
        cute::cast_smem_ptr_to_uint(storage.k[stage]), k_head, 2 * params.k.stride_seqlen, n_block * Traits::kTileN,
        params.seqlen_kv, params.head_dim_qk);
  }
  template <bool kRagged>
  CUTE_DEVICE void values(int n_block, int stage) const {
    copy_tile<Traits::kTileN, Traits::kHeadDimVO, Traits::kThreads, kRagged>(
        cute::cast_smem_ptr_to_uint(storage.v[stage]), v_head, 2 * params.v.stride_seqlen, n_block * Traits::kTileN,
        params.seqlen_kv, params.head_dim_vo);
  }
};

}  // namespace hattn::sm80
