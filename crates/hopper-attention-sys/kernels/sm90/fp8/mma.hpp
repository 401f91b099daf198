// The consumer warpgroups of the FP8 forward: both products and the softmax between them.
//
// A CTA's tiles and their key blocks form one stream. In each step a warpgroup issues S = Q K_j^T together with
// P_{j-1} V_{j-1}, exponentiates S, adds the second product to O meanwhile and makes P_j. At a tile's border the last
// product hides the look at the next tile, and the next tile's first S the epilogue, where registers allow it.
//
// The tensor cores' own sums carry some 13 bits, so that those of a long sequence would drift: P V of a block has
// accumulators of its own, which are added to O in f32, times the factor of the block's V. V^T has rows of ones, so
// that the rounded weights are summed beside O: O is divided by that, and equal values give themselves. The LSE is of
// the weights before rounding (softmax.hpp).
//
// Three consumers at head dim 128 have no registers for all columns of P V: it comes in parts, each added to O before
// the next is issued, and S goes with the last of them, so that exponentials have the warpgroup to themselves.
//
// A warp alone decides to move a reference: nothing that the warpgroup's products depend on may follow from that.
#pragma once

#include "common/mask.hpp"
#include "common/visits.hpp"
#include "sm90/fp8/epilogue.hpp"
#include "sm90/fp8/recompute.hpp"
#include "sm90/fp8/share.hpp"
#include "sm90/fp8/softmax.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/product.hpp"
#include "sm90/turns.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Mma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using Weights =
      cute::conditional_t<Traits::kScores == Scores::F16, WeightsF16<Traits::kTileN, Traits::kPolynomialEvery>,
                          WeightsF32<Traits::kTileN, Traits::kColumnsAhead>>;
  using Softmax = Fp8Softmax<Weights>;
  using Share = Fp8Share<Traits>;
  using Turns = sm90::Turns<Traits::kConsumers, Traits::kTurns, Traits::kTurns>;
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  // A number that is known when lambdas that take it are compiled.
  template <int kValue>
  using Constant = std::integral_constant<int, kValue>;

  CUTE_DEVICE static void run(Fp8KernelParams const& params, Band const& band, Storage& storage, int consumer) {
    using MmaQK = typename Traits::MmaQK;
    auto const tSrQ = Traits::SmemQ::of(storage.q[0] + consumer * 64 * Traits::kHeadDimQK);  // the warpgroup's rows
    auto const tSrK = Traits::SmemK::of(storage.k[0]);
    auto const tOrV = Traits::SmemVt::of(storage.vt[0]);
    typename MmaQK::Sums tSrS{};
    // A part of P V of a block, and after the columns of the last part, in four elements, the sums of P.
    Fragment<float, Traits::kElementsPart> tOrT{};
    constexpr int kElementsO = Traits::kHeadDimVO / 2;
    constexpr int kLastPart = Traits::kParts - 1;
    Fragment<float, kElementsO> tOrO{};
    Fragment<std::uint32_t, kTileN / 8> tOrP{};

    Softmax softmax;
    float divisor[2] = {0.0F, 0.0F};  // sums of rounded weights, as far as O goes
    float ratio_v = 1.0F;             // of the block whose weights P has
    RingPosition<Traits::kStages> k;
    RingPosition<Traits::kBuffersQ> q;
    bool v_ready = false;  // the block's V^T, whose barrier was asked while its scores were waited for
    int m_block = -1;
    KeyVisits visits{0, 0, 0, 0};

    auto release = [&](Mbarrier& barrier) {
      if (cute::elect_one_sync()) {
        barrier.arrive();
      }
    };
    auto make_p = [&]() __attribute__((always_inline)) { Weights::pack(tSrS, tOrP); };
    auto issue_scores = [&]() { issue_product<MmaQK, false>(tSrQ.stage(q.stage), tSrK.stage(k.stage), tSrS); };
    // Where a part's rows of V^T begin follows from where the first part's do: ptxas would make each anew.
    auto issue_part = [&](auto part, std::uint32_t stage) __attribute__((always_inline)) {
      using MmaPV = typename Traits::template MmaPV<part>;
      auto& sums = tOrT.template part<MmaPV::Sums::size()>(0);
      issue_product<MmaPV, false>(tOrP, tOrV.stage(stage).further(part * (Traits::kPartColumns * kTileN / 16)), sums);
    };
    // P V's first part. V's block is the one before K's. Returns where it lies.
    auto issue_output = [&]() __attribute__((always_inline)) {
      auto const v = k.before();
      if constexpr (Traits::kParts == 1) {
        storage.vt_full[v.stage].wait(v.parity);
      } else {
        storage.vt_full[v.stage].wait_unless(v_ready, v.parity);
      }
      issue_part(Constant<0>{}, v.stage);
      return v.stage;
    };
    auto await_keys = [&]() __attribute__((always_inline)) {
      storage.k_full[k.stage].wait(k.parity);
      return storage.factors[k.stage][consumer];
    };
    auto release_k = [&]() __attribute__((always_inline)) {
      release(storage.k_empty[k.stage]);
      k.advance();
    };
    auto release_v = [&](std::uint32_t stage) __attribute__((always_inline)) {
      warpgroup_fence_operand(tOrT);
      release(storage.vt_empty[stage]);
    };
    auto add_part = [&](auto part, float ratio_v) __attribute__((always_inline)) {
      constexpr int kFirst = part * Traits::kPartColumns / 2;
      constexpr int kCount = cute::min(Traits::kPartColumns / 2, kElementsO - kFirst);
      CUTE_UNROLL
      for (int i = 0; i < kCount; ++i) {
        tOrO(kFirst + i) = fmaf(tOrT(i), ratio_v, tOrO(kFirst + i));
      }
      if constexpr (part == kLastPart) {
        divisor[0] += tOrT(kCount);
        divisor[1] += tOrT(kCount + 2);
      }
    };
    // Awaits and adds all parts but the last, which is then on its way.
    auto add_first_parts = [&](std::uint32_t stage, float ratio_v) __attribute__((always_inline)) {
      auto const add_and_issue = [&](auto part) __attribute__((always_inline)) {
        if constexpr (part < kLastPart) {
          warpgroup_wait<0>();
          warpgroup_fence_operand(tOrT);
          add_part(part, ratio_v);
          issue_part(Constant<part + 1>{}, stage);
        }
      };
      add_and_issue(Constant<0>{});
      add_and_issue(Constant<1>{});
      static_assert(kLastPart <= 2);
    };
    auto mask_block = [&](int visit) __attribute__((always_inline)) {
      int const thread = Traits::thread_index();
      int const row = m_block * kTileM + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
      apply_mask<kMask, kTileN>(tSrS, band, row, 2 * (thread % 4), visits.block(visit));
    };
    // The K that it reads must not have been released.
    auto recompute_scores = [&]() {
      Fp8Recompute<Traits>::scores(tSrS, storage.q[q.stage] + consumer * 64 * Traits::kHeadDimQK, storage.k[k.stage]);
    };
    auto rescale_output = [&](float const(&rescale)[2]) __attribute__((always_inline)) {
      CUTE_UNROLL
      for (int i = 0; i < kElementsO; ++i) {
        tOrO(i) *= rescale[i / 2 % 2];
      }
      divisor[0] *= rescale[0];
      divisor[1] *= rescale[1];
    };

    // The tile in a buffer. The shuffle tells the compiler that the block is the same in the whole warp. -1: no more.
    auto enter_tile = [&]() __attribute__((always_inline)) {
      storage.tile_full[q.stage].wait(q.parity);
      Tile const tile = storage.tile[q.stage];
      m_block = __shfl_sync(0xffffffffU, tile.valid() ? tile.block : -1, 0);
      visits = Traits::visits_of(band, m_block, storage.part[q.stage]);
    };
    auto first_softmax = [&](BlockFactors const& factors) __attribute__((always_inline)) {
      release_k();
      if (kMask != MaskClass::Full || band.seqlen_kv % kTileN != 0) {
        mask_block(visits.first());
      }
      softmax.first_block(tSrS, factors);
      clear(tOrO);
      divisor[0] = divisor[1] = 0.0F;
      ratio_v = factors.ratio_v;
      make_p();
    };

    // One key block: on entry P has the weights of the block before. Exponentials leave issue slots between them, which
    // the additions to O and the conversions fill: so nothing pins exponentials before the wait for the second product.
    // (ptxas puts a quarter of them there; all, half or none were slower, benches/LOG.md, 24.)
    auto step = [&](auto masked, int visit) __attribute__((always_inline)) {
      BlockFactors factors;
      std::uint32_t v;
      if constexpr (Traits::kParts == 1) {
        factors = await_keys();
        Turns::wait(consumer);
        issue_scores();
        v = issue_output();
        Turns::pass(consumer);
        warpgroup_wait<1>();
        warpgroup_fence_operand(tSrS);
        warpgroup_wait<0>();
        release_v(v);
      } else {
        // Products first, then exponentials: ptxas would put these between the instructions that issue those, for which
        // the whole warpgroup waits (benches/LOG.md, 26). Barriers take their time to answer: they are asked beside
        // products.
        v = issue_output();
        factors = await_keys();
        add_first_parts(v, ratio_v);
        issue_scores();
        warpgroup_wait<1>();
        release_v(v);
        add_part(Constant<kLastPart>{}, ratio_v);
        v_ready = storage.vt_full[k.stage].test(k.parity);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
      }
      auto add_output = [&]() __attribute__((always_inline)) {
        if constexpr (Traits::kParts == 1) {
          add_part(Constant<kLastPart>{}, ratio_v);
        }
        ratio_v = factors.ratio_v;
      };
      if constexpr (decltype(masked)::value) {
        add_output();
        mask_block(visit);
        softmax.masked_block(tSrS, factors, rescale_output);
        make_p();
      } else {
        float sums[2];
        softmax.unseen_block(tSrS, factors, sums);
        add_output();
        make_p();
        // (What is rare lies elsewhere then, and the loop in one piece.)
        if (__builtin_expect(!softmax.suits(sums), 0)) {
          softmax.move_block(tSrS, factors, sums, recompute_scores, rescale_output);
          make_p();
        }
        softmax.add(sums);
      }
      release_k();
    };

    Turns::begin(consumer);

    enter_tile();
    if (m_block < 0) {
      return;
    }
    storage.q_full[0].wait(0);
    BlockFactors factors = await_keys();
    Turns::wait(consumer);
    issue_scores();
    Turns::pass(consumer);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    first_softmax(factors);

    while (true) {
      int visit = visits.next(visits.first());
      if constexpr (kMask != MaskClass::Full) {
        // The right edge of a tile; its first block is behind us.
        for (; visits.on_right_edge(visit); visit = visits.next(visit)) {
          step(std::true_type{}, visit);
        }
      }
      if constexpr (Traits::kParts > 1) {
        // ptxas would begin the loop with some of O elsewhere, and move it in each round.
        warpgroup_fence_operand(tOrO);
      }
      for (; visits.before_left_edge(visit); visit = visits.next(visit)) {
        step(std::false_type{}, visit);
      }
      if constexpr (kMask == MaskClass::Window) {
        for (; visits.has(visit); visit = visits.next(visit)) {
          step(std::true_type{}, visit);
        }
      }

      Turns::wait(consumer);
      std::uint32_t const v = issue_output();
      float sums[2];
      softmax.finish(sums);
      Tile const tile = storage.tile[q.stage];
      int const others = storage.part[q.stage].sums;
      float const largest_v = storage.largest_v[q.stage];
      __syncwarp();
      release(storage.tile_empty[q.stage]);
      q.advance();
      enter_tile();
      // After the last tile the scores are those of whatever lies in the buffers: a branch between the two products and
      // the wait for the first would make ptxas serialise them.
      if (m_block >= 0) {
        storage.q_full[q.stage].wait(q.parity);
        factors = await_keys();
      }
      auto finish_tile = [&]() __attribute__((always_inline)) {
        int const place = Traits::consumer_thread_index();
        if (Traits::kShares && others < 0) {
          Share::leave(params, -1 - others, place, softmax.reference, sums, divisor, tOrO);
        } else {
          if (Traits::kShares && others > 0) {
            Share::join(params, others - 1, place, softmax.reference, sums, divisor, tOrO);
          }
          Fp8Epilogue<Traits>::run(params, tile, consumer, softmax.reference, sums, divisor, largest_v, tOrO);
        }
      };
      if constexpr (Traits::kParts == 1) {
        issue_scores();
        Turns::pass(consumer);
        warpgroup_wait<1>();
        release_v(v);
        add_part(Constant<kLastPart>{}, ratio_v);
        finish_tile();
      } else {
        add_first_parts(v, ratio_v);
        warpgroup_wait<0>();
        release_v(v);
        add_part(Constant<kLastPart>{}, ratio_v);
        if constexpr (Traits::kShares) {
          // Scores have to wait: what two CTAs share passes through more registers than are left beside them.
          finish_tile();
          if (m_block < 0) {
            break;
          }
          issue_scores();
        } else {
          issue_scores();
          finish_tile();
        }
      }
      v_ready = false;
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      if (m_block < 0) {
        break;
      }
      first_softmax(factors);
    }
  }
};

}  // namespace hattn::sm90
