// The end of a tile, as one consumer warpgroup sees it: O / row_sum in the output's type, its largest magnitude, and
// the log-sum-exp, straight to memory.
#pragma once

#include "common/element.hpp"
#include "common/softmax.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Epilogue {
  // `max` and `row_sum` as in mma.hpp, `output` the sums of P V, whose V has the factor `largest_v`.
  template <class Output>
  CUTE_DEVICE static void run(Fp8KernelParams const& params, Tile const& tile, int consumer, float const (&max)[2],
                              float const (&row_sum)[2], float largest_v, Output& output) {
    int const thread = static_cast<int>(threadIdx.x) % 128;
    int const lane = thread % 32;
    int const row = tile.block * Traits::kTileM + consumer * 64 + thread / 32 * 16;
    float factors[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float const sum = quad_sum(row_sum[r]);
      bool const empty = sum == 0.0F;  // no key at all: O = 0, LSE = -inf; a NaN stays one
      factors[r] = empty ? 0.0F : reciprocal_approx(sum) * largest_v;
      int const query = row + lane / 4 + 8 * r;
      if (params.lse != nullptr && lane % 4 == 0 && query < params.seqlen_q) {
        constexpr float kLn2 = 0.693147180559945309F;
        constexpr float kSmallest = 1.0F / (1 << static_cast<int>(Traits::kOffset));
        params.lse[tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head + query] =
            empty ? -INFINITY : (max[r] + log2_approx(sum * kSmallest)) * kLn2;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < cute::size(output); ++i) {
      output(i) *= factors[i / 2 % 2];
    }
    if (params.amax != nullptr) {
      // Magnitudes compare as their bits do, and a NaN is the largest.
      unsigned largest = 0;
      CUTE_UNROLL
      for (int i = 0; i < cute::size(output); ++i) {
        bool const there = row + lane / 4 + 8 * (i / 2 % 2) < params.seqlen_q;
        largest = cute::max(largest, there ? __float_as_uint(output(i)) & 0x7fffffffU : 0U);
      }
      largest = __reduce_max_sync(0xffffffffU, largest);
      if (lane == 0) {
        atomicMax(params.amax, largest);
      }
    }
    auto const write = [&](auto element) __attribute__((always_inline)) {
      write_pairs<Traits::kHeadDimVO>(
          params.o.address + 2 * (tile.batch * params.o.stride_batch + tile.head * params.o.stride_head),
          2 * params.o.stride_seqlen, row, params.seqlen_q, params.head_dim_vo, lane, [&](int i, int j) {
            int const at = 8 * i + 2 * j;
            return pack_pair<decltype(element)>(output(at), output(at + 1));
          });
    };
    if (params.output == DType::E4M3) {
      write_bytes(params, tile, row, lane, output);
    } else if (params.output == DType::F16) {
      write(cutlass::half_t{});
    } else {
      write(cutlass::bfloat16_t{});
    }
  }

  // O in e4m3, a pair of columns at a time.
  template <class Output>
  CUTE_DEVICE static void write_bytes(Fp8KernelParams const& params, Tile const& tile, int row, int lane,
                                      Output const& output) {
    float const scale = *params.scale_o;
    std::uint64_t const head = params.o.address + tile.batch * params.o.stride_batch + tile.head * params.o.stride_head;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const query = row + lane / 4 + 8 * r;
      CUTE_UNROLL
      for (int i = 0; i < Traits::kHeadDimVO / 8; ++i) {
        int const column = 8 * i + 2 * (lane % 4);
        if (query < params.seqlen_q && column < params.head_dim_vo) {
          int const at = 4 * i + 2 * r;
          *reinterpret_cast<unsigned short*>(head + query * params.o.stride_seqlen + column) =
              static_cast<unsigned short>(pack_e4m3(output(at) * scale, output(at + 1) * scale, 0.0F, 0.0F));
        }
      }
    }
  }
};

}  // namespace hattn::sm90
