// A warp of the forward: both products of each block, and the softmax between them.
//
// For each block a warp computes S = Q K^T of its 32 (or 16) queries, masks it if the block is on an edge,
// exponentiates it to P, and adds P V to O. Everything stays in the warp's registers. The copies of the next blocks run
// meanwhile.
#pragma once

#include "common/alibi.hpp"
#include "common/bias.hpp"
#include "common/dropout.hpp"
#include "common/fragment.hpp"
#include "common/mask.hpp"
#include "common/matrices.hpp"
#include "common/max_logits.hpp"
#include "common/product.hpp"
#include "common/softcap.hpp"
#include "common/visits.hpp"
#include "sm80/fwd/epilogue.hpp"
#include "sm80/fwd/load.hpp"
#include "sm80/fwd/softmax.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct Mma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using Softmax = ExactSoftmax<Traits::kTileN, Traits::kStrips>;
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr bool kIsListed = Traits::kIsListed;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kStrips = Traits::kStrips;
  static constexpr int kStages = Traits::kStages;
  // How many blocks of a tile are compared before any is exponentiated unseen: those of 64 keys. Without a mask it is
  // twice as many: the reference of 64 keys would leave N(0,1) of 512 with 1.055 times the error of a running maximum.
  static constexpr int kFirstBlocks = (kMask == MaskClass::Full ? 128 : 64) / kTileN;
  static constexpr int kStepsQK = Traits::kHeadDimQK / 16;

  CUTE_DEVICE static int lane() { return Traits::thread_index() % 32; }
  // The same for V, from another special register where ptxas spills else: it takes two reads of one special register
  // for one value, and keeps what follows from it. (In the other kernels it spills by this.)
  CUTE_DEVICE static int lane_of_values() {
    if constexpr (kMask == MaskClass::Full ? Traits::kHeadDimQK < 256 : kMask == MaskClass::Causal && kStages == 1) {
      int lane;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
      return lane;
    } else {
      return lane();
    }
  }

  // One step's operand of Q: 16 columns of the warp's rows.
  CUTE_DEVICE static void load_queries(std::uint32_t q, int step, std::uint32_t (&a)[kStrips][4]) {
    CUTE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      load_matrices(Columns::of_step(step).from<kTileM>(q) + strip * (16 * kSlabRowBytes), a[strip]);
    }
  }

  // scores += one step of Q K^T.
  template <class Scores>
  CUTE_DEVICE static void score_step(std::uint32_t (&a)[kStrips][4], std::uint32_t k, int step, Scores& scores) {
    CUTE_UNROLL
    for (int n = 0; n < kTileN / 16; ++n) {
      std::uint32_t b[4];
      load_matrices(Columns::of_step(step).from<kTileN>(k) + n * (16 * kSlabRowBytes), b);
      multiply_step<Element, kStrips, kTileN>(
          [&](int strip) -> auto const& { return a[strip]; }, b, n, scores);
    }
  }

  // output += P V, for 16 keys.
  template <class Output>
  CUTE_DEVICE static void output_step(std::uint32_t (&p)[kStrips][kTileN / 16][4], std::uint32_t v, int key,
                                      Output& output) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kHeadDimVO / 16; ++i) {
      std::uint32_t b[4];
      load_transposed(Columns::of_step(i).from<kTileN>(v) + key * (16 * kSlabRowBytes), b);
      multiply_step<Element, kStrips, Traits::kHeadDimVO>(
          [&](int strip) -> auto const& { return p[strip][key]; }, b, i, output);
    }
  }

  // This warp's first row of a tile.
  CUTE_DEVICE static int first_row(typename Traits::TileRecord const& tile) {
    return tile.block * kTileM + Traits::thread_index() / 32 * Traits::kWarpRows;
  }

  // Whether keys of the last block are missing.
  CUTE_DEVICE static bool has_ragged_end(Band const& band) {
    return band.seqlen_kv % kTileN != 0 || (Traits::kIsPacked && band.seqlen_kv == 0);
  }

  // Tells the compiler that visits are the same in the whole warp, so that the loop's branches do not diverge. It sees
  // that where lengths are constants. Where it does not, and the epilogue has a call, it makes the warp meet again
  // after every branch, and ptxas spills.
  CUTE_DEVICE static KeyVisits in_whole_warp(KeyVisits const& visits) {
    if constexpr (Traits::kIsPacked && kMask == MaskClass::Full && kLooksForInfinity<Traits>) {
      return {visits.begin, __shfl_sync(0xffffffffU, visits.end, 0), visits.free_begin, visits.free_end};
    } else {
      return visits;
    }
  }

  CUTE_DEVICE static KeyVisits visits_of(Band const& band, int m_block) {
    KeyVisits visits = KeyVisits::of<kMask, kTileM, kTileN>(band, m_block);
    if constexpr (Traits::kIsPacked) {
      visits.keep_one();
    }
    return in_whole_warp(visits);
  }

  CUTE_DEVICE static void run(FwdParams const& params, FwdScalars const& scalars,
                              typename Traits::Scheduler const& scheduler, Band const& band, Storage& storage) {
    auto const tile = scheduler.tile(static_cast<int>(blockIdx.x));
    if constexpr (Traits::kIsPacked) {
      if (!tile.valid()) {
        return;
      }
      storage.packed.band.template keep<kMask>(
          band_of_tile(params, tile));  // by every thread the same, as what follows
    }
    KeyVisits visits;
    if constexpr (kIsListed) {
      auto const listed = ListedTile<kTileM, kTileN>::of(params.blocks, tile);
      storage.listed = listed;  // by every thread the same
      visits = listed.visits();
    } else {
      visits = visits_of(band, tile.block);
    }
    storage.tile = tile;  // by every thread the same
    if constexpr (Traits::kIsPacked) {
      storage.packed.visits = visits;
    }
    KeyVisits own = visits;  // those that this warp's rows need
    if constexpr (kMask != MaskClass::Full && !kIsListed) {
      own = KeyVisits::of_rows<kMask, Traits::kWarpRows, kTileN>(band, first_row(tile) / Traits::kWarpRows, visits);
      storage.own[Traits::thread_index() / 32] = own;
    }
    if (__builtin_expect(has_alibi(params), false)) {
      storage.slope = alibi_slope(params.alibi, tile.batch, tile.head, scalars.scale_log2);
    }
    if (__builtin_expect(wants_max_logits(params), false)) {
      storage.largest[Traits::thread_index() / 32].clear();
    }
    Load<Traits> const load(params, scalars, storage, tile);
    load.first(tile, visits);

    // This lane's first address in Q, K and V, worked out where it is needed: the compiler is not to see through it, or
    // the addresses of all steps would be made before the loop and take registers in it.
    // (`first`: the tile's first visit.)
    auto q_lane = [&](int first) {
      return Traits::queries_at(storage, first) + lane_offset_down(lane()) +
             Traits::thread_index() / 32 * (Traits::kWarpRows * kSlabRowBytes);
    };
    auto k_lane = [&](int visit) {
      return cute::cast_smem_ptr_to_uint(&storage) + lane_offset_along(lane()) + Traits::keys_from_begin(visit);
    };
    auto v_lane = [&](int visit) { return Traits::values_at(storage, visit) + lane_offset_down(lane_of_values()); };

    Fragment<float, kTileN / 2, kStrips> scores{};
    Fragment<float, Traits::kHeadDimVO / 2, kStrips> output{};
    // P as operand of the second product: for 16-bit types the accumulator's order is the operand's.
    std::uint32_t p[kStrips][kTileN / 16][4];
    // Before the ways through the softmax meet again: there the second product begins, whose first operands need the
    // registers that the scores had.
    auto make_p = [&]() {
      CUTE_UNROLL
      for (int i = 0; i < scores.size() / 2; ++i) {
        int const at = i % (kTileN / 4);
        p[i / (kTileN / 4)][at / 4][at % 4] = pack_pair<Element>(scores(2 * i), scores(2 * i + 1));
      }
    };
    std::uint32_t queries[Traits::kQueriesInRegisters ? kStepsQK : 1][kStrips][4];
    Softmax softmax;
    softmax.clear();
    Limits<kStrips> limits{};

    auto rescale_output = [&](float const(&rescale)[Softmax::kRows]) {
      CUTE_UNROLL
      for (int i = 0; i < output.size(); ++i) {
        output(i) *= rescale[i / (Traits::kHeadDimVO / 2) * 2 + i / 2 % 2];
      }
    };

    auto keep_queries = [&](int first) {
      std::uint32_t const q = q_lane(first);
      CUTE_UNROLL
      for (int step = 0; step < kStepsQK; ++step) {
        load_queries(q, step, queries[Traits::kQueriesInRegisters ? step : 0]);
      }
    };
    if constexpr (Traits::kQueriesInStage) {
      // Before the loop's first barrier, after which the other stage is copied over Q.
      await_copies<1>();
      __syncthreads();
      keep_queries(visits.first());
    }

    // Copies of a block are waited for before a barrier, and what they overwrite has been read before it. With two
    // stages there is one barrier a block, for both operands of the next one. With one stage, the next K is copied
    // after the softmax, which may compute the scores again, and V after the product of the block before.
    bool begins = true;
    CUTE_NO_UNROLL
    for (int visit = visits.first(); visits.has(visit); visit = visits.next(visit)) {
      // (The same. ptxas spills in some kernels with either.)
      constexpr bool kCounts =
          kMask == MaskClass::Window || (kMask == MaskClass::Causal && Traits::kIsPacked && Traits::kRegistersShort);
      bool const first = kCounts ? begins : visits.is_first(visit);
      int const next = visits.next(visit);
      if (kStages == 1 && first) {
        await_copies<1>();
      } else {
        await_copies<0>();
      }
      __syncthreads();
      if constexpr (Traits::kIsPacked && Traits::kRegistersShort) {
        visits = in_whole_warp(storage.packed.visits);
      }
      if (kStages == 1 && !first) {
        load.next_values(visits, visit);
        commit_copies();
      }
      if (kStages == 2 && visits.has(next)) {
        load.next_keys(visits, next);
        load.next_values(visits, next);
        commit_copies();
      }
      if (Traits::kQueriesInRegisters && !Traits::kQueriesInStage && first) {
        keep_queries(visit);
      }

      if constexpr (kMask != MaskClass::Full && !kIsListed && Traits::kRegistersShort) {
        // (The same number. ptxas spills in some kernels with either.)
        int const thread = Traits::thread_index();
        own = storage.own[kMask == MaskClass::Window ? thread / 32 : static_cast<unsigned>(thread) / 32];
      }
      bool const needed = kMask == MaskClass::Full || kIsListed || own.contains(visit);
      // A warp's first block is on the diagonal or is the ragged last one, but for a full mask.
      bool const masked = kMask == MaskClass::Full ? first && has_ragged_end(band)
                          : kIsListed              ? own.on_edge(visit)
                                                   : own.is_first(visit) || own.on_edge(visit);
      if (needed) {
        std::uint32_t const q = q_lane(visit);
        std::uint32_t const k = k_lane(visit);
        clear(scores);
        CUTE_UNROLL
        for (int step = 0; step < kStepsQK; ++step) {
          if constexpr (Traits::kQueriesInRegisters) {
            score_step(queries[step], k, step, scores);
          } else {
            load_queries(q, step, queries[0]);
            score_step(queries[0], k, step, scores);
          }
        }
        // The softmax has what cap and ALiBi make of the products in their place.
        auto const own_row = [&]() { return first_row(storage.tile) + Traits::thread_index() % 32 / 4; };
        auto modify = [&]() {
          if (__builtin_expect(scalars.softcap.caps(), false)) {
            cap_any<8>(scores, scalars.softcap.factor_anew());
          }
          if (__builtin_expect(has_alibi(params), false)) {
            int const distance = own_row() + diagonal_of(params, band) - load.block_of(visits, visit) * kTileN -
                                 Traits::thread_index() % 4 * 2;
            CUTE_UNROLL
            for (int strip = 0; strip < kStrips; ++strip) {
              auto& strip_scores = scores.strip(strip);
              add_alibi<kTileN>(strip_scores, storage.slope, distance + 16 * strip);
            }
          }
          if constexpr (Traits::kAddsBias) {
            if (has_bias(params)) {
              CUTE_UNROLL
              for (int strip = 0; strip < kStrips; ++strip) {
                add_bias<true, kTileN, Traits::kBiasAtATime>(
                    scores.strip(strip), scalars.scale_log2,
                    [&]() { return BiasOfHead::of(params, storage.tile.batch, storage.tile.head); },
                    own_row() + 16 * strip, band.seqlen_q, load.block_of(visits, visit) * kTileN,
                    Traits::thread_index() % 4, band.seqlen_kv);
              }
            }
          }
        };
        // Makes the dropped ones of the weights 0.
        auto drop = [&]() {
          if constexpr (Traits::kDrops) {
            if (has_dropout(params)) {
              CUTE_UNROLL
              for (int strip = 0; strip < kStrips; ++strip) {
                auto of_strip = [&](int pair) -> std::uint32_t& { return p[strip][pair / 4][pair % 4]; };
                drop_weights<kTileN>(
                    of_strip,
                    DropoutOfHead::of(params.dropout, storage.tile.batch * params.heads_q + storage.tile.head),
                    params.dropout.dropped, own_row() + 16 * strip, load.block_of(visits, visit) * kTileN,
                    Traits::thread_index() % 4);
              }
            }
          }
        };
        modify();
        // What brings scores to powers of two. (A bias has done it.)
        auto scale_of_scores = [&]() { return Traits::kAddsBias && has_bias(params) ? 1.0F : scalars.scale_log2; };
        // Behind the mask.
        auto see_largest = [&]() {
          if (__builtin_expect(wants_max_logits(params), false)) {
            CUTE_UNROLL
            for (int strip = 0; strip < kStrips; ++strip) {
              auto& strip_scores = scores.strip(strip);
              see_scores<kTileN>(
                  strip_scores, scale_of_scores(), [&]() { return own_row() + 16 * strip; }, band.seqlen_q,
                  storage.largest[Traits::thread_index() / 32]);
            }
          }
        };
        auto recompute = [&]() {
          if constexpr (Traits::kQueriesInStage) {
            std::uint32_t const k_again = k_lane(visit);
            clear(scores);
            CUTE_UNROLL
            for (int step = 0; step < kStepsQK; ++step) {
              score_step(queries[step], k_again, step, scores);
            }
          } else {
            std::uint32_t const q_again = q_lane(visit);
            std::uint32_t const k_again = k_lane(visit);
            clear(scores);
            CUTE_NO_UNROLL
            for (int step = 0; step < kStepsQK; ++step) {
              std::uint32_t again[kStrips][4];
              load_queries(q_again, step, again);
              score_step(again, k_again, step, scores);
            }
          }
          modify();
        };
        // P is packed on each of the ways through the softmax. Where they met before that, ptxas moved 50 registers.
        bool starts =
            kIsListed ? begins : own.is_first(visit);  // (The same. ptxas spills with either in some kernels.)
        if constexpr (kFirstBlocks > 1) {
          starts = (kMask == MaskClass::Full ? visits : own).end - visit <= kFirstBlocks;
        }
        bool compares = masked || starts || limits.none();
        if (__builtin_expect(has_alibi(params), false)) {
          // (The blocks of a list come in any order: each is compared.)
          compares = compares || kIsListed ||
                     visits.block(visit) >
                         first_unseen_block<kTileN>(storage.slope, first_row(storage.tile), diagonal_of(params, band));
        }
        // (With a mask some kernels would spill. At head dim 64 it gains nothing.)
        constexpr bool kLooks = kMask == MaskClass::Full && Traits::kHeadDimQK > 64;
        // Nothing says what the bias of a block is.
        if (Traits::kAddsBias || compares) {
          if (masked) {
            int const row = own_row();
            int const column = Traits::thread_index() % 4 * 2;
            CUTE_UNROLL
            for (int strip = 0; strip < kStrips; ++strip) {
              auto& strip_scores = scores.strip(strip);
              if constexpr (kIsListed) {
                KeptBits<kTileN / 32> const kept[2] = {storage.listed.kept(visit, band, row + 16 * strip),
                                                       storage.listed.kept(visit, band, row + 16 * strip + 8)};
                hide_scores(strip_scores, kept, column, -INFINITY);
              } else {
                apply_mask<kMask, kTileN>(strip_scores, band, row + 16 * strip, column, visits.block(visit));
              }
            }
          }
          see_largest();
          bool const far = softmax.template compared_block<kLooks>(scores, scale_of_scores(), rescale_output);
          make_p();
          if (Traits::kAddsBias) {
            // It needs no limits.
          } else if (far) {
            limits = Softmax::no_limits();
          } else if (starts) {
            int const row = own_row();
            limits = softmax.first_limits(
                [&](int strip) {
                  if constexpr (kIsListed) {
                    auto const keys = [&](int r) {
                      return cute::max(1, storage.listed.kept(visit, band, row + 16 * strip + 8 * r).count());
                    };
                    return KeysOfRows{{keys(0), keys(1)}};
                  } else {
                    return keys_before_edge<kMask, kTileN>(band, row + 16 * strip, visits.block(visit));
                  }
                },
                kFirstBlocks);
          } else if (visit % Softmax::kComparedBlocks == 0) {
            limits = softmax.later_limits();
          }
        } else if constexpr (!Traits::kAddsBias) {
          see_largest();
          float sums[Softmax::kRows];
          softmax.unseen_block(scores, scalars.scale_log2, sums);
          if (limits.reached(sums)) {
            if (softmax.lost(sums)) {
              recompute();
              if (softmax.template compared_block<kLooks>(scores, scalars.scale_log2, rescale_output)) {
                limits = Softmax::no_limits();
              }
              make_p();
            } else {
              float factors[Softmax::kRows];
              softmax.move_rows(scores, sums, factors);
              limits = softmax.limits_after_stop(visit);
              rescale_output(factors);
              make_p();
            }
          } else {
            softmax.add(sums);
            make_p();
          }
        }
        drop();
      }

      if constexpr (kStages == 1) {
        await_copies<0>();
        __syncthreads();
        if (visits.has(next)) {
          load.next_keys(visits, next);
          commit_copies();
        }
      }
      if (needed) {
        std::uint32_t const v = v_lane(visit);
        CUTE_UNROLL
        for (int key = 0; key < kTileN / 16; ++key) {
          output_step(p, v, key, output);
        }
      }
      begins = false;
    }
    if (__builtin_expect(wants_max_logits(params), false)) {
      finish_max_logit(params, storage.tile.head, storage.largest[Traits::thread_index() / 32]);
    }
    Epilogue<Traits>::run(params, scalars, band, storage.tile, first_row(storage.tile), softmax, output);
  }
};

}  // namespace hattn::sm80
