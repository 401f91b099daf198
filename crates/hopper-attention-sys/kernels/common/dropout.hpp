// Dropout: some weights become 0, chosen by random numbers, and the others are multiplied by `factor`. The LSE is that
// of all scores.
//
//     O = (P o Z) V    dV = (P o Z)^T dO    dS = P o (Z o dP - delta)    Z = factor or 0
//
// Which weights: Philox-4x32 with 7 rounds (Salmon et al. 2011) of a counter and a key. With query i and key j of a
// sequence, and the caller's seed and offset:
//
//     key      seed low, seed high ^ offset high
//     counter  j / 32 * 8 + j % 8, i / 16 * 8 + i % 8, batch * heads_q + head, offset low
//     bits     word j / 8 % 4, its low half where i / 8 is even, else its high half, of it the low 15 bits
//
// A pair is dropped where the bits are below `dropped`. So tiles, packing and the order of work change nothing. And the
// patch of a call, 16 queries by 4 keys 8 apart, is what a lane has of accumulators of both passes: two rows 8 apart,
// and in each block of 8 columns two neighbours, which take two calls.
//
// A kernel that multiplies weights of 0 with V or dO looks for what leaks from there, as from under a mask (leak.hpp).
// The factor is part of the scale at the end of O and dV: there a weight of 1 stays 1, and exact. It is part of dS,
// which in f16 would lose range without it: a backward multiplies P by the factor, and the statistics of a query have
// delta over the factor.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "common/thread.hpp"
#include "kernels.hpp"

namespace hattn {

template <class Params>
CUTE_HOST_DEVICE bool has_dropout(Params const& params) {
  return params.dropout.dropped != 0;
}
// What weights that stay are multiplied by.
template <class Params>
CUTE_HOST_DEVICE float dropout_factor(Params const& params) {
  return has_dropout(params) ? params.dropout.factor : 1.0F;
}

// What the delta of a query and its dLSE are multiplied by in the statistics.
CUTE_DEVICE float delta_factor(BwdParams const& params) {
  return has_dropout(params) ? __frcp_rn(params.dropout.factor) : 1.0F;
}

// The random numbers of one head of a sequence.
struct DropoutOfHead {
  std::uint32_t key[2];
  std::uint32_t head;
  std::uint32_t offset;

  CUTE_DEVICE static DropoutOfHead of(Dropout const& dropout, int head) {
    uint4 words;
    // Read anew at each call: kept through all of a kernel, the words would take registers. And all in one statement:
    // moves of their own made a kernel spill.
    asm volatile(
        "{\n"
        ".reg .pred in_memory;\n"
        "setp.ne.b64 in_memory, %4, 0;\n"
        "mov.b64 {%0, %1}, %5;\n"
        "mov.b64 {%2, %3}, %6;\n"
        "@in_memory ld.global.nc.b32 %0, [%4];\n"
        "@in_memory ld.global.nc.b32 %1, [%4 + 4];\n"
        "@in_memory ld.global.nc.b32 %2, [%4 + 8];\n"
        "@in_memory ld.global.nc.b32 %3, [%4 + 12];\n"
        "}\n"
        : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
        : "l"(dropout.state), "l"(dropout.seed), "l"(dropout.offset));
    return {{words.x, words.y ^ words.w}, static_cast<std::uint32_t>(head), words.z};
  }

  // The words of one call.
  CUTE_DEVICE uint4 words(int key_patch, int query_patch) const {
    std::uint32_t a = static_cast<std::uint32_t>(key_patch);
    std::uint32_t b = static_cast<std::uint32_t>(query_patch);
    std::uint32_t c = head;
    std::uint32_t d = offset;
    std::uint32_t low = key[0];
    std::uint32_t high = key[1];
    CUTE_UNROLL
    for (int round = 0; round < 7; ++round) {
      std::uint64_t const first = std::uint64_t{0xd2511f53U} * a;
      std::uint64_t const second = std::uint64_t{0xcd9e8d57U} * c;
      a = static_cast<std::uint32_t>(second >> 32) ^ b ^ low;
      b = static_cast<std::uint32_t>(second);
      c = static_cast<std::uint32_t>(first >> 32) ^ d ^ high;
      d = static_cast<std::uint32_t>(first);
      low += 0x9e3779b9U;
      high += 0xbb67ae85U;
    }
    return {a, b, c, d};
  }

  // Whether one pair is dropped.
  CUTE_DEVICE bool drops(int query, int key_index, int dropped) const {
    uint4 const all = words(key_index / 32 * 8 + key_index % 8, query / 16 * 8 + query % 8);
    std::uint32_t const first = (key_index & 8) != 0 ? all.y : all.x;
    std::uint32_t const second = (key_index & 8) != 0 ? all.w : all.z;
    std::uint32_t const word = (key_index & 16) != 0 ? second : first;
    return static_cast<int>(word >> query / 8 % 2 * 16 & 0x7fff) < dropped;
  }
};

// Of two neighbours' numbers: all bits of a half for a pair that stays, none for one that is dropped. `limits`: see
// below.
CUTE_DEVICE std::uint32_t kept_of(std::uint32_t numbers, std::uint32_t limits) {
  // A sum with the limit reaches the sign where the number is large enough, and PRMT spreads the sign.
  std::uint32_t const sums = (numbers & 0x7fff7fffU) + limits;
  std::uint32_t kept;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(kept) : "r"(sums));
  return kept;
}
// The same of their words. `kHigh`: of the halves of the words.
template <bool kHigh>
CUTE_DEVICE std::uint32_t kept_pair(std::uint32_t first, std::uint32_t second, std::uint32_t limits) {
  return kept_of(__byte_perm(first, second, kHigh ? 0x7632 : 0x5410), limits);
}
CUTE_DEVICE std::uint32_t dropout_limits(int dropped) {
  return static_cast<std::uint32_t>(0x8000 - anew(dropped)) * 0x10001U;
}

// Makes the dropped weights of a forward's block 0: those of a lane's rows `query` and 8 after it, packed as the
// operand of the product with V. `quad_lane`: the lane's columns are 2 * quad_lane and the next, of each 8.
template <int kTileN, class Weights>
CUTE_DEVICE void drop_weights(Weights& weights, DropoutOfHead const& head, int dropped, int query, int first_key,
                              int quad_lane) {
  // As many keys at a time as have one call's words, where tiles begin with a whole call.
  constexpr int kKeys = kTileN % 32 == 0 ? 32 : 16;
  std::uint32_t const limits = dropout_limits(dropped);
  int const query_patch = query / 16 * 8 + query % 8;
  CUTE_UNROLL
  for (int begin = 0; begin < kTileN; begin += kKeys) {
    int const key = first_key + begin;
    int const key_patch = key / 32 * 8 + 2 * quad_lane;
    uint4 const first = head.words(key_patch, query_patch);
    uint4 const second = head.words(key_patch + 1, query_patch);
    auto const drop = [&](int block, std::uint32_t a, std::uint32_t b) __attribute__((always_inline)) {
      weights(2 * block) &= kept_pair<false>(a, b, limits);
      weights(2 * block + 1) &= kept_pair<true>(a, b, limits);
    };
    if constexpr (kKeys == 32) {
      drop(begin / 8, first.x, second.x);
      drop(begin / 8 + 1, first.y, second.y);
      drop(begin / 8 + 2, first.z, second.z);
      drop(begin / 8 + 3, first.w, second.w);
    } else {
      bool const later = key % 32 >= 16;
      drop(begin / 8, later ? first.z : first.x, later ? second.z : second.x);
      drop(begin / 8 + 1, later ? first.w : first.y, later ? second.w : second.y);
    }
  }
}

// The same of a backward's block of kTileM queries from `first_query` on, whose rows are keys: those of a lane are
// `key` and 8 after it. `kept(at, pair)` is called with the place of each pair among packed weights, and the bits of
// those that stay.
template <int kTileM, class Kept>
CUTE_DEVICE void see_kept(DropoutOfHead const& head, int dropped, int key, int first_query, int quad_lane,
                          Kept const& kept) {
  std::uint32_t const limits = dropout_limits(dropped);
  bool const later = key % 32 >= 16;  // the same for a whole warp
  int const key_patch = key / 32 * 8 + key % 8;
  CUTE_UNROLL
  for (int begin = 0; begin < kTileM; begin += 16) {
    int const query_patch = (first_query + begin) / 16 * 8 + 2 * quad_lane;
    uint4 const first = head.words(key_patch, query_patch);
    uint4 const second = head.words(key_patch, query_patch + 1);
    auto const see = [&](int at, std::uint32_t a, std::uint32_t b) __attribute__((always_inline)) {
      kept(at, kept_pair<false>(a, b, limits));
      kept(at + 2, kept_pair<true>(a, b, limits));  // queries 8 after the others are the next block of columns
    };
    see(begin / 4, later ? first.z : first.x, later ? second.z : second.x);
    see(begin / 4 + 1, later ? first.w : first.y, later ? second.w : second.y);
  }
}

// The same of two warps, whose keys are the first and the last 16 of 32. A call has words for both: each warp makes one
// of the two calls for a block of columns, and hands the other's words over in shared memory. `from` and `to`: where a
// lane finds what it gets, and where the other warp finds what it gives; kTileM / 16 * 256 bytes of each warp.
// `meet()`: a barrier of both warps.
template <int kTileM, class Meet, class Kept>
CUTE_DEVICE void see_kept_by_two(DropoutOfHead const& head, int dropped, int key, int first_query, int quad_lane,
                                 std::uint32_t from, std::uint32_t to, Meet const& meet, Kept const& kept) {
  bool const later = key % 32 >= 16;  // the same for a whole warp
  int const key_patch = key / 32 * 8 + key % 8;
  std::uint32_t own[kTileM / 8];
  CUTE_UNROLL
  for (int begin = 0; begin < kTileM; begin += 16) {
    int const query_patch = (first_query + begin) / 16 * 8 + 2 * quad_lane;
    uint4 const words = head.words(key_patch, query_patch + static_cast<int>(later));
    own[begin / 8] = later ? words.z : words.x;
    own[begin / 8 + 1] = later ? words.w : words.y;
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to + begin * 16), "r"(later ? words.x : words.z),
                 "r"(later ? words.y : words.w)
                 : "memory");
  }
  meet();
  std::uint32_t const limits = dropout_limits(dropped);
  // The first warp's words are those of the first neighbour.
  std::uint32_t const low = later ? 0x1054 : 0x5410;
  std::uint32_t const high = later ? 0x3276 : 0x7632;
  CUTE_UNROLL
  for (int begin = 0; begin < kTileM; begin += 16) {
    std::uint32_t got[2];
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(got[0]), "=r"(got[1]) : "r"(from + begin * 16) : "memory");
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      kept(begin / 4 + i, kept_of(__byte_perm(own[begin / 8 + i], got[i], low), limits));
      kept(begin / 4 + i + 2, kept_of(__byte_perm(own[begin / 8 + i], got[i], high), limits));
    }
  }
}

}  // namespace hattn
