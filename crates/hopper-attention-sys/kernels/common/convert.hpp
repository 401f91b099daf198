// The kernel after the backward: dQ from its sums.
#pragma once

#include <cuda_runtime.h>

#include "common/around.hpp"
#include "common/element.hpp"
#include "common/status.hpp"
#include "kernels.hpp"

namespace hattn {

// The sums of a block lie in memory as they lay in the accumulators of the warps that made them. Traits::ThreadSums is
// what a thread had of them: strips of 16 queries a warp.
template <class Traits>
__global__ void __launch_bounds__(Traits::ThreadSums::kThreads) bwd_convert(BwdParams const params) {
  using Element = typename Traits::Element;
  using ThreadSums = typename Traits::ThreadSums;
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  // From the last block to the first: the sums that were written last are still in L2.
  std::int64_t const block = gridDim.x - 1 - blockIdx.x;
  // A block that no tile visits has no sums. prepare.hpp has written the zeros of its dQ.
  if (reinterpret_cast<int const*>(params.progress)[block] == kUnvisited) {
    return;
  }
  std::int64_t const batch_head = block / m_blocks;
  int const m_block = static_cast<int>(block % m_blocks);
  std::int64_t const batch = batch_head / params.heads_q;
  std::int64_t const head = batch_head % params.heads_q;
  ThreadSums thread_sums;
  thread_sums.load(reinterpret_cast<float const*>(params.sums), block);
  int const column = ThreadSums::column();
  std::uint64_t const first =
      params.d_q.address + 2 * (batch * params.d_q.stride_batch + head * params.d_q.stride_head + column);
  CUTE_UNROLL
  for (int strip = 0; strip < ThreadSums::kStrips; ++strip) {
    write_pairs<ThreadSums::kWidth>(
        first, 2 * params.d_q.stride_row, m_block * Traits::kTileM + ThreadSums::row() + 16 * strip, params.seqlen_q,
        params.head_dim_qk - column, static_cast<int>(threadIdx.x) % 32, [&](int i, int j) {
          float2 const pair = thread_sums.pair(strip, i, j);
          return pack_pair<Element>(pair.x * params.softmax_scale, pair.y * params.softmax_scale);
        });
  }
}

template <class Traits>
Status BwdConvert<Traits>::load() noexcept {
  return load_kernel(bwd_convert<Traits>);
}

template <class Traits>
void BwdConvert<Traits>::launch(BwdParams const& params, cudaStream_t stream) noexcept {
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  int const blocks = params.batch * params.heads_q * m_blocks;
  bwd_convert<Traits><<<blocks, Traits::ThreadSums::kThreads, 0, stream>>>(params);
}

}  // namespace hattn
