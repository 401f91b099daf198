// The gradient of attention sinks (sinks.hpp).
//
// P of a sink s in a row is p = exp(s - LSE'), where LSE' is the LSE that the forward has written, with the sink. With
// delta' = rowsum(dO o O') - dLSE (prepare.hpp)
//
//     dS_sink = -sum of p delta'     over all rows of the query head, of all sequences
//
// since the derivative of LSE' by s is p, and that of O' is -p O'. dQ, dK and dV need nothing: made of LSE' and O',
// they are those of the softmax with the sink.
//
// - Where s is -inf, the gradient is 0. Rows with an LSE of -inf have no part in it.
// - Where s and LSE' are equal (also where both are inf), p is 1.
// - A row without keys has O' = 0 whatever s is: dO has no part in it, whatever it is. (LSE' is s: dLSE has.)
//
// A CTA sums the rows of a head. A thread has every kSinkThreads-th row, in the order of the tensor, and sums in f64.
// So the result has the same bits in every run. The order of the table of sequences, which may change, has no part in
// it.
#pragma once

#include <cstdint>

#include "common/bias.hpp"
#include "common/blocks.hpp"
#include "common/dropout.hpp"
#include "common/mask.hpp"
#include "common/scalars.hpp"
#include "common/sequences.hpp"
#include "common/sinks.hpp"
#include "common/tile_scheduler.hpp"
#include "kernels.hpp"

namespace hattn {

constexpr int kSinkThreads = 1024;
constexpr int kSinkWarps = kSinkThreads / 32;

// An element of an LSE, or of its gradient.
CUTE_DEVICE float element_of(TensorDesc const& tensor, std::int64_t batch, int head, std::int64_t row) {
  return reinterpret_cast<float const*>(
      tensor.address)[batch * tensor.stride_batch + head * tensor.stride_head + row * tensor.stride_row];
}

CUTE_DEVICE float weight_of_sink(float sink, float lse) {
  return sink == lse ? 1.0F : exp2_approx((sink - lse) * kLog2E);
}
// 0 of what has no part. (A product of 0 and NaN is NaN by right: exp(s - LSE') may be too small for f32.)
CUTE_DEVICE double weighed(float weight, float value) { return static_cast<double>(weight) * value; }

// Writes the sum over all threads, in a fixed order.
CUTE_DEVICE void store_sink_gradient(BwdParams const& params, int head, double sum) {
  __shared__ double sums[kSinkWarps];
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffU, sum, step);
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    double total = sums[threadIdx.x];
    CUTE_UNROLL
    for (int step = 16; step > 0; step /= 2) {
      total += __shfl_xor_sync(0xffffffffU, total, step);
    }
    if (threadIdx.x == 0) {
      reinterpret_cast<float*>(params.d_sinks.address)[head * params.d_sinks.stride_head] = static_cast<float>(total);
    }
  }
}

// Some sequences in the order of their numbers: where the statistics of each begin, what it has, and its record.
struct SinkSequences {
  std::int64_t first[kSinkThreads];
  int rows[kSinkThreads];
  int q_begin[kSinkThreads];
  int record[kSinkThreads];

  // Reads sequences [begin, begin + kSinkThreads) of the table, whose records are in another order.
  CUTE_DEVICE void read(SequenceTable const& table, int begin, int rows_apart) {
    int const thread = static_cast<int>(threadIdx.x);
    __syncthreads();
    rows[thread] = 0;
    __syncthreads();
    for (int i = thread; i < table.batch; i += kSinkThreads) {
      Sequence const& sequence = table.records()[i];
      int const place = sequence.index - begin;
      if (place >= 0 && place < kSinkThreads) {
        rows[place] = sequence.q_len;
        q_begin[place] = sequence.q_begin;
        record[place] = i;
        first[place] = sequence.q_begin + std::int64_t{sequence.index} * rows_apart;
      }
    }
    __syncthreads();
  }
};

// Whether the mask, the lists and the bias keep a key of a query. A thread looks at one after the other, up to the
// first that is kept.
CUTE_DEVICE bool has_keys(BwdParams const& params, Band const& band, int batch, int head, int query) {
  int const end = cute::min(band.seqlen_kv, band.last_key<MaskClass::Window>(query) + 1);
  for (int key = band.first_key<MaskClass::Window>(query); key < end; ++key) {
    bool const listed = params.blocks.counts == 0 || is_listed(params.blocks, batch, head, query, key);
    bool const shown = !has_bias(params) || BiasOfHead::of(params, batch, head).one(query, key) != -INFINITY;
    if (listed && shown) {
      return true;
    }
  }
  return false;
}

// `padded`: rows of the statistics of a head (dense).
template <class Statistics, bool kIsPacked>
__global__ void __launch_bounds__(kSinkThreads) bwd_sinks(__grid_constant__ BwdParams const params, int padded) {
  int const head = static_cast<int>(blockIdx.x);
  auto const* const all = reinterpret_cast<Statistics const*>(params.statistics);
  float const sink = sink_of_head(params, head);
  double sum = 0.0;
  // `query`: the row's place in its sequence, whose band `band_of_row()` is.
  auto const add = [&](int batch, int row, int query, std::int64_t at, auto const& band_of_row) {
    float const lse = element_of(params.lse, batch, head, row);
    if (lse != -INFINITY) {
      Statistics const statistics = all[at];
      float value = statistics.has_nan() ? NAN : statistics.negative_delta() * dropout_factor(params);
      // A row without keys has an LSE' of s. Whatever O and dO are there, what is left of -delta' is dLSE. It is
      // already where O is 0, as the forward writes it, so that few rows are looked at.
      if (lse == sink || isnan(value)) {
        float const without_keys = params.d_lse.address != 0 ? element_of(params.d_lse, batch, head, row) : 0.0F;
        if (value != without_keys && !isnan(lse) && !has_keys(params, band_of_row(), batch, head, query)) {
          value = without_keys;
        }
      }
      sum += weighed(weight_of_sink(sink, lse), value);
    }
  };
  if constexpr (kIsPacked) {
    __shared__ SinkSequences sequences;
    SequenceTable const table{params.sequences.table, params.batch};
    int const rows_apart = statistics_rows_apart(params);
    std::int64_t const of_head = head * statistics_rows(params);
    for (int begin = 0; begin < params.batch && sink != -INFINITY; begin += kSinkThreads) {
      sequences.read(table, begin, rows_apart);
      for (int i = 0; i < cute::min(int{kSinkThreads}, params.batch - begin); ++i) {
        if (sequences.rows[i] == 0) {
          continue;
        }
        // This thread's first row of the tensor in the sequence, and then every so many-th.
        std::int64_t const first = sequences.first[i];
        int const skipped =
            (static_cast<int>(threadIdx.x) - static_cast<int>(first % kSinkThreads)) & (kSinkThreads - 1);
        for (int row = skipped; row < sequences.rows[i]; row += kSinkThreads) {
          add(begin + i, sequences.q_begin[i] + row, row, of_head + first + row,
              [&]() { return band_of_tile(params, table.records()[sequences.record[i]]); });
        }
      }
    }
  } else {
    std::int64_t const rows = std::int64_t{params.batch} * params.seqlen_q;
    for (std::int64_t i = threadIdx.x; i < rows && sink != -INFINITY; i += kSinkThreads) {
      int const batch = static_cast<int>(i / params.seqlen_q);
      int const query = static_cast<int>(i - std::int64_t{batch} * params.seqlen_q);
      add(batch, query, query, (std::int64_t{batch} * params.heads_q + head) * padded + query,
          [&]() { return band_of_launch(params); });
    }
  }
  store_sink_gradient(params, head, sum);
}

}  // namespace hattn
