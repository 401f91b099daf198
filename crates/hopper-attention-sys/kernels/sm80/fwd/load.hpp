// What the block copies for its warps: Q once, K and V block by block, every thread its share.
#pragma once

#include "common/tile_scheduler.hpp"
#include "sm80/copy.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct Load {
  using Storage = typename Traits::SharedStorage;

  // Q, and the first block of keys and values visited, which alone may be ragged; as two groups, V being the second.
  CUTE_DEVICE static void first(KernelParams const& params, Storage& storage, Tile const& tile, int n_block) {
    int const head = tile.head / params.heads_per_kv_head;
    std::uint64_t const k_head = head_address(params.k, tile.batch, head);
    std::uint64_t const v_head = head_address(params.v, tile.batch, head);
    storage.k_head = k_head;  // by every thread the same
    storage.v_head = v_head;
    copy_tile<Traits::kTileM, Traits::kHeadDimQK, Traits::kThreads, true>(
        cute::cast_smem_ptr_to_uint(storage.q), head_address(params.q, tile.batch, tile.head),
        2 * params.q.stride_seqlen, tile.block * Traits::kTileM, params.seqlen_q, params.head_dim_qk);
    keys<true>(params, storage, k_head, n_block);
    commit_copies();
    values<true>(params, storage, v_head, n_block);
    commit_copies();
  }

  // A later block of keys, or of their values, into its stage. A barrier has passed since `first`.
  CUTE_DEVICE static void next_keys(KernelParams const& params, Storage& storage, int n_block) {
    keys<false>(params, storage, storage.k_head, n_block);
  }
  CUTE_DEVICE static void next_values(KernelParams const& params, Storage& storage, int n_block) {
    values<false>(params, storage, storage.v_head, n_block);
  }

 private:
  template <bool kRagged>
  CUTE_DEVICE static void keys(KernelParams const& params, Storage& storage, std::uint64_t head, int n_block) {
    copy_tile<Traits::kTileN, Traits::kHeadDimQK, Traits::kThreads, kRagged>(
        cute::cast_smem_ptr_to_uint(storage.k[Traits::stage(n_block)]), head, 2 * params.k.stride_seqlen,
        n_block * Traits::kTileN, params.seqlen_kv, params.head_dim_qk);
  }
  template <bool kRagged>
  CUTE_DEVICE static void values(KernelParams const& params, Storage& storage, std::uint64_t head, int n_block) {
    copy_tile<Traits::kTileN, Traits::kHeadDimVO, Traits::kThreads, kRagged>(
        cute::cast_smem_ptr_to_uint(storage.v[Traits::stage(n_block)]), head, 2 * params.v.stride_seqlen,
        n_block * Traits::kTileN, params.seqlen_kv, params.head_dim_vo);
  }
};

}  // namespace hattn::sm80
