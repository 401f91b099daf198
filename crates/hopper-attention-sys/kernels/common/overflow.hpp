// Rows of O whose sums have overflowed, computed again where there is no mask. (Under a mask leak.hpp does it.)
//
// Weights are relative to what a row's maximum was some blocks ago (common/softmax.hpp), so they may be far above 1. A
// sum of bf16 weights and values may then be infinite although O is not. Here they are relative to the maximum.
//
// One row at a time, so that it takes few registers. It is slow, and it is rare.
#pragma once

#include <type_traits>

#include "common/leak.hpp"
#include "common/softmax.hpp"

namespace hattn {

template <class Traits>
struct Overflows {
  static_assert(Traits::kMask == MaskClass::Full, "a row has all keys");
  using Operands = OperandsOf<Traits>;
  using Pairs = LanePairs<Traits::kHeadDimVO>;
  static constexpr unsigned kAll = 0xffffffffU;

  CUTE_DEVICE static float score(Operands const& operands, int query, int key) {
    int const rows[1] = {query};
    float sum[1];
    dot_rows(operands.q, rows, operands.k, key, operands.head_dim_qk, sum);
    return operands.score(sum[0], query, key);
  }

  // Puts right what has overflowed in a warp's 16 rows of O, from `first_row` on. (`words`: as Leaks::repair takes
  // them.)
  template <class Words>
  CUTE_DEVICE static void repair(Operands const& operands, Band const& band, int first_row, SoundRows const& sound,
                                 Words const& words) {
    if (!sound.any() || first_row >= band.seqlen_q) {
      return;
    }
    int const lane = thread_index_anew() % 32;
    if (Leaks<Traits>::is_by_right(operands, band, first_row, sound, words, lane)) {
      return;
    }
    CUTE_NO_UNROLL
    for (int row = 0; row < 16; ++row) {
      int const query = first_row + row;
      if (query >= band.seqlen_q || !sound.has(row)) {
        continue;
      }
      unsigned wrong = 0;  // which of this lane's columns
      CUTE_UNROLL
      for (int pair = 0; pair < Pairs::kCount; ++pair) {
        wrong |= not_finite(words.load(row, pair)) << 2 * pair;
      }
      if (!__any_sync(kAll, wrong != 0)) {
        continue;
      }
      int const end = sound.is_empty(row) ? 0 : band.seqlen_kv;
      float const sink_log2 = operands.sink(words) * kLog2E;
      float max = sink_log2;
      CUTE_NO_UNROLL
      for (int key = lane; key < end; key += 32) {
        max = fmaxf(max, score(operands, query, key));
      }
      CUTE_UNROLL
      for (int step = 1; step < 32; step *= 2) {
        max = fmaxf(max, __shfl_xor_sync(kAll, max, step));
      }
      // This lane's. The sink is a key without a value.
      float sum = lane != 0 || sink_log2 == -INFINITY ? 0.0F : sink_log2 == max ? 1.0F : exp2_approx(sink_log2 - max);
      float2 output[Pairs::kCount] = {};
      CUTE_NO_UNROLL
      for (int first = 0; first < end; first += 32) {
        float const own = first + lane < end ? exp2_approx(score(operands, query, first + lane) - max) : 0.0F;
        sum += own;
        CUTE_NO_UNROLL
        for (int i = 0; i < cute::min(32, end - first); ++i) {
          float const weight = __shfl_sync(kAll, own, i);
          CUTE_UNROLL
          for (int pair = 0; pair < Pairs::kCount; ++pair) {
            int const column = Pairs::column(lane, pair);
            if (column < operands.head_dim_vo) {
              float2 const values = operands.v.pair(first + i, column);
              output[pair].x = fmaf(weight, values.x, output[pair].x);
              output[pair].y = fmaf(weight, values.y, output[pair].y);
            }
          }
        }
      }
      CUTE_UNROLL
      for (int step = 1; step < 32; step *= 2) {
        sum += __shfl_xor_sync(kAll, sum, step);
      }
      float const inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
      CUTE_UNROLL
      for (int i = 0; i < 2 * Pairs::kCount; ++i) {
        float const value = (i % 2 == 0 ? output[i / 2].x : output[i / 2].y) * inverse;
        if ((wrong >> i & 1) != 0 && !isnan(value)) {
          words.store(row, i / 2, i % 2, value);
        }
      }
    }
  }
};

// What puts a kernel's rows of O right. (Dropout is a mask, and so is a bias of -inf.)
template <class Traits>
using RepairOf = std::conditional_t<Traits::kMask != MaskClass::Full || Traits::kDrops || Traits::kAddsBias,
                                    Leaks<Traits>, Overflows<Traits>>;

}  // namespace hattn
