// The kernel after the backward: dQ from its sums.
#pragma once

#include <cute/tensor.hpp>

#include "kernels.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

// The sums of a block of queries lie as the accumulators of its consumer warps did.
template <class Traits>
__global__ void __launch_bounds__(256) bwd_convert(BwdParams const params) {
  using Element = typename Traits::Element;
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  // From the last to the first: the sums that were written last are still in the second-level cache.
  std::int64_t const block = gridDim.x - 1 - blockIdx.x;
  // What no tile of keys sees has no sums; prepare.hpp wrote its zeros.
  if (reinterpret_cast<Progress const*>(params.progress)[block] == kNobody) {
    return;
  }
  std::int64_t const batch_head = block / m_blocks;
  int const m_block = static_cast<int>(block % m_blocks);
  std::int64_t const batch = batch_head / params.heads_q;
  std::int64_t const head = batch_head % params.heads_q;
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const consumer = warp / 4;

  constexpr int kFours = Traits::kElementsQ / 256 / 4;
  float4 fours[kFours];
  CUTE_UNROLL
  for (int i = 0; i < kFours; ++i) {
    fours[i] =
        reinterpret_cast<float4 const*>(params.sums)[block * (Traits::kElementsQ / 4) +
                                                     consumer * (Traits::kElementsQ / 8) + i * 128 + threadIdx.x % 128];
  }
  int const row = m_block * Traits::kTileM + (Traits::kSplitsColumns ? 0 : consumer * 64) + warp % 4 * 16;
  int const column = Traits::kSplitsColumns ? consumer * Traits::kColumnsQ : 0;
  std::uint64_t const first =
      params.d_q.address + 2 * (batch * params.d_q.stride_batch + head * params.d_q.stride_head + column);
  write_pairs<Traits::kColumnsQ>(first, 2 * params.d_q.stride_seqlen, row, params.seqlen_q, params.head_dim_qk - column,
                                 lane, [&](int i, int j) {
                                   float4 const four = fours[2 * i + j / 2];
                                   return pack_pair<Element>((j % 2 == 0 ? four.x : four.z) * params.softmax_scale,
                                                             (j % 2 == 0 ? four.y : four.w) * params.softmax_scale);
                                 });
}

}  // namespace hattn::sm90
