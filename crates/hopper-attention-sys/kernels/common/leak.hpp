// What leaks from under a mask into O, and how it is put right.
//
// A masked key has the weight 0. But 0 times NaN or infinity is NaN. So what stands in V of a masked key reaches the O
// of a query that visits the key's block. (K of a masked key reaches nothing: its score is overwritten.)
//
// Every such leak is a NaN. So a forward looks for NaN in O (NanLook, one instruction for four values). A warp that
// finds one in a row whose sum of weights is not NaN computes these elements of O again, from the operands in memory
// and without the masked keys (Leaks). That is slow, and it is rare: it takes a masked key with NaN or infinity in a
// block that some other query needs. A NaN of a key that the query keeps belongs into O, and stays.
//
// What dropout drops is under a mask in this sense, too: its weight is 0, and its key is in the row's sum alone.
//
// In the same way a sum of bf16 weights and values is computed again that has overflowed although O does not (without a
// mask: overflow.hpp). There are two ways to find one:
//
// - Elements of O that are infinite or NaN (InfinityLook). This finds every one, but also what V makes so by right. So
//   first V is asked (Leaks::is_by_right). All bf16 kernels look so but those of sm90 under a mask.
// - A large sum of weights at the tile's end (is_large_sum). This misses a sum that overflowed before its row moved:
//   then the weights have been made small, and infinity stays. It also misses values of V above 3.2e32.
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <type_traits>

#include "common/alibi.hpp"
#include "common/bias.hpp"
#include "common/dropout.hpp"
#include "common/element.hpp"
#include "common/mask.hpp"
#include "common/scalars.hpp"
#include "common/sinks.hpp"
#include "common/softcap.hpp"
#include "common/softmax.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "common/visits.hpp"
#include "kernels.hpp"

namespace hattn {

// Looks for NaN among pairs of 16-bit elements. Conversion from f32 makes every NaN 0x7fff, the largest 16-bit integer.
struct NanLook {
  std::uint32_t largest = 0;

  CUTE_DEVICE void see(std::uint32_t a, std::uint32_t b) { largest = __vimax3_s16x2(largest, a, b); }
  CUTE_DEVICE void see(std::uint32_t a) { largest = __vmaxs2(largest, a); }
  CUTE_DEVICE void see(NanLook const& other) { largest = __vmaxs2(largest, other.largest); }
  CUTE_DEVICE bool found() const {
    std::uint32_t const swapped = __byte_perm(largest, 0, 0x1032);
    return __vmaxs2(largest, swapped) >> 16 == 0x7fff;
  }
};

// Looks for infinity and NaN among pairs of bf16: sums of products keep both (inf * 0 is NaN). One instruction for four
// values, as NanLook. Products of finite values may overflow, too. Then the call that it leads to finds nothing.
struct InfinityLook {
  std::uint32_t sums = 0;

  CUTE_DEVICE void see(std::uint32_t a, std::uint32_t b) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(a), "r"(b));
  }
  CUTE_DEVICE void see(std::uint32_t a) { see(a, a); }
  CUTE_DEVICE void see(InfinityLook const& other) { see(sums, other.sums); }
  CUTE_DEVICE bool found() const {
    float2 const both = unpack_pair<cutlass::bfloat16_t>(sums);
    return !(fabsf(both.x) < INFINITY) | !(fabsf(both.y) < INFINITY);
  }
};

// Whether a kernel looks for elements of O that are not finite. f16 has none that overflowed: its weights are below
// 2^15, and its values below 2^16.
template <class Traits>
inline constexpr bool kLooksForInfinity = Traits::kDType == DType::BF16 &&
                                          (Traits::kMask == MaskClass::Full || Traits::kArch == Arch::Sm80);

// Whether a kernel looks at its O.
template <class Traits>
inline constexpr bool kLooksAtOutput =
    Traits::kMask != MaskClass::Full || kLooksForInfinity<Traits> || Traits::kDrops || Traits::kAddsBias;

// Whether a row's sum of weights is 2^20 or more, from its inverse. Sums of bf16 weights reach it over many blocks, so
// that their products with a large V overflow although O does not. Below 2^20 they do not, unless V is above 3.2e32.
CUTE_DEVICE bool is_large_sum(float inverse) { return __float_as_uint(inverse) - 1U < 0x35800000U; }

// Looks at a thread's two rows of an accumulator.
template <class Look>
struct LooksAtRows {
  Look of[2];

  // Of rows of `Element`, after their elements: one that may have overflowed counts as one with a NaN. (Before them,
  // ptxas takes the uniform registers away from the kernel's loop.)
  template <class Element>
  CUTE_DEVICE void see_sums(float const (&inverse)[2]) {
    if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
      of[0].largest = is_large_sum(inverse[0]) ? 0x7fff7fffU : of[0].largest;
      of[1].largest = is_large_sum(inverse[1]) ? 0x7fff7fffU : of[1].largest;
    }
  }
  CUTE_DEVICE void see(int row, std::uint32_t a, std::uint32_t b) { of[row].see(a, b); }
  // Whether the warp has what is looked for.
  CUTE_DEVICE bool found() const {
    Look both = of[0];
    both.see(of[1]);
    return __any_sync(0xffffffffU, both.found());
  }
  // Whether a row of the warp has it though its sum of weights is not NaN.
  CUTE_DEVICE bool leaked(float const (&sums)[2]) const {
    bool const own = (of[0].found() && !isnan(sums[0])) || (of[1].found() && !isnan(sums[1]));
    return __any_sync(0xffffffffU, own);
  }
};
using RowLooks = LooksAtRows<NanLook>;

// What a kernel of 16-bit operands looks with.
template <class Traits>
using OutputLooks = LooksAtRows<std::conditional_t<kLooksForInfinity<Traits>, InfinityLook, NanLook>>;

// Neighbouring elements, read in one access.
template <class Element, int kCount>
struct alignas(kCount * sizeof(Element)) Neighbours {
  Element of[kCount];
};

// A head of a tensor.
template <class Element>
struct HeadRows {
  std::uint64_t address;
  std::int64_t row_bytes;

  CUTE_DEVICE static HeadRows of(TensorDesc const& tensor, int batch, int head) {
    constexpr int kBytes = sizeof(Element);
    return {tensor.address + kBytes * (batch * tensor.stride_batch + head * tensor.stride_head),
            kBytes * tensor.stride_row};
  }
  // Makes row `rows` the first.
  CUTE_DEVICE void skip(int rows) { address += rows * row_bytes; }
  CUTE_DEVICE std::uint64_t at(int row, int column) const {
    return address + row * row_bytes + column * static_cast<int>(sizeof(Element));
  }

  // Eight elements as f32, from a column that is a multiple of eight.
  CUTE_DEVICE void eight(int row, int column, float (&values)[8]) const {
    auto const elements = *reinterpret_cast<Neighbours<Element, 8> const*>(at(row, column));
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      values[i] = static_cast<float>(elements.of[i]);
    }
  }
  CUTE_DEVICE float one(int row, int column) const {
    return static_cast<float>(*reinterpret_cast<Element const*>(at(row, column)));
  }
  // Two, from an even column.
  CUTE_DEVICE float2 pair(int row, int column) const {
    auto const elements = *reinterpret_cast<Neighbours<Element, 2> const*>(at(row, column));
    return {static_cast<float>(elements.of[0]), static_cast<float>(elements.of[1])};
  }
};

// The sums of products of kRows rows of one head with a row of another, both of `columns` elements.
template <class Element, int kRows>
CUTE_DEVICE void dot_rows(HeadRows<Element> const& rows, int const (&row)[kRows], HeadRows<Element> const& others,
                          int other, int columns, float (&sums)[kRows]) {
  CUTE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    sums[r] = 0.0F;
  }
  CUTE_NO_UNROLL
  for (int column = 0; column < columns; column += 8) {
    float values[8];
    others.eight(other, column, values);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float own[8];
      rows.eight(row[r], column, own);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        sums[r] = fmaf(own[i], values[i], sums[r]);
      }
    }
  }
}

// A lane's pairs of columns of a row: 2 * lane and the one after, and every 64 columns on.
template <int kHeadDim>
struct LanePairs {
  static constexpr int kCount = (kHeadDim + 63) / 64;
  CUTE_DEVICE static int column(int lane, int pair) { return 2 * lane + 64 * pair; }
};

CUTE_DEVICE bool is_finite(float value) { return fabsf(value) < INFINITY; }
// Which of a pair are not: a bit each.
CUTE_DEVICE unsigned not_finite(float2 const& pair) {
  return (is_finite(pair.x) ? 0U : 1U) | (is_finite(pair.y) ? 0U : 2U);
}

// Whether a NaN is in a pair that is not in another one.
CUTE_DEVICE bool lacks_nan(float2 const& has, float2 const& other) {
  return (isnan(has.x) && !isnan(other.x)) || (isnan(has.y) && !isnan(other.y));
}

// What a head's O is computed of, where operands have 16 bits. (FP8: sm90/fp8/leak.hpp.)
template <class E, Modifiers kModifiers, bool kMayDrop = false, bool kMayHide = false>
struct PlainOperands {
  using Element = E;
  static constexpr bool kDrops = kMayDrop;  // whether there may be dropout
  static constexpr bool kHides = kMayHide;  // whether there may be a bias, which hides keys
  HeadRows<Element> q;
  HeadRows<Element> k;
  HeadRows<Element> v;
  int head_dim_qk;
  int head_dim_vo;
  float scale_log2;
  float inner;  // of a cap, or 0 (softcap.hpp)
  float sink_of_rows;
  float slope;   // of ALiBi (alibi.hpp), or 0
  int diagonal;  // of the sequence
  Dropout dropout;
  int head;         // of all batch entries
  BiasOfHead bias;  // of address 0: none

  CUTE_DEVICE static PlainOperands of(FwdParams const& params, int batch, int head) {
    int const kv_head = head / (params.heads_q / params.heads_kv);
    return {HeadRows<Element>::of(params.q, batch, head),
            HeadRows<Element>::of(params.k, batch, kv_head),
            HeadRows<Element>::of(params.v, batch, kv_head),
            params.head_dim_qk,
            params.head_dim_vo,
            kModifiers == Modifiers::Never ? exponent_factor(params.softmax_scale) : forward_factor(params),
            kModifiers == Modifiers::Never ? 0.0F : inner_of(params),
            sink_of_head(params, head),
            kModifiers == Modifiers::Never ? 0.0F : alibi_slope_or_zero(params, batch, head, forward_factor(params)),
            params.diagonal_offset,
            params.dropout,
            batch * params.heads_q + head,
            kHides && hattn::has_bias(params) ? BiasOfHead::of(params, batch, head) : BiasOfHead{0, 0, DType::F32}};
  }
  CUTE_DEVICE static PlainOperands of(FwdParams const& params, Tile const& tile) {
    return of(params, tile.batch, tile.head);
  }
  CUTE_DEVICE static PlainOperands of(FwdParams const& params, PackedTile const& tile) {
    PlainOperands operands = of(params, tile.batch, tile.head);
    operands.q.skip(tile.q_begin);
    operands.k.skip(tile.kv_begin);
    operands.v.skip(tile.kv_begin);
    operands.diagonal = diagonal_of_tile(params, tile);
    return operands;
  }
  // The score of a query and a key in powers of two, from their product.
  CUTE_DEVICE float score(float product, [[maybe_unused]] int query, [[maybe_unused]] int key) const {
    if constexpr (kModifiers == Modifiers::Never) {
      return product * scale_log2;
    } else {
      float const kept = inner == 0.0F ? product : capped(product, inner);
      float score = with_alibi(kept, slope, query + diagonal - key);
      if (has_bias()) {
        return with_bias(score, scale_log2, bias.one(query, key), -INFINITY);
      }
      return score * scale_log2;
    }
  }
  CUTE_DEVICE bool has_bias() const { return kHides && bias.address != 0; }
  // Whether a bias of -inf hides a key from a query.
  CUTE_DEVICE bool hides(int query, int key) const { return has_bias() && bias.one(query, key) == -INFINITY; }
  CUTE_DEVICE bool has_dropout() const { return kDrops && dropout.dropped != 0; }
  CUTE_DEVICE bool drops(int query, int key) const {
    return has_dropout() && DropoutOfHead::of(dropout, head).drops(query, key, dropout.dropped);
  }
  // What O is multiplied by.
  CUTE_DEVICE float output_factor() const { return has_dropout() ? dropout.factor : 1.0F; }
  // What V of a key is multiplied by.
  CUTE_DEVICE float value_factor(int) const { return 1.0F; }
  CUTE_DEVICE bool has_garbage_factor(int, int, int) const { return false; }
  // The sink of the head.
  template <class Words>
  CUTE_DEVICE float sink(Words const&) const {
    return sink_of_rows;
  }
};

// Which of a warp's 16 rows can have a leak: those whose sum of weights is a number. (If the sum is NaN, a key that the
// row keeps made it NaN, and the row is NaN by right.) Which have a sum of 0: they have no key, or none with a weight.
// And which may have overflowed: there, infinity is as wrong as NaN. A lane has rows lane / 4 and lane / 4 + 8, as in
// an accumulator.
struct SoundRows {
  unsigned of[2];
  unsigned empty[2];
  unsigned far[2] = {0, 0};

  // `sums`: or their inverses, 0 where they are 0. (Bits are compared: see RowEnd in sinks.hpp.)
  CUTE_DEVICE static SoundRows with(float const (&sums)[2]) {
    return {{__ballot_sync(0xffffffffU, !isnan(sums[0])), __ballot_sync(0xffffffffU, !isnan(sums[1]))},
            {__ballot_sync(0xffffffffU, __float_as_uint(sums[0]) == 0),
             __ballot_sync(0xffffffffU, __float_as_uint(sums[1]) == 0)}};
  }
  // Of a kernel's rows, which may have overflowed.
  template <class Traits>
  CUTE_DEVICE static SoundRows of_inverses(float const (&inverse)[2]) {
    SoundRows rows = with(inverse);
    if constexpr (kLooksForInfinity<Traits>) {
      rows.far[0] = rows.of[0];  // what the sum is at the end says nothing about what it was
      rows.far[1] = rows.of[1];
    } else if constexpr (Traits::kDType == DType::BF16) {
      rows.far[0] = __ballot_sync(0xffffffffU, is_large_sum(inverse[0]));
      rows.far[1] = __ballot_sync(0xffffffffU, is_large_sum(inverse[1]));
    }
    return rows;
  }
  CUTE_DEVICE bool any() const { return (of[0] | of[1]) != 0; }
  CUTE_DEVICE bool any_far() const { return (far[0] | far[1]) != 0; }
  CUTE_DEVICE bool has(int row) const { return is(of, row); }
  CUTE_DEVICE bool is_empty(int row) const { return is(empty, row); }
  CUTE_DEVICE bool is_far(int row) const { return is(far, row); }

 private:
  CUTE_DEVICE static bool is(unsigned const (&rows)[2], int row) {
    return ((row < 8 ? rows[0] : rows[1]) >> row % 8 * 4 & 1) != 0;
  }
};

template <class Traits>
using OperandsOf = PlainOperands<typename Traits::Element, Traits::kModifiers, Traits::kDrops, Traits::kAddsBias>;

template <class Traits, class Operands = OperandsOf<Traits>>
struct Leaks {
  using Pairs = LanePairs<Traits::kHeadDimVO>;
  static constexpr MaskClass kMask = Traits::kMask;
  // Rows of a pass over the keys. Three consumers are short of registers, and so is FP8's Window, whose rows have two
  // edges.
  static constexpr int kRows =
      Traits::kThreads > 384 || (Traits::kDType == DType::E4M3 && kMask == MaskClass::Window) || Traits::kAddsBias ? 2
                                                                                                                   : 4;
  static constexpr unsigned kAll = 0xffffffffU;

  // Whether V is no number in a row of keys [begin, end). The whole warp looks.
  CUTE_DEVICE static bool has_garbage(Operands const& operands, int begin, int end, int lane) {
    constexpr int kLanes = Traits::kHeadDimVO / 8;  // that read a key
    bool found = false;
    int const column = lane % kLanes * 8;
    for (int key = begin + lane / kLanes; key < end; key += 32 / kLanes) {
      if (column < operands.head_dim_vo) {
        float values[8];
        operands.v.eight(key, column, values);
        CUTE_UNROLL
        for (int i = 0; i < 8; ++i) {
          found = found || !(fabsf(values[i]) < INFINITY);
        }
      }
    }
    return __any_sync(kAll, found);
  }

  // Whether all that is not finite in a warp's rows is so by right: V is not finite there in a key that all rows keep.
  // So one NaN in V does not send every row of its head through `repair`. A row without a weight has no key.
  template <class Words>
  CUTE_DEVICE static bool is_by_right(Operands const& operands, Band const& band, int first_row, SoundRows const& sound,
                                      Words const& words, int lane) {
    if ((Operands::kDrops && operands.has_dropout()) || (Operands::kHides && operands.has_bias())) {
      return false;  // rows do not keep the same keys
    }
    unsigned open = 0;  // which of this lane's columns
    bool wrong = false;
    CUTE_NO_UNROLL
    for (int row = 0; row < 16; ++row) {
      if (!sound.has(row) || first_row + row >= band.seqlen_q) {
        continue;
      }
      unsigned found = 0;
      CUTE_UNROLL
      for (int pair = 0; pair < Pairs::kCount; ++pair) {
        found |= not_finite(words.load(row, pair)) << 2 * pair;
      }
      open |= found;
      wrong = wrong || (found != 0 && sound.is_empty(row));
    }
    if (__any_sync(kAll, wrong)) {
      return false;
    }
    int const last_row = cute::min(first_row + 15, band.seqlen_q - 1);
    int const begin = band.first_key<kMask>(last_row);
    int const end =
        kMask == MaskClass::Full ? band.seqlen_kv : cute::min(band.seqlen_kv, band.last_key<kMask>(first_row) + 1);
    // One column of V alone is read, until it has what is looked for. That key is often the reason in other columns,
    // too.
    for (unsigned lanes = __ballot_sync(kAll, open != 0); lanes != 0; lanes = __ballot_sync(kAll, open != 0)) {
      int const from = __ffs(lanes) - 1;
      int const bit = __ffs(__shfl_sync(kAll, open, from)) - 1;
      int const column = Pairs::column(from, bit / 2) + bit % 2;
      int reason = end;
      CUTE_NO_UNROLL
      for (int key = begin + lane; key - lane < end && reason >= end; key += 128) {
        int own = end;
        CUTE_UNROLL
        for (int i = 3; i >= 0; --i) {
          int const at = key + 32 * i;
          own = at < end && !is_finite(operands.v.one(at, column)) ? at : own;
        }
        reason = __reduce_min_sync(kAll, own);
      }
      if (reason >= end) {
        return false;
      }
      CUTE_UNROLL
      for (int pair = 0; pair < Pairs::kCount; ++pair) {
        int const own = Pairs::column(lane, pair);
        if (own < operands.head_dim_vo) {
          open &= ~(not_finite(operands.v.pair(reason, own)) << 2 * pair);
        }
      }
    }
    return true;
  }

  // Puts right what has leaked into a warp's 16 rows of O, from `first_row` on. `words` has a lane's pairs of a row
  // (LanePairs): `load` reads what the warp has written, `store` replaces an element.
  template <class Words>
  CUTE_DEVICE static void repair(Operands const& operands, Band const& band, int first_row, SoundRows const& sound,
                                 Words const& words) {
    if (!sound.any() || first_row >= band.seqlen_q) {
      return;
    }
    int const lane = thread_index_anew() % 32;
    if constexpr (kLooksForInfinity<Traits>) {
      if (is_by_right(operands, band, first_row, sound, words, lane)) {
        return;
      }
    } else if (sound.any_far()) {
      // Few of such rows have overflowed.
      bool wrong = false;
      CUTE_NO_UNROLL
      for (int row = 0; row < 16; ++row) {
        if (!sound.has(row) || first_row + row >= band.seqlen_q) {
          continue;
        }
        CUTE_UNROLL
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
          wrong = wrong || not_finite(words.load(row, pair)) != 0;
        }
      }
      if (!__any_sync(kAll, wrong)) {
        return;
      }
    }
    int const last_row = first_row + 15;
    // Masked keys of blocks that are visited. (Rows may visit a block that only other rows of the tile need.)
    KeyVisits const visits = KeyVisits::of<kMask, Traits::kTileM, Traits::kTileN>(band, first_row / Traits::kTileM);
    int const visited_end = cute::min(band.seqlen_kv, visits.end * Traits::kTileN);
    bool garbage = has_garbage(operands, cute::max(0, band.last_key<kMask>(first_row) + 1), visited_end, lane);
    garbage = garbage || operands.has_garbage_factor(cute::min(first_row, band.seqlen_q - 1), band.seqlen_kv, lane);
    if constexpr (Operands::kDrops) {
      garbage = garbage || operands.has_dropout();
    }
    if constexpr (Operands::kHides) {
      garbage = garbage || operands.has_bias();
    }
    if constexpr (kMask == MaskClass::Window) {
      garbage = garbage || has_garbage(operands, cute::max(visits.begin, 0) * Traits::kTileN,
                                       cute::min(visited_end, band.first_key<kMask>(last_row)), lane);
    }

    CUTE_NO_UNROLL
    for (int strip_row = 0; strip_row < 16; strip_row += kRows) {
      int row[kRows];
      int first_key[kRows];
      int keys_end[kRows];
      float2 before[kRows][Pairs::kCount];
      bool leaked = false;
      int begin = band.seqlen_kv;
      int end = 0;
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        row[r] = first_row + strip_row + r;
        // (A window may begin behind the last key.)
        first_key[r] = cute::min(band.first_key<kMask>(row[r]), band.seqlen_kv);
        keys_end[r] = cute::min(band.seqlen_kv, band.last_key<kMask>(row[r]) + 1);
        keys_end[r] = sound.is_empty(strip_row + r) ? first_key[r] : keys_end[r];
        bool const exists = row[r] < band.seqlen_q && sound.has(strip_row + r);
        bool const has_keys = first_key[r] < keys_end[r];
        row[r] = cute::min(row[r], band.seqlen_q - 1);
        CUTE_UNROLL
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
          // Without garbage under the mask, a NaN is of a key that the row keeps. A row without keys keeps none.
          bool const far = sound.is_far(strip_row + r);
          bool const looks = exists && (garbage || !has_keys || far);
          before[r][pair] = looks ? words.load(strip_row + r, pair) : float2{0.0F, 0.0F};
          if (far) {
            // Infinity counts as NaN.
            before[r][pair].x = fabsf(before[r][pair].x) < INFINITY ? before[r][pair].x : NAN;
            before[r][pair].y = fabsf(before[r][pair].y) < INFINITY ? before[r][pair].y : NAN;
          }
          leaked = leaked || isnan(before[r][pair].x) || isnan(before[r][pair].y);
        }
        begin = cute::min(begin, first_key[r]);
        end = cute::max(end, keys_end[r]);
      }
      if (!__any_sync(kAll, leaked)) {
        continue;
      }
      float max[kRows];
      float sum[kRows];  // this lane's
      float2 output[kRows][Pairs::kCount];
      // The sink is a key without a value.
      float const sink_log2 = operands.sink(words) * kLog2E;
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        max[r] = sink_log2;
        sum[r] = lane == 0 && sink_log2 != -INFINITY ? 1.0F : 0.0F;
        CUTE_UNROLL
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
          output[r][pair] = {0.0F, 0.0F};
        }
      }
      // From the last key on, until every NaN is known to be of a key that its row keeps.
      bool wrong = true;
      CUTE_NO_UNROLL
      for (int chunk = end; chunk > begin && wrong; chunk -= 32) {
        int const key = chunk - 32 + lane;
        float weights[kRows];
        dot_rows(operands.q, row, operands.k, cute::max(key, 0), operands.head_dim_qk, weights);
        unsigned kept[kRows];
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          bool keeps = key >= first_key[r] && key < keys_end[r];
          if constexpr (Operands::kHides) {
            keeps = keeps && !operands.hides(row[r], key);
          }
          if constexpr (Operands::kDrops) {
            kept[r] = __ballot_sync(kAll, keeps && !operands.drops(row[r], key));
          } else {
            kept[r] = __ballot_sync(kAll, keeps);
          }
          float const score = keeps ? operands.score(weights[r], row[r], key) : -INFINITY;
          float most = fmaxf(max[r], score);
          CUTE_UNROLL
          for (int step = 1; step < 32; step *= 2) {
            most = fmaxf(most, __shfl_xor_sync(kAll, most, step));
          }
          // (Scores may all be -inf so far.)
          float const factor = max[r] == most ? 1.0F : exp2_approx(max[r] - most);
          weights[r] = keeps ? exp2_approx(score - (most == -INFINITY ? 0.0F : most)) : 0.0F;
          sum[r] = sum[r] * factor + weights[r];
          max[r] = most;
          CUTE_UNROLL
          for (int pair = 0; pair < Pairs::kCount; ++pair) {
            output[r][pair].x *= factor;
            output[r][pair].y *= factor;
          }
        }
        CUTE_NO_UNROLL
        for (int i = 0; i < 32; ++i) {
          float2 values[Pairs::kCount];
          CUTE_UNROLL
          for (int pair = 0; pair < Pairs::kCount; ++pair) {
            int const column = Pairs::column(lane, pair);
            values[pair] = {0.0F, 0.0F};
            if (chunk - 32 + i >= begin && column < operands.head_dim_vo) {
              float const factor = operands.value_factor(chunk - 32 + i);
              values[pair] = operands.v.pair(chunk - 32 + i, column);
              values[pair].x *= factor;
              values[pair].y *= factor;
            }
          }
          CUTE_UNROLL
          for (int r = 0; r < kRows; ++r) {
            float const weight = __shfl_sync(kAll, weights[r], i);
            if ((kept[r] >> i & 1) != 0) {
              CUTE_UNROLL
              for (int pair = 0; pair < Pairs::kCount; ++pair) {
                output[r][pair].x = fmaf(weight, values[pair].x, output[r][pair].x);
                output[r][pair].y = fmaf(weight, values[pair].y, output[r][pair].y);
              }
            }
          }
        }
        wrong = false;
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          CUTE_UNROLL
          for (int pair = 0; pair < Pairs::kCount; ++pair) {
            wrong = wrong || lacks_nan(before[r][pair], output[r][pair]);
          }
        }
        wrong = __any_sync(kAll, wrong);
      }
      if (!wrong) {
        continue;
      }
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CUTE_UNROLL
        for (int step = 1; step < 32; step *= 2) {
          sum[r] += __shfl_xor_sync(kAll, sum[r], step);
        }
        float inverse = sum[r] == 0.0F ? 0.0F : 1.0F / sum[r];
        if constexpr (Operands::kDrops) {
          inverse *= operands.output_factor();
        }
        CUTE_UNROLL
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
          if (isnan(before[r][pair].x) && !isnan(output[r][pair].x)) {
            words.store(strip_row + r, pair, 0, output[r][pair].x * inverse);
          }
          if (isnan(before[r][pair].y) && !isnan(output[r][pair].y)) {
            words.store(strip_row + r, pair, 1, output[r][pair].y * inverse);
          }
        }
      }
    }
  }
};

// Rows of O in global memory, as Leaks::repair takes them. `owned(column)`: whether the warp has written the columns.
template <class Element, int kHeadDim, class Owned>
struct GlobalWords {
  HeadRows<Element> rows;
  int first_row;
  int columns;
  Owned owned;

  CUTE_DEVICE static int column(int pair) { return LanePairs<kHeadDim>::column(thread_index_anew() % 32, pair); }
  CUTE_DEVICE bool has(int pair) const { return column(pair) < columns && owned(column(pair)); }
  CUTE_DEVICE float2 load(int row, int pair) const {
    return has(pair) ? rows.pair(first_row + row, column(pair)) : float2{0.0F, 0.0F};
  }
  CUTE_DEVICE void store(int row, int pair, int which, float value) const {
    *reinterpret_cast<Element*>(rows.at(first_row + row, column(pair) + which)) = Element{value};
  }
};

}  // namespace hattn
