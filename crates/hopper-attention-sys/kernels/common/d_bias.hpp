// The gradient of an additive bias (common/bias.hpp). The kernel runs behind the backward kernel, and reads the same
// statistics.
//
//     dBias = P o (Z o dP - delta)    summed over the batch entries, heads and queries that share a number
//
// A CTA has a tile of kRows queries and kRows keys of the bias. For each batch entry and query head that shares it the
// CTA computes S and dP of the tile again, and adds dS in registers. Where queries share their numbers it goes over all
// blocks of queries, and adds up their rows at the end. So each number is written once, the sum has one order, and no
// scores are kept in memory. The price is two of the backward's five products.
//
// With lists of blocks (common/blocks.hpp) a tile is a part of a block, and pairs that the list hides have no part.
//
// Sequences whose lengths the device knows (common/sequences.hpp) are batch entries. Numbers that no sequence reaches
// have gradients of 0.
//
// Four warps; each has 16 of the tile's queries and all of its keys. Shared memory has one block of Q, K, dO, V and the
// bias each, in slabs of 64 columns (common/slab.hpp). A bias that cannot be copied there is read from memory.
#pragma once

#include <climits>

#include "common/alibi.hpp"
#include "common/around.hpp"
#include "common/blocks.hpp"
#include "common/copied_bias.hpp"
#include "common/copy.hpp"
#include "common/dropout.hpp"
#include "common/fragment.hpp"
#include "common/launch.hpp"
#include "common/mask.hpp"
#include "common/matrices.hpp"
#include "common/product.hpp"
#include "common/scalars.hpp"
#include "common/sequences.hpp"
#include "common/tile_scheduler.hpp"

namespace hattn {

template <class Traits>
struct BiasGradientTraits {
  using Element = typename Traits::Element;
  using Statistics = typename Traits::Statistics;
  static constexpr int kHeadDim = Traits::kHeadDimQK;
  static_assert(Traits::kHeadDimVO == kHeadDim);
  static constexpr int kTileM = Traits::kTileM;  // queries of a block of the statistics
  static constexpr int kRows = 64;               // queries of a tile, and keys
  static constexpr int kThreads = 128;
  static constexpr bool kIsPacked = Traits::kIsPacked;
  static constexpr bool kIsListed = Traits::kMask == MaskClass::Blocks;
  static constexpr int kCtas = kHeadDim > 64 || kIsPacked ? 2 : 3;  // of a multiprocessor
  static_assert(kRows == kSlabColumns, "the bias of a tile is one slab");
  struct SharedStorage {
    alignas(1024) Element q[kRows * kHeadDim];
    alignas(1024) Element k[kRows * kHeadDim];
    alignas(1024) Element d_o[kRows * kHeadDim];
    alignas(1024) Element v[kRows * kHeadDim];
    alignas(1024) std::uint16_t bias[kRows * kRows];
    Statistics statistics[kRows];
    float sums[kThreads / 32][kRows];           // of each warp's queries
    int record[kIsPacked ? int{kThreads} : 1];  // packed: where the table has neighbouring sequences
  };
};

// Numbers from `begin` to `end`, which share a dimension of the bias with `own`: all of them, or that one.
struct Sharers {
  int begin;
  int end;
  CUTE_HOST_DEVICE static Sharers of(std::int64_t stride, int own, int all) {
    return stride == 0 ? Sharers{0, all} : Sharers{own, own + 1};
  }
};
CUTE_HOST_DEVICE int numbers_of(std::int64_t stride, int all) { return stride == 0 ? 1 : all; }

// The queries and keys that a bias has numbers for.
template <class Traits>
CUTE_HOST_DEVICE int queries_of_bias(BwdParams const& params) {
  return Traits::kIsPacked ? params.sequences.most_queries : params.seqlen_q;
}
template <class Traits>
CUTE_HOST_DEVICE int keys_of_bias(BwdParams const& params) {
  return Traits::kIsPacked ? params.sequences.most_keys : params.seqlen_kv;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    d_bias_kernel(__grid_constant__ BwdParams const params) {
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows;
  constexpr int kHeadDim = Traits::kHeadDim;
  constexpr unsigned kAll = 0xffffffffU;
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread % 32;
  int const warp = warp_index();

  // Neighbouring CTAs have neighbouring keys.
  TensorDesc const& d_bias = params.d_bias;
  int const key_tiles = ceil_div(keys_of_bias<Traits>(params), kRows);
  bool const per_query = d_bias.stride_row != 0;
  int const query_tiles = per_query ? ceil_div(queries_of_bias<Traits>(params), kRows) : 1;
  int tile = static_cast<int>(blockIdx.x);
  int const key_tile = tile % key_tiles;
  tile /= key_tiles;
  int const query_tile = tile % query_tiles;
  tile /= query_tiles;
  int const heads = numbers_of(d_bias.stride_head, params.heads_q);
  int const own_head = tile % heads;
  int const own_batch = tile / heads;
  Sharers of_batch = Sharers::of(d_bias.stride_batch, own_batch, params.batch);
  Sharers const of_heads = Sharers::of(d_bias.stride_head, own_head, params.heads_q);
  Sharers of_queries = per_query ? Sharers{query_tile, query_tile + 1} : Sharers{0, ceil_div(params.seqlen_q, kRows)};

  // Packed: the sequence under way, and its band.
  [[maybe_unused]] Sequence sequence{};
  [[maybe_unused]] SequenceTable const table{params.sequences.table, params.batch};
  Band band = band_of_launch(params);
  if (Traits::kIsPacked && (params.seqlen_q == 0 || params.seqlen_kv == 0)) {
    of_batch = {0, 0};  // (where there is no row at all, there is no table)
  }
  float const factor = backward_factor(params);
  float const of_dropout = dropout_factor(params);
  int const first_key = key_tile * kRows;
  int const group = params.heads_q / params.heads_kv;
  constexpr int kTileM = Traits::kTileM;
  int const padded = ceil_div(params.seqlen_q, kTileM) * kTileM;

  auto const address = [](auto const& tile_of) { return cute::cast_smem_ptr_to_uint(tile_of); };
  auto const load_rows = [&](auto const& tile_of, TensorDesc const& tensor, int batch, int head, int begin, int first,
                             int rows, int columns) {
    std::uint64_t const from = head_address(tensor, batch, head) + 2 * (begin * tensor.stride_row);
    copy_tile<kRows, kHeadDim, Traits::kThreads, true>(address(tile_of), from, 2 * tensor.stride_row, first, rows,
                                                       columns, thread);
  };
  auto const load_queries = [&](auto const& tile_of, TensorDesc const& tensor, int batch, int head, int first,
                                int columns) {
    load_rows(tile_of, tensor, batch, head, sequence.q_begin, first, band.seqlen_q, columns);
  };
  auto const load_keys = [&](auto const& tile_of, TensorDesc const& tensor, int batch, int head, int columns) {
    load_rows(tile_of, tensor, batch, head, sequence.kv_begin, first_key, band.seqlen_kv, columns);
  };
  // The tile of a bias, of which each warp reads its own queries. Rows and keys past the last become zeros.
  auto const load_bias = [&](BiasOfHead const& bias, int first_query) {
    int const chunk = thread % 8;
    int const bytes = bytes_of_chunk(first_key + 8 * chunk, band.seqlen_kv);
    CUTE_UNROLL
    for (int pass = 0; pass < kRows / 16; ++pass) {
      int const row = 16 * pass + thread / 8;
      copy_chunk(slab_address(address(storage.bias), row, chunk), bias.at(first_query + row, first_key + 8 * chunk),
                 first_query + row < band.seqlen_q ? bytes : 0);
    }
  };
  // Packed: finds the records of sequences [first, first + kThreads), which are in another order.
  [[maybe_unused]] auto const find_records = [&](int first) {
    __syncthreads();
    for (int i = thread; i < table.batch; i += Traits::kThreads) {
      int const place = table.records()[i].index - first;
      if (place >= 0 && place < Traits::kThreads) {
        storage.record[place] = i;
      }
    }
    __syncthreads();
  };
  // The warp's rows of a times all rows of b, both of them tiles.
  using Sums = Fragment<float, kRows / 2>;
  auto const multiply = [&](auto const& a_tile, auto const& b_tile, Sums& sums) {
    std::uint32_t x = address(a_tile) + lane_offset_down(lane) + warp * (16 * kSlabRowBytes);
    std::uint32_t y = address(b_tile) + lane_offset_along(lane);
    clear(sums);
    CUTE_NO_UNROLL  // registers are short
        for (int slab = 0; slab < kHeadDim / kSlabColumns; ++slab) {
      CUTE_UNROLL
      for (int step = 0; step < kSlabColumns / 16; ++step) {
        std::uint32_t a[4];
        load_matrices(Columns::of_step(step).template from<kRows>(x), a);
        CUTE_UNROLL
        for (int n = 0; n < kRows / 16; ++n) {
          std::uint32_t b[4];
          load_matrices(Columns::of_step(step).template from<kRows>(y) + n * (16 * kSlabRowBytes), b);
          multiply_step<Element, 1, kRows>(
              [&](int) -> auto const& { return a; }, b, n, sums);
        }
      }
      x += kRows * kSlabRowBytes;
      y += kRows * kSlabRowBytes;
    }
  };

  Sums gradient{};
  clear(gradient);
  CUTE_NO_UNROLL
  for (int batch = of_batch.begin; batch < of_batch.end; ++batch) {
    if constexpr (Traits::kIsPacked) {
      int const place = (batch - of_batch.begin) % Traits::kThreads;
      if (place == 0) {
        find_records(batch);
      }
      sequence = table.records()[storage.record[place]];
      band = band_of_tile(params, sequence);
      int const blocks = first_key < sequence.kv_len ? ceil_div(sequence.q_len, kRows) : 0;
      of_queries = per_query ? Sharers{query_tile, cute::min(query_tile + 1, blocks)} : Sharers{0, blocks};
    }
    CUTE_NO_UNROLL
    for (int head = of_heads.begin; head < of_heads.end; ++head) {
      BiasOfHead const bias = BiasOfHead::of(params, batch, head);
      float const slope = alibi_slope_or_zero(params, batch, head, factor);
      CUTE_NO_UNROLL
      for (int block = of_queries.begin; block < of_queries.end; ++block) {
        if (is_hidden<MaskClass::Window, kRows, kRows>(band, block, key_tile)) {
          continue;
        }
        int const first_query = block * kRows;
        // The block's entry, where there are lists.
        [[maybe_unused]] BlockEntry entry{0};
        if constexpr (Traits::kIsListed) {
          int const row = row_of_lists(params.blocks, batch, head, first_query / kListedBlock);
          entry = {entries_of_row(params.blocks, row)[first_key / kListedBlock]};
          if (entry.word == kNotListed) {
            continue;
          }
        }
        load_queries(storage.q, params.q, batch, head, first_query, params.head_dim_qk);
        load_keys(storage.k, params.k, batch, head / group, params.head_dim_qk);
        load_queries(storage.d_o, params.d_o, batch, head, first_query, params.head_dim_vo);
        load_keys(storage.v, params.v, batch, head / group, params.head_dim_vo);
        if (is_copied(params)) {
          load_bias(bias, first_query);
        }
        commit_copies();
        if (thread < kRows) {
          // (A block of queries may have fewer rows than a tile. Nobody asks for those that are missing.)
          std::int64_t at = 0;
          if constexpr (Traits::kIsPacked) {
            at = head * statistics_rows(params) + sequence.q_begin +
                 static_cast<std::int64_t>(batch) * statistics_rows_apart(params) +
                 cute::min(first_query + thread, sequence.q_len - 1);
          } else {
            at = (static_cast<std::int64_t>(batch) * params.heads_q + head) * padded +
                 cute::min(first_query + thread, padded - 1);
          }
          storage.statistics[thread] = reinterpret_cast<typename Traits::Statistics const*>(params.statistics)[at];
        }
        await_copies<0>();
        __syncthreads();
        Sums scores;
        Sums d_p;
        multiply(storage.q, storage.k, scores);
        multiply(storage.d_o, storage.v, d_p);
        int const first_row = first_query + warp * 16 + lane / 4;
        if (has_dropout(params)) {
          auto const dropout = DropoutOfHead::of(params.dropout, batch * params.heads_q + head);
          auto first = static_cast<std::uint32_t>(anew(first_key) + 2 * (lane % 4));
          CUTE_UNROLL
          for (int i = 0; i < kRows / 32; ++i) {
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
              // What one call decides. (One after the other: registers are short.)
              CUTE_UNROLL
              for (int at = 16 * i + c; at < 16 * (i + 1); at += 2) {
                int const query = first_row + at / 2 % 2 * 8;
                int const key = static_cast<int>(first) + at / 4 * 8 + c;
                d_p(at) = dropout.drops(query, key, params.dropout.dropped) ? 0.0F : d_p(at);
              }
              first = after(__float_as_uint(d_p(16 * i + 14 + c)), first);
            }
          }
        }
        if (has_alibi(params)) {
          add_alibi<kRows>(scores, slope, first_row + diagonal_of(params, band) - first_key - 2 * (lane % 4));
        }
        if (is_copied(params)) {
          CopiedBias<kRows>::template add<1>(scores, factor, address(storage.bias) + warp * CopiedBias<kRows>::kBytes,
                                             params.bias_dtype, lane, -INFINITY);
        } else {
          add_bias<true, kRows, 2>(
              scores, factor, [&]() { return bias; }, first_row, band.seqlen_q, first_key, lane % 4, band.seqlen_kv);
        }
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          int const query = first_row + 8 * r;
          typename Traits::Statistics const statistics = storage.statistics[query - first_query];
          float const negative_delta = statistics.negative_delta();
          int const begin = band.template first_key<MaskClass::Window>(query) - first_key - 2 * (lane % 4);
          int const end = query >= band.seqlen_q || statistics.is_empty()
                              ? INT_MIN
                              : cute::min(band.seqlen_kv, band.template last_key<MaskClass::Window>(query) + 1) -
                                    first_key - 2 * (lane % 4);
          // Which of the tile's keys the list keeps, from the lane's first on.
          std::uint32_t kept_keys[2] = {~0U, ~0U};
          if constexpr (Traits::kIsListed) {
            if (entry.has(kEntryBits) && query < band.seqlen_q) {
              std::uint64_t const bits = given_bits(params.blocks, batch, head, first_query / kListedBlock) +
                                         static_cast<std::int64_t>(entry.place()) * kBytesBits +
                                         query % kListedBlock * 16 + first_key % kListedBlock / 8;
              uint2 const words = __ldg(reinterpret_cast<uint2 const*>(bits));
              kept_keys[0] = words.x >> 2 * (lane % 4);
              kept_keys[1] = words.y >> 2 * (lane % 4);
            }
          }
          CUTE_UNROLL
          for (int i = 0; i < kRows / 8; ++i) {
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
              int const at = 4 * i + 2 * r + c;
              bool const in_list = !Traits::kIsListed || (kept_keys[i / 4] >> (8 * (i % 4) + c) & 1) != 0;
              bool const kept = 8 * i + c >= begin && 8 * i + c < end && scores(at) != -INFINITY && in_list;
              float const p = statistics.weight(scores(at), 1.0F, true) * of_dropout;
              float const d_s = statistics.has_nan() ? NAN : p * (d_p(at) + negative_delta);
              gradient(at) += kept ? d_s : 0.0F;
            }
          }
        }
        __syncthreads();  // before the next block is loaded
      }
    }
  }

  auto const store = [&](int query, int key, float value) {
    int const bytes = bytes_of_bias(params.bias_dtype);
    std::uint64_t const to = d_bias.address + bytes * (own_batch * d_bias.stride_batch + own_head * d_bias.stride_head +
                                                       query * d_bias.stride_row + key);
    if (params.bias_dtype == DType::F32) {
      *reinterpret_cast<float*>(to) = value;
    } else if (params.bias_dtype == DType::BF16) {
      *reinterpret_cast<cutlass::bfloat16_t*>(to) = cutlass::bfloat16_t{value};
    } else {
      *reinterpret_cast<cutlass::half_t*>(to) = cutlass::half_t{value};
    }
  };
  if (per_query) {
    CUTE_UNROLL
    for (int at = 0; at < Sums::size(); ++at) {
      int const query = query_tile * kRows + warp * 16 + lane / 4 + at / 2 % 2 * 8;
      int const key = first_key + at / 4 * 8 + 2 * (lane % 4) + at % 2;
      if (query < queries_of_bias<Traits>(params) && key < keys_of_bias<Traits>(params)) {
        store(query, key, gradient(at));
      }
    }
    return;
  }
  CUTE_UNROLL
  for (int at = 0; at < Sums::size(); ++at) {
    if (at / 2 % 2 != 0) {
      continue;
    }
    float sum = gradient(at) + gradient(at + 2);
    CUTE_UNROLL
    for (int step = 4; step < 32; step *= 2) {
      sum += __shfl_xor_sync(kAll, sum, step);
    }
    if (lane < 4) {
      storage.sums[warp][at / 4 * 8 + 2 * lane + at % 2] = sum;
    }
  }
  __syncthreads();
  if (thread < kRows && first_key + thread < keys_of_bias<Traits>(params)) {
    float sum = 0.0F;
    CUTE_UNROLL
    for (int of_warp = 0; of_warp < Traits::kThreads / 32; ++of_warp) {
      sum += storage.sums[of_warp][thread];
    }
    store(0, first_key + thread, sum);
  }
}

// (Rows that add no bias have none.)
template <class Traits>
Status BwdBiasGradient<Traits>::load() noexcept {
  if constexpr (Traits::kMayTakeBias) {
    using Own = BiasGradientTraits<Traits>;
    return prepare_kernel(d_bias_kernel<Own>, sizeof(typename Own::SharedStorage));
  }
  return {};
}

template <class Traits>
void BwdBiasGradient<Traits>::launch(BwdParams const& params, cudaStream_t stream) noexcept {
  if constexpr (Traits::kMayTakeBias) {
    using Own = BiasGradientTraits<Traits>;
    auto const tiles = [](int rows) { return (rows + Own::kRows - 1) / Own::kRows; };
    TensorDesc const& d_bias = params.d_bias;
    int const grid = tiles(keys_of_bias<Own>(params)) *
                     (d_bias.stride_row != 0 ? tiles(queries_of_bias<Own>(params)) : 1) *
                     numbers_of(d_bias.stride_head, params.heads_q) * numbers_of(d_bias.stride_batch, params.batch);
    if (d_bias.address != 0 && grid > 0) {
      d_bias_kernel<Own><<<grid, Own::kThreads, sizeof(typename Own::SharedStorage), stream>>>(params);
    }
  }
}

}  // namespace hattn

// What the unit around a list says once for all rows that differ by their mask alone, with the columns but the mask: of
// the kernel, and of the one that packs.
#define HATTN_INSTANTIATE_BIAS(Traits, dtype, ...)                                                          \
  template struct hattn::BwdBiasGradient<Traits<hattn::DType::dtype, hattn::MaskClass::Full, __VA_ARGS__>>; \
  template struct hattn::BwdBiasGradient<Traits<hattn::DType::dtype, hattn::MaskClass::Full, __VA_ARGS__, true>>;
