// Shares of a tile's keys: how several warpgroups, of a CTA or of a cluster, compute one tile.
//
// Where a launch has few tiles, which visit many blocks of keys, the CTAs of a cluster take the same tile.
// Each takes a share of the key blocks that the tile visits (Share in common/visits.hpp). Where a tile has 64 queries,
// the two consumer warpgroups of a CTA share in the same way: each takes every second block of the CTA's. A CTA
// computes one tile and ends.
//
// When the products are done, a share's sums are written to shared memory, over the buffers of K and V: O before the
// division, and for each query the row sum and what stands for the row's maximum (softmax.hpp). Then each share reads a
// part of the columns of O from all shares, sums them in the order of the shares, divides, and writes these columns to
// memory. So the result does not depend on which share is done first. The sink of the head is added to the whole sums,
// once.
//
// Where a cluster of the best size would leave multiprocessors idle, several clusters share a tile (`splits`): they are
// the grid's second dimension. Then each share leaves what its cluster has of these columns in the workspace, not yet
// divided, and counts itself. Of the shares with the same columns, one of each cluster, the last to come reads what all
// of them have left, and sums it in the order of the clusters. No CTA waits for another cluster.
#pragma once

#include "common/element.hpp"
#include "common/leak.hpp"
#include "common/memory.hpp"
#include "common/overflow.hpp"
#include "common/sinks.hpp"
#include "common/softmax.hpp"
#include "common/visits.hpp"
#include "sm90/cluster.hpp"
#include "sm90/fwd/rotation.hpp"
#include "sm90/fwd/traits.hpp"
#include "sm90/partial_sums.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Shares {
  static constexpr int kWays = Traits::kWays;                // warpgroups of a CTA that share a tile's keys
  static constexpr int kThreads = 128 * Traits::kConsumers;  // those with sums
  static constexpr int kPlaces = kThreads / kWays;           // those with sums of one share
  static constexpr int kGroups = Traits::kHeadDimVO / 8;     // of 8 columns of O, of which a thread has 2 in 2 rows

  // The sums of a share. A thread's elements lie as it has them, so that all shares are read alike.
  struct Sums {
    float4 output[kGroups][kPlaces];
    float2 rows[Traits::kTileM];  // reference and row sum
  };
  struct AllSums {
    Sums of[kWays];
  };
  static_assert(kWays * Traits::kMostShares <= 8, "each of the four lanes of a row looks at two shares");
  static_assert(Traits::kMostShares == 1 ||
                    sizeof(AllSums) <= sizeof(Traits::SharedStorage::k) + sizeof(Traits::SharedStorage::v),
                "the sums lie over K and V");

  // What a cluster has of a tile, in the workspace. Columns lie as in Sums. Each share counts itself alone, so each has
  // the rows' numbers, too.
  struct ClusterSums {
    float4 output[kGroups][kPlaces];
    float2 rows[8][Traits::kTileM];
  };

  // Bytes of the counters before them, one for each CTA of a split.
  CUTE_HOST_DEVICE static constexpr std::size_t counter_bytes(int grid) { return (sizeof(int) * grid + 15) / 16 * 16; }

  // The cluster's number among those of its tile, and how many there are.
  CUTE_DEVICE static int split() { return static_cast<int>(blockIdx.y); }
  CUTE_DEVICE static int splits() { return static_cast<int>(gridDim.y); }

  // The key blocks that this CTA visits of a tile.
  CUTE_DEVICE static KeyVisits visits(Band const& band, int m_block) {
    KeyVisits visits = KeyVisits::of<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, m_block);
    if constexpr (Traits::kShares) {
      int const shares = cluster_shares();
      visits.keep_share(split() * shares + cluster_share(), splits() * shares);
    }
    if constexpr (Traits::kIsPacked) {
      visits.keep_one();
    }
    return visits;
  }

  // The index of this CTA's tile in the tile order.
  CUTE_DEVICE static int tile() { return static_cast<int>(blockIdx.x) / cluster_shares(); }

  // Sums what all shares have, and writes this share's columns of O. `sums` are the rows' whole sums. Both warpgroups
  // come here from one place of the code, with keys or without: compute-sanitizer's synccheck takes barriers at two
  // places for two barriers.
  template <class Output>
  CUTE_DEVICE static void finish_tile(FwdParams const& params, FwdScalars const& scalars,
                                      typename Traits::SharedStorage& storage, int consumer,
                                      float const (&reference)[2], float const (&sums)[2], float const (&divisors)[2],
                                      Output& output) {
    int const thread = thread_index_anew() - 128;
    int const way = kWays == 2 ? consumer : 0;
    int const place = thread - way * kPlaces;
    int const row = place / 32 * 16 + place % 32 / 4;
    auto& own = reinterpret_cast<AllSums*>(storage.k)->of[way];
    // O as if it were to be divided by the sums.
    float factors[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      factors[r] = divisors[r] == 0.0F ? 1.0F : sums[r] * reciprocal_approx(divisors[r]);
    }
    CUTE_UNROLL
    for (int i = 0; i < output.size(); ++i) {
      output(i) *= factors[i / 2 % 2];
    }
    // The other warpgroup's products may still read K and V.
    named_barrier_sync(Traits::kConsumers + 1, kThreads);
    CUTE_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      own.output[group][place] = {output(4 * group), output(4 * group + 1), output(4 * group + 2),
                                  output(4 * group + 3)};
    }
    if (place % 4 == 0) {
      own.rows[row] = {reference[0], sums[0]};
      own.rows[row + 8] = {reference[1], sums[1]};
    }
    if (is_alone()) {
      named_barrier_sync(Traits::kConsumers + 1, kThreads);
    } else {
      await_sums();
    }
    Written const written = splits() == 1 ? write_columns<false>(params, scalars, storage, way, place, row)
                                          : write_columns_of_clusters(params, scalars, storage, way, place, row);
    bool const found = kLooksAtOutput<Traits> && written.looks.found();
    if (!is_alone()) {
      await_readers();
    }
    // (The last thing, as what is rare lies far in the code.)
    if (found) {
      repair_columns(params, storage, way, place, written.looks, written.inverse[0], written.inverse[1]);
    }
  }

 private:
  // Whether all shares of a tile are in this CTA.
  CUTE_DEVICE static bool is_alone() { return kWays == 2 && cluster_shares() == 1; }

  static constexpr int kMost = kGroups / 2;  // groups of a share; there are two shares or more

  // Leaves the cluster's sums of this share's columns in the workspace. In the share that is the last to do so, these
  // become the sums of all clusters. The result: whether this is that share. `number` and `count` are those of
  // write_columns.
  CUTE_DEVICE static bool sum_clusters(FwdParams const& params, typename Traits::SharedStorage& storage, int number,
                                       int count, int place, int row, float (&references)[2], float (&sums)[2],
                                       float4 (&total)[kMost]) {
    auto* const all = reinterpret_cast<ClusterSums*>(params.split_sums + counter_bytes(gridDim.x)) + tile() * splits();
    auto const group = [&](int i) { return number + i * count; };
    auto& own = all[split()];
    CUTE_UNROLL
    for (int i = 0; i < kMost; ++i) {
      if (group(i) < kGroups) {
        __stcg(&own.output[group(i)][place], total[i]);
      }
    }
    if (place % 4 == 0) {
      __stcg(&own.rows[number][row], float2{references[0], sums[0]});
      __stcg(&own.rows[number][row + 8], float2{references[1], sums[1]});
    }
    int& before = *reinterpret_cast<int*>(storage.q);  // of Q nothing is read any more
    named_barrier_sync(Traits::kConsumers + 1, kThreads);
    if (thread_index_anew() == 128) {
      before = add_acquire_release(reinterpret_cast<int*>(params.split_sums) + blockIdx.x, 1);
    }
    named_barrier_sync(Traits::kConsumers + 1, kThreads);
    if (before + 1 < splits()) {
      return false;
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      references[r] = -INFINITY;
      sums[r] = 0.0F;
    }
    CUTE_UNROLL
    for (int i = 0; i < kMost; ++i) {
      total[i] = {};
    }
    CUTE_NO_UNROLL
    for (int s = 0; s < splits(); ++s) {
      float2 const rows[2] = {__ldcg(&all[s].rows[number][row]), __ldcg(&all[s].rows[number][row + 8])};
      float4 parts[kMost];
      CUTE_UNROLL
      for (int i = 0; i < kMost; ++i) {
        if (group(i) < kGroups) {
          parts[i] = __ldcg(&all[s].output[group(i)][place]);
        }
      }
      JointFactors factors[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        factors[r] = JointFactors::of(references[r], rows[r].x);
        sums[r] = factors[r].sum(sums[r], rows[r].y);
      }
      CUTE_UNROLL
      for (int i = 0; i < kMost; ++i) {
        if (group(i) < kGroups) {
          total[i].x = factors[0].sum(total[i].x, parts[i].x);
          total[i].y = factors[0].sum(total[i].y, parts[i].y);
          total[i].z = factors[1].sum(total[i].z, parts[i].z);
          total[i].w = factors[1].sum(total[i].w, parts[i].w);
        }
      }
    }
    return true;
  }

  // What a thread knows of the columns that it has written. Of none, where another share writes them.
  struct Written {
    OutputLooks<Traits> looks;  // has looked at them, if the kernel does
    float inverse[2];           // what rows were multiplied by
  };

  // Writes every so many-th group of columns, from this share's number on. The code is kept short: it runs once, so
  // that fetching it is a part of its time.
  template <bool kOfClusters>
  CUTE_DEVICE static Written write_columns(FwdParams const& params, FwdScalars const& scalars,
                                           typename Traits::SharedStorage& storage, int way, int place, int row) {
    using Element = typename Traits::Element;
    auto const& all = *reinterpret_cast<AllSums const*>(storage.k);
    int const count = kWays * cluster_shares();        // of all shares
    int const number = kWays * cluster_share() + way;  // of this one
    int const lane = place % 32;
    // The four lanes that have a row look at two shares each.
    Written written{};
    auto& [looks, inverse] = written;
    float weights[2][2];
    float lse[2];
    float references[2];
    float sums[2];
    Tile const tile = storage.tile[0];
    int const query = tile.block * Traits::kTileM + row;
    float const sink = sink_of_head(params, tile.head);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float2 rows[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const share = lane % 4 + 4 * i;
        rows[i] = share < count ? read_shared(all.of[share % kWays].rows[row + 8 * r], share / kWays)
                                : float2{-INFINITY, 0.0F};
      }
      float const reference = references[r] = quad_max(fmaxf(rows[0].x, rows[1].x));
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        // Equal also where both are -inf: no key.
        weights[r][i] = rows[i].x == reference ? 1.0F : exp2_approx(rows[i].x - reference);
      }
      float const sum = sums[r] = quad_sum(rows[0].y * weights[r][0] + rows[1].y * weights[r][1]);
      RowEnd const end = RowEnd::of(sink, reference, sum, sum);
      inverse[r] = end.inverse;
      lse[r] = end.lse;
    }
    auto const group = [&](int i) { return number + i * count; };
    float4 total[kMost] = {};
    CUTE_NO_UNROLL
    for (int s = 0; s < count; ++s) {
      float4 parts[kMost];
      CUTE_UNROLL
      for (int i = 0; i < kMost; ++i) {
        if (group(i) < kGroups) {
          parts[i] = read_shared(all.of[s % kWays].output[group(i)][place], s / kWays);
        }
      }
      int const from = lane / 4 * 4 + s % 4;
      float const first = __shfl_sync(0xffffffffU, s < 4 ? weights[0][0] : weights[0][1], from);
      float const second = __shfl_sync(0xffffffffU, s < 4 ? weights[1][0] : weights[1][1], from);
      CUTE_UNROLL
      for (int i = 0; i < kMost; ++i) {
        if (group(i) < kGroups) {
          total[i].x += parts[i].x * first;
          total[i].y += parts[i].y * first;
          total[i].z += parts[i].z * second;
          total[i].w += parts[i].w * second;
        }
      }
    }
    if constexpr (kOfClusters) {
      if (!sum_clusters(params, storage, number, count, place, row, references, sums, total)) {
        return {};
      }
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        RowEnd const end = RowEnd::of(sink, references[r], sums[r], sums[r]);
        inverse[r] = end.inverse;
        lse[r] = end.lse;
      }
    }
    if (scalars.lse != nullptr && number == 0 && lane % 4 == 0) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        if (query + 8 * r < scalars.seqlen_q) {
          scalars.lse[lse_place(params.lse, tile, query + 8 * r)] = lse[r];
        }
      }
    }
    auto* const o = reinterpret_cast<Element*>(params.o.address) + tile.batch * params.o.stride_batch +
                    tile.head * params.o.stride_head + query * params.o.stride_row + lane % 4 * 2;
    std::uint32_t before[2] = {0, 0};  // looked at two at a time
    static_assert(kMost % 2 == 0);
    int const rotation = rotation_of_output<Traits>(params, scalars, tile);
    auto const store = [&](bool wanted, Element* to, std::uint32_t pair) {
      if (wanted) {
        *reinterpret_cast<std::uint32_t*>(to) = pair;
      }
    };
    CUTE_UNROLL
    for (int i = 0; i < kMost; ++i) {
      bool const is_there = !Traits::kRotates || group(i) < kGroups;  // (else columns are beyond those of O)
      int const column = rotated<Traits>(8 * group(i), -rotation);
      std::uint32_t const first = pack_pair<Element>(total[i].x * inverse[0], total[i].y * inverse[0]);
      std::uint32_t const second = pack_pair<Element>(total[i].z * inverse[1], total[i].w * inverse[1]);
      if constexpr (kLooksAtOutput<Traits>) {
        if (i % 2 == 1) {
          looks.see(0, before[0], first);
          looks.see(1, before[1], second);
        }
        before[0] = first;
        before[1] = second;
      }
      if (is_there && column < params.head_dim_vo) {
        store(query < scalars.seqlen_q, o + column, first);
        store(query + 8 < scalars.seqlen_q, o + 8 * params.o.stride_row + column, second);
      }
    }
    if constexpr (Traits::kMask != MaskClass::Full) {
      looks.template see_sums<Element>(inverse);
    }
    return written;
  }

  // The same where several clusters share the tile. Not in the kernel's own code: in the way of other launches it made
  // them up to 2 us slower, as more code had to be fetched.
  __device__ __noinline__ static Written write_columns_of_clusters(FwdParams const& params, FwdScalars const& scalars,
                                                                   typename Traits::SharedStorage& storage, int way,
                                                                   int place, int row) {
    return write_columns<true>(params, scalars, storage, way, place, row);
  }

  // Puts right what has leaked into this share's columns, which are written.
  __device__ __noinline__ static void repair_columns(FwdParams const& params,
                                                     typename Traits::SharedStorage const& storage, int way, int place,
                                                     OutputLooks<Traits> looks, float first_sum, float second_sum) {
    float const sums[2] = {first_sum, second_sum};
    if (!looks.leaked(sums)) {
      return;
    }
    using Element = typename Traits::Element;
    Tile const tile = storage.tile[0];
    int const count = kWays * cluster_shares();
    int const number = kWays * cluster_share() + way;
    int const first_row = tile.block * Traits::kTileM + place / 32 * 16;
    int const rotation =
        rotation_of<Traits>(params.v, params.head_dim_vo, tile.head / (params.heads_q / params.heads_kv));
    auto const owned = [&](int column) { return rotated<Traits>(column, rotation) / 8 % count == number; };
    auto const o = HeadRows<Element>::of(params.o, tile.batch, tile.head);
    __syncwarp();
    RepairOf<Traits>::repair(
        PlainOperands<Element, Traits::kModifiers>::of(params, tile.batch, tile.head), band_of_launch(params),
        first_row, SoundRows::of_inverses<Traits>(sums),
        GlobalWords<Element, Traits::kHeadDimVO, decltype(owned)>{o, first_row, params.head_dim_vo, owned});
  }
};

}  // namespace hattn::sm90
