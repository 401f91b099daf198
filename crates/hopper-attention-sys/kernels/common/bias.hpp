// An additive bias (hopper-attention/src/problem/bias.rs): a number of any 16-bit type or f32 that is added to a score
// in natural units, after the cap and before the mask. A bias of -inf is a mask of its own: nothing of its pair reaches
// a result.
//
// A kernel keeps a product q k, or what a cap makes of it, and multiplies it by a factor to be in powers of two
// (forward_factor and backward_factor in scalars.hpp). A bias is added in powers of two, and the score is multiplied
// for that: what comes later multiplies it by 1. So a bias far below 0 that all of a row has cancels exactly: in the
// forward against the row's maximum, in the backward against the LSE, which was rounded as the bias is.
//
// Threads read the numbers of their scores from memory, in the order of the accumulator. Two scores of a lane are of
// neighbouring keys in the forward, and are read in one access where they lie so. In the backward they are of
// neighbouring queries, and are read one by one. A forward fetches the numbers of the next block into the L2 cache.
// The sm90 kernels have a faster way for most biases (copied_bias.hpp).
//
// Of sequences whose lengths the device knows (common/sequences.hpp), query 0 and key 0 are the sequence's first. No
// sequence has more rows than the bias (Sequences::most_keys).
//
// Blocks are always compared (common/softmax.hpp): no block says what the bias of the next one is.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/config.hpp>

#include "common/element.hpp"
#include "common/softcap.hpp"
#include "kernels.hpp"

namespace hattn {

template <class Params>
CUTE_HOST_DEVICE bool has_bias(Params const& params) {
  return params.bias.address != 0;
}

// The bytes of one number of it.
CUTE_DEVICE int bytes_of_bias(DType dtype) { return dtype == DType::F32 ? 4 : 2; }

// The bias of one head.
struct BiasOfHead {
  std::uint64_t address;  // of query 0 and key 0
  std::int64_t row_bytes;
  DType dtype;

  template <class Params>
  CUTE_DEVICE static BiasOfHead of(Params const& params, int batch, int head) {
    TensorDesc const& tensor = params.bias;
    int const bytes = bytes_of_bias(params.bias_dtype);
    return {tensor.address + bytes * (batch * tensor.stride_batch + head * tensor.stride_head),
            bytes * tensor.stride_row, params.bias_dtype};
  }
  CUTE_DEVICE int bytes() const { return bytes_of_bias(dtype); }
  CUTE_DEVICE std::uint64_t at(int query, int key) const {
    return address + query * row_bytes + static_cast<std::int64_t>(key) * bytes();
  }
  CUTE_DEVICE static std::uint32_t load_half(std::uint64_t from) {
    std::uint16_t half;
    asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(half) : "l"(from));
    return half;
  }
  CUTE_DEVICE static std::uint32_t load_word(std::uint64_t from) {
    std::uint32_t word;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
  }
  // One number, as the bits of its type.
  CUTE_DEVICE std::uint32_t bits(std::uint64_t from) const {
    return dtype == DType::F32 ? load_word(from) : load_half(from);
  }
  // The two numbers of a word.
  template <DType kDType>
  CUTE_DEVICE static float2 both(std::uint32_t word) {
    if constexpr (kDType == DType::BF16) {
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000U)};
    } else {
      return unpack_pair<cutlass::half_t>(word);
    }
  }
  // Its value.
  CUTE_DEVICE float value(std::uint32_t bits) const {
    if (dtype == DType::F32) {
      return __uint_as_float(bits);
    }
    return dtype == DType::BF16 ? __uint_as_float(bits << 16) : unpack_pair<cutlass::half_t>(bits).x;
  }
  CUTE_DEVICE float one(int query, int key) const { return value(bits(at(query, key))); }
};

// What becomes of a score that `factor` brings to powers of two. `hidden`: of a bias of -inf.
CUTE_DEVICE float with_bias(float score, float factor, float bias, float hidden) {
  return bias == -INFINITY ? hidden : fmaf(score, factor, bias * kLog2E);
}

// The same of two scores, whose biases are the halves of a word. From sm_90 on one comparison looks at both.
template <DType kDType>
CUTE_DEVICE void add_pair_of_biases(float& first, float& second, float factor, std::uint32_t word, float hidden) {
  float2 const both = BiasOfHead::both<kDType>(word);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  first = fmaf(first, factor, both.x * kLog2E);
  second = fmaf(second, factor, both.y * kLog2E);
  if constexpr (kDType == DType::BF16) {
    asm("{ .reg .pred p, q;\n"
        "setp.eq.bf16x2 p|q, %2, %3;\n"
        "selp.f32 %0, %4, %0, p;\n"
        "selp.f32 %1, %4, %1, q; }"
        : "+f"(first), "+f"(second)
        : "r"(word), "r"(0xff80ff80U), "f"(hidden));
  } else {
    asm("{ .reg .pred p, q;\n"
        "setp.eq.f16x2 p|q, %2, %3;\n"
        "selp.f32 %0, %4, %0, p;\n"
        "selp.f32 %1, %4, %1, q; }"
        : "+f"(first), "+f"(second)
        : "r"(word), "r"(0xfc00fc00U), "f"(hidden));
  }
#else
  first = with_bias(first, factor, both.x, hidden);
  second = with_bias(second, factor, both.y, hidden);
#endif
}

// Adds the bias to a thread's scores of one row of a block of the forward: elements (c, kRow, i) are of the key
// 2 * quad_lane + 8 i + c of the block. `numbers`: where the bias of the first of them is. `left`: how many keys there
// are from that one on. kRagged: whether these may be fewer than the block has: what is past the last gets no bias, and
// is masked later. kAtATime: how many of the accumulator's columns the compiler may begin with. It would begin with all
// of them, and spill.
template <bool kRagged, int kRow, int kColumns, int kAtATime, class Scores>
CUTE_DEVICE void add_bias_of_row(Scores& scores, float factor, std::uint64_t numbers, DType dtype, int left) {
  static_assert(kColumns / 8 % kAtATime == 0);
  // Some columns after the others: their addresses are known when the scores before them are.
  auto const go_on = [&](int begin) __attribute__((always_inline)) {
    if (begin > 0) {
      auto const low = static_cast<std::uint32_t>(numbers);
      numbers = (numbers & 0xffffffff00000000U) | after(__float_as_uint(scores(4 * begin - 4 + 2 * kRow + 1)), low);
    }
  };
  auto const add = [&](int i, float x, float y) __attribute__((always_inline)) {
    float& first = scores(4 * i + 2 * kRow);
    float& second = scores(4 * i + 2 * kRow + 1);
    first = with_bias(first, factor, x, -INFINITY);
    second = with_bias(second, factor, y, -INFINITY);
  };
  if (dtype == DType::F32) {
    CUTE_UNROLL
    for (int begin = 0; begin < kColumns / 8; begin += kAtATime) {
      go_on(begin);
      std::uint32_t words[2 * kAtATime];
      CUTE_UNROLL
      for (int i = 0; i < 2 * kAtATime; ++i) {
        int const column = 8 * (begin + i / 2) + i % 2;
        words[i] = !kRagged || column < left ? BiasOfHead::load_word(numbers + 4 * column) : 0;
      }
      CUTE_UNROLL
      for (int i = 0; i < kAtATime; ++i) {
        add(begin + i, __uint_as_float(words[2 * i]), __uint_as_float(words[2 * i + 1]));
      }
    }
    return;
  }
  // (The lanes of a warp take one way.)
  bool const pairs = !kRagged && __ballot_sync(0xffffffffU, (numbers & 2) != 0) == 0;
  CUTE_UNROLL
  for (int begin = 0; begin < kColumns / 8; begin += kAtATime) {
    go_on(begin);
    std::uint32_t words[kAtATime];
    if (pairs) {
      CUTE_UNROLL
      for (int i = 0; i < kAtATime; ++i) {
        words[i] = BiasOfHead::load_word(numbers + 16 * (begin + i));
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kAtATime; ++i) {
        int const column = 8 * (begin + i);
        words[i] = !kRagged || column < left ? BiasOfHead::load_half(numbers + 2 * column) : 0;
        words[i] |= !kRagged || column + 1 < left ? BiasOfHead::load_half(numbers + 2 * column + 2) << 16 : 0;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kAtATime; ++i) {
      float2 const both =
          dtype == DType::BF16 ? BiasOfHead::both<DType::BF16>(words[i]) : BiasOfHead::both<DType::F16>(words[i]);
      add(begin + i, both.x, both.y);
    }
  }
}

// The same of both of its rows, `row` and 8 after it. Rows past the last get any number: nobody reads them.
// `of_head()` is the BiasOfHead, read anew: registers are short.
template <bool kRagged, int kColumns, int kAtATime, class Scores, class OfHead>
CUTE_DEVICE void add_bias(Scores& scores, float factor, OfHead const& of_head, int row, int seqlen_q, int first_key,
                          int quad_lane, int seqlen_kv) {
  int const key = first_key + 2 * quad_lane;
  BiasOfHead const first = of_head();
  add_bias_of_row<kRagged, 0, kColumns, kAtATime>(scores, factor, first.at(cute::min(row, seqlen_q - 1), key),
                                                  first.dtype, seqlen_kv - key);
  BiasOfHead const second = of_head();
  add_bias_of_row<kRagged, 1, kColumns, kAtATime>(scores, factor, second.at(cute::min(row + 8, seqlen_q - 1), key),
                                                  second.dtype, seqlen_kv - key);
  // The numbers of the block before this one, which comes next.
  if (first_key >= kColumns) {
    BiasOfHead const bias = of_head();
    int const bytes = bias.bytes();
    std::uint64_t const line =
        bias.at(cute::min(row + quad_lane / 2 * 8, seqlen_q - 1), first_key - kColumns) + quad_lane % 2 * 128;
    CUTE_UNROLL
    for (int at = 0; at < 4 * kColumns; at += 256) {
      if (at < kColumns * bytes) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line + at));
      }
    }
  }
}

// The same of transposed scores: element (c, r, i) is of key `key` + 8 r, and of query `query` + 8 i + c. `hidden` is
// what becomes of a score with a bias of -inf.
template <int kColumns, int kAtATime, class Scores, class OfHead>
CUTE_DEVICE void add_bias_transposed(Scores& scores, float factor, OfHead const& of_head, int key, int seqlen_kv,
                                     int query, int seqlen_q, float hidden) {
  static_assert(kColumns / 8 % kAtATime == 0);
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    BiasOfHead const bias = of_head();
    std::uint64_t const numbers = bias.at(0, cute::min(key + 8 * r, seqlen_kv - 1));
    auto first = static_cast<std::uint32_t>(query);
    CUTE_UNROLL
    for (int begin = 0; begin < kColumns / 8; begin += kAtATime) {
      if (begin > 0) {
        first = after(__float_as_uint(scores(4 * begin - 4 + 2 * r + 1)), first);
      }
      std::uint32_t bits[2 * kAtATime];
      CUTE_UNROLL
      for (int i = 0; i < 2 * kAtATime; ++i) {
        int const of_query = cute::min(static_cast<int>(first) + 8 * (begin + i / 2) + i % 2, seqlen_q - 1);
        bits[i] = bias.bits(numbers + of_query * bias.row_bytes);
      }
      CUTE_UNROLL
      for (int i = 0; i < 2 * kAtATime; ++i) {
        float& score = scores(4 * (begin + i / 2) + 2 * r + i % 2);
        score = with_bias(score, factor, bias.value(bits[i]), hidden);
      }
    }
  }
}

}  // namespace hattn
