// The kernel after the backward: dQ from its sums.
#pragma once

#include <cute/tensor.hpp>

#include "kernels.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

// The sums of a block of queries lie as the accumulators of its 256 consumer threads did: four neighbouring values of a
// thread are columns c and c + 1 of rows r and r + 8. A quad of lanes turns four such groups into 16 bytes a lane.
template <class Traits>
__global__ void __launch_bounds__(256) bwd_convert(BwdParams const params) {
  using Element = typename Traits::Element;
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  std::int64_t const block = blockIdx.x;
  std::int64_t const batch_head = block / m_blocks;
  int const m_block = static_cast<int>(block % m_blocks);
  std::int64_t const batch = batch_head / params.heads_q;
  std::int64_t const head = batch_head % params.heads_q;
  int const thread = static_cast<int>(threadIdx.x);
  int const consumer = thread / 128;
  int const lane = thread % 32;
  int const quad = lane % 4;
  int const row =
      m_block * Traits::kTileM + (Traits::kSplitsColumns ? 0 : consumer * 64) + thread % 128 / 32 * 16 + lane / 4;
  int const first_column = Traits::kSplitsColumns ? consumer * Traits::kColumnsQ : 0;
  auto const* const sums = reinterpret_cast<float4 const*>(params.sums) + block * (Traits::kElementsQ / 4) + thread;

  CUTE_UNROLL
  for (int i = 0; i < Traits::kColumnsQ / 32; ++i) {
    std::uint32_t words[2][4];
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      float4 const four = sums[(4 * i + j) * 256];
      words[0][j] = pack_pair<Element>(four.x * params.softmax_scale, four.y * params.softmax_scale);
      words[1][j] = pack_pair<Element>(four.z * params.softmax_scale, four.w * params.softmax_scale);
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      // A transposition of the quad's 4 x 4 words.
      CUTE_UNROLL
      for (int step = 1; step < 4; step *= 2) {
        bool const upper = (quad & step) != 0;
        CUTE_UNROLL
        for (int j = 0; j < 4; ++j) {
          if ((j & step) == 0) {
            std::uint32_t const given = upper ? words[r][j] : words[r][j + step];
            std::uint32_t const taken = __shfl_xor_sync(0xffffffffU, given, step);
            words[r][j] = upper ? taken : words[r][j];
            words[r][j + step] = upper ? words[r][j + step] : taken;
          }
        }
      }
      int const query = row + 8 * r;
      int const column = first_column + 32 * i + 8 * quad;
      if (query < params.seqlen_q && column < params.head_dim_qk) {
        std::int64_t const at =
            batch * params.d_q.stride_batch + query * params.d_q.stride_seqlen + head * params.d_q.stride_head + column;
        *reinterpret_cast<uint4*>(params.d_q.address + 2 * at) =
            uint4{words[r][0], words[r][1], words[r][2], words[r][3]};
      }
    }
  }
}

}  // namespace hattn::sm90
