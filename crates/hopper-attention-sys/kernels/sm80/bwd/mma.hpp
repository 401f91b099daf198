// A warp of the backward (Dao 2023, FlashAttention-2, algorithm 2, with keys outside and queries inside).
//
//     P = exp(S - LSE)    dV += P^T dO    dP = dO V^T    dS = P o (dP - delta)    dK += dS^T Q    dQ += dS K
//
// The two warps of a pair have the same keys. One computes S, P and dV, the other dP, dS and dK, by the same
// instructions on other operands. Scores are transposed, so that P and dS are operands as they lie in registers.
//
// The second warp reads P from where it then writes dS in shared memory. At head dim 128 this P is f32: there is room
// for 32 queries of it, so that a block of 64 is handed over in two parts of the keys (kParts in traits.hpp). At head
// dim 64 it is rounded as dV has it: where a row's weights are alike, they round alike, and dQ and dK get a factor of
// up to 1 + 2^-8 (bf16). P is lifted where the operands are f16 (kLift).
#pragma once

#include <cfloat>

#include "common/alibi.hpp"
#include "common/barrier.hpp"
#include "common/bias.hpp"
#include "common/dropout.hpp"
#include "common/fragment.hpp"
#include "common/leak_bwd.hpp"
#include "common/mask.hpp"
#include "common/matrices.hpp"
#include "common/memory.hpp"
#include "common/product.hpp"
#include "common/scalars.hpp"
#include "common/softcap.hpp"
#include "common/softmax.hpp"
#include "common/visits.hpp"
#include "sm80/bwd/load.hpp"
#include "sm80/bwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
struct BwdMma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using Load = BwdLoad<Traits>;
  using Scalars = typename Traits::Scalars;
  using TileRecord = typename Traits::TileRecord;
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr bool kIsListed = Traits::kIsListed;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDimQK;
  static constexpr int kStrips = Traits::kStrips;
  static constexpr int kChunk = Traits::kChunk;
  static constexpr int kStripsOfPart = kStrips / Traits::kParts;

  // scores = X Y^T, of the warp's keys of K or V and a chunk of Q or dO.
  template <class Scores>
  CUTE_DEVICE static void make_scores(std::uint32_t x, std::uint32_t y, Scores& scores) {
    clear(scores);
    CUTE_UNROLL
    for (int step = 0; step < kHeadDim / 16; ++step) {
      std::uint32_t a[kStrips][4];
      CUTE_UNROLL
      for (int strip = 0; strip < kStrips; ++strip) {
        load_matrices(Columns::of_step(step).from<kTileN>(x) + strip * (16 * kSlabRowBytes), a[strip]);
      }
      CUTE_UNROLL
      for (int n = 0; n < kChunk / 16; ++n) {
        std::uint32_t b[4];
        load_matrices(Columns::of_step(step).from<kTileM>(y) + n * (16 * kSlabRowBytes), b);
        multiply_step<Element, kStrips, kChunk>(
            [&](int strip) -> auto const& { return a[strip]; }, b, n, scores);
      }
    }
  }

  // gradient += F Z, of P^T or dS^T and a chunk of dO or Q.
  template <class Gradient>
  CUTE_DEVICE static void add_product(std::uint32_t (&f)[kStrips][kChunk / 16][4], std::uint32_t z,
                                      Gradient& gradient) {
    CUTE_UNROLL
    for (int step = 0; step < kChunk / 16; ++step) {
      CUTE_UNROLL
      for (int i = 0; i < kHeadDim / 16; ++i) {
        std::uint32_t b[4];
        load_transposed(Columns::of_step(i).from<kTileM>(z) + step * (16 * kSlabRowBytes), b);
        multiply_step<Element, kStrips, kHeadDim>(
            [&](int strip) -> auto const& { return f[strip][step]; }, b, i, gradient);
      }
    }
  }

  // Which warp of a pair a thread is in, and of which pair. Under a causal mask the two have different quarters of the
  // multiprocessor, so that what it hides is work that every quarter is spared.
  CUTE_DEVICE static bool makes_p(int thread) { return thread / 32 < Traits::kPairs; }
  CUTE_DEVICE static int pair_of(int thread) {
    int const warp = thread / 32;
    int const away = kMask == MaskClass::Causal ? Traits::kPairs / 2 : 0;
    return (warp < Traits::kPairs ? warp : warp + away) % Traits::kPairs;
  }

  // dQ of a block, from all keys of the tile: the warp's queries and columns. Ordered: it is added after dQ of the
  // tiles before.
  CUTE_DEVICE static void add_queries(BwdParams const& params, BwdScalars const& scalars, Storage& storage, int stage,
                                      int block) {
    int const thread = Traits::thread_index();
    int const lane = thread % 32;
    int const query = thread / 32 % Traits::kWarpsQueries * 32;
    int const column = thread / 32 / Traits::kWarpsQueries * Traits::kColumnsQ;
    std::uint32_t const d_s =
        (cute::cast_smem_ptr_to_uint(storage.d_s[stage]) + lane_offset_along(lane) ^ query % kSlabColumns * 2) +
        query / kSlabColumns * (kTileN * kSlabRowBytes);
    std::uint32_t const k =
        (cute::cast_smem_ptr_to_uint(storage.k) + lane_offset_down(lane) ^ column % kSlabColumns * 2) +
        column / kSlabColumns * (kTileN * kSlabRowBytes);
    Fragment<float, Traits::kValuesQ> d_q;
    clear(d_q);
    CUTE_UNROLL
    for (int step = 0; step < kTileN / 16; ++step) {
      std::uint32_t a[2][4];
      load_transposed(d_s + step * 16 * kSlabRowBytes, a[0]);
      load_transposed((d_s ^ 32) + step * 16 * kSlabRowBytes, a[1]);
      CUTE_UNROLL
      for (int i = 0; i < Traits::kColumnsQ / 16; ++i) {
        std::uint32_t b[4];
        load_transposed((k ^ i * 32) + step * 16 * kSlabRowBytes, b);
        multiply_step<Element, 2, Traits::kValuesQ>(
            [&](int strip) -> auto const& { return a[strip]; }, b, i, d_q);
      }
    }
    if (scalars.ordered) {
      int warps_before = storage.tile.block * Traits::kWarps;
      if constexpr (kIsListed) {
        warps_before = ListedSteps<Traits>::tiles_before(storage.staged, storage.tile.block, stage) * Traits::kWarps;
      }
      while (load_acquire(scalars.progress + block) < warps_before) {
      }
    }
    float* const sums = scalars.sums + static_cast<std::int64_t>(block) * Traits::kElementsQ +
                        Traits::ThreadSums::offset(Traits::thread_index());
    CUTE_UNROLL
    for (int i = 0; i < Traits::kValuesQ; ++i) {
      asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(sums + 32 * i), "f"(d_q(i)) : "memory");
    }
    if (scalars.ordered) {
      __syncwarp();  // after it the release is of what all lanes have added
      if (lane == 0) {
        add_release(scalars.progress + block, 1);
      }
    }
  }

  // One chunk of a block: adds its products to dV or dK.
  template <class Gradient>
  CUTE_DEVICE static void add_chunk(BwdParams const& params, BwdScalars const& scalars, Band const& band,
                                    Storage& storage, int stage, int m_block, int chunk, Gradient& gradient) {
    int const lane = Traits::thread_index() % 32;
    // Where this lane has P, or dS, of its first key and queries.
    std::uint32_t const place = cute::cast_smem_ptr_to_uint(storage.d_s[stage]) +
                                (pair_of(Traits::thread_index()) * Traits::kKeys + lane / 4) * kSlabRowBytes +
                                lane / 4 * 16 + lane % 4 * 4;
    auto const at = [&](int strip, int i, int r) {
      int const column = chunk * kChunk + i * 8;
      return (place ^ column % kSlabColumns * 2) +
             (column / kSlabColumns * kTileN + strip * 16 + r * 8) * kSlabRowBytes;
    };
    if constexpr (Traits::kSkipsHidden) {
      if (is_hidden<kMask, kChunk, Traits::kKeys>(
              band, m_block * Traits::kChunks + chunk,
              storage.tile.block * Traits::kPairs + pair_of(Traits::thread_index()))) {
        if (!makes_p(Traits::thread_index())) {
          CUTE_UNROLL
          for (int i = 0; i < kChunk / 8; ++i) {
            CUTE_UNROLL
            for (int row = 0; row < 2 * kStrips; ++row) {
              store_word(at(row / 2, i, row % 2), 0);
            }
          }
        }
        return;
      }
    }

    Fragment<float, kChunk / 2, kStrips> scores{};
    {
      std::uint32_t const x = cute::cast_smem_ptr_to_uint(makes_p(Traits::thread_index()) ? storage.k : storage.v);
      std::uint32_t const y =
          cute::cast_smem_ptr_to_uint(makes_p(Traits::thread_index()) ? storage.q[stage] : storage.d_o[stage]);
      make_scores(x + lane_offset_down(lane) + pair_of(Traits::thread_index()) * (Traits::kKeys * kSlabRowBytes),
                  y + lane_offset_along(lane) + chunk * (kChunk * kSlabRowBytes), scores);
    }
    std::uint32_t operand[kStrips][kChunk / 16][4];
    auto const word = [&](int strip, int i, int r) -> std::uint32_t& { return operand[strip][i / 2][i % 2 * 2 + r]; };
    auto const statistics = [&](int i) {
      return *reinterpret_cast<float4 const*>(&storage.statistics[stage][chunk * kChunk + i * 8 + lane % 4 * 2]);
    };
    // `do_each(strip, i, statistics)` for a part: its strips of keys, and each 8 queries.
    auto const for_part = [&](int part, auto const& do_each) __attribute__((always_inline)) {
      CUTE_UNROLL
      for (int i = 0; i < kChunk / 8; ++i) {
        float4 const s = statistics(i);
        CUTE_UNROLL
        for (int strip = 0; strip < kStripsOfPart; ++strip) {
          do_each(part * kStripsOfPart + strip, i, s);
        }
      }
    };
    // Where the lane has P of a strip of keys and 8 queries in f32: in the rows of the pair's keys. A lane reads what
    // the same lane of the other warp wrote, so that any order will do.
    std::uint32_t const weights = cute::cast_smem_ptr_to_uint(storage.d_s[stage]) +
                                  pair_of(Traits::thread_index()) * (Traits::kKeys * kSlabRowBytes) + lane * 16;
    auto const weights_at = [&](int strip, int i) {
      return weights + (strip % kStripsOfPart * (kChunk / 8) + i) * 512;
    };
    // `kept(at, strip, bits)` for the place of each pair of neighbouring queries, and the bits of those that stay.
    [[maybe_unused]] auto const see_drops = [&](auto const& kept) {
      if constexpr (Traits::kDrops) {
        if (has_dropout(params)) {
          int const m_chunk = storage.visits.block(storage.visit[stage]) * Traits::kChunks + chunk;
          int const first_key = (storage.tile.block * Traits::kPairs + pair_of(Traits::thread_index())) * Traits::kKeys;
          CUTE_UNROLL
          for (int strip = 0; strip < kStrips; ++strip) {
            see_kept<kChunk>(
                DropoutOfHead::of(params.dropout, storage.tile.batch * params.heads_q + storage.head[stage]),
                params.dropout.dropped, first_key + 16 * strip + lane / 4, m_chunk * kChunk, lane % 4,
                [&](int at, std::uint32_t bits) { kept(at, strip, bits); });
          }
        }
      }
    };
    // The pair's barriers, from here on: the first and the second part are written, and the first is read; or the chunk
    // is written.
    int const barrier =
        1 + Traits::kBarriersOfPair * pair_of(Traits::thread_index()) + (Traits::kHandsF32 ? 0 : chunk % 2);
    if (makes_p(Traits::thread_index())) {
      bool const reads_anew = Traits::kRegistersShort && Traits::kIsPacked;
      int const block = reads_anew ? storage.visits.block(storage.visit[stage]) : m_block;
      int const m_chunk = block * Traits::kChunks + chunk;
      int const n_pair = storage.tile.block * Traits::kPairs + pair_of(Traits::thread_index());
      // A masked score is finite where scores are capped: -inf may be a score then, whose P is not 0.
      constexpr float kMasked = -FLT_MAX;
      bool const capped = scalars.softcap.caps();
      float const masked = capped ? kMasked : -INFINITY;
      // Past the last query of a packed sequence -LSE is 0, and a bias above 0 would make P infinite.
      auto const hide_past_queries = [&]() __attribute__((always_inline)) {
        if (Traits::kIsPacked && (m_chunk + 1) * kChunk > band.seqlen_q) {
          CUTE_UNROLL
          for (int strip = 0; strip < kStrips; ++strip) {
            auto& strip_scores = scores.strip(strip);
            hide_queries(strip_scores, band.seqlen_q - m_chunk * kChunk - lane % 4 * 2, masked);
          }
        }
      };
      // (A problem with both a cap and ALiBi never comes here: the plan refuses it. There are no registers for both.)
      if (__builtin_expect(has_alibi(params), false)) {
        float const slope = alibi_slope(params.alibi, storage.tile.batch, storage.head[stage], scalars.scale_log2);
        // How far the lane's first key is behind the diagonal of its first query.
        int const distance =
            n_pair * Traits::kKeys + lane / 4 - m_chunk * kChunk - lane % 4 * 2 - diagonal_of(params, band);
        CUTE_UNROLL
        for (int strip = 0; strip < kStrips; ++strip) {
          auto& strip_scores = scores.strip(strip);
          add_alibi<kChunk>(strip_scores, slope, distance + 16 * strip);
        }
        hide_past_queries();
      }
      // (Nor is there ever a cap beside a bias.)
      if constexpr (Traits::kAddsBias) {
        int const seqlen_q = Traits::kIsPacked ? band.seqlen_q : scalars.seqlen_q;
        int const seqlen_kv = Traits::kIsPacked ? band.seqlen_kv : scalars.seqlen_kv;
        // (A packed sequence may have no queries, and no biases then.)
        if (has_bias(params) && (!Traits::kIsPacked || seqlen_q > 0)) {
          CUTE_UNROLL
          for (int strip = 0; strip < kStrips; ++strip) {
            add_bias_transposed<kChunk, Traits::kBiasAtATime>(
                scores.strip(strip), scalars.scale_log2,
                [&]() { return BiasOfHead::of(params, storage.tile.batch, storage.head[stage]); },
                n_pair * Traits::kKeys + 16 * strip + lane / 4, seqlen_kv, m_chunk * kChunk + lane % 4 * 2, seqlen_q,
                masked);
          }
          hide_past_queries();
        }
      }
      if constexpr (kIsListed) {
        ListedStep const step = storage.staged.step[stage];
        if (step.marks != 0) {
          CUTE_UNROLL
          for (int strip = 0; strip < kStrips; ++strip) {
            hide_listed<kTileM, kChunk>(scores.strip(strip), step, chunk, band, storage.tile.block * kTileN,
                                        pair_of(Traits::thread_index()) * Traits::kKeys + 16 * strip + lane / 4,
                                        lane % 4 * 2, masked);
          }
        }
      } else if (!is_free<kMask, kChunk, Traits::kKeys>(band, m_chunk, n_pair)) {
        CUTE_UNROLL
        for (int strip = 0; strip < kStrips; ++strip) {
          auto& strip_scores = scores.strip(strip);
          apply_mask_transposed<kMask, kChunk>(strip_scores, band, n_pair * Traits::kKeys + strip * 16 + lane / 4,
                                               m_chunk * kChunk + lane % 4 * 2, masked);
        }
      }
      // P of a part goes to the operand of dV, and what the second warp makes dS of stays in place of the scores.
      bool const far = __builtin_expect(capped, false);
      auto const make_part = [&](int part, auto const& hand_over) __attribute__((always_inline)) {
        if (far) {
          // P (1 - t^2) in place of P. (All scores in the far form: some kernels have no registers for both.)
          float const factor = scalars.softcap.factor_anew();
          for_part(
              part, [&](int strip, int i, float4 const& s) __attribute__((always_inline)) {
                CUTE_UNROLL
                for (int r = 0; r < 2; ++r) {
                  float p[2];
                  CUTE_UNROLL
                  for (int c = 0; c < 2; ++c) {
                    float& score = scores(4 * i + 2 * r + c, strip);
                    CappedScore const of_score = CappedScore::far(score * factor);
                    p[c] = exp2_approx(fmaf(of_score.t, scalars.scale_log2, c == 0 ? s.x : s.z));
                    p[c] = score == kMasked ? 0.0F : p[c];
                    score = p[c] * of_score.slope;
                  }
                  word(strip, i, r) = pack_pair<Element>(p[0], p[1]);
                }
                hand_over(strip, i);
              });
          return;
        }
        // (A bias has brought scores to powers of two. Beside an LSE as far from 0 as a bias may be, the lift is lost:
        // it is taken off and added again.)
        float const scale_log2 = Traits::kAddsBias && has_bias(params) ? 1.0F : scalars.scale_log2;
        auto const weight = [&](float score, float minus_lse) {
          if constexpr (Traits::kAddsBias && Traits::kLift > 0) {
            return exp2_approx(fmaf(score, scale_log2, minus_lse - Traits::kLift) + Traits::kLift);
          } else {
            return exp2_approx(fmaf(score, scale_log2, minus_lse));
          }
        };
        for_part(
            part, [&](int strip, int i, float4 const& s) __attribute__((always_inline)) {
              CUTE_UNROLL
              for (int r = 0; r < 2; ++r) {
                float& first = scores(4 * i + 2 * r, strip);
                float& second = scores(4 * i + 2 * r + 1, strip);
                first = weight(first, s.x);
                second = weight(second, s.z);
                word(strip, i, r) = pack_pair<Element>(first, second);
              }
              hand_over(strip, i);
            });
      };
      if constexpr (Traits::kHandsF32) {
        CUTE_UNROLL
        for (int part = 0; part < Traits::kParts; ++part) {
          make_part(part, [](int, int) {});
          if (part > 0) {
            named_barrier_sync(barrier + 2, 64);
          }
          for_part(
              part, [&](int strip, int i, float4 const&) __attribute__((always_inline)) {
                auto const p = [&](int at) { return scores(4 * i + at, strip); };
                store_weights(weights_at(strip, i), {p(0), p(1), p(2), p(3)});
              });
          named_barrier_arrive(barrier + part, 64);
        }
      } else {
        // Stored as they are made: kernels spill that store them after all are made.
        make_part(
            0, [&](int strip, int i) __attribute__((always_inline)) {
              auto const p = [&](int at) { return scores(4 * i + at, strip); };
              store_word(at(strip, i, 0), pack_pair<Element>(p(0), p(1)));
              store_word(at(strip, i, 1), pack_pair<Element>(p(2), p(3)));
            });
        named_barrier_arrive(barrier, 64);
      }
      // The second warp has got all weights: delta is of dropped ones, too.
      see_drops([&](int at_pair, int strip, std::uint32_t bits) { word(strip, at_pair / 2, at_pair % 2) &= bits; });
    } else {
      // dP of a dropped weight counts as 0.
      see_drops([&](int at_pair, int strip, std::uint32_t bits) {
        float& first = scores(2 * at_pair, strip);
        float& second = scores(2 * at_pair + 1, strip);
        first = (bits & 1) != 0 ? first : 0.0F;
        second = (bits >> 16 & 1) != 0 ? second : 0.0F;
      });
      [[maybe_unused]] float const factor = Traits::kDrops ? dropout_factor(params) : 1.0F;
      auto const d_s_pair = [&](int strip, int i, int r, float4 const& s, float2 const& p) {
        float const first = fmaf(scores(4 * i + 2 * r, strip), Traits::kDrop, s.y) * p.x;
        float const second = fmaf(scores(4 * i + 2 * r + 1, strip), Traits::kDrop, s.w) * p.y;
        return Traits::kDrops ? pack_pair<Element>(first * factor, second * factor) : pack_pair<Element>(first, second);
      };
      if constexpr (Traits::kHandsF32) {
        CUTE_UNROLL
        for (int part = 0; part < Traits::kParts; ++part) {
          named_barrier_sync(barrier + part, 64);
          for_part(
              part, [&](int strip, int i, float4 const& s) __attribute__((always_inline)) {
                float4 const p = load_weights(weights_at(strip, i));
                word(strip, i, 0) = d_s_pair(strip, i, 0, s, {p.x, p.y});
                word(strip, i, 1) = d_s_pair(strip, i, 1, s, {p.z, p.w});
              });
          if (part + 1 < Traits::kParts) {
            named_barrier_arrive(barrier + 2, 64);
          }
        }
        __syncwarp();  // dS overwrites P that other lanes read
        CUTE_UNROLL
        for (int i = 0; i < kChunk / 8; ++i) {
          CUTE_UNROLL
          for (int row = 0; row < 2 * kStrips; ++row) {
            store_word(at(row / 2, i, row % 2), word(row / 2, i, row % 2));
          }
        }
      } else {
        named_barrier_sync(barrier, 64);
        for_part(
            0, [&](int strip, int i, float4 const& s) __attribute__((always_inline)) {
              CUTE_UNROLL
              for (int r = 0; r < 2; ++r) {
                word(strip, i, r) = d_s_pair(strip, i, r, s, unpack_pair<Element>(load_word(at(strip, i, r))));
                store_word(at(strip, i, r), word(strip, i, r));
              }
            });
      }
    }
    std::uint32_t const z =
        cute::cast_smem_ptr_to_uint(makes_p(Traits::thread_index()) ? storage.d_o[stage] : storage.q[stage]);
    add_product(operand, z + lane_offset_down(Traits::thread_index() % 32) + chunk * (kChunk * kSlabRowBytes),
                gradient);
  }

  // The block of sums of dQ that a block of queries has in a head.
  CUTE_DEVICE static int block_of_sums(Scalars const& scalars, TileRecord const& tile, int head, int m_block) {
    if constexpr (Traits::kIsPacked) {
      return head * scalars.sum_blocks + tile.first_block + m_block;
    } else {
      return (tile.batch * scalars.heads_q + head) * scalars.m_blocks + m_block;
    }
  }

  // dK and dV of a tile that no query sees, since its sequence has none.
  CUTE_DEVICE static void clear_gradients(BwdParams const& params, TileRecord const& tile) {
    auto const clear_rows = [&](TensorDesc const& tensor, int head_dim) {
      int const chunks = head_dim / 8;
      int const rows = cute::min(int{kTileN}, tile.kv_len - tile.block * kTileN);
      std::uint64_t const first = keys_address(tensor, tile, tile.head);
      for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += Traits::kThreads) {
        std::int64_t const at = (tile.block * kTileN + i / chunks) * tensor.stride_row + i % chunks * 8;
        *reinterpret_cast<uint4*>(first + 2 * at) = uint4{0, 0, 0, 0};
      }
    };
    clear_rows(params.d_k, params.head_dim_qk);
    clear_rows(params.d_v, params.head_dim_vo);
  }

  // With lists, a visit is the number of the block itself (QueryVisits::block).
  CUTE_DEVICE static QueryVisits visits_of(Band const& band, int n_block, bool ordered) {
    if constexpr (kIsListed) {
      return {0, 0, 0};
    } else {
      return QueryVisits::of<kMask, kTileM, kTileN>(band, n_block, ordered);
    }
  }

  CUTE_DEVICE static void run(BwdParams const& params, Scalars const& scalars, TileRecord const& tile, Band const& band,
                              Storage& storage) {
    QueryVisits const visits = visits_of(band, tile.block, scalars.ordered);
    storage.tile = tile;  // by every thread the same, as what follows
    storage.visits = visits;
    int visit = visits.first();
    int head = tile.head * scalars.heads_per_kv_head;
    int remaining = scalars.heads_per_kv_head * visits.count();
    if constexpr (kIsListed) {
      ListedSteps<Traits> const steps{params, tile, storage.staged};
      remaining = steps.count(head, head + scalars.heads_per_kv_head);
      if (remaining == 0) {
        return;
      }
      visit = steps.first(remaining % 2, head);
    }
    int stage = remaining % 2;
    storage.visit[stage] = visit;
    storage.head[stage] = head;
    Load::keys(params, scalars, tile, storage);
    Load::queries(params, scalars, tile, head, visits.block(visit), stage, storage);
    commit_copies();

    // dV or dK.
    Fragment<float, kHeadDim / 2, kStrips> gradient{};
    int before = -1;  // the block whose dQ is still to be made
    auto const block_before = [&]() {
      if constexpr (Traits::kStoresBlock) {
        return storage.sums()[stage ^ 1];
      } else {
        return before;
      }
    };
    if constexpr (Traits::kStoresBlock) {
      storage.sums()[stage ^ 1] = before;
    }
    CUTE_NO_UNROLL
    while (true) {
      await_copies<0>();
      __syncthreads();
      if constexpr (Traits::kRegistersShort) {
        visit = storage.visit[stage];
        head = storage.head[stage];
      }
      int const m_block = storage.visits.block(visit);
      int const block = block_of_sums(scalars, storage.tile, head, m_block);
      if constexpr (kIsListed) {
        storage.staged.turn_of_sums[stage] = storage.staged.turn[stage];
      }
      if constexpr (Traits::kStoresBlock) {
        storage.sums()[stage] = block;
      }
      if (remaining > 1) {
        if constexpr (kIsListed) {
          visit = ListedSteps<Traits>{params, storage.tile, storage.staged}.next(stage, head);
        } else {
          visit = storage.visits.next(visit);
          head += storage.visits.is_first(visit) ? 1 : 0;  // the group's next one
        }
        if constexpr (Traits::kRegistersShort) {
          storage.visit[stage ^ 1] = visit;
        }
        storage.head[stage ^ 1] = head;
        Load::queries(params, scalars, storage.tile, head, storage.visits.block(visit), stage ^ 1, storage);
      }
      commit_copies();
      if (!makes_p(Traits::thread_index()) && block_before() >= 0) {
        add_queries(params, scalars, storage, stage ^ 1, block_before());
      }
      CUTE_UNROLL
      for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
        add_chunk(params, scalars, band, storage, stage,
                  Traits::kRegistersShort ? storage.visits.block(storage.visit[stage]) : m_block, chunk, gradient);
      }
      if (makes_p(Traits::thread_index()) && block_before() >= 0) {
        add_queries(params, scalars, storage, stage ^ 1, block_before());
      }
      before = block;
      stage ^= 1;
      if (--remaining == 0) {
        break;
      }
    }
    __syncthreads();
    // (The last block is always in stage 1. Of the number ptxas keeps nothing, where it would spill the first stage.)
    add_queries(params, scalars, storage, kMask == MaskClass::Window ? 1 : stage ^ 1, block_before());

    // Both warps at once, each its own.
    TensorDesc const& tensor = makes_p(Traits::thread_index()) ? params.d_v : params.d_k;
    float const of_values = Traits::kDrops ? Traits::kDrop * dropout_factor(params) : Traits::kDrop;
    float const scale = makes_p(Traits::thread_index()) ? of_values : scalars.softmax_scale;
    int const head_dim = makes_p(Traits::thread_index()) ? scalars.head_dim_vo : scalars.head_dim_qk;
    FiniteLook<Element> look;
    CUTE_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      write_pairs<kHeadDim>(keys_address(tensor, storage.tile, storage.tile.head), 2 * tensor.stride_row,
                            storage.tile.block * kTileN + pair_of(Traits::thread_index()) * Traits::kKeys + strip * 16,
                            keys_of(scalars, storage.tile), head_dim, Traits::thread_index() % 32, [&](int i, int j) {
                              int const first = 8 * i + 2 * j;
                              return look.see(pack_pair<Element>(scaled(gradient(first, strip), scale),
                                                                 scaled(gradient(first + 1, strip), scale)));
                            });
    }
    if (look.found()) {
      flag_leak(params);
    }
  }

  CUTE_DEVICE static void store_word(std::uint32_t address, std::uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
  }
  CUTE_DEVICE static void store_weights(std::uint32_t address, float4 const& p) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(p.x), "f"(p.y), "f"(p.z), "f"(p.w)
                 : "memory");
  }
  CUTE_DEVICE static float4 load_weights(std::uint32_t address) {
    float4 p;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(p.x), "=f"(p.y), "=f"(p.z), "=f"(p.w)
                 : "r"(address)
                 : "memory");
    return p;
  }
  CUTE_DEVICE static std::uint32_t load_word(std::uint32_t address) {
    std::uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
  }
};

}  // namespace hattn::sm80
