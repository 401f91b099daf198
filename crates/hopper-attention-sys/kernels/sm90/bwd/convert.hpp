// dQ from its sums: what the consumers do with blocks whose sums they completed, or a kernel after the backward.
#pragma once

#include <cute/tensor.hpp>

#include "common/mask.hpp"
#include "kernels.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

// A warp's part of a block. The sums lie as the accumulators of the consumer warps did.
template <class Traits>
CUTE_DEVICE void convert_block(float const* sums, TensorDesc const& d_q, int heads_q, int m_blocks, int seqlen_q,
                               int head_dim, float scale, int block, int consumer, int thread) {
  constexpr int kFours = Traits::kElementsQ / 256 / 4;
  auto const* const part = reinterpret_cast<float4 const*>(sums) +
                           static_cast<std::int64_t>(block) * (Traits::kElementsQ / 4) +
                           consumer * (Traits::kElementsQ / 8) + thread;
  float4 fours[kFours];
  CUTE_UNROLL
  for (int i = 0; i < kFours; ++i) {
    fours[i] = __ldcg(part + i * 128);  // others wrote them, at L2
  }
  int const batch_head = block / m_blocks;
  int const m_block = block - batch_head * m_blocks;
  int const batch = batch_head / heads_q;
  int const head = batch_head - batch * heads_q;
  int const row = m_block * Traits::kTileM + (Traits::kSplitsColumns ? 0 : consumer * 64) + thread / 32 * 16;
  int const column = Traits::kSplitsColumns ? consumer * Traits::kColumnsQ : 0;
  std::uint64_t const first = d_q.address + 2 * (batch * d_q.stride_batch + head * d_q.stride_head + column);
  write_pairs<Traits::kColumnsQ>(first, 2 * d_q.stride_seqlen, row, seqlen_q, head_dim - column, thread % 32,
                                 [&](int i, int j) {
                                   float4 const four = fours[2 * i + j / 2];
                                   return pack_pair<typename Traits::Element>((j % 2 == 0 ? four.x : four.z) * scale,
                                                                              (j % 2 == 0 ? four.y : four.w) * scale);
                                 });
}

template <class Traits>
__global__ void __launch_bounds__(256) bwd_convert(BwdParams const params) {
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  int const block = static_cast<int>(blockIdx.x);
  // What no tile of keys sees has no sums; prepare.hpp wrote its zeros.
  if (reinterpret_cast<Progress const*>(params.progress)[block].left > 0) {
    convert_block<Traits>(reinterpret_cast<float const*>(params.sums), params.d_q, params.heads_q, m_blocks,
                          params.seqlen_q, params.head_dim_qk, params.softmax_scale, block,
                          static_cast<int>(threadIdx.x) / 128, static_cast<int>(threadIdx.x) % 128);
  }
}

}  // namespace hattn::sm90
