// The consumer warpgroups of the backward (Dao 2023, FlashAttention-2, algorithm 2, with keys outside and queries
// inside).
//
//     P = exp(S - LSE)    dV += P^T dO    dP = dO V^T    dS = P o (dP - delta)    dK += dS^T Q    dQ += dS K
//
// Here "o" multiplies element by element, and delta = rowsum(dO o O) - dLSE.
//
// The blocks of all tiles of a CTA form one stream. Between the exponentials of a block and those of the next one,
// products are issued in this order: dQ of the block before, dP, dV, dK, and S of the next block.
//
// dQ of a block needs dS of both warpgroups. So dQ is computed a block late, and neither warpgroup waits for the other.
// While one warpgroup computes exponentials, with no product of its own in flight, the tensor cores work for the other.
//
// The step of a block begins and ends with no product in flight. dQ and dP share registers: dQ is stored before dP is
// issued.
//
// Rows for modified scores (common/softcap.hpp, common/alibi.hpp) have S without the LSE, which threads subtract from
// what the modifiers make of it. They multiply P by the derivative of the cap at once, and keep that in place of P.
// With ALiBi alone S keeps the LSE, and begins with a part of the bias (sm90/bwd/alibi.hpp).
#pragma once

#include <cfloat>

#include "common/alibi.hpp"
#include "common/copied_bias.hpp"
#include "common/dropout.hpp"
#include "common/leak_bwd.hpp"
#include "common/mask.hpp"
#include "common/memory.hpp"
#include "common/scalars.hpp"
#include "common/shared.hpp"
#include "common/softcap.hpp"
#include "common/softmax.hpp"
#include "common/thread.hpp"
#include "common/visits.hpp"
#include "sm90/bwd/cluster.hpp"
#include "sm90/bwd/draw.hpp"
#include "sm90/bwd/traits.hpp"
#include "sm90/product.hpp"

namespace hattn::sm90 {

template <class Traits>
struct BwdMma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  static_assert(Traits::kStages == 2, "dS has as many buffers as Q and dO");
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr bool kIsListed = Traits::kIsListed;
  static constexpr bool kModified = Traits::kModifiers == Modifiers::Always;
  // Kernels with fewer registers than others read again what others keep.
  static constexpr bool kReadsAgain = (kModified && kIsListed) || Traits::kDraws;
  static constexpr float kMasked = kModified ? -FLT_MAX : -INFINITY;  // a score

  // A thread's place in its warpgroup, as a new value at each call. Where registers are shortest it is even read again.
  CUTE_DEVICE static int thread_in_group_anew(int thread) {
    // The mask tells the compiler the range, too.
    return (Traits::kTileM == 128 ? thread_index_anew() : anew(thread)) & 127;
  }

  // The address of a tile's key head, and of the sequence's first key there.
  CUTE_DEVICE static std::uint64_t head_address(TensorDesc const& tensor, TileShare const& tile) {
    return tensor.address + 2 * (tile.batch * tensor.stride_batch + tile.head * tensor.stride_head);
  }
  CUTE_DEVICE static std::uint64_t head_address(TensorDesc const& tensor, PackedShare const& tile) {
    return head_address(tensor, static_cast<TileShare const&>(tile)) + 2 * (tile.kv_begin * tensor.stride_row);
  }
  CUTE_DEVICE static int keys_of(BwdScalars const& scalars, TileShare const&) { return scalars.seqlen_kv; }
  CUTE_DEVICE static int keys_of(BwdScalars const&, PackedShare const& tile) { return tile.kv_len; }

  CUTE_DEVICE static void run(BwdParams const& params, typename Traits::Scalars const& scalars, Band const& launch_band,
                              Storage& storage, int consumer) {
    int const thread_in_group = static_cast<int>(threadIdx.x) % 128;

    constexpr int kM = Traits::kTileM;
    constexpr int kN = Traits::kTileN;
    constexpr int kQK = Traits::kHeadDimQK;
    constexpr int kVO = Traits::kHeadDimVO;
    constexpr int kStages = Traits::kStages;
    constexpr int kBuffers = Traits::kBuffersK;
    using MmaScores = typename Traits::MmaScores;
    using MmaStatistics = typename Traits::MmaStatistics;
    using MmaDV = typename Traits::template MmaKeys<kVO>;
    using MmaDK = typename Traits::template MmaKeys<kQK>;
    using MmaDQ = typename Traits::MmaQueries;
    constexpr int kRowsOfGroup = 64 * 64;  // elements of a warpgroup's rows of a slab
    auto const tSrK = Traits::template SmemRows<kN, kQK>::of(storage.k[0] + consumer * kRowsOfGroup);
    auto const tSrQ = Traits::template SmemRows<kM, kQK>::of(storage.q[0]);
    auto const tSrOnes = Traits::SmemOnes::of(storage.ones[0]);
    auto const tSrStatistics = Traits::SmemStatistics::of(storage.statistics[0][0].minus_lse);
    auto const tPrV = Traits::template SmemRows<kN, kVO>::of(storage.v + consumer * kRowsOfGroup);
    auto const tPrdO = Traits::template SmemRows<kM, kVO>::of(storage.d_o[0]);
    auto const tVrdO = Traits::template SmemColumns<kM, kVO>::of(storage.d_o[0]);
    auto const tKrQ = Traits::template SmemColumns<kM, kQK>::of(storage.q[0]);
    // dQ: the warpgroup's half of the columns, or of the queries. dS is written [key][query], and read as [query][key].
    int const half_columns = Traits::kSplitsColumns ? consumer : 0;
    int const half_queries = Traits::kSplitsColumns ? 0 : consumer;
    auto const tQrdS = Traits::template SmemColumns<kN, kM, 64>::of(storage.d_s[0] + half_queries * (kN * 64));
    auto const tQrK =
        Traits::template SmemColumns<kN, kQK, Traits::kColumnsQ>::of(storage.k[0] + half_columns * (kN * 64));

    typename MmaScores::Sums tS{};
    typename MmaScores::Sums tdP{};
    typename MmaDV::Sums tdV{};
    typename MmaDK::Sums tdK{};
    typename MmaDQ::Sums tdQ{};
    // The A operands of dV and dK: for 16-bit types the accumulator's element order is the operand's.
    Fragment<std::uint32_t, kM / 4> tP{};
    Fragment<std::uint32_t, kM / 4> tdS{};

    // The warp's first key in the tile.
    auto warp_row = [&](int thread) { return consumer * 64 + thread / 32 * 16; };

    RingPosition<kStages> ring;  // of Q and dO, and of dS as well
    RingPosition<kBuffers> k;    // of K; V, in one buffer, has the parity of its stage
    typename Traits::TileBand band = launch_band;
    int n_block = 0;
    bool is_only = false;   // packed: whether the tile has dQ of its sequence to itself
    bool was_only = false;  // the tile before
    QueryVisits visits{0, 0, 0};
    int visit = 0;
    int remaining = 0;  // steps of this share of a tile
    bool more = true;   // whether there is a tile whose first scores are there
    auto warp_value = [](int value) { return __shfl_sync(0xffffffffU, value, 0); };

    // The tile in a buffer; the shuffles tell the compiler that it is the same in the whole warp.
    auto await_tile = [&]() __attribute__((always_inline)) {
      storage.tile_full[k.stage].wait(k.parity);
      return warp_value(storage.tile[k.stage].batch) >= 0;
    };
    auto enter_tile = [&]() __attribute__((always_inline)) {
      typename Traits::TileRecord const tile = storage.tile[k.stage];
      n_block = warp_value(tile.block);
      if constexpr (Traits::kIsPacked) {
        Band const of_tile = band_of_tile(params, tile);
        band.left_offset = warp_value(of_tile.left_offset);
        band.right_offset = warp_value(of_tile.right_offset);
        band.seqlen_q = warp_value(of_tile.seqlen_q);
        band.seqlen_kv = warp_value(of_tile.seqlen_kv);
        was_only = is_only;
        is_only = warp_value(tile.is_only) != 0;
        visits = QueryVisits::blocks_of_any<kMask, kM, kN>(band, n_block);
      } else if constexpr (!kIsListed) {
        visits = QueryVisits::blocks_of<kMask, kM, kN>(band, n_block);  // asked for blocks, not for the first of them
      }
      remaining = warp_value(tile.steps);
      visit = warp_value(tile.visit);
    };
    auto next_block = [&]() __attribute__((always_inline)) {
      --remaining;
      if constexpr (!kIsListed) {
        visit = visits.next(visit);
      }
    };

    auto issue_scores = [&]() __attribute__((always_inline)) {
      if constexpr (kModified) {
        issue_product<MmaScores, false>(tSrK.stage(k.stage), tSrQ.stage(ring.stage), tS);
      } else {
        issue_sum<MmaStatistics, MmaScores>(tSrOnes.stage(0), tSrStatistics.stage(ring.stage), tSrK.stage(k.stage),
                                            tSrQ.stage(ring.stage), tS);
      }
    };
    auto release = [&](Mbarrier& barrier) {
      if (cute::elect_one_sync()) {
        barrier.arrive();
      }
    };
    auto pack = [&](auto& operand, auto const& values) __attribute__((always_inline)) {
      CUTE_UNROLL
      for (int i = 0; i < operand.size(); ++i) {
        operand(i) = pack_pair<Element>(values(2 * i), values(2 * i + 1));
      }
    };
    // Rows for modified scores. The block's query head.
    [[maybe_unused]] auto head_of_block = [&]() __attribute__((always_inline)) {
      if constexpr (kModified) {
        return Traits::kIsPacked ? storage.modifiers.head[ring.stage]
                                 : static_cast<int>(storage.modifiers.slope_or_head[ring.stage]);
      } else if constexpr (Traits::kIsAlibi) {
        return static_cast<int>(storage.alibi.head[ring.stage]);
      } else {
        return 0;
      }
    };
    // Its slope. (The loading lane of the dense kernel has no registers for it, and these warps of the packed one have
    // none.)
    auto slope_of_block = [&]() __attribute__((always_inline)) {
      float slope = 0.0F;
      if constexpr (kModified) {
        std::uint32_t const word = read_word(storage.modifiers.slope_or_head[ring.stage]);
        slope = Traits::kIsPacked ? __uint_as_float(word)
                                  : alibi_slope(params.alibi, storage.tile[k.stage].batch, static_cast<int>(word),
                                                scalars.scale_log2);
      } else if constexpr (Traits::kIsAlibi) {
        slope = alibi_slope(params.alibi, storage.tile[k.stage].batch, head_of_block(), scalars.scale_log2);
      }
      return slope;
    };
    // The queries and keys of the tile's sequence.
    [[maybe_unused]] auto queries_of_tile = [&]() __attribute__((always_inline)) {
      return Traits::kIsPacked ? band.seqlen_q : scalars.seqlen_q;
    };
    [[maybe_unused]] auto keys_of_tile = [&]() __attribute__((always_inline)) {
      return Traits::kIsPacked ? band.seqlen_kv : scalars.seqlen_kv;
    };
    // The block of keys of the step.
    auto n_block_of_step = [&]() __attribute__((always_inline)) {
      return kReadsAgain ? warp_value(storage.tile[k.stage].block) : n_block;
    };
    // The block of queries of the step.
    auto m_block_of_step = [&]() __attribute__((always_inline)) {
      if constexpr (kIsListed) {
        return storage.step[ring.stage].m_block;
      } else {
        return visits.block(visit);
      }
    };
    // The key at which the tile's query 0 stands.
    [[maybe_unused]] auto diagonal_of_tile = [&]() __attribute__((always_inline)) {
      return Traits::kIsPacked ? diagonal_of(params, band) : params.diagonal_offset;
    };
    // How far the thread's first key is behind the diagonal of its first query.
    auto distance_of_thread = [&]() __attribute__((always_inline)) {
      int const thread = thread_in_group_anew(thread_in_group);
      int const key = n_block_of_step() * kN + warp_row(thread) + thread % 32 / 4;
      return key - (m_block_of_step() * kM + 2 * (thread % 4)) - diagonal_of_tile();
    };
    // With ALiBi alone: the slope of the block whose scores come next. It is asked for while they are computed.
    [[maybe_unused]] float slope_log2 = 0.0F;
    auto read_slope = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kIsAlibi) {
        slope_log2 = more ? alibi_slope_log2(params.alibi, storage.tile[k.stage].batch, head_of_block()) : 0.0F;
      }
    };
    [[maybe_unused]] auto add_alibi_alone = [&](float(&addends)[2]) __attribute__((always_inline)) {
      int const thread = thread_in_group_anew(thread_in_group);
      int const first = m_block_of_step() * kM + diagonal_of_tile();
      finish_alibi<kM, 64>(tS, slope_log2, first - n_block_of_step() * kN - consumer * 64,
                           thread / 32 * 16 + thread % 32 / 4, 2 * (thread % 4), alibi_gap<kM>(first, keys_of_tile()),
                           slope_of_block, addends);
    };
    // Past the last query -LSE is low, and of a packed sequence 0: a bias above 0 would make P infinite.
    auto hide_past_queries = [&]() __attribute__((always_inline)) {
      bool const hides = Traits::kIsAlibi ? Traits::kIsPacked || !alibi_falls_apart_by_query(slope_log2)
                                          : Traits::kIsPacked && (Traits::kAddsBias || has_alibi(params));
      int const left = queries_of_tile() - m_block_of_step() * kM;
      if (hides && left < kM) {
        hide_queries(tS, left - 2 * (thread_in_group_anew(thread_in_group) % 4), kMasked);
      }
    };
    // Scores: without a cap; all near; all near or masked; of any size; of any size, with a bias behind the cap.
    enum class Form { Plain, Near, NearOrMasked, Far, FarWithBias };
    // P of a block goes to its operand, and P (1 - t^2) is left in tS.
    auto modified_block = [&](auto form) __attribute__((always_inline)) {
      constexpr Form kForm = decltype(form)::value;
      float inner = scalars.softcap.inner * kTwoLog2E;
      float slope = 0.0F;
      float first[2] = {0.0F, 0.0F};
      if constexpr (kForm == Form::FarWithBias) {
        slope = slope_of_block();
        int const distance = distance_of_thread();
        first[0] = static_cast<float>(distance);
        first[1] = static_cast<float>(distance + 8);
      }
      auto const* const statistics = storage.statistics[ring.stage] + 2 * (thread_in_group_anew(thread_in_group) % 4);
      CUTE_UNROLL
      for (int i = 0; i < kM / 8; ++i) {
        float minus_lse[2];
        if (kForm == Form::FarWithBias && !Traits::kIsPacked && i > 0) {
          slope = factor_after(tS(4 * i - 1), slope);  // or ptxas begins with all of them, and spills
        }
        if (kIsListed && (kForm == Form::Far || kForm == Form::FarWithBias) && i > 0) {
          inner = factor_after(tS(4 * i - 1), inner);  // for the same reason
        }
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {
          uint2 const words = *reinterpret_cast<uint2 const*>(&statistics[8 * i + c]);
          minus_lse[c] = Statistics::joined(words.x, words.y);
        }
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          float p[2];
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            float& score = tS(4 * i + 2 * r + c);
            bool const masked = kForm != Form::Near && score == kMasked;
            CappedScore capped{score, 1.0F};
            if constexpr (kForm == Form::Near || kForm == Form::NearOrMasked) {
              capped = CappedScore::near(masked ? 0.0F : score, scalars.softcap);
            } else if constexpr (kForm != Form::Plain) {
              capped = CappedScore::far(score * inner);
            }
            if constexpr (kForm == Form::FarWithBias) {
              capped.t = fmaf(fabsf(first[r] - static_cast<float>(8 * i + c)), -slope, capped.t);
            }
            float const scale_log2 = Traits::kAddsBias ? 1.0F : scalars.scale_log2;  // (a bias has scaled them)
            p[c] = exp2_approx(fmaf(capped.t, scale_log2, minus_lse[c]));
            p[c] = masked ? 0.0F : p[c];
            score = p[c] * capped.slope;
          }
          tP(2 * i + r) = pack_pair<Element>(p[0], p[1]);
        }
      }
    };
    // The result: whether there may be masked pairs.
    auto mask_scores = [&]() __attribute__((always_inline)) {
      if constexpr (kIsListed) {
        ListedStep const listed = storage.step[ring.stage];
        if (listed.marks != 0) {
          int const thread = thread_in_group_anew(thread_in_group);
          hide_listed<kM, kM>(tS, listed, 0, band, n_block_of_step() * kN, warp_row(thread) + thread % 32 / 4,
                              2 * (thread % 4), kMasked);
        }
        return listed.marks != 0;
      }
      int const m_block = visits.block(visit);
      int const n_of_step = n_block_of_step();
      bool const may_be_masked = !is_free<kMask, kM, kN>(band, m_block, n_of_step);
      if (may_be_masked) {
        int const thread = thread_in_group_anew(thread_in_group);
        apply_mask_transposed<kMask, kM>(tS, band, n_of_step * kN + warp_row(thread) + thread % 32 / 4,
                                         m_block * kM + 2 * (thread % 4), kMasked);
      }
      return may_be_masked;
    };
    // Where the warp's dS of the block goes. Before, its bias or its random numbers are there.
    auto d_s_of = [&](int row) __attribute__((always_inline)) {
      return cute::cast_smem_ptr_to_uint(storage.d_s[ring.stage]) + row * kSlabRowBytes;
    };
    auto own_d_s = [&](int thread) __attribute__((always_inline)) { return d_s_of(warp_row(thread)); };
    // Where a warpgroup draws dropout's numbers: reports that dS of a stage has been read, so that numbers may come to
    // its place.
    auto want_numbers = [&](int stage) __attribute__((always_inline)) {
      if constexpr (Traits::kDraws) {
        release(storage.drawing.wanted[stage]);
      }
    };
    // The lane's bits of 64 queries.
    [[maybe_unused]] auto read_bits = [&](int word) __attribute__((always_inline)) {
      int const thread = thread_in_group_anew(thread_in_group);
      return DrawnBits::read(BwdDraw<Traits>::place(storage, ring.stage, warp_row(thread), thread % 32) + 128 * word);
    };
    // Makes the operand's dropped weights 0. Where consumers draw, those in tS get the sign, which no weight has.
    auto drop = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kDraws) {
        storage.drawing.full[ring.stage].wait(ring.parity);
        DrawnBits bits{};
        CUTE_UNROLL
        for (int i = 0; i < tP.size(); ++i) {
          if (i % 16 == 0) {
            bits = read_bits(i / 16);
          }
          tP(i) &= bits.mask(i % 16);
        }
      } else if constexpr (kModified) {
        if (has_dropout(params)) {
          int const thread = thread_in_group_anew(thread_in_group);
          int const batch = warp_value(storage.tile[k.stage].batch);
          // The words come to where the warp's dS goes later. Before them a bias was there.
          auto const meet = [&]() { named_barrier_sync(6 + 2 * consumer + thread / 64, 64); };
          if constexpr (Traits::kAddsBias) {
            meet();
          }
          see_kept_by_two<kM>(
              DropoutOfHead::of(params.dropout, batch * params.heads_q + head_of_block()), params.dropout.dropped,
              n_block_of_step() * kN + warp_row(thread) + thread % 32 / 4, m_block_of_step() * kM, thread % 4,
              own_d_s(thread) + thread % 32 * 8, d_s_of(warp_row(thread) ^ 16) + thread % 32 * 8,
              meet, [&](int at, std::uint32_t kept) __attribute__((always_inline)) {
                tP(at) &= kept;
                auto const sign = [&](float& p, std::uint32_t half) {
                  p = __uint_as_float(__float_as_uint(p) | (~half & 0x80000000U));
                };
                sign(tS(2 * at), kept << 16);
                sign(tS(2 * at + 1), kept);
              });
        }
      }
    };
    // dS of a block, where a warpgroup has drawn the numbers, and has left -delta of each query beside them.
    [[maybe_unused]] auto make_drawn_d_s = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kDraws) {
        int const thread = thread_in_group_anew(thread_in_group);
        std::uint32_t deltas = BwdDraw<Traits>::place_of_deltas(storage, ring.stage, warp_row(thread)) + thread % 4 * 8;
        float const factor = params.dropout.factor;
        DrawnBits bits{};
        CUTE_UNROLL
        for (int i = 0; i < kM / 8; ++i) {
          if (i % 8 == 0) {
            bits = read_bits(i / 8);
          }
          if (i > 0) {
            deltas = after(tdS(2 * i - 1), deltas);  // ptxas would begin with all of the reads
          }
          float minus_delta[2];
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(minus_delta[0]), "=f"(minus_delta[1])
                       : "r"(deltas + 32 * i)
                       : "memory");
          CUTE_UNROLL
          for (int at = 4 * i; at < 4 * i + 4; ++at) {
            tS(at) *= (bits.keeps(at / 2 % 16, at % 2) ? tdP(at) : minus_delta[at % 2]) * factor;
          }
          tdS(2 * i) = pack_pair<Element>(tS(4 * i), tS(4 * i + 1));
          tdS(2 * i + 1) = pack_pair<Element>(tS(4 * i + 2), tS(4 * i + 3));
        }
      }
    };
    // dS of a block, from what drop() has left, and dP less delta.
    auto make_d_s = [&]() __attribute__((always_inline)) {
      if constexpr (kModified) {
        if (has_dropout(params)) {
          std::uint32_t address = cute::cast_smem_ptr_to_uint(storage.statistics[ring.stage]) +
                                  sizeof(Statistics) * 2 * (thread_in_group_anew(thread_in_group) % 4);
          CUTE_UNROLL
          for (int i = 0; i < kM / 8; ++i) {
            if (i > 0) {
              // One block after the other: ptxas would begin with all of the reads, and spill.
              address = after(tdS(2 * i - 1), address);
            }
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
              float const delta = Statistics::read_delta(address + sizeof(Statistics) * (8 * i + c));
              CUTE_UNROLL
              for (int r = 0; r < 2; ++r) {
                int const at = 4 * i + 2 * r + c;
                tS(at) *= __float_as_int(tS(at)) < 0 ? delta : tdP(at);
              }
            }
            float const factor = params.dropout.factor;
            tdS(2 * i) = pack_pair<Element>(tS(4 * i) * factor, tS(4 * i + 1) * factor);
            tdS(2 * i + 1) = pack_pair<Element>(tS(4 * i + 2) * factor, tS(4 * i + 3) * factor);
          }
          return;
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < tS.size(); ++i) {
        tS(i) *= tdP(i);
      }
      pack(tdS, tS);
    };
    auto bias_of_head = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kAddsBias) {
        return BiasOfHead::of(params, warp_value(storage.tile[k.stage].batch), head_of_block());
      }
    };
    using WarpBias = CopiedBiasTransposed<kM, kN * kSlabRowBytes>;
    // Has the warp begin to copy it, when the products with the dS that was there are done. (There may be no block.)
    auto copy_bias = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kAddsBias) {
        if (more && is_copied(params)) {
          int const thread = thread_in_group_anew(thread_in_group);
          WarpBias::begin(own_d_s(thread), bias_of_head(), m_block_of_step() * kM, queries_of_tile(),
                          n_block_of_step() * kN + warp_row(thread), keys_of_tile(), thread % 32);
        }
      }
    };
    auto add_bias = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kAddsBias) {
        int const thread = thread_in_group_anew(thread_in_group);
        if (is_copied(params)) {
          await_copies<0>();
          __syncwarp();
          WarpBias::template add<Traits::kBiasAtATime / 2>(tS, scalars.scale_log2, own_d_s(thread), params.bias_dtype,
                                                           thread % 32, kMasked);
          __syncwarp();
          return;
        }
        if (Traits::kIsPacked && queries_of_tile() == 0) {
          return;  // a sequence without queries may have no biases
        }
        add_bias_transposed<kM, Traits::kBiasAtATime>(
            tS, scalars.scale_log2, bias_of_head, n_block_of_step() * kN + warp_row(thread) + thread % 32 / 4,
            keys_of_tile(), m_block_of_step() * kM + 2 * (thread % 4), queries_of_tile(), kMasked);
      }
    };
    // P of a block, from its scores.
    auto exponentials = [&]() __attribute__((always_inline)) {
      if constexpr (kModified) {
        // The plan refuses a cap beside an additive bias.
        bool const caps = !Traits::kAddsBias && scalars.softcap.caps();
        bool near = false;
        if (caps) {
          near = all_near(tS, scalars.softcap.most);  // of all scores, whether masked or not
        } else if (has_alibi(params)) {
          add_alibi<kM>(tS, slope_of_block(), distance_of_thread());
        }
        add_bias();
        bool const may_be_masked = mask_scores();
        hide_past_queries();
        if (!caps) {
          modified_block(std::integral_constant<Form, Form::Plain>{});
        } else if (has_alibi(params)) {
          modified_block(std::integral_constant<Form, Form::FarWithBias>{});
        } else if (near && !may_be_masked) {
          modified_block(std::integral_constant<Form, Form::Near>{});
        } else if (near) {
          modified_block(std::integral_constant<Form, Form::NearOrMasked>{});
        } else {
          modified_block(std::integral_constant<Form, Form::Far>{});
        }
        drop();
      } else if constexpr (Traits::kIsAlibi) {
        float addends[2];
        add_alibi_alone(addends);
        hide_past_queries();
        mask_scores();
        CUTE_UNROLL
        for (int i = 0; i < tS.size(); ++i) {
          tS(i) = exp2_approx(fmaf(tS(i), scalars.scale_log2, addends[i / 2 % 2]));
        }
      } else {
        mask_scores();
        CUTE_UNROLL
        for (int i = 0; i < tS.size(); ++i) {
          tS(i) = exp2_approx(tS(i) * scalars.scale_log2);
        }
      }
    };
    // `scale` makes an element of a sum. `see` is given each pair, and gives it back.
    auto write_gradient = [&](auto columns, TensorDesc const& tensor, auto const& tile, int head_dim,
                              auto const& values, auto const& scale, auto const& see) __attribute__((always_inline)) {
      int const thread = thread_in_group_anew(thread_in_group);
      write_pairs<columns>(head_address(tensor, tile), 2 * tensor.stride_row, tile.block * kN + warp_row(thread),
                           keys_of(scalars, tile), head_dim, thread % 32, [&](int i, int j) {
                             int const at = 8 * i + 2 * j;
                             return see(pack_pair<Element>(scale(values(at)), scale(values(at + 1))));
                           });
    };
    // dQ, to shared memory.
    RingPosition<Traits::kSlotsQ> slot;
    if (consumer != 0) {
      slot.advance();
    }
    auto next_slot = [&]() __attribute__((always_inline)) {
      slot.advance();
      slot.advance();
    };
    auto store_queries = [&]() __attribute__((always_inline)) {
      storage.d_q_empty[slot.stage].wait(slot.parity ^ 1);
      float4* const half = reinterpret_cast<float4*>(storage.d_q[slot.stage]) + thread_in_group_anew(thread_in_group);
      CUTE_UNROLL
      for (int i = 0; i < tdQ.size() / 4; ++i) {
        half[128 * i] = float4{tdQ(4 * i), tdQ(4 * i + 1), tdQ(4 * i + 2), tdQ(4 * i + 3)};
      }
    };
    // The same of a sequence's only tile: dQ itself, to memory. It is of the step `step` of the tile in a buffer.
    auto write_queries = [&](int buffer, int step) __attribute__((always_inline)) {
      if constexpr (Traits::kIsPacked) {
        PackedShare const& tile = storage.tile[buffer];
        QueryVisits of_tile = QueryVisits::blocks_of_any<kMask, kM, kN>(band_of_tile(params, tile), tile.block);
        of_tile.start = tile.start;
        step = step < 0 ? tile.steps - 1 : tile.steps - step;
        int const head = step / of_tile.count();
        int const m_block = of_tile.block(of_tile.nth(step - head * of_tile.count()));
        TensorDesc const& tensor = params.d_q;
        int const thread = thread_in_group_anew(thread_in_group);
        int const column = half_columns * Traits::kColumnsQ;
        std::uint64_t const first =
            tensor.address + 2 * (tile.batch * tensor.stride_batch + (tile.head_q + head) * tensor.stride_head +
                                  tile.q_begin * tensor.stride_row + column);
        write_pairs<Traits::kColumnsQ>(first, 2 * tensor.stride_row,
                                       m_block * kM + half_queries * 64 + thread / 32 * 16, tile.q_len,
                                       scalars.head_dim_qk - column, thread % 32, [&](int i, int j) {
                                         int const at = 8 * i + 2 * j;
                                         return pack_pair<Element>(scaled(tdQ(at), scalars.softmax_scale),
                                                                   scaled(tdQ(at + 1), scalars.softmax_scale));
                                       });
      }
    };
    auto report_queries = [&]() __attribute__((always_inline)) {
      fence_proxy_async();
      __syncwarp();
      release(storage.d_q_full[slot.stage]);
      next_slot();
    };
    // Adds dK and dV of a share of a tile to the tile's sums.
    auto add_share = [&](int buffer) __attribute__((always_inline)) {
      using Sums = typename Traits::KeySums;
      float* const sums = scalars.key_sums + static_cast<std::int64_t>(storage.tile[buffer].sums) * Sums::kElements +
                          Sums::offset(0, consumer * 128 + thread_in_group_anew(thread_in_group));
      auto const add = [&](int first, auto const& values) __attribute__((always_inline)) {
        CUTE_UNROLL
        for (int i = 0; i < values.size() / 4; ++i) {
          add_four(sums + first + Sums::offset(i, 0),
                   {values(4 * i), values(4 * i + 1), values(4 * i + 2), values(4 * i + 3)});
        }
      };
      add(0, tdV);
      add(Traits::kElementsV, tdK);
    };
    // Writes dK and dV of a tile, unless they were added to sums. The tile's tile[] and K may be overwritten then.
    auto hand_over = [&](int buffer) __attribute__((always_inline)) {
      typename Traits::TileRecord const tile = storage.tile[buffer];
      __syncwarp();
      release(storage.k_empty[buffer]);
      if (tile.sums >= 0) {
        return;
      }
      FiniteLook<Element> look;
      if constexpr (Traits::kDrops) {
        // What spoils dV does not always spoil dK: dP of a dropped pair counts as 0.
        write_gradient(
            std::integral_constant<int, kVO>{}, params.d_v, tile, scalars.head_dim_vo, tdV,
            [&](float sum) { return sum * dropout_factor(params); },
            [&](std::uint32_t pair) { return look.see(pair); });
      } else {
        write_gradient(
            std::integral_constant<int, kVO>{}, params.d_v, tile, scalars.head_dim_vo, tdV,
            [](float sum) { return sum; }, [](std::uint32_t pair) { return pair; });
      }
      write_gradient(
          std::integral_constant<int, kQK>{}, params.d_k, tile, scalars.head_dim_qk, tdK,
          [&](float sum) { return scaled(sum, scalars.softmax_scale); },
          [&](std::uint32_t pair) { return look.see(pair); });
      if (look.found()) {
        flag_leak(params);
      }
    };

    want_numbers(0);
    want_numbers(1);
    if (!await_tile()) {
      return;  // other CTAs drew all tiles before this one started
    }
    enter_tile();
    // A share of a tile may have no step.
    bool has_steps = true;
    if constexpr (Traits::kShares) {
      has_steps = remaining > 0;
    }
    if (has_steps) {
      storage.k_full[0].wait(0);
      storage.q_full[0].wait(0);
      issue_scores();
      read_slope();
      warpgroup_wait<0>();
      warpgroup_fence_operand(tS);
    }

    // dQ of the block before, of dS of both warpgroups. `after` is what must have been computed by then.
    // `only`: whether it is of a sequence's only tile, and then `left`: the steps from that block's on, or below 0
    // where it was the tile's last.
    auto finish_queries = [&](int k_stage, std::uint32_t after, [[maybe_unused]] bool only, [[maybe_unused]] int left)
        __attribute__((always_inline)) {
      int const stage = ring.stage ^ 1;
      auto const zero = static_cast<std::uint32_t>(scalars.batch >> 31);  // batch > 0, which ptxas does not know
      named_barrier_sync(1 + 2 * stage + consumer + (after & zero), 256);
      copy_bias();
      issue_product<MmaDQ, false>(tQrdS.stage(stage), tQrK.stage(k_stage), tdQ);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tdQ);
      want_numbers(stage);
      if (Traits::kIsPacked && only) {
        write_queries(k_stage, left);
        return;
      }
      store_queries();
    };
    // Whether there is a tile.
    auto has_tile = [&]() __attribute__((always_inline)) {
      return kReadsAgain ? warp_value(storage.tile[k.stage].batch) >= 0 : more;
    };
    bool any = false;    // whether there was one before it
    bool fresh = false;  // whether the scores are of a new tile
    // One block: from its scores to the scores of the next block. `only` is of a block that is not a tile's first:
    // whether it is of a sequence's only tile. (As a run-time branch it cost all packed tiles 7%.)
    auto step = [&](auto is_first, auto only) __attribute__((always_inline)) {
      std::uint32_t after = 0;
      if constexpr (!kModified) {
        exponentials();
        warpgroup_fence_operand(tS);
        // ptxas would move the exponentials behind the products, where registers are short: the barrier before dQ
        // depends on all of them.
        CUTE_UNROLL
        for (int i = 0; i < tS.size(); ++i) {
          after |= __float_as_uint(tS(i));
        }
      }
      storage.d_o_full[ring.stage].wait(ring.parity);
      if constexpr (is_first) {
        if (any) {
          finish_queries(k.stage ^ 1, after, was_only, -1);
          if (!Traits::kIsPacked || !was_only) {
            report_queries();
          }
          hand_over(k.stage ^ 1);
        } else {
          copy_bias();
        }
        any = true;
        clear(tdV);
        clear(tdK);
        storage.v_full.wait(k.stage);
      } else {
        finish_queries(k.stage, after, only, remaining + 1);
      }
      if constexpr (kModified) {
        // Not before dQ: P beside P (1 - t^2) and dQ would take more registers than there are.
        exponentials();
        warpgroup_fence_operand(tS);
      }
      // V's place is a new value: held for the whole loop, the descriptors of an operand with one buffer would take
      // every uniform register there is.
      issue_sum<MmaStatistics, MmaScores>(tSrOnes.stage(1), tSrStatistics.stage(ring.stage), tPrV.stage(opaque_zero()),
                                          tPrdO.stage(ring.stage), tdP);
      if constexpr (!kModified) {
        pack(tP, tS);
      }
      if constexpr (Traits::kDraws) {
        drop();
      }
      issue_product<MmaDV, true>(tP, tVrdO.stage(ring.stage), tdV);
      if constexpr (!is_first) {
        if constexpr (!only) {
          report_queries();
        }
      }
      fresh = remaining == 1;
      warpgroup_wait<1>();
      warpgroup_fence_operand(tdP);
      if constexpr (Traits::kDraws) {
        make_drawn_d_s();
      } else {
        make_d_s();
      }
      int const thread = thread_in_group_anew(thread_in_group);
      store_pairs<kN, kM>(storage.d_s[ring.stage], warp_row(thread), thread % 32,
                          [&](int i, int j) { return tdS(4 * i + j); });
      issue_product<MmaDK, true>(tdS, tKrQ.stage(ring.stage), tdK);
      fence_proxy_async();
      named_barrier_arrive(1 + 2 * ring.stage + 1 - consumer, 256);

      warpgroup_wait<0>();
      warpgroup_fence_operand(tdV);
      warpgroup_fence_operand(tdK);
      release(storage.block_empty[ring.stage]);
      ring.advance();
      if (fresh) {
        release(storage.v_empty);
        if constexpr (!Traits::kShares) {
          if (warp_value(storage.tile[k.stage].sums) >= 0) {
            add_share(k.stage);
          }
        }
        k.advance();
        if constexpr (Traits::kShares) {
          more = false;
        } else {
          more = await_tile();
        }
        if (more) {
          storage.k_full[k.stage].wait(k.parity);
        }
      }
      // After the last tile the scores are of whatever lies in the buffers. They are not used.
      if (has_tile()) {
        storage.q_full[ring.stage].wait(ring.parity);
      }
      issue_scores();
      read_slope();
      warpgroup_wait<0>();
      warpgroup_fence_operand(tS);
      if (fresh) {
        enter_tile();
      } else {
        next_block();
      }
    };
    if (has_steps) {
      while (has_tile()) {
        step(std::true_type{}, std::false_type{});
        if (is_only) {
          while (!fresh) {
            step(std::false_type{}, std::true_type{});
          }
        } else {
          while (!fresh) {
            step(std::false_type{}, std::false_type{});
          }
        }
      }
      finish_queries(k.stage ^ 1, 0, was_only, -1);
      if (!Traits::kIsPacked || !was_only) {
        report_queries();
      }
    } else {
      clear(tdV);
      clear(tdK);
    }
    if constexpr (Traits::kShares) {
      write_shared_tile<Traits>(params, storage, consumer * 128 + thread_in_group_anew(thread_in_group), tdV, tdK);
    } else {
      hand_over(k.stage ^ 1);
    }
  }
};

}  // namespace hattn::sm90
