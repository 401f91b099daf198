// A consumer warpgroup of the FP8 forward: both products and the softmax between them, for 64 queries.
//
// Order. The blocks of all tiles of a CTA form one stream. In the step of block j the warpgroup
//   1. issues S_j = Q K_j^T and P_{j-1} V_{j-1};
//   2. exponentiates S_j;
//   3. meanwhile adds P_{j-1} V_{j-1} to O;
//   4. makes P_j, the e4m3 weights.
// At a tile's end, the last product runs while the warpgroup waits for the next tile. The next tile's first S runs
// during the epilogue, where registers allow it.
//
// Precision. The tensor cores keep some 13 bits of a sum of FP8 products, too few for a long sequence. So P V of each
// block has accumulators of its own. They are multiplied by the factor of the block's V and added to O in f32.
//
// V^T has rows of ones, so that the product also sums the rounded weights. O is divided by that sum. So if all values
// are equal, O is that value. The LSE is made of the weights before rounding (softmax.hpp).
//
// Parts. Three consumers at head dim 128 have too few registers for all columns of P V, and so have two where lengths
// are a tile's own. There it is computed in kParts parts of columns. Each part is added to O before the next is issued.
// S is issued with the last part, so that nothing else is left to do during the exponentials.
//
// References. P is 2^(x - reference), where x is a scaled score. The reference takes the place of the row maximum, and
// is moved only where weights come out too large or too small for e4m3 (softmax.hpp). Each warp decides this alone. So
// no branch around a product, which the whole warpgroup issues, may depend on it.
#pragma once

#include "common/mask.hpp"
#include "common/visits.hpp"
#include "sm90/fp8/epilogue.hpp"
#include "sm90/fp8/leak.hpp"
#include "sm90/fp8/recompute.hpp"
#include "sm90/fp8/softmax.hpp"
#include "sm90/fp8/split.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/product.hpp"
#include "sm90/turns.hpp"

namespace hattn::sm90 {

// One consumer warpgroup, as one of its threads sees it: operands, accumulators, positions in the rings. `run` does
// everything.
//
// All functions are inlined into the kernel, so that the members are registers.
template <class Traits>
struct Fp8Mma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using MmaQK = typename Traits::MmaQK;
  using Weights =
      cute::conditional_t<Traits::kScores == Scores::F16, WeightsF16<Traits::kTileN, Traits::kPolynomialEvery>,
                          WeightsF32<Traits::kTileN, Traits::kColumnsAhead>>;
  using Softmax = Fp8Softmax<Weights, Traits::kLooksFirst, Traits::kNanLooks>;
  using Split = Fp8Split<Traits>;
  using Turns = sm90::Turns<Traits::kConsumers, Traits::kTurns, Traits::kTurns>;
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr bool kIsListed = Traits::kIsListed;
  static constexpr bool kModified = Traits::kModifiers == Modifiers::Always;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kElementsO = Traits::kHeadDimVO / 2;  // of O, a thread's
  static constexpr int kLastPart = Traits::kParts - 1;

  typename Traits::Params const& params;
  Band const& launch_band;
  Storage& storage;
  int const consumer;  // number of the warpgroup among the consumers, from 0

  // Operands in shared memory, as descriptors of their first buffer.
  typename Traits::SmemQ tSrQ;  // the 64 rows of this warpgroup
  typename Traits::SmemK tSrK;
  typename Traits::SmemVt tOrV;

  typename MmaQK::Sums tSrS{};  // scores of a block; its weights after the softmax
  // One part of a block's P V. Behind the columns of the last part four elements hold the sums of P.
  Fragment<float, Traits::kElementsPart> tOrT{};
  // Sums of rounded weights, of the same blocks as O. Declared before O: with the two the other way round, ptxas orders
  // the loop of head dim 64 so that it takes 2% longer (benches/LOG.md, 32).
  float divisor[2] = {0.0F, 0.0F};
  Fragment<float, kElementsO> tOrO{};          // O before the division
  Fragment<std::uint32_t, kTileN / 8> tOrP{};  // e4m3 weights of a block

  Softmax softmax;
  float ratio_v = 1.0F;               // of the block that tOrP belongs to
  RingPosition<Traits::kStages> k;    // of the next K
  RingPosition<Traits::kBuffersQ> q;  // of the tile
  bool v_ready = false;               // whether vt_full was seen to be complete, for the block that tOrP belongs to
  int m_block = -1;                   // number of the tile in its head; -1: there are no more tiles
  KeyVisits visits{0, 0, 0, 0};       // key blocks of the tile

  CUTE_DEVICE Fp8Mma(typename Traits::Params const& given_params, Band const& given_band, Storage& given_storage,
                     int number)
      : params{given_params},
        launch_band{given_band},
        storage{given_storage},
        consumer{number},
        tSrQ{Traits::SmemQ::of(given_storage.q[0] + number * 64 * Traits::kSlabQK)},
        tSrK{Traits::SmemK::of(given_storage.k[0])},
        tOrV{Traits::SmemVt::of(given_storage.vt[0])} {}

  CUTE_DEVICE void run() {
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
      visit_blocks();

      Turns::wait(consumer);
      std::uint32_t const v = issue_output();
      Finished const finished = leave_tile();
      enter_tile();
      // After the last tile the scores are those of whatever lies in the buffers: a branch between the two products and
      // the wait for the first would make ptxas serialise them.
      if (m_block >= 0) {
        storage.q_full[q.stage].wait(q.parity);
        factors = await_keys();
      }
      if constexpr (Traits::kParts == 1) {
        issue_scores();
        Turns::pass(consumer);
        warpgroup_wait<1>();
        release_v(v);
        add_part<kLastPart>();
        finish_tile(finished);
      } else {
        add_first_parts(v);
        warpgroup_wait<0>();
        release_v(v);
        add_part<kLastPart>();
        if constexpr (Traits::kScoresWait) {
          finish_tile(finished);
          if (m_block < 0) {
            repair_noted();
            break;
          }
          issue_scores();
        } else {
          issue_scores();
          finish_tile(finished);
        }
      }
      v_ready = false;
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      repair_noted();
      if (m_block < 0) {
        break;
      }
      first_softmax(factors);
    }
  }

  // The same for one share of one tile (shares.hpp). Then the CTA ends.
  CUTE_DEVICE void run_share() {
    Turns::begin(consumer);
    enter_tile();
    storage.q_full[0].wait(0);  // also without a block: a CTA must not end while a copy to it is under way
    float sums[2] = {0.0F, 0.0F};
    float largest_v = 1.0F;
    if (visits.has(visits.first())) {
      BlockFactors factors = await_keys();
      Turns::wait(consumer);
      issue_scores();
      Turns::pass(consumer);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      first_softmax(factors);
      visit_blocks();
      Turns::wait(consumer);
      issue_output();
      Turns::pass(consumer);
      softmax.finish(sums);
      largest_v = storage.largest_v[0];
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrT);
      add_part<kLastPart>();
    } else {
      softmax.reference[0] = softmax.reference[1] = -INFINITY;
      clear(tOrO);
    }
    Tile const tile = storage.tile[0];
    bool found = false;
    if (Fp8Shares<Traits>::join(storage, softmax.reference, sums, divisor, largest_v, tOrO)) {
      found = Fp8Epilogue<Traits>::run(params, tile, consumer, softmax.reference, sums, divisor, largest_v, tOrO);
    }
    typename Traits::Leak& leak = storage.leak[Traits::consumer_thread_index() / 32];
    if (kMask != MaskClass::Full && found) {
      note_leak(leak, tile, sums);
    }
    await_readers();
    // (The last thing, as what is rare lies far in the code.)
    if constexpr (kMask != MaskClass::Full) {
      if (found) {
        repair_rows<Traits>(params, leak, consumer * 64 + Traits::thread_index() / 32 * 16);
      }
    }
  }

 private:
  // Registers are short where a tile's record is long: there it lies in shared memory.
  struct InMemory {};
  using FinishedTile = cute::conditional_t<Traits::kIsPacked, InMemory, Tile>;

  // What is known of a tile when its last product is issued, and is needed until O is written.
  struct Finished {
    float sums[2];  // of weights before rounding, of the whole rows
    FinishedTile tile;
    int partial;      // Piece::partial
    float largest_v;  // factor of O
  };

  CUTE_DEVICE Tile const& tile_of(Tile const& tile) const { return tile; }
  CUTE_DEVICE PackedTile const& tile_of(InMemory) const {
    return storage.finished[Traits::consumer_thread_index() / 32];
  }

  CUTE_DEVICE static void release(Mbarrier& barrier) {
    if (cute::elect_one_sync()) {
      barrier.arrive();
    }
  }

  // Of the tile in buffer q. Read anew at each call: registers are short.
  CUTE_DEVICE typename Traits::TileBand band() const {
    return Traits::tile_band(params, launch_band, storage.tile[q.stage]);
  }

  // Waits for the tile in buffer q and sets m_block and visits. The shuffle tells the compiler that the block is the
  // same in the whole warp.
  CUTE_DEVICE void enter_tile() {
    storage.tile_full[q.stage].wait(q.parity);
    typename Traits::TileRecord const tile = storage.tile[q.stage];
    m_block = __shfl_sync(0xffffffffU, tile.valid() ? tile.block : -1, 0);
    visits = Traits::visits_of(band(), m_block, storage.piece[q.stage]);
    if constexpr (Traits::kIsPacked || kIsListed) {
      visits.end = __shfl_sync(0xffffffffU, visits.end, 0);
      visits.free_end = __shfl_sync(0xffffffffU, visits.free_end, 0);
      if constexpr (kMask == MaskClass::Window) {
        visits.begin = __shfl_sync(0xffffffffU, visits.begin, 0);
        visits.free_begin = __shfl_sync(0xffffffffU, visits.free_begin, 0);
      }
    }
  }

  // Hands buffer q back to the producers and moves on to the next one.
  CUTE_DEVICE Finished leave_tile() {
    Finished finished;
    softmax.finish(finished.sums);
    if constexpr (Traits::kIsPacked) {
      storage.finished[Traits::consumer_thread_index() / 32] = storage.tile[q.stage];  // by every lane the same
    } else {
      finished.tile = storage.tile[q.stage];
    }
    finished.partial = storage.piece[q.stage].partial;
    finished.largest_v = storage.largest_v[q.stage];
    __syncwarp();
    release(storage.tile_empty[q.stage]);
    q.advance();
    return finished;
  }

  // Writes O of a tile that all products were added of, or what another CTA adds to its own.
  CUTE_DEVICE void finish_tile(Finished finished) {
    int const place = Traits::consumer_thread_index();
    if (Traits::kSplits && finished.partial < 0) {
      Split::write_partial(params, -1 - finished.partial, place, softmax.reference, finished.sums, divisor, tOrO);
    } else {
      if (Traits::kSplits && finished.partial > 0) {
        Split::add_partial(params, finished.partial - 1, place, softmax.reference, finished.sums, divisor, tOrO);
      }
      bool const found = Fp8Epilogue<Traits>::run(params, tile_of(finished.tile), consumer, softmax.reference,
                                                  finished.sums, divisor, finished.largest_v, tOrO);
      if constexpr (kMask != MaskClass::Full) {
        if (found) {
          note_leak(storage.leak[place / 32], tile_of(finished.tile), finished.sums);
        }
      }
    }
  }

  // Puts right the tile that this warp has noted, if there is one. No product may be under way.
  CUTE_DEVICE void repair_noted() {
    if constexpr (kMask != MaskClass::Full) {
      typename Traits::Leak& leak = storage.leak[Traits::consumer_thread_index() / 32];
      if (leak.noted) {
        repair_rows<Traits>(params, leak, consumer * 64 + Traits::thread_index() / 32 * 16);
      }
    }
  }

  // Waits for K of a block and returns the block's factors.
  CUTE_DEVICE BlockFactors await_keys() {
    storage.k_full[k.stage].wait(k.parity);
    return storage.factors[k.stage][consumer];
  }
  CUTE_DEVICE void release_k() {
    release(storage.k_empty[k.stage]);
    k.advance();
  }
  CUTE_DEVICE void release_v(std::uint32_t stage) {
    if constexpr (Traits::kOnesAlone) {
      // The other registers hold nothing now, and the scores need them.
      warpgroup_fence_operand(tOrT.template part<Traits::template MmaPV<kLastPart>::Sums::size()>(0));
    } else {
      warpgroup_fence_operand(tOrT);
    }
    release(storage.vt_empty[stage]);
  }

  // S = Q K^T of the block that k is at.
  CUTE_DEVICE void issue_scores() { issue_product<MmaQK, false>(tSrQ.stage(q.stage), tSrK.stage(k.stage), tSrS); }

  // One part of P V. Where the part's rows of V^T begin follows from where the first part's do: ptxas would make each
  // anew.
  template <int kPart>
  CUTE_DEVICE void issue_part(std::uint32_t stage) {
    using MmaPV = typename Traits::template MmaPV<kPart>;
    auto& sums = tOrT.template part<MmaPV::Sums::size()>(0);
    issue_product<MmaPV, false>(tOrP, tOrV.stage(stage).further(kPart * (Traits::kPartColumns * kTileN / 16)), sums);
  }

  // The first part of P V. V belongs to the block before the one that k is at. Returns the stage where it lies.
  CUTE_DEVICE std::uint32_t issue_output() {
    auto const v = k.before();
    if constexpr (Traits::kParts == 1) {
      storage.vt_full[v.stage].wait(v.parity);
    } else {
      storage.vt_full[v.stage].wait_unless(v_ready, v.parity);
    }
    issue_part<0>(v.stage);
    return v.stage;
  }

  // Adds a part of P V, which has come, to O, and after the last part the sums of P to the divisor.
  template <int kPart>
  CUTE_DEVICE void add_part() {
    constexpr int kFirst = kPart * Traits::kPartColumns / 2;
    constexpr int kCount = cute::min(Traits::kPartColumns / 2, kElementsO - kFirst);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      tOrO(kFirst + i) = fmaf(tOrT(i), ratio_v, tOrO(kFirst + i));
    }
    if constexpr (kPart == kLastPart) {
      divisor[0] += tOrT(kCount);
      divisor[1] += tOrT(kCount + 2);
    }
  }

  // Waits for part kPart, adds it and issues the next one.
  template <int kPart>
  CUTE_DEVICE void add_and_issue(std::uint32_t stage) {
    if constexpr (kPart < kLastPart) {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrT);
      add_part<kPart>();
      issue_part<kPart + 1>(stage);
    }
  }
  // Waits for all parts but the last and adds them. The last one is then on its way.
  CUTE_DEVICE void add_first_parts(std::uint32_t stage) {
    add_and_issue<0>(stage);
    add_and_issue<1>(stage);
    add_and_issue<2>(stage);
    add_and_issue<3>(stage);
    static_assert(kLastPart <= 4);
  }

  CUTE_DEVICE void mask_block(int visit) {
    int const thread = Traits::thread_index();
    int const row = m_block * kTileM + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
    if constexpr (kIsListed) {
      // (One row after the other: registers are short.)
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        int const query = anew(row) + 8 * r;
        std::uint64_t const bits = storage.tile[q.stage].bits + query % kListedBlock * 16;
        hide_scores(tSrS, storage.entry[k.stage].kept(bits, band(), query), r, 2 * (thread % 4), -INFINITY);
      }
    } else {
      apply_mask<kMask, kTileN>(tSrS, band(), row, 2 * (thread % 4), visits.block(visit));
    }
  }

  // S once more, in other instructions. K must not have been released.
  CUTE_DEVICE void recompute_scores() {
    Fp8Recompute<Traits>::scores(tSrS, storage.q[q.stage] + consumer * 64 * Traits::kSlabQK, storage.k[k.stage]);
  }

  CUTE_DEVICE void rescale_output(float const (&rescale)[2]) {
    multiply_rows(tOrO, rescale);
    divisor[0] *= rescale[0];
    divisor[1] *= rescale[1];
  }

  // Whether a key of a tile's first block is masked: where the block is the diagonal's, or a ragged last one.
  CUTE_DEVICE bool first_is_masked() const {
    if constexpr (Traits::kIsPacked) {
      return kMask != MaskClass::Full || visits.on_right_edge(visits.first());
    } else {
      return kMask != MaskClass::Full || band().seqlen_kv % kTileN != 0;
    }
  }

  // Of a row for modified scores: caps the scores, and makes the factors what they are from then on.
  CUTE_DEVICE void cap_scores(BlockFactors& factors) {
    if constexpr (kModified) {
      factors.unit = params.cap.template cap<Traits::kLooksForNear, Traits::kCapsAtATime>(tSrS, factors.unit);
    }
  }

  // The softmax of a tile's first block. Releases K, clears O and makes P.
  CUTE_DEVICE void first_softmax(BlockFactors& factors) {
    if constexpr (kIsListed) {
      cap_scores(factors);
      mask_block(visits.first());  // its entry comes with K, too
    }
    __syncwarp();  // every lane has read the factors, which come with K
    release_k();
    if constexpr (!kIsListed) {
      cap_scores(factors);
      if (first_is_masked()) {
        mask_block(visits.first());
      }
    }
    softmax.first_block(tSrS, factors);
    clear(tOrO);
    divisor[0] = divisor[1] = 0.0F;
    ratio_v = factors.ratio_v;
    Weights::pack(tSrS, tOrP);
  }

  // All blocks of a tile but the first, which is done.
  CUTE_DEVICE void visit_blocks() {
    int visit = visits.next(visits.first());
    if constexpr (kMask != MaskClass::Full) {
      // The right edge of a tile; its first block is behind us.
      for (; visits.on_right_edge(visit); visit = visits.next(visit)) {
        step<true>(visit);
      }
    }
    if constexpr (Traits::kPinsOutput) {
      // ptxas would begin the loop with some of O elsewhere, and move it in each round.
      warpgroup_fence_operand(tOrO);
    }
    for (; visits.before_left_edge(visit); visit = visits.next(visit)) {
      step<false>(visit);
    }
    if constexpr (kMask == MaskClass::Window) {
      for (; visits.has(visit); visit = visits.next(visit)) {
        step<true>(visit);
      }
    }
  }

  // One key block. On entry tOrP has the weights of the block before, on return those of the block of `visit`.
  //
  // Exponentials leave issue slots between them, which the additions to O and the conversions fill. So nothing pins
  // exponentials before the wait for the second product. (ptxas puts a quarter of them there; all, half or none were
  // slower, benches/LOG.md, 24.)
  template <bool kMasked>
  CUTE_DEVICE void step(int visit) {
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
      add_first_parts(v);
      issue_scores();
      warpgroup_wait<1>();
      release_v(v);
      add_part<kLastPart>();
      v_ready = storage.vt_full[k.stage].test(k.parity);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
    }
    if constexpr (kModified) {
      add_output(factors);  // its registers are needed
      cap_scores(factors);
    }
    auto const rescale = [&](float const(&by)[2]) __attribute__((always_inline)) { rescale_output(by); };
    // (What is rare lies elsewhere then, and the loop in one piece.)
    if (kMasked || __builtin_expect(softmax.looks(), 0)) {
      if constexpr (!kModified) {
        add_output(factors);
      }
      if constexpr (kMasked) {
        mask_block(visit);
      }
      softmax.masked_block(tSrS, factors, rescale);
      Weights::pack(tSrS, tOrP);
    } else {
      float sums[2];
      softmax.unseen_block(tSrS, factors, sums);
      if constexpr (!kModified) {
        add_output(factors);
      }
      Weights::pack(tSrS, tOrP);
      if (__builtin_expect(!softmax.suits(sums), 0)) {
        softmax.move_block(
            tSrS, factors, sums,
            [&] {
              recompute_scores();
              if constexpr (kModified) {
                params.cap.template cap<false, Traits::kCapsAtATime>(tSrS, storage.factors[k.stage][consumer].unit);
              }
            },
            rescale);
        Weights::pack(tSrS, tOrP);
      } else if (Traits::kLooksFirst) {
        softmax.add(sums);
      }
      if constexpr (!Traits::kLooksFirst) {
        softmax.add(sums);
      }
    }
    release_k();
  }

  CUTE_DEVICE void add_output(BlockFactors const& factors) {
    if constexpr (Traits::kParts == 1) {
      add_part<kLastPart>();
    }
    ratio_v = factors.ratio_v;
  }
};

}  // namespace hattn::sm90
