// An additive bias (common/bias.hpp) that lies in shared memory before it is needed.
//
// It is one of 16-bit numbers whose rows begin at multiples of 16 bytes (is_copied). A warp copies what it needs
// itself, so that no barrier is in the way. ldmatrix then brings the numbers in the order of the accumulator. A lane
// that reads them from memory in that order takes eight times as many instructions, each of which touches eight rows.
#pragma once

#include <cmath>

#include "common/bias.hpp"
#include "common/copy.hpp"
#include "common/matrices.hpp"
#include "common/slab.hpp"

namespace hattn {

// Whether a bias is copied.
template <class Params>
CUTE_HOST_DEVICE bool is_copied(Params const& params) {
  TensorDesc const& bias = params.bias;
  auto const strides = bias.stride_batch | bias.stride_head | bias.stride_row;  // of 16 bytes are 8 numbers
  return params.bias_dtype != DType::F32 && bias.address % 16 == 0 && strides % 8 == 0;
}

// How many of a row's numbers from `key` on are copied in 16 bytes, in bytes.
CUTE_DEVICE int bytes_of_chunk(int key, int seqlen_kv) { return 2 * cute::max(0, cute::min(8, seqlen_kv - key)); }

// Adds copied numbers to a thread's scores, 16 columns of both of its rows a step. `load(from, step, words)`: they come
// from shared memory, in the order of the accumulator. `from` is where this lane reads. kStepsAtATime: how many steps
// the compiler may begin with. It would begin with all of them, and spill.
template <DType kDType, int kSteps, int kStepsAtATime, class Scores, class Load>
CUTE_DEVICE void add_copied_of(Scores& scores, float factor, std::uint32_t from, float hidden, Load const& load) {
  factor = factor_after(scores(0), factor);  // or it is read from constant memory for each score
  CUTE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    if (step > 0 && step % kStepsAtATime == 0) {
      from = after(__float_as_uint(scores(8 * step - 1)), from);
    }
    std::uint32_t words[4];
    load(from, step, words);
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      add_pair_of_biases<kDType>(scores(8 * step + 2 * i), scores(8 * step + 2 * i + 1), factor, words[i], hidden);
    }
  }
}
template <int kSteps, int kStepsAtATime, class Scores, class Load>
CUTE_DEVICE void add_copied(Scores& scores, float factor, std::uint32_t from, DType dtype, float hidden,
                            Load const& load) {
  if (dtype == DType::BF16) {
    add_copied_of<DType::BF16, kSteps, kStepsAtATime>(scores, factor, from, hidden, load);
  } else {
    add_copied_of<DType::F16, kSteps, kStepsAtATime>(scores, factor, from, hidden, load);
  }
}

// The bias of 16 queries and a block's kColumns keys in shared memory, as slabs (common/slab.hpp).
template <int kColumns>
struct CopiedBias {
  static constexpr int kRows = 16;
  static constexpr int kBytes = kRows * kColumns * 2;
  static_assert(kColumns % kSlabColumns == 0);

  // Has a warp begin to copy it, if it is `wanted`; else the memory becomes zeros. (Without a branch: this may stand
  // where products run.) So do rows past the last query, which nobody reads. kRagged: whether the block may be the
  // sequence's last. Else all copies are whole, which takes fewer instructions.
  template <bool kRagged>
  CUTE_DEVICE static void begin(bool wanted, std::uint32_t to, BiasOfHead const& bias, int first_query, int seqlen_q,
                                int first_key, int seqlen_kv, int lane) {
    int const chunk = lane % 8;
    int const key = first_key + 8 * chunk;
    std::uint64_t from = bias.at(first_query + lane / 8, key);
    int const rows_left = wanted ? seqlen_q - first_query - lane / 8 : 0;
    int bytes[kColumns / kSlabColumns];
    CUTE_UNROLL
    for (int slab = 0; slab < kColumns / kSlabColumns; ++slab) {
      bytes[slab] = kRagged ? bytes_of_chunk(key + slab * kSlabColumns, seqlen_kv) : 16;
    }
    CUTE_UNROLL
    for (int pass = 0; pass < kRows / 4; ++pass) {
      CUTE_UNROLL
      for (int slab = 0; slab < kColumns / kSlabColumns; ++slab) {
        copy_chunk(slab_address(to, 4 * pass + lane / 8, chunk) + slab * (kRows * kSlabRowBytes),
                   from + slab * kSlabRowBytes, 4 * pass < rows_left ? bytes[slab] : 0);
      }
      from += 4 * bias.row_bytes;
    }
    commit_copies();
  }

  // Adds it to the scores of the same queries and keys, when the warp's copies are there.
  template <int kStepsAtATime, class Scores>
  CUTE_DEVICE static void add(Scores& scores, float factor, std::uint32_t from, DType dtype, int lane, float hidden) {
    from += lane_offset_down(lane);
    add_copied<kColumns / 16, kStepsAtATime>(scores, factor, from, dtype, hidden,
                                             [](std::uint32_t from, int step, std::uint32_t(&words)[4]) {
                                               load_matrices(Columns::of_step(step).template from<kRows>(from), words);
                                             });
  }
};

// The bias of a block's kQueries queries and 16 keys in shared memory: a row of 32 bytes a query, in slabs of 64
// queries that are kSlabBytes apart. The two chunks of a row change places in rows 4 to 7 of 8: so the same chunk of
// eight rows lies in eight different groups of banks.
template <int kQueries, int kSlabBytes>
struct CopiedBiasTransposed {
  static constexpr int kRowBytes = 32;
  static constexpr int kSlabRows = 64;

  CUTE_DEVICE static std::uint32_t place(int row, int chunk) { return row * kRowBytes + (chunk ^ row / 4 % 2) * 16; }

  // Has a warp begin to copy it. Rows past the last query become zeros.
  CUTE_DEVICE static void begin(std::uint32_t to, BiasOfHead const& bias, int first_query, int seqlen_q, int first_key,
                                int seqlen_kv, int lane) {
    int const chunk = lane % 2;
    int const key = first_key + 8 * chunk;
    int const bytes = bytes_of_chunk(key, seqlen_kv);
    int const rows_left = seqlen_q - first_query - lane / 2;
    std::uint64_t from = bias.at(first_query + lane / 2, key);
    std::uint32_t const own = to + place(lane / 2, chunk);
    CUTE_UNROLL
    for (int row = 0; row < kQueries; row += 16) {
      copy_chunk(own + row / kSlabRows * kSlabBytes + row % kSlabRows * kRowBytes, from, row < rows_left ? bytes : 0);
      from += 16 * bias.row_bytes;
    }
    commit_copies();
  }

  // Adds it to the transposed scores of the same queries and keys, when the warp's copies are there.
  template <int kStepsAtATime, class Scores>
  CUTE_DEVICE static void add(Scores& scores, float factor, std::uint32_t from, DType dtype, int lane, float hidden) {
    from += place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    add_copied<kQueries / 16, kStepsAtATime>(
        scores, factor, from, dtype, hidden, [](std::uint32_t from, int step, std::uint32_t(&words)[4]) {
          load_transposed(from + step / 4 * kSlabBytes + step % 4 * (16 * kRowBytes), words);
        });
  }
};

}  // namespace hattn
