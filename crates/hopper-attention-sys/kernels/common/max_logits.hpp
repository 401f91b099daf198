// The maximum logit: the largest score of a query head over all batch entries, queries and keys that are kept, after
// the softmax scale, the cap and ALiBi. Sinks do not count, and neither does a NaN.
//
// The launch sets the results to -inf, before its kernel (launch_fill_max_logits in common/fill.hpp). A warp has
// places in shared memory for the largest scores of its tile: no register keeps them from block to block. After a tile
// they take part in the result of the tile's head, by an atomic maximum. So the result is the same on every run.
//
// Maxima in memory are of integers in the order of the scores (ordered). Nothing here branches, and no instruction has
// one result for a warp: with either, ptxas takes the uniform registers away from the forward's loop, and spills.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/arch/util.hpp>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/scalars.hpp"
#include "common/thread.hpp"
#include "kernels.hpp"

namespace hattn {

// Integers in the order of floats, and back.
CUTE_HOST_DEVICE constexpr int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
constexpr int kNoScore = ordered(static_cast<int>(0xff800000U));  // of -inf

// Of a warp. Lanes 8 apart share a place.
struct LargestScores {
  int of[8];

  CUTE_DEVICE void clear() {
    for (int& place : of) {
      place = kNoScore;
    }
  }

  CUTE_DEVICE std::uint32_t own() const { return cute::cast_smem_ptr_to_uint(&of[thread_index_anew() & 7]); }
};

CUTE_DEVICE bool wants_max_logits(FwdParams const& params) { return params.max_logits.address != 0; }

// A warp's block of scores, whose masked ones are -inf. A thread's rows are `row_of_lane()` and 8 after it, of
// `queries`. Rows past the last query have scores, too, which do not count. `largest`: the warp's.
template <int kColumns, class Scores, class Row>
CUTE_DEVICE void see_scores(Scores const& scores, Row const& row_of_lane, int queries, LargestScores const& largest) {
  float max[2] = {-INFINITY, -INFINITY};
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 2; ++i) {
    float& of_row = max[i / 2 % 2];
    of_row = fmaxf(of_row, scores(i));
  }
  asm volatile("" : "+f"(max[0]), "+f"(max[1]));  // what follows is not there before
  int const row = row_of_lane();
  float const first = row < queries ? max[0] : -INFINITY;
  float const second = row + 8 < queries ? max[1] : -INFINITY;
  int const most = ordered(__float_as_int(fmaxf(first, second)));
  asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(largest.own()), "r"(most) : "memory");
}

// After a warp's tile of a head: the result takes part of what the warp has, which then has nothing.
CUTE_DEVICE void finish_max_logit(FwdParams const& params, int head, LargestScores const& largest) {
  int most;
  __syncwarp();
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(most) : "r"(largest.own()) : "memory");
  __syncwarp();
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(largest.own()), "r"(kNoScore) : "memory");
  CUTE_UNROLL
  for (int step = 1; step < 8; step *= 2) {
    most = cute::max(most, __shfl_xor_sync(0xffffffffU, most, step));
  }
  __syncwarp();
  float const unit = params.softcap == 0.0F ? params.softmax_scale : params.softcap;
  int const bits = __float_as_int(scaled(__int_as_float(ordered(most)), unit));
  auto* const result = reinterpret_cast<float*>(params.max_logits.address) + head * params.max_logits.stride_head;
  // Floats that are not negative are in the order of their bits, the others in the opposite one. (-inf is the largest
  // of these: it changes nothing.)
  asm volatile(
      "{\n"
      ".reg .pred first, negative;\n"
      "setp.eq.s32 first, %2, 0;\n"
      "setp.lt.and.s32 negative, %1, 0, first;\n"
      "setp.ge.and.s32 first, %1, 0, first;\n"
      "@first red.relaxed.gpu.global.max.s32 [%0], %1;\n"
      "@negative red.relaxed.gpu.global.min.u32 [%0], %1;\n"
      "}\n" ::"l"(result),
      "r"(bits), "r"(thread_index_anew() & 31)
      : "memory");
}

}  // namespace hattn
