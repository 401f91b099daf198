// What leaks into O from what lists of blocks hide, and sums that have overflowed (leak.hpp), under a mask of class
// Blocks. One row at a time, so that it takes few registers. It is slow, and it is rare.
#pragma once

#include "common/blocks.hpp"
#include "common/leak.hpp"
#include "common/softmax.hpp"

namespace hattn {

template <class Traits, class Operands = OperandsOf<Traits>>
struct BlockLeaks {
  using Pairs = LanePairs<Traits::kHeadDimVO>;
  static constexpr unsigned kAll = 0xffffffffU;

  // A warp's row, and its list.
  struct Row {
    Operands const& operands;
    Band const& band;
    std::uint32_t const* entries;
    int count;
    std::uint64_t bits;  // of the row
    int query;
    int lane;

    // Calls `use(first, kept)` for each 32 keys from `first` on of which the row keeps some, those of the word `kept`.
    template <class Use>
    CUTE_DEVICE void each(Use const& use) const {
      CUTE_NO_UNROLL
      for (int i = 0; i < count; ++i) {
        BlockEntry const entry{entries[i]};
        KeptBits<4> const kept = kept_keys(entry, bits, band, query);
        CUTE_UNROLL
        for (int word = 0; word < 4; ++word) {
          int const first = entry.block() * kListedBlock + 32 * word;
          unsigned const shown = showing(first, kept.of[word]);
          if (shown != 0) {
            use(first, shown);
          }
        }
      }
    }
    // Those of the keys `kept` that a bias does not hide. The whole warp works on it.
    CUTE_DEVICE unsigned showing(int first, unsigned kept) const {
      if constexpr (Operands::kHides) {
        return __ballot_sync(kAll, (kept >> lane & 1) != 0 && !operands.hides(query, first + lane));
      }
      return kept;
    }
    // This lane's score, -inf where its key is not kept.
    CUTE_DEVICE float score(int first, unsigned kept) const {
      if ((kept >> lane & 1) == 0) {
        return -INFINITY;
      }
      int const rows[1] = {query};
      float sum[1];
      dot_rows(operands.q, rows, operands.k, first + lane, operands.head_dim_qk, sum);
      return operands.score(sum[0], query, first + lane);
    }
    // Those of the keys `kept` whose weights dropout leaves. The whole warp works on it.
    CUTE_DEVICE unsigned staying(int first, unsigned kept) const {
      if constexpr (Operands::kDrops) {
        return __ballot_sync(kAll, (kept >> lane & 1) != 0 && !operands.drops(query, first + lane));
      }
      return kept;
    }
    CUTE_DEVICE float2 values(int key, int pair) const {
      int const column = Pairs::column(lane, pair);
      if (column >= operands.head_dim_vo) {
        return {0.0F, 0.0F};
      }
      float2 const values = operands.v.pair(key, column);
      float const factor = operands.value_factor(key);
      return {values.x * factor, values.y * factor};
    }
  };

  // Puts right a warp's 16 rows of O, from `first_row` on. (`words`: as Leaks::repair takes them.)
  template <class Words>
  CUTE_DEVICE static void repair(BlockLists const& lists, Tile const& tile, Operands const& operands, Band const& band,
                                 int first_row, SoundRows const& sound, Words const& words) {
    if (!sound.any() || first_row >= band.seqlen_q) {
      return;
    }
    int const q_block = first_row / kListedBlock;
    int const row_of_list = row_of_lists(lists, tile.batch, tile.head, q_block);
    std::uint64_t const bits = given_bits(lists, tile.batch, tile.head, q_block);
    CUTE_NO_UNROLL
    for (int i = 0; i < 16; ++i) {
      int const query = first_row + i;
      if (query >= band.seqlen_q || !sound.has(i)) {
        continue;
      }
      unsigned wrong = 0;  // which of this lane's columns
      CUTE_UNROLL
      for (int pair = 0; pair < Pairs::kCount; ++pair) {
        float2 const value = words.load(i, pair);
        unsigned const is_nan = (isnan(value.x) ? 1U : 0U) | (isnan(value.y) ? 2U : 0U);
        wrong |= (sound.is_far(i) ? not_finite(value) : is_nan) << 2 * pair;
      }
      if (!__any_sync(kAll, wrong != 0)) {
        continue;
      }
      // (A row without a weight has no key.)
      Row const row{operands,
                    band,
                    entries_of_row(lists, row_of_list),
                    sound.is_empty(i) ? 0 : counts_of_row(lists, row_of_list).y,
                    bits + query % kListedBlock * 16,
                    query,
                    thread_index_anew() % 32};
      repair_row(row, wrong, i, words);
    }
  }

 private:
  template <class Words>
  CUTE_DEVICE static void repair_row(Row const& row, unsigned wrong, int place, Words const& words) {
    float const sink_log2 = row.operands.sink(words) * kLog2E;
    float max = sink_log2;
    row.each([&](int first, unsigned kept) {
      max = fmaxf(max, row.score(first, kept));
      // What is not finite in a key that the row keeps is so by right.
      for (unsigned left = row.staying(first, kept); left != 0; left &= left - 1) {
        CUTE_UNROLL
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
          wrong &= ~(not_finite(row.values(first + __ffs(static_cast<int>(left)) - 1, pair)) << 2 * pair);
        }
      }
    });
    if (!__any_sync(kAll, wrong != 0)) {
      return;
    }
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      max = fmaxf(max, __shfl_xor_sync(kAll, max, step));
    }
    float const shift = max == -INFINITY ? 0.0F : max;
    // This lane's. The sink is a key without a value.
    float sum = row.lane != 0 || sink_log2 == -INFINITY ? 0.0F : sink_log2 == max ? 1.0F : exp2_approx(sink_log2 - max);
    float2 output[Pairs::kCount] = {};
    row.each([&](int first, unsigned kept) {
      float const score = row.score(first, kept);
      float const own = (kept >> row.lane & 1) != 0 ? exp2_approx(score - shift) : 0.0F;
      sum += own;
      for (unsigned left = row.staying(first, kept); left != 0; left &= left - 1) {
        int const i = __ffs(static_cast<int>(left)) - 1;
        float const weight = __shfl_sync(kAll, own, i);
        CUTE_UNROLL
        for (int pair = 0; pair < Pairs::kCount; ++pair) {
          float2 const values = row.values(first + i, pair);
          output[pair].x = fmaf(weight, values.x, output[pair].x);
          output[pair].y = fmaf(weight, values.y, output[pair].y);
        }
      }
    });
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      sum += __shfl_xor_sync(kAll, sum, step);
    }
    float const inverse = (sum == 0.0F ? 0.0F : 1.0F / sum) * row.operands.output_factor();
    CUTE_UNROLL
    for (int i = 0; i < 2 * Pairs::kCount; ++i) {
      float const value = (i % 2 == 0 ? output[i / 2].x : output[i / 2].y) * inverse;
      if ((wrong >> i & 1) != 0 && !isnan(value)) {
        words.store(place, i / 2, i % 2, value);
      }
    }
  }
};

}  // namespace hattn
