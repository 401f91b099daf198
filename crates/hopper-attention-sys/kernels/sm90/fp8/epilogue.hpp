// The end of a tile, for one consumer warpgroup: writes O / row_sum in the output's type, O's largest magnitude and the
// log-sum-exp, straight to memory. Looks for what may have leaked from under a mask (leak.hpp).
#pragma once

#include "common/e4m3.hpp"
#include "common/element.hpp"
#include "common/leak.hpp"
#include "common/sinks.hpp"
#include "common/softmax.hpp"
#include "sm90/fp8/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Epilogue {
  // - `reference`, `row_sum`: of this thread's two rows, from the softmax. A sink of NaN makes NaN of `row_sum`.
  // - `divisor`: sums of the rounded weights, by which O is divided.
  // - `largest_v`: factor of O.
  // - `output`: the sums of P V. Multiplied by the factors in place.
  // Whether something may have leaked into the warp's rows. O's largest magnitude leaves out what may have.
  template <class Output>
  CUTE_DEVICE static bool run(Fp8KernelParams const& params, typename Traits::PlainTile const& tile, int consumer,
                              float const (&reference)[2], float (&row_sum)[2], float const (&divisor)[2],
                              float largest_v, Output& output) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    int const row = tile.block * Traits::kTileM + consumer * 64 + thread / 32 * 16;
    float const sink = sink_of_head<Traits::kScores == Scores::F16>(params, tile.head);
    float factors[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      RowEnd const end = RowEnd::of(sink, reference[r], row_sum[r], divisor[r]);
      factors[r] = row_sum[r] == 0.0F ? end.inverse : end.inverse * largest_v;
      int const query = row + lane / 4 + 8 * r;
      if (params.lse != nullptr && lane % 4 == 0 && query < queries_of(params, tile)) {
        params.lse[tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head + first_row_of(tile) +
                   query] = end.lse;
      }
      row_sum[r] = isnan(sink) ? sink : row_sum[r];
    }
    multiply_rows(output, factors);
    if (params.amax != nullptr) {
      // Magnitudes compare as their bits do, and a NaN is the largest.
      unsigned largest = 0;
      CUTE_UNROLL
      for (int i = 0; i < output.size(); ++i) {
        bool const there = row + lane / 4 + 8 * (i / 2 % 2) < queries_of(params, tile);
        unsigned const magnitude = __float_as_uint(output(i)) & 0x7fffffffU;
        bool const counts = Traits::kMask == MaskClass::Full || magnitude <= 0x7f800000U || isnan(row_sum[i / 2 % 2]);
        largest = cute::max(largest, there && counts ? magnitude : 0U);
      }
      largest = __reduce_max_sync(0xffffffffU, largest);
      if (lane == 0) {
        atomicMax(params.amax, largest);
      }
    }
    constexpr bool kLooks = Traits::kMask != MaskClass::Full;
    RowLooks looks;
    std::uint32_t nan_e4m3[2] = {0, 0};  // of each row, bit 7 of each byte: a NaN, 0x7f but for the sign
    if (params.output == DType::E4M3) {
      float const scale = *params.scale_o;
      write<1>(params, tile, row, lane, [&](int i) {
        std::uint32_t const word =
            pack_e4m3(output(i) * scale, output(i + 4) * scale, output(i + 1) * scale, output(i + 5) * scale);
        nan_e4m3[i / 2 % 2] |= kLooks ? (word & 0x7f7f7f7fU) + 0x01010101U : 0U;
        return cute::array<std::uint32_t, 1>{word};
      });
    } else {
      auto const pairs = [&](auto element) __attribute__((always_inline)) {
        using Element = decltype(element);
        write<2>(params, tile, row, lane, [&](int i) {
          std::uint32_t const words[2] = {pack_pair<Element>(output(i), output(i + 4)),
                                          pack_pair<Element>(output(i + 1), output(i + 5))};
          if constexpr (kLooks) {
            looks.see(i / 2 % 2, words[0], words[1]);
          }
          return cute::array<std::uint32_t, 2>{words[0], words[1]};
        });
      };
      if (params.output == DType::F16) {
        pairs(cutlass::half_t{});
      } else {
        pairs(cutlass::bfloat16_t{});
      }
    }
    if constexpr (kLooks) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        std::uint32_t const nan = (nan_e4m3[r] & 0x80808080U) != 0 ? 0x7fff7fffU : 0;
        looks.see(r, nan, nan);
      }
      return looks.found() && looks.leaked(row_sum);
    } else {
      return false;
    }
  }

  // Writes four columns side by side at a time. A lane has them, since V^T lists the even columns of 16 before the odd
  // ones: they are the accumulator elements i, i + 4, i + 1, i + 5. `words(i)` are these in the output's type.
  template <int kElementBytes, class Words>
  CUTE_DEVICE static void write(Fp8KernelParams const& params, typename Traits::PlainTile const& tile, int row,
                                int lane, Words const& words) {
    std::uint64_t const head =
        params.o.address + kElementBytes * (tile.batch * params.o.stride_batch + tile.head * params.o.stride_head);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int const query = row + lane / 4 + 8 * r;
      std::uint64_t const first =
          head + kElementBytes * ((first_row_of(tile) + query) * params.o.stride_row + 4 * (lane % 4));
      CUTE_UNROLL
      for (int i = 0; i < Traits::kHeadDimVO / 16; ++i) {
        store_if(query < queries_of(params, tile) && 16 * i < params.head_dim_vo, first + kElementBytes * 16 * i,
                 words(8 * i + 2 * r));
      }
    }
  }

  // Without a branch: words that only a branch makes would keep their registers all through the kernel.
  CUTE_DEVICE static void store_if(bool condition, std::uint64_t address, cute::array<std::uint32_t, 1> const& words) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b32 [%0], %1;}" ::"l"(address), "r"(words[0]),
                 "r"(static_cast<int>(condition))
                 : "memory");
  }
  CUTE_DEVICE static void store_if(bool condition, std::uint64_t address, cute::array<std::uint32_t, 2> const& words) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p st.global.v2.b32 [%0], {%1, %2};}" ::"l"(address),
                 "r"(words[0]), "r"(words[1]), "r"(static_cast<int>(condition))
                 : "memory");
  }
};

}  // namespace hattn::sm90
