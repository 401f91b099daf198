// What leaks from under a mask into the gradients, and how it is put right (as common/leak.hpp does for O).
//
//     dQ_i = scale sum_j dS_ij K_j    dK_j = scale sum_i dS_ij Q_i    dV_j = sum_i P_ij dO_i    dS = P o (dP - delta)
//
// (Where scores are capped, dS has the factor 1 - t^2: softcap.hpp.)
//
// P of a masked pair is 0. But 0 times NaN or infinity is NaN, so K_j, Q_i, dO_i, and dP_ij leak where they are NaN or
// infinite. Such leaks are NaN, in dQ or in dK; what spoils a dV spoils the dK of its key, too.
//
// - The backward kernel looks at the dK that it writes, and sets a flag where one is not finite (FiniteLook). With
//   dropout it looks at dV, too: dP of a dropped pair counts as 0, whatever dO is.
// - The kernel after it looks at dQ, and at all dK and dV if the flag is set. It decides for each such row
//   (RepairGradients):
//   - A query whose LSE or delta is NaN makes NaN of the dK of every key that it keeps, and of its own dQ.
//   - Any other NaN is computed again, from the operands in memory, without the masked pairs. That is slow, and rare.
//
// sm90: delta is an operand of a product whose other operand has zeros, and 0 times NaN would spoil S, and so dV. So a
// delta of NaN is stored as infinity, with a mark (Statistics in sm90/bwd/traits.hpp).
//
// A query whose LSE is -inf has no part in any gradient, even if the mask keeps keys of it.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

#include "common/alibi.hpp"
#include "common/bias.hpp"
#include "common/blocks.hpp"
#include "common/dropout.hpp"
#include "common/leak.hpp"
#include "common/mask.hpp"
#include "common/scalars.hpp"
#include "common/sequences.hpp"
#include "common/softcap.hpp"
#include "common/thread.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"

namespace hattn {

// Looks for NaN and infinity among pairs of 16-bit elements.
template <class Element>
struct FiniteLook {
  std::uint32_t zeros = 0;  // 0, or NaN

  CUTE_DEVICE std::uint32_t see(std::uint32_t pair) {
    if constexpr (cute::is_same_v<Element, cutlass::bfloat16_t>) {
      asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(zeros) : "r"(pair), "r"(0));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(zeros) : "r"(pair), "r"(0));
    }
    return pair;
  }
  CUTE_DEVICE bool found() const { return (zeros & 0x7fff7fffU) != 0; }
};

// Tells the kernel after the backward kernel that a dK is not finite.
CUTE_DEVICE void flag_leak(BwdParams const& params) { *reinterpret_cast<int*>(params.leak_flag) = 1; }

// Columns [begin, end) of a gradient.
struct ColumnRange {
  int begin;
  int end;
};

template <class Traits>
struct RepairGradients {
  using Element = typename Traits::Element;
  using Statistics = typename Traits::Statistics;
  static constexpr unsigned kAll = 0xffffffffU;
  static constexpr int kPairs = LanePairs<Traits::kHeadDimQK>::kCount;
  // Whether there may be a bias, which hides pairs.
  static constexpr bool kHides = Traits::kMayTakeBias;
  static_assert(Traits::kHeadDimVO == Traits::kHeadDimQK, "a lane has as many columns of dV as of dK");
  using Sums = float2[kPairs];
  struct Weights {
    float p;
    float d_s;
    bool counts;
    bool stays;  // dropout has not made it 0
  };

  BwdParams const& params;
  int batch;
  int lane;
  Sequence sequence;  // packed only

  CUTE_DEVICE RepairGradients(BwdParams const& of, int of_batch)
      : params(of), batch(of_batch), lane(static_cast<int>(threadIdx.x) % 32) {}
  CUTE_DEVICE RepairGradients(BwdParams const& of, Sequence const& of_sequence)
      : params(of), batch(of_sequence.index), lane(static_cast<int>(threadIdx.x) % 32), sequence(of_sequence) {}

  // A head of an operand with the rows of queries, and of keys.
  CUTE_DEVICE HeadRows<Element> query_rows(TensorDesc const& tensor, int head) const {
    auto rows = HeadRows<Element>::of(tensor, batch, head);
    if constexpr (Traits::kIsPacked) {
      rows.skip(sequence.q_begin);
    }
    return rows;
  }
  CUTE_DEVICE HeadRows<Element> key_rows(TensorDesc const& tensor, int head) const {
    auto rows = HeadRows<Element>::of(tensor, batch, head);
    if constexpr (Traits::kIsPacked) {
      rows.skip(sequence.kv_begin);
    }
    return rows;
  }
  CUTE_DEVICE int seqlen_q() const {
    if constexpr (Traits::kIsPacked) {
      return sequence.q_len;
    } else {
      return params.seqlen_q;
    }
  }
  CUTE_DEVICE int seqlen_kv() const {
    if constexpr (Traits::kIsPacked) {
      return sequence.kv_len;
    } else {
      return params.seqlen_kv;
    }
  }
  CUTE_DEVICE Band band() const {
    if constexpr (Traits::kIsPacked) {
      return band_of_tile(params, sequence);
    } else {
      return band_of_launch(params);
    }
  }
  CUTE_DEVICE Statistics const& statistics(int head, int query) const {
    if constexpr (Traits::kIsPacked) {
      std::int64_t const at = head * statistics_rows(params) + sequence.q_begin +
                              static_cast<std::int64_t>(batch) * statistics_rows_apart(params) + query;
      return reinterpret_cast<Statistics const*>(params.statistics)[at];
    }
    std::int64_t const padded = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM * std::int64_t{Traits::kTileM};
    return reinterpret_cast<Statistics const*>(
        params.statistics)[(static_cast<std::int64_t>(batch) * params.heads_q + head) * padded + query];
  }
  // (bwd_convert is of all masks. What class Window reads says what the others keep, too.)
  static constexpr MaskClass kAnyMask = MaskClass::Window;
  CUTE_DEVICE int first_key(int query) const { return band().template first_key<kAnyMask>(query); }
  CUTE_DEVICE int keys_end(int query) const {
    return cute::min(seqlen_kv(), band().template last_key<kAnyMask>(query) + 1);
  }
  CUTE_DEVICE int first_query(int key) const { return band().template first_query<kAnyMask>(key); }
  // Whether the lists, or the bias, keep a pair that the band keeps.
  CUTE_DEVICE bool lists(int head, int query, int key) const {
    if constexpr (Traits::kMask == MaskClass::Blocks) {
      if (!is_listed(params.blocks, batch, head, query, key)) {
        return false;
      }
    }
    if constexpr (kHides) {
      return !has_bias(params) || BiasOfHead::of(params, batch, head).one(query, key) != -INFINITY;
    } else {
      return true;
    }
  }
  // Whether they keep any key of a query, from `begin` on. The whole warp looks.
  CUTE_DEVICE bool list_any(int head, int query, int begin, int end) const {
    if (Traits::kMask == MaskClass::Blocks || (kHides && has_bias(params))) {
      bool found = false;
      CUTE_NO_UNROLL
      for (int key = begin + lane; key - lane < end && !found; key += 32) {
        found = __any_sync(kAll, key < end && lists(head, query, key));
      }
      return found;
    }
    return begin < end;
  }
  CUTE_DEVICE int queries_end(int key) const { return cute::min(seqlen_q(), band().last_query(key) + 1); }

  // A lane's elements of a row. Columns that are not in the range are 0.
  CUTE_DEVICE void read(HeadRows<Element> const& rows, int row, ColumnRange const& range, Sums& values) const {
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      int const column = LanePairs<Traits::kHeadDimQK>::column(lane, pair);
      bool const has = column >= range.begin && column < range.end;
      values[pair] = has ? rows.pair(row, column) : float2{0.0F, 0.0F};
    }
  }
  // Replaces a lane's elements that were NaN.
  CUTE_DEVICE void replace(HeadRows<Element> const& rows, int row, ColumnRange const& range, Sums const& old,
                           Sums const& anew, float scale) const {
    auto const store = [&](int column, float before, float value) __attribute__((always_inline)) {
      if (column >= range.begin && column < range.end && isnan(before)) {
        *reinterpret_cast<Element*>(rows.at(row, column)) = Element{scaled(value, scale)};
      }
    };
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      int const column = LanePairs<Traits::kHeadDimQK>::column(lane, pair);
      store(column, old[pair].x, anew[pair].x);
      store(column + 1, old[pair].y, anew[pair].y);
    }
  }
  // Makes NaN of all columns of the range. Then nothing is left to be done with the lane's `values` of them.
  CUTE_DEVICE void make_nan(HeadRows<Element> const& rows, int row, ColumnRange const& range, Sums& values) const {
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      values[pair] = {NAN, NAN};
    }
    replace(rows, row, range, values, values, 1.0F);
    clear(values);
  }
  CUTE_DEVICE static void clear(Sums& values) {
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      values[pair] = {0.0F, 0.0F};
    }
  }
  template <class Holds>
  CUTE_DEVICE static bool any(Sums const& values, Holds const& holds) {
    bool found = false;
    CUTE_UNROLL
    for (int pair = 0; pair < kPairs; ++pair) {
      found = found || holds(values[pair].x) || holds(values[pair].y);
    }
    return __any_sync(kAll, found);
  }
  CUTE_DEVICE static bool any_nan(Sums const& values) {
    return any(values, [](float x) { return isnan(x); });
  }
  CUTE_DEVICE static bool any_infinite(Sums const& values) {
    return any(values, [](float x) { return !(fabsf(x) < INFINITY); });
  }

  // Row `own` of a and b (a query's Q and dO, or a key's K and V) against rows [begin, end) of the others:
  //     d_a += sum dS other_a    d_b += sum P other_b
  // `weights_of_pair(other, s, d_p)` is P and dS of a pair, from its score and dP, and whether the pair counts.
  template <bool kBoth, class WeightsOfPair>
  CUTE_DEVICE void add_pairs(HeadRows<Element> const& a, HeadRows<Element> const& b, int own,
                             HeadRows<Element> const& other_a, HeadRows<Element> const& other_b, int begin, int end,
                             WeightsOfPair const& weights_of_pair, Sums& d_a, Sums& d_b) const {
    CUTE_NO_UNROLL
    for (int chunk = begin; chunk < end; chunk += 32) {
      int const other = cute::min(chunk + lane, end - 1);
      int const row[1] = {own};
      float s[1];
      float d_p[1];
      dot_rows(a, row, other_a, other, params.head_dim_qk, s);
      dot_rows(b, row, other_b, other, params.head_dim_vo, d_p);
      Weights const lane_weights = weights_of_pair(other, s[0], d_p[0]);
      unsigned const counted = __ballot_sync(kAll, lane_weights.counts);
      unsigned const staying = __ballot_sync(kAll, lane_weights.stays);
      CUTE_NO_UNROLL
      for (int i = 0; i < cute::min(32, end - chunk); ++i) {
        float const p = __shfl_sync(kAll, lane_weights.p, i);
        float const d_s = __shfl_sync(kAll, lane_weights.d_s, i);
        if ((counted >> i & 1) == 0) {
          continue;
        }
        auto const add = [&](Sums & sums, float weight, HeadRows<Element> const& rows, int columns)
            __attribute__((always_inline)) {
          Sums values;
          read(rows, chunk + i, {0, columns}, values);
          CUTE_UNROLL
          for (int pair = 0; pair < kPairs; ++pair) {
            sums[pair].x = fmaf(weight, values[pair].x, sums[pair].x);
            sums[pair].y = fmaf(weight, values[pair].y, sums[pair].y);
          }
        };
        add(d_a, d_s, other_a, params.head_dim_qk);
        if (kBoth && (staying >> i & 1) != 0) {
          add(d_b, p, other_b, params.head_dim_vo);
        }
      }
    }
  }
  CUTE_DEVICE int diagonal() const {
    if constexpr (Traits::kIsPacked) {
      return diagonal_of_tile(params, sequence);
    } else {
      return params.diagonal_offset;
    }
  }
  // (A call saves registers in one kernel, and costs some in the other.)
  __device__ __noinline__ static bool call_drops(Dropout dropout, int head, int query, int key) {
    return DropoutOfHead::of(dropout, head).drops(query, key, dropout.dropped);
  }
  CUTE_DEVICE bool drops(int head, int query, int key) const {
    if (!has_dropout(params)) {
      return false;
    }
    int const of_all = batch * params.heads_q + head;
    if constexpr (Traits::kIsPacked) {
      return call_drops(params.dropout, of_all, query, key);
    } else {
      return DropoutOfHead::of(params.dropout, of_all).drops(query, key, params.dropout.dropped);
    }
  }
  // A score with ALiBi's bias, but for what the statistics have of it. (What follows from query and head is worked out
  // anew for each pair: registers are short.)
  CUTE_DEVICE float biased(float s, int head, int query, int key) const {
    int const of_head = anew(head);
    int const distance = abs(anew(query) + diagonal() - key) -
                         Traits::start_distance(params, batch, of_head, anew(query), diagonal(), seqlen_kv());
    return fmaf(static_cast<float>(distance), -alibi_slope(params.alibi, batch, of_head, backward_factor(params)), s);
  }
  CUTE_DEVICE Weights weights_of(Statistics const& of_query, int head, int query, int key, float s, float d_p) const {
    float slope = 1.0F;
    float factor = backward_factor(params);
    if (params.softcap != 0.0F) {
      CappedScore const score = CappedScore::of(s * (inner_of(params) * kTwoLog2E));
      s = score.t;
      slope = score.slope;
    }
    if (has_alibi(params)) {
      s = biased(s, head, query, key);
    }
    if constexpr (kHides) {
      if (has_bias(params)) {
        float const bias = BiasOfHead::of(params, batch, head).one(query, key);
        s = with_bias(s, factor, bias, -INFINITY);
        factor = 1.0F;
      }
    }
    float const p = of_query.weight(s, factor, Traits::modifies_scores(params));
    bool const dropped = drops(head, query, key);
    return {p, p * dropout_factor(params) * ((dropped ? 0.0F : d_p) + of_query.negative_delta()) * slope,
            lists(head, query, key) && !of_query.is_empty(), !dropped};
  }

  // dQ of a query. The whole warp works on it, here and below.
  CUTE_DEVICE void query(int head, int query) const {
    HeadRows<Element> const d_q = query_rows(params.d_q, head);
    ColumnRange const range{0, params.head_dim_qk};
    Sums old;
    read(d_q, query, range, old);
    if (!any_infinite(old)) {
      return;
    }
    Statistics const of_query = statistics(head, query);
    int const begin = first_key(query);
    int end = keys_end(query);
    if (of_query.has_nan() && list_any(head, query, begin, end)) {
      make_nan(d_q, query, range, old);
      return;
    }
    if (!any_nan(old)) {
      return;
    }
    end = of_query.is_empty() ? begin : end;
    int const kv_head = head / (params.heads_q / params.heads_kv);
    Sums sums;
    Sums unused;
    clear(sums);
    add_pairs<false>(
        query_rows(params.q, head), query_rows(params.d_o, head), query, key_rows(params.k, kv_head),
        key_rows(params.v, kv_head), begin, end,
        [&](int key, float s, float d_p) { return weights_of(of_query, head, query, key, s, d_p); }, sums, unused);
    replace(query_rows(params.d_q, anew(head)), query, range, old, sums, params.softmax_scale);
  }

  // Columns of the dK and the dV of a key.
  CUTE_DEVICE void key(int kv_head, int key, ColumnRange const& of_k, ColumnRange const& of_v) const {
    HeadRows<Element> const d_k = key_rows(params.d_k, kv_head);
    HeadRows<Element> const d_v = key_rows(params.d_v, kv_head);
    Sums old_k;
    Sums old_v;
    read(d_k, key, of_k, old_k);
    read(d_v, key, of_v, old_v);
    if (!any_infinite(old_k) && !any_infinite(old_v)) {
      return;
    }
    int const begin = first_query(key);
    int const end = queries_end(key);
    int const group = params.heads_q / params.heads_kv;
    // Queries that make NaN by right.
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      HeadRows<Element> const d_o = query_rows(params.d_o, head);
      for (int chunk = begin; chunk < end; chunk += 32) {
        int const query = cute::min(chunk + lane, end - 1);
        Statistics const of_query = statistics(head, query);
        unsigned of_nan = __ballot_sync(kAll, of_query.has_nan() && chunk + lane < end && lists(head, query, key));
        if (of_nan == 0) {
          continue;
        }
        if (any_infinite(old_k)) {
          make_nan(d_k, key, of_k, old_k);
        }
        // A dropped pair has no part in dV.
        bool const stays = (of_nan >> lane & 1) != 0 && !drops(head, query, key);
        of_nan = __ballot_sync(kAll, stays);
        if (any_nan(old_v) && __any_sync(kAll, stays && of_query.has_nan_lse())) {
          make_nan(d_v, key, of_v, old_v);
        }
        // NaN in dO of these queries.
        while (of_nan != 0 && any_nan(old_v)) {
          Sums values;
          read(d_o, chunk + __ffs(static_cast<int>(of_nan)) - 1, of_v, values);
          CUTE_UNROLL
          for (int pair = 0; pair < kPairs; ++pair) {
            old_v[pair].x = isnan(values[pair].x) ? 0.0F : old_v[pair].x;
            old_v[pair].y = isnan(values[pair].y) ? 0.0F : old_v[pair].y;
          }
          of_nan &= of_nan - 1;
        }
        if (!any_nan(old_k) && !any_nan(old_v)) {
          return;
        }
      }
    }
    if (!any_nan(old_k) && !any_nan(old_v)) {
      return;
    }
    Sums sums_k;
    Sums sums_v;
    clear(sums_k);
    clear(sums_v);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      add_pairs<true>(
          key_rows(params.k, kv_head), key_rows(params.v, kv_head), key, query_rows(params.q, head),
          query_rows(params.d_o, head), begin, end,
          [&](int query, float s, float d_p) { return weights_of(statistics(head, query), head, query, key, s, d_p); },
          sums_k, sums_v);
    }
    replace(key_rows(params.d_k, anew(kv_head)), key, of_k, old_k, sums_k, params.softmax_scale);
    replace(key_rows(params.d_v, anew(kv_head)), key, of_v, old_v, sums_v, dropout_factor(params));
  }
};

}  // namespace hattn
