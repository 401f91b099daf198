// The producer warpgroup of the FP8 forward.
//
// - Warp 0 loads K and V. It also makes the factors of each block of the descale factors (kernel.hpp).
// - Warp 1 draws tiles and loads Q. In a row with scores in f16 it also checks whether the scores fit (range.hpp).
// - Warps 2 and 3 transpose V, because FP8 products need both operands with keys side by side.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/matrices.hpp"
#include "common/slab.hpp"
#include "common/softmax.hpp"
#include "common/visits.hpp"
#include "sm90/element.hpp"
#include "sm90/fp8/range.hpp"
#include "sm90/fp8/split.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/fp8/weights.hpp"
#include "sm90/tma.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Load {
  using Storage = typename Traits::SharedStorage;
  using Params = typename Traits::Params;

  // Stages of V, as it is loaded, that a block takes.
  static constexpr int kRawStages = Traits::kTileN / Traits::kKeysRaw;

  // Whether the position of V is made at a block's beginning, and the place of a tile's first factors once for each. It
  // decides about nothing but ptxas' order: up to head dim 128 it keeps loops of some rows as they were measured, above
  // it ptxas would serialise the products of packed kernels.
  static constexpr bool kEarly = Traits::kHeadDimQK <= 128;

  // Least ratio of a block's factor of V to the head's largest. A smaller one counts as this, which keeps sums in the
  // range of f32.
  static constexpr float kLeastRatio = 0x1p-100F;

  // The largest factor of every 32nd block of a head, from block `lane` on. The first 32 blocks are not waited for. NaN
  // is larger than any number (numbers that are not negative compare as their bits do). Infinity and negative numbers
  // count as NaN, but -0 as 0. `first`: index of the sequence's first factor.
  CUTE_DEVICE static float largest_factor(TensorDesc const& factors, int batch, int head, int first, int seqlen_kv,
                                          int lane) {
    int const blocks = factors.stride_row == 0 ? 1 : (seqlen_kv + Traits::kScaleBlock - 1) / Traits::kScaleBlock;
    // -0 + 0 is 0.
    unsigned largest = __float_as_uint(factor(factors, batch, head, first + cute::min(lane, blocks - 1)) + 0.0F);
    CUTE_NO_UNROLL
    for (int block = lane + 32; block < blocks; block += 32) {
      largest = cute::max(largest, __float_as_uint(factor(factors, batch, head, first + block) + 0.0F));
    }
    constexpr unsigned kInfinity = 0x7f800000;
    return __uint_as_float(largest >= kInfinity ? kInfinity + 1 : largest);
  }

  // Makes the factors of a block from `product`, the score's factor in powers of two. The product of the smallest
  // factors is 0 in f32. It is replaced by the smallest normal number, since 0 would make a NaN of a masked score. A
  // product that is negative or not finite makes NaN of every row that keeps a key of the block. Under a mask it would
  // reach masked scores too: there it becomes 1, and NaN gets into O by the ratio (leak.hpp).
  CUTE_DEVICE static BlockFactors block_factors(float product, float ratio_v) {
    float unit = product == 0.0F ? 0x1p-126F : product;
    bool const legal = __float_as_uint(unit) < 0x7f800000U;
    if constexpr (Traits::kMask != MaskClass::Full) {
      unit = legal ? unit : 1.0F;
      ratio_v = legal ? ratio_v : NAN;
    } else {
      unit = legal ? unit : NAN;
    }
    std::uint32_t pair = 0;
    if constexpr (Traits::kScores == Scores::F16) {
      pair = unit <= 65504.0F ? half_pair(fmaxf(unit, 0x1p-24F)) : kNoPair;
    }
    return {unit, pair, ratio_v, 0.0F};
  }

  // The index of a block's factors in the sequence.
  CUTE_DEVICE static int factor_of(int block) { return block / (Traits::kScaleBlock / Traits::kTileN); }

  // Rows from a batch entry to the next.
  struct RowsApart {
    int q;
    int k;
    int v;
  };
  CUTE_DEVICE static RowsApart rows_apart(Params const& params) {
    if constexpr (Traits::kIsPacked) {
      return {params.rows_apart_q, params.rows_apart_k, params.rows_apart_v};
    } else {
      return {0, 0, 0};
    }
  }

  // Calls visit(tile, q) for every tile of the CTA, once warp 1 has named it. q is the position of its buffer.
  template <class Visit>
  CUTE_DEVICE static void tiles(Storage& storage, Visit const& visit) {
    CUTE_NO_UNROLL
    for (std::uint32_t count = 0;; ++count) {
      auto const q = RingPosition<Traits::kBuffersQ>::of(count);
      storage.tile_full[q.stage].wait(q.parity);
      typename Traits::TileRecord const tile = storage.tile[q.stage];
      if (!tile.valid()) {
        break;
      }
      visit(tile, q);
      if constexpr (Traits::kShares) {
        break;  // a CTA has one tile
      }
    }
  }

  // Warp 0. One lane copies K and V. The lower lanes work out the factors of scores, each for one consumer. The upper
  // lanes work out the ratio of V. K is asked for before any factor, so that the two latencies pass side by side. (At a
  // head's first block they are those of memory.)
  CUTE_DEVICE static void keys_and_values(Params const& params, CUtensorMap const& map_k, CUtensorMap const& map_v,
                                          Band const& launch_band, Storage& storage) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    bool const of_keys = lane < 16;
    int const consumer = cute::min(lane % 16, Traits::kConsumers - 1);
    std::uint32_t count = 0;  // of blocks
    tiles(storage, [&](auto const& tile, auto const& q) {
      typename Traits::TileBand band = Traits::tile_band(params, launch_band, tile);
      KeyVisits const visits = Traits::visits_of(band, tile.block, storage.piece[q.stage]);
      [[maybe_unused]] ListReader<Traits::kIsListed, Traits::kTileN> entries(tile);
      int const head = tile.head / params.heads_per_kv_head;
      // A sequence without keys has no factors either: they count as 1.
      bool const has_keys = !Traits::kIsPacked || keys_of(params, tile) > 0;
      TensorDesc const& descale = of_keys ? params.descale_k : params.descale_v;
      float const* own =
          &factor(descale, tile.batch, head, first_factor_kv(params, tile) + factor_of(visits.block(visits.first())));
      float largest_v = 1.0F;
      if (has_keys) {
        largest_v = largest_factor(params.descale_v, tile.batch, head, first_factor_kv(params, tile),
                                   keys_of(params, tile), lane);
      }
      // What a block's own factor is multiplied by, once V's largest is known.
      float other = 1.0F;
      if (has_keys) {
        other = factor(params.descale_q, tile.batch, tile.head / params.descale_q_group,
                       first_factor_q(params, tile) +
                           cute::min(tile.block * Traits::kTileM + 64 * consumer, queries_of(params, tile) - 1) /
                               Traits::kScaleBlock);
      }
      bool first = true;
      CUTE_NO_UNROLL
      for (int visit = visits.first(); visits.has(visit); visit = visits.next(visit), ++count) {
        auto const k = RingPosition<Traits::kStages>::of(count);
        auto const first_v = RingPosition<Traits::kStagesRaw>::of(kRawStages * count);
        [[maybe_unused]] auto const entry = entries.take(visit);
        auto const block = [&]() __attribute__((always_inline)) {
          if constexpr (Traits::kIsListed) {
            return entry.block_of_visit();
          } else {
            return visits.block(visit);
          }
        };
        if constexpr (Traits::kIsListed) {
          own = &factor(descale, tile.batch, head, factor_of(block()));
        }
        float const factor = has_keys ? *own : 1.0F;
        own -= (factor_of(visits.block(visit)) - factor_of(visits.block(visits.next(visit)))) * descale.stride_row;
        storage.k_empty[k.stage].wait(k.parity ^ 1);
        if (cute::elect_one_sync()) {
          storage.k_full[k.stage].arrive_expect_bytes(Traits::kBytesK);
          load_tile<Traits::kTileN, Traits::kHeadDimQK, Traits::kSlabQK>(
              map_k, storage.k_full[k.stage], kEvictLast, storage.k[k.stage],
              keys_at(tile, rows_apart(params).k, block() * Traits::kTileN, head));
        }
        if (first) {
          first = false;
          largest_v = __uint_as_float(__reduce_max_sync(0xffffffffU, __float_as_uint(largest_v)));
          other = of_keys ? other * params.scale_log2 : 1.0F / largest_v;
          if (cute::elect_one_sync()) {
            storage.largest_v[q.stage] = largest_v;
            storage.tile_empty[q.stage].arrive();
          }
        }
        float const product = factor * other;
        float const ratio_v =
            __shfl_sync(0xffffffffU, params.descale_v.stride_row != 0 ? fmaxf(product, kLeastRatio) : 1.0F, 16);
        if (of_keys) {
          // (The lanes beyond the last consumer's write what that one does.)
          storage.factors[k.stage][consumer] = block_factors(product, ratio_v);
        }
        __syncwarp();
        if (cute::elect_one_sync()) {
          if constexpr (Traits::kIsListed) {
            storage.entry[k.stage] = entry;
          }
          storage.k_full[k.stage].arrive();
          CUTE_UNROLL
          for (int half = 0; half < kRawStages; ++half) {
            auto const v =
                kEarly && half == 0 ? first_v : RingPosition<Traits::kStagesRaw>::of(kRawStages * count + half);
            storage.v_empty[v.stage].wait(v.parity ^ 1);
            storage.v_full[v.stage].arrive_expect_bytes(Traits::kBytesV);
            load_tile<Traits::kKeysRaw, Traits::kHeadDimVO, Traits::kSlabVO>(
                map_v, storage.v_full[v.stage], kEvictLast, storage.v[v.stage],
                keys_at(tile, rows_apart(params).v, block() * Traits::kTileN + half * Traits::kKeysRaw, head));
          }
        }
        __syncwarp();
      }
    });
  }

  CUTE_DEVICE static void prefetch_factor(TensorDesc const& factors, int batch, int head, int block) {
    if (factors.stride_row != 0) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(&factor(factors, batch, head, block)));
    }
  }

  // Warp 1. One lane draws tiles and copies Q. The warp follows the blocks of K and checks those that are checked with
  // its tile (range.hpp). It draws the next tile when the last block but one has come, as in sm90/fwd/load.hpp, or when
  // the first one has.
  CUTE_DEVICE static void queries(Params const& params, CUtensorMap const& map_q, Band const& launch_band,
                                  typename Traits::Scheduler const& scheduler, Storage& storage) {
    bool const launch_late = draws_late<Traits::kTileN>(scheduler.counter, params);
    std::uint32_t drawn = 0;  // tiles
    auto draw = [&]() __attribute__((always_inline)) {
      auto const q = RingPosition<Traits::kBuffersQ>::of(drawn);
      storage.tile_empty[q.stage].wait(q.parity ^ 1);
      if (cute::elect_one_sync()) {
        draw_tile(params, map_q, launch_band, scheduler, storage, q.stage, drawn);
      }
      __syncwarp();
      ++drawn;
    };
    if (cute::elect_one_sync()) {
      storage.segment.left = 0;
    }
    draw();
    Fp8Range<Traits> range_check;
    std::uint32_t count = 0;  // of blocks
    tiles(storage, [&](auto const& tile, auto const& q) {
      typename Traits::TileBand band = Traits::tile_band(params, launch_band, tile);
      bool const late = Traits::kIsPacked || Traits::kIsListed ? draws_late<Traits::kTileN>(tile, params) : launch_late;
      KeyVisits const visits = Traits::visits_of(band, tile.block, storage.piece[q.stage]);
      range_check.enter_tile(params, band, scheduler, tile);
      int const draws_at = late ? visits.last_but_one() : visits.first();
      CUTE_NO_UNROLL
      for (int visit = visits.first(); visits.has(visit); visit = visits.next(visit), ++count) {
        auto const k = RingPosition<Traits::kStages>::of(count);
        storage.k_full[k.stage].wait(k.parity);
        if (!Traits::kShares && visit == draws_at) {
          draw();
        }
        range_check.look_at_keys(storage.k[k.stage], visits.block(visit));
        __syncwarp();  // every lane has read K before one releases it
        if (cute::elect_one_sync()) {
          storage.k_empty[k.stage].arrive();
        }
      }
      range_check.look_at_queries(storage.q_full[q.stage], q.parity, storage.q[q.stage]);
      __syncwarp();
      if (cute::elect_one_sync()) {
        storage.tile_empty[q.stage].arrive();
      }
    });
    range_check.report(params);
  }

  // By a whole warp, once: the scheduler of a packed launch, with a copy of its table where that is small.
  CUTE_DEVICE static PackedScheduler packed_scheduler(Params const& params, Storage& storage) {
    SequenceTable table = params.table;
    if (cute::elect_one_sync()) {
      table = copied_table(table, params.table_bytes, storage);
    }
    table.address = params.table_bytes <= Storage::kTableBytes ? reinterpret_cast<std::uint64_t>(storage.table)
                                                               : params.table.address;
    __syncwarp();
    return hattn::packed_scheduler<Traits>(params, table);
  }

  // By one lane: draws the next tile, names it in buffer `stage` and asks for its Q. `round`: tiles drawn before.
  CUTE_DEVICE static void draw_tile(Params const& params, CUtensorMap const& map_q, Band const& launch_band,
                                    typename Traits::Scheduler const& scheduler, Storage& storage, std::uint32_t stage,
                                    int round) {
    Piece piece;
    typename Traits::TileRecord const tile = Fp8Split<Traits>::next(params, scheduler, round, storage.segment, piece);
    storage.tile[stage] = tile;
    storage.piece[stage] = piece;
    if (tile.valid()) {
      // The tile is still to come. Its first factors are then in L2 when they are asked for.
      typename Traits::TileBand band = Traits::tile_band(params, launch_band, tile);
      KeyVisits const visits = Traits::visits_of(band, tile.block, piece);
      int const head = tile.head / params.heads_per_kv_head;
      prefetch_factor(params.descale_q, tile.batch, tile.head / params.descale_q_group,
                      first_factor_q(params, tile) + tile.block * Traits::kTileM / Traits::kScaleBlock);
      // (A share may have no block. Which block a list begins with is not looked up here.)
      if (!Traits::kIsListed && (!(Traits::kShares || Traits::kIsPacked) ||
                                 (Traits::kShares ? visits.has(visits.first()) : keys_of(params, tile) > 0))) {
        if constexpr (kEarly) {
          prefetch_factor(params.descale_k, tile.batch, head,
                          first_factor_kv(params, tile) + factor_of(visits.block(visits.first())));
          prefetch_factor(params.descale_v, tile.batch, head,
                          first_factor_kv(params, tile) + factor_of(visits.block(visits.first())));
        } else {
          int const block = first_factor_kv(params, tile) + factor_of(visits.block(visits.first()));
          prefetch_factor(params.descale_k, tile.batch, head, block);
          prefetch_factor(params.descale_v, tile.batch, head, block);
        }
      }
      storage.q_full[stage].arrive_expect_bytes(Traits::kBytesQ);
      load_tile<Traits::kTileM, Traits::kHeadDimQK, Traits::kSlabQK>(
          map_q, storage.q_full[stage], kEvictFirst, storage.q[stage],
          queries_at(tile, rows_apart(params).q, tile.block * Traits::kTileM));
    }
    storage.tile_full[stage].arrive();
  }

  // By all threads of the CTA, once: the rows of ones below V^T. Nothing writes over them.
  CUTE_DEVICE static void ones(Storage& storage) {
    constexpr int kWords = 8 * Traits::kTileN / 4;
    for (int i = static_cast<int>(threadIdx.x); i < Traits::kStages * kWords; i += Traits::kThreads) {
      auto* const ones = reinterpret_cast<std::uint32_t*>(storage.vt[i / kWords] + Traits::kTileN * Traits::kHeadDimVO);
      ones[i % kWords] = 0x38383838U;
    }
    fence_proxy_async();
  }

  // Warps 2 and 3 (`transposer` 0 and 1): transpose V. An FP8 product needs both operands with keys side by side.
  //
  // A warp takes 16 keys by 32 columns at a time. Pairs of columns move as 16-bit elements, and a byte permutation
  // separates them. The result has another order than the source:
  // - of each 16 keys: 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, the order in which a lane has its P;
  // - of each 16 columns: the even ones before the odd ones, so that eight rows lie in eight banks.
  //   (epilogue.hpp undoes this order.)
  CUTE_DEVICE static void transpose(Params const& params, Band const& launch_band, Storage& storage, int transposer) {
    constexpr int kRowBytes = Traits::kSlabVO;
    int const lane = static_cast<int>(threadIdx.x) % 32;
    // Where the lane reads of the first 16 keys and 32 columns (a key's row, 16 columns of it), and where it writes: a
    // column's 16 keys. Other columns and keys are those addresses with bits flipped, or an offset away.
    int const key = transposer * 16 + lane % 16;
    std::uint32_t const lane_from = slab_address<kRowBytes>(0, key, lane / 16);
    std::uint32_t const lane_to = slab_address<Traits::kTileN>(0, lane, transposer);
    std::uint32_t count = 0;  // of blocks: fewer registers than two positions
    tiles(storage, [&](auto const& tile, auto const& q) {
      typename Traits::TileBand band = Traits::tile_band(params, launch_band, tile);
      KeyVisits const visits = Traits::visits_of(band, tile.block, storage.piece[q.stage]);
      __syncwarp();
      if (cute::elect_one_sync()) {
        storage.tile_empty[q.stage].arrive();
      }
      CUTE_NO_UNROLL
      for (int left = visits.count(); left > 0; --left) {
        auto const first_v = RingPosition<Traits::kStagesRaw>::of(kRawStages * count);
        auto const vt = RingPosition<Traits::kStages>::of(count);
        CUTE_UNROLL
        for (int half = 0; half < kRawStages; ++half) {
          auto const v =
              kEarly && half == 0 ? first_v : RingPosition<Traits::kStagesRaw>::of(kRawStages * count + half);
          storage.v_full[v.stage].wait(v.parity);
          if (half == 0) {
            storage.vt_empty[vt.stage].wait(vt.parity ^ 1);
          }
          std::uint32_t const from = cute::cast_smem_ptr_to_uint(storage.v[v.stage]) + lane_from;
          std::uint32_t const to = cute::cast_smem_ptr_to_uint(storage.vt[vt.stage]) + lane_to;
          // Loads come before the first of their stores, or their latency would be what a block takes.
          constexpr int kBatch = Traits::kTransposeBatch;
          constexpr int kKeySteps = Traits::kKeysRaw / (16 * Traits::kTransposers);
          constexpr int kColumnSteps = Traits::kHeadDimVO / 32;
          constexpr int kSteps = kColumnSteps * kKeySteps;
          static_assert(kSteps % kBatch == 0);
          auto const columns = [](int step) { return step % kColumnSteps * 32; };
          auto const keys = [](int step) { return step / kColumnSteps * 16 * Traits::kTransposers; };
          CUTE_UNROLL
          for (int step = 0; step < kSteps; step += kBatch) {
            std::uint32_t r[kBatch][4];
            CUTE_UNROLL
            for (int i = 0; i < kBatch; ++i) {
              auto const at = ColumnsOf<kRowBytes>::of_byte(columns(step + i));
              load_transposed(at.template from<Traits::kKeysRaw>(from) + keys(step + i) * kRowBytes, r[i]);
            }
            CUTE_UNROLL
            for (int i = 0; i < kBatch; ++i) {
              store_matrices((to ^ (half * Traits::kKeysRaw + keys(step + i))) + columns(step + i) * Traits::kTileN,
                             __byte_perm(r[i][0], r[i][1], 0x6420), __byte_perm(r[i][0], r[i][1], 0x7531),
                             __byte_perm(r[i][2], r[i][3], 0x6420), __byte_perm(r[i][2], r[i][3], 0x7531));
            }
          }
          fence_proxy_async();
          __syncwarp();
          if (cute::elect_one_sync()) {
            storage.v_empty[v.stage].arrive();
            if (half == kRawStages - 1) {
              storage.vt_full[vt.stage].arrive();
            }
          }
        }
        ++count;
      }
    });
  }
};

}  // namespace hattn::sm90
