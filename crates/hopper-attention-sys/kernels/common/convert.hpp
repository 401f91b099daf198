// The kernel after the backward: dQ from its sums, and dK and dV from theirs where tiles have shares.
#pragma once

#include <cuda_runtime.h>

#include "common/around.hpp"
#include "common/element.hpp"
#include "common/key_pieces.hpp"
#include "common/start.hpp"
#include "common/status.hpp"
#include "kernels.hpp"

namespace hattn {

// CTAs that convert dK and dV.
template <class Traits>
CUTE_HOST_DEVICE int key_pieces(BwdParams const& params) {
  int const tiles = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN * params.heads_kv * params.batch;
  return params.key_sums == 0 ? 0 : tiles * KeyPieces<Traits>::kCount;
}

// A piece of a tile's dV or dK, from the sums of all shares, in the order of the shares where each has its own.
template <class Traits>
CUTE_DEVICE void convert_keys(BwdParams const& params, int index) {
  using Pieces = KeyPieces<Traits>;
  using KeySums = typename Traits::KeySums;
  static_assert(KeySums::kThreads == Traits::ThreadSums::kThreads);
  int const n_tiles = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN;
  std::int64_t const tiles = static_cast<std::int64_t>(n_tiles) * params.heads_kv * params.batch;
  int const tile = index / Pieces::kCount;
  int const piece = index % Pieces::kCount;
  int const batch_head = tile / n_tiles;
  int const thread = static_cast<int>(threadIdx.x);
  float const* sums = reinterpret_cast<float const*>(params.key_sums) + tile * std::int64_t{KeySums::kElements} +
                      Pieces::offset(piece, thread);
  float4 fours[Pieces::kFours] = {};
  int const copies = params.ordered ? params.shares : 1;
  for (int copy = 0; copy < copies; ++copy, sums += tiles * KeySums::kElements) {
    CUTE_UNROLL
    for (int i = 0; i < Pieces::kFours; ++i) {
      Pieces::add(fours, i, *reinterpret_cast<float4 const*>(sums + KeySums::offset(i, 0)));
    }
  }
  Pieces::write(params, tile % n_tiles, batch_head % params.heads_kv, batch_head / params.heads_kv, piece, fours,
                thread);
}

// The sums of a block lie in memory as they lay in the accumulators of the warps that made them. Traits::ThreadSums is
// what a thread had of them: strips of 16 queries a warp.
template <class Traits>
__global__ void __launch_bounds__(Traits::ThreadSums::kThreads) bwd_convert(BwdParams const params) {
  using Element = typename Traits::Element;
  using ThreadSums = typename Traits::ThreadSums;
  if constexpr (Traits::kOverlaps) {
    await_kernel_before();
  }
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  // From the last block to the first: the sums that were written last are still in L2.
  std::int64_t block = gridDim.x - 1 - blockIdx.x;
  if constexpr (Traits::kTakesShares) {
    int const pieces = key_pieces<Traits>(params);
    if (block < pieces) {
      convert_keys<Traits>(params, static_cast<int>(block));
      return;
    }
    block -= pieces;
  }
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
  int blocks = params.batch * params.heads_q * m_blocks;
  if constexpr (Traits::kTakesShares) {
    blocks += key_pieces<Traits>(params);
  }
  constexpr int kThreads = Traits::ThreadSums::kThreads;
  if constexpr (Traits::kOverlaps) {
    start_kernel({blocks, kThreads, 0, stream, 1, true}, bwd_convert<Traits>, params);
  } else {
    bwd_convert<Traits><<<blocks, kThreads, 0, stream>>>(params);
  }
}

}  // namespace hattn
