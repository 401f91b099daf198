// The kernel before the backward: what it needs of each query, and how far the sums of dQ are.
#pragma once

#include <cute/tensor.hpp>

#include "common/mask.hpp"
#include "kernels.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

// The softmax scale where it is divided by: no float that a problem may have makes the quotient overflow.
CUTE_HOST_DEVICE float exponent_scale(float softmax_scale) { return cute::max(softmax_scale, 0x1p-90F); }

// x as a sum of three terms, each half an ulp of the one before at most: 24 bits.
CUTE_DEVICE void split(float x, cutlass::bfloat16_t (&terms)[3]) {
  CUTE_UNROLL
  for (cutlass::bfloat16_t& term : terms) {
    term = cutlass::bfloat16_t{x};
    x -= static_cast<float>(term);
  }
}

// Writes the Statistics of each query, where delta = rowsum(dO o O) - dLSE (Dao et al. 2022, FlashAttention,
// appendix B; a gradient of the LSE adds P dLSE to dS). A query without keys, or past the end, gets a number so low
// that its P is 0: not -inf, which would make NaN of the zeros that it meets.
template <class Traits>
__global__ void __launch_bounds__(256) bwd_prepare(BwdParams const params) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kHeadDimVO / 8;  // a lane reads 16 bytes of a row
  constexpr int kTileM = Traits::kTileM;
  int const m_blocks = (params.seqlen_q + kTileM - 1) / kTileM;
  int const padded = m_blocks * kTileM;
  std::int64_t const rows = static_cast<std::int64_t>(params.batch) * params.heads_q * padded;
  std::int64_t const threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::int64_t const thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int const lane = static_cast<int>(threadIdx.x) % kLanes;
  bool const heads_first = params.o.stride_head < params.o.stride_seqlen;

  // Whole warps go round the loop together: the shuffles need them.
  std::int64_t const rounds = (rows + threads / kLanes - 1) / (threads / kLanes);
  for (std::int64_t round = 0; round < rounds; ++round) {
    std::int64_t const row = round * (threads / kLanes) + thread / kLanes;
    // Neighbours in memory are neighbours here.
    std::int64_t const rest = heads_first ? row / params.heads_q : row / padded;
    int const first = static_cast<int>(heads_first ? row % params.heads_q : row % padded);
    int const second = static_cast<int>(heads_first ? rest % padded : rest % params.heads_q);
    int const head = heads_first ? first : second;
    int const query = heads_first ? second : first;
    std::int64_t const batch = heads_first ? rest / padded : rest / params.heads_q;
    bool const there = row < rows && query < params.seqlen_q;

    float sum = 0.0F;
    if (there && lane * 8 < params.head_dim_vo) {
      auto const load = [&](TensorDesc const& tensor) {
        std::int64_t const at = batch * tensor.stride_batch + static_cast<std::int64_t>(query) * tensor.stride_seqlen +
                                head * tensor.stride_head + lane * 8;
        return *reinterpret_cast<uint4 const*>(tensor.address + 2 * at);
      };
      uint4 const o = load(params.o);
      uint4 const d_o = load(params.d_o);
      auto const* const a = reinterpret_cast<Element const*>(&o);
      auto const* const b = reinterpret_cast<Element const*>(&d_o);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        sum = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), sum);
      }
    }
    CUTE_UNROLL
    for (int step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(0xffffffffU, sum, step);
    }
    if (row < rows && lane == 0) {
      constexpr float kFar = -3e38F;
      Statistics statistics{};
      float start = kFar;
      if (there) {
        float const lse = reinterpret_cast<float const*>(
            params.lse_address)[batch * params.lse_stride_batch + head * params.lse_stride_head + query];
        if (lse != -INFINITY) {
          start = __fdiv_rn(-lse, exponent_scale(params.softmax_scale));
          start = start < kFar ? kFar : start;
          if (params.d_lse_address != 0) {
            sum -= reinterpret_cast<float const*>(
                params.d_lse_address)[batch * params.d_lse_stride_batch + head * params.d_lse_stride_head + query];
          }
          split(-sum, statistics.minus_delta);
        }
      }
      split(start, statistics.minus_lse);
      reinterpret_cast<Statistics*>(params.statistics)[(batch * params.heads_q + head) * padded + query] = statistics;
    }
  }

  // Nothing has been added to any block; in turns, the first of the tiles that see it begins. A warp a block.
  Band const band{params.diagonal_offset - params.window_left, params.diagonal_offset + params.window_right,
                  params.seqlen_q, params.seqlen_kv};
  auto const blocks = static_cast<int>(rows / kTileM);
  for (int block = static_cast<int>(thread / 32); block < blocks; block += static_cast<int>(threads / 32)) {
    int const batch_head = block / m_blocks;
    int const m_block = block - batch_head * m_blocks;
    TileRange const range = tile_range<Traits::kMask, kTileM, Traits::kTileN>(band, m_block);
    bool const seen = range.begin < range.end;
    if (threadIdx.x % 32 == 0) {
      Progress const fresh = params.ordered ? kFresh + range.begin : 0;
      reinterpret_cast<Progress*>(params.progress)[block] = seen ? fresh : kNobody;
    }
    if (!seen) {
      // No tile will write its dQ.
      int const batch = batch_head / params.heads_q;
      int const head = batch_head - batch * params.heads_q;
      int const end = cute::min((m_block + 1) * kTileM, params.seqlen_q);
      int const chunks = params.head_dim_qk / 8;
      for (int i = static_cast<int>(threadIdx.x) % 32; i < (end - m_block * kTileM) * chunks; i += 32) {
        std::int64_t const query = m_block * kTileM + i / chunks;
        std::int64_t const at = batch * params.d_q.stride_batch + query * params.d_q.stride_seqlen +
                                head * params.d_q.stride_head + i % chunks * 8;
        *reinterpret_cast<uint4*>(params.d_q.address + 2 * at) = uint4{0, 0, 0, 0};
      }
    }
  }
}

}  // namespace hattn::sm90
