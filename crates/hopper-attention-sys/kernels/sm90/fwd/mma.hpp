// The consumer warpgroups of the forward: both products, and the softmax between them.
//
// The blocks of all tiles of a CTA form one stream. For block j a warpgroup
// 1. waits for its turn, issues S = Q K_j^T and then O += P_{j-1} V_{j-1}, and passes the turn on;
// 2. waits for S, masks it if the block is on an edge, and exponentiates it while the second product still runs;
// 3. waits for the second product, and converts S to P_j.
//
// So the product with V is always one block late. Between two tiles the stream does not stop:
// - While the last product of a tile runs, the warpgroup finishes the tile's row sums and looks up the next tile.
// - While the first S of the next tile is computed, it writes O of the finished tile.
//
// Where the keys of a tile are shared (shares.hpp), the stream is this share's blocks of one tile, and may be empty.
// Its end is Shares::finish_tile, or Epilogue::write_output where the CTA has the tile for itself.
//
// Turns (sm90/turns.hpp) keep the warpgroups apart: one exponentiates while another multiplies.
#pragma once

#include "common/alibi.hpp"
#include "common/bias.hpp"
#include "common/dropout.hpp"
#include "common/mask.hpp"
#include "common/max_logits.hpp"
#include "common/scalars.hpp"
#include "common/shared.hpp"
#include "common/visits.hpp"
#include "sm90/fwd/alibi.hpp"
#include "sm90/fwd/choices.hpp"
#include "sm90/fwd/epilogue.hpp"
#include "sm90/fwd/recompute.hpp"
#include "sm90/fwd/shares.hpp"
#include "sm90/fwd/softmax.hpp"
#include "sm90/fwd/traits.hpp"
#include "sm90/product.hpp"
#include "sm90/turns.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Mma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using Softmax = ExactSoftmax<Traits::kDType, Traits::kTileN, Traits::kMask != MaskClass::Full>;
  using Row = MmaChoices<Traits>;
  using Turns = sm90::Turns<Traits::kConsumers, Traits::kWays == 1>;
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr bool kModified = Traits::kModifiers == Modifiers::Always;
  static constexpr bool kIsAlibi = Traits::kIsAlibi;
  static constexpr bool kIsListed = Traits::kIsListed;
  using Kept = KeptBits<kIsListed ? Traits::kTileN / 32 : 4>;  // of a row
  static constexpr bool kAddsBias = Traits::kAddsBias;

  CUTE_DEVICE static void run(FwdParams const& params, typename Traits::Scalars const& scalars, Band const& launch_band,
                              Storage& storage, int consumer) {
    using MmaQK = typename Traits::MmaQK;
    using MmaPV = typename Traits::MmaPV;
    // The warpgroup's rows of a slab.
    auto const tSrQ = Traits::SmemQ::of(storage.q[0] + consumer * (Traits::kRowsApart * Traits::kSlabColumns));
    auto const tSrK = Traits::SmemK::of(storage.k[0]);
    auto const tOrV = Traits::SmemV::of(storage.v[0]);

    typename MmaQK::Sums tSrS{};
    typename MmaPV::Sums tOrO{};
    // P is the A operand of the second product. For 16-bit types the accumulator's element order is the operand's
    // order, so making P is a conversion in place.
    Fragment<std::uint32_t, Traits::kTileN / 4> tOrP{};
    auto make_p = [&]() { pack_pairs<Element>(tSrS, tOrP); };

    Softmax softmax{};
    // Where two warpgroups share the keys, each has every second block.
    int const first_block = Traits::kWays == 2 ? consumer : 0;
    typename Traits::Position k;
    typename Traits::Position v;
    if constexpr (Traits::kWays == 2) {
      k.begin(consumer);
      v.begin(consumer);
    }
    RingPosition<Traits::kRecords> q;
    int m_block = -1;
    KeyVisits visits{0, 0, 0, 0};
    [[maybe_unused]] int masked_entries = 0;  // of the next tile's list
    [[maybe_unused]] int all_entries = 0;
    [[maybe_unused]] int listed_block = 0;  // of the keys of the step, where a list says it and modifiers ask

    typename Traits::TileBand band = launch_band;

    // The tile in a buffer. The shuffle tells the compiler that the block is the same in the whole warp, which keeps
    // what depends on it (loop bounds, descriptors) in uniform registers. -1: no more tiles.
    auto await_tile = [&](int buffer, int parity) {
      storage.tile_full[buffer].wait(parity);
      auto const& tile = storage.tile[buffer];
      if constexpr (Traits::kIsPacked && !Row::kReadsBand) {
        Band const band_of_next = band_of_tile(params, tile);
        band.left_offset = __shfl_sync(0xffffffffU, band_of_next.left_offset, 0);
        band.right_offset = __shfl_sync(0xffffffffU, band_of_next.right_offset, 0);
        band.seqlen_q = __shfl_sync(0xffffffffU, band_of_next.seqlen_q, 0);
        band.seqlen_kv = __shfl_sync(0xffffffffU, band_of_next.seqlen_kv, 0);
      }
      if constexpr (kIsListed) {
        masked_entries = kAddsBias ? 0 : __shfl_sync(0xffffffffU, tile.masked, 0);
        all_entries = __shfl_sync(0xffffffffU, tile.total, 0);
      }
      return __shfl_sync(0xffffffffU, tile.valid() ? tile.block : -1, 0);
    };

    // The band of the tile's sequence.
    auto band_of_sequence = [&]() __attribute__((always_inline))
                                ->std::conditional_t<Row::kReadsBand, Band, Band const&> {
      if constexpr (Row::kReadsBand) {
        typename Traits::TileRecord tile{};
        tile.q_len = __shfl_sync(0xffffffffU, read_word(storage.tile[q.stage].q_len), 0);
        tile.kv_len = __shfl_sync(0xffffffffU, read_word(storage.tile[q.stage].kv_len), 0);
        return band_of_tile(params, tile);
      } else {
        return band;
      }
    };

    auto arrive_k = [&]() {
      if (cute::elect_one_sync()) {
        storage.k_empty[k.stage].arrive();
      }
    };
    auto release_k = [&]() {
      arrive_k();
      k.advance();
    };
    auto release_v = [&]() {
      if (cute::elect_one_sync()) {
        storage.v_empty[v.stage].arrive();
      }
      v.advance();
    };
    // This warpgroup's number, read anew where registers are short.
    auto self = [&]() __attribute__((always_inline)) {
      constexpr bool kAnew = Row::kRenews || (Traits::kHeadDimQK > 128 && (kModified || kMask == MaskClass::Window));
      return kAnew ? __shfl_sync(0xffffffffU, thread_index_anew() / 128 - 1, 0) : consumer;
    };
    // The visits that this warpgroup's rows need. The warpgroup passes over the tile's visits before them (the result)
    // and after them, and passes its turns on in each.
    auto enter_tile = [&]() __attribute__((always_inline)) {
      if constexpr (kIsListed) {
        visits = visits_of_list<Traits::kTileN>(masked_entries, all_entries);
        return 0;
      }
      Band of_tile = band_of_sequence();
      if constexpr (kAddsBias && !Row::kReadsBand) {
        of_tile.seqlen_kv = anew(band.seqlen_kv);  // what follows from it would be kept all through the loop
      }
      KeyVisits const tile_visits = Shares<Traits>::visits(of_tile, m_block);
      if constexpr (kMask == MaskClass::Full || Traits::kWays == 2) {
        visits = tile_visits;
        if constexpr (Traits::kWays == 2) {
          visits.end -= first_block;
        }
        return 0;
      } else {
        int const strip = m_block * Traits::kConsumers + self();
        visits = KeyVisits::of_rows<kMask, 64, Traits::kTileN>(Row::kReadsBand ? of_tile : band, strip, tile_visits);
        if constexpr (Traits::kShares && kMask == MaskClass::Causal) {
          visits.begin = tile_visits.begin;  // of_rows begins with the first key
        }
        if constexpr (kMask == MaskClass::Window) {
          visits.begin = cute::min(visits.begin, tile_visits.begin + Row::kMostSkipped);
        }
        return visits.skipped_before(tile_visits);
      }
    };
    // Worked out again where it is needed: registers are short while the tile is under way.
    auto skipped_after = [&]() __attribute__((always_inline)) {
      if constexpr (kMask == MaskClass::Window && Traits::kWays == 1) {
        // (Else what it is made of is kept from enter_tile on.)
        return visits.skipped_after(Shares<Traits>::visits(band_of_sequence(), kModified ? anew(m_block) : m_block));
      } else {
        return 0;
      }
    };
    auto skip_k = [&](int blocks) {
      if constexpr (Row::kSkips) {
        CUTE_NO_UNROLL
        for (int i = 0; i < blocks; ++i) {
          storage.k_full[k.stage + consumer * Traits::kFullsApart].wait(k.parity);
          release_k();
          Turns::wait(consumer);
          Turns::pass(consumer);
        }
        k.make_uniform();
      }
    };
    auto skip_v = [&](int blocks) {
      if constexpr (Row::kSkips) {
        CUTE_NO_UNROLL
        for (int i = 0; i < blocks; ++i) {
          storage.v_full[v.stage + consumer * Traits::kFullsApart].wait(v.parity);
          release_v();
        }
        v.make_uniform();
      }
    };
    // This lane's first row.
    auto own_row = [&]() __attribute__((always_inline)) {
      int const thread = Traits::thread_index();
      return m_block * Traits::kTileM + consumer * Traits::kRowsApart + (thread / 32 % 4) * 16 + thread % 32 / 4;
    };
    // Before the K of a block is given back: its entry is with it.
    auto note_listed_block = [&]() __attribute__((always_inline)) {
      if constexpr (kIsListed && kModified) {
        listed_block = __shfl_sync(0xffffffffU, storage.entry[k.stage].block_of_visit(), 0);
      }
    };
    // The block of keys of a visit.
    auto block_of = [&](int visit) __attribute__((always_inline)) {
      return kIsListed ? listed_block : visits.block(visit);
    };
    // Where lists say what is masked: the keys of the block in a stage that this lane's rows keep.
    auto listed_keys = [&](Kept(&kept)[2], int tile, int stage) __attribute__((always_inline)) {
      if constexpr (kIsListed) {
        int const row = own_row();
        std::uint64_t const bits = storage.tile[tile].bits + row % kListedBlock * 16;
        kept[0] = storage.entry[stage].kept(bits, band, row);
        kept[1] = storage.entry[stage].kept(bits + 8 * 16, band, row + 8);
      }
    };
    auto mask_block = [&](int visit) __attribute__((always_inline)) {
      apply_mask<kMask, Traits::kTileN>(tSrS, band_of_sequence(), own_row(), 2 * (Traits::thread_index() % 4),
                                        visits.block(visit));
    };
    auto buffer_of = [](int record) { return Traits::kWritesOutput ? 0 : record; };
    auto issue_scores = [&]() {
      if constexpr (kIsListed && kAddsBias) {
        // (Uniform registers are short.)
        auto const rows = Traits::SmemQ::of(storage.q[0] + self() * (Traits::kRowsApart * Traits::kSlabColumns));
        issue_product<MmaQK, false>(rows.stage(buffer_of(q.stage)), tSrK.stage(k.stage), tSrS);
      } else {
        issue_product<MmaQK, false>(tSrQ.stage(buffer_of(q.stage)), tSrK.stage(k.stage), tSrS);
      }
    };
    auto issue_output = [&]() {
      storage.v_full[v.stage + consumer * Traits::kFullsApart].wait(v.parity);
      issue_product<MmaPV, true>(tOrP, tOrV.stage(v.stage), tOrO);
    };
    auto await_output = [&]() {
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
      release_v();
    };

    // Rows for modified scores: the slope of the tile, read where it is needed (registers are short), and its diagonal.
    auto slope_of_tile = [&]() __attribute__((always_inline)) {
      if constexpr (kModified) {
        return __uint_as_float(read_word(storage.modifiers.slope[q.stage]));
      } else {
        return 0.0F;
      }
    };
    auto diagonal = [&]() __attribute__((always_inline)) {
      int offset = params.diagonal_offset;
      if constexpr (Traits::kIsPacked && Traits::kScoresWait && kMask == MaskClass::Window) {
        offset = diagonal_of(params, band_of_sequence());
      } else if constexpr (Traits::kIsPacked) {
        if (params.sequences.bottom_right) {
          auto const& tile = storage.tile[q.stage];
          offset += static_cast<int>(read_word(tile.kv_len) - read_word(tile.q_len));
        }
      }
      return offset;
    };
    auto own_row_anew = [&]() __attribute__((always_inline)) {
      auto const thread = static_cast<unsigned>(thread_index_anew());
      unsigned const row = thread / 32 * 16 + thread % 32 / 4 - 64;  // warpgroup 0 loads
      return static_cast<int>(read_word(storage.tile[q.stage].block) * Traits::kTileM + row);
    };
    // The tile's first visit. A full mask's is the same in all tiles: it would be kept all through the loop.
    auto first_visit = [&]() __attribute__((always_inline)) {
      if constexpr (kModified && kMask == MaskClass::Full && !Traits::kIsPacked) {
        constexpr int kTileN = Traits::kTileN;
        return cute::max(1, ceil_div(anew(band.seqlen_kv), kTileN)) - 1;
      } else {
        return visits.first();
      }
    };
    auto add_alibi_bias = [&](int visit) __attribute__((always_inline)) {
      if constexpr (kModified) {
        if (has_alibi(params)) {
          int const first_key = block_of(visit) * Traits::kTileN + 2 * (thread_index_anew() & 3);
          add_alibi<Traits::kTileN>(tSrS, slope_of_tile(), own_row_anew() + diagonal() - first_key);
        }
      }
    };
    auto bias_of_head = [&]() __attribute__((always_inline)) {
      auto const& tile = storage.tile[q.stage];
      return BiasOfHead::of(params, static_cast<int>(read_word(tile.batch)), static_cast<int>(read_word(tile.head)));
    };
    // The queries and keys of the tile's sequence.
    auto queries_of_tile = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kIsPacked) {
        return static_cast<int>(read_word(storage.tile[q.stage].q_len));
      }
      return scalars.seqlen_q;
    };
    auto keys_of_tile = [&]() __attribute__((always_inline)) {
      if constexpr (Traits::kIsPacked) {
        return static_cast<int>(read_word(storage.tile[q.stage].kv_len));
      }
      return scalars.seqlen_kv;
    };
    // Where the warp has the bias of its queries and the next block.
    auto copied_bias = [&]() __attribute__((always_inline)) {
      if constexpr (Row::kCopiesBias) {
        return cute::cast_smem_ptr_to_uint(&storage.bias.rows[static_cast<unsigned>(thread_index_anew()) / 32 - 4][0]);
      }
    };
    // Has the warp begin to copy that of a block, if there is a tile and such a block.
    auto copy_bias = [&](auto ragged, int block) __attribute__((always_inline)) {
      if constexpr (Row::kConsumersCopyBias) {
        int const lane = thread_index_anew() & 31;
        Traits::WarpBias::template begin<decltype(ragged)::value>(
            is_copied(params) && m_block >= 0 && block >= 0, copied_bias(), bias_of_head(), own_row_anew() - lane / 4,
            queries_of_tile(), block * Traits::kTileN, keys_of_tile(), lane);
      }
    };
    auto copy_first_bias = [&]() __attribute__((always_inline)) {
      if constexpr (Row::kConsumersCopyBias) {
        await_copies<0>();  // those of a block that the tile before does not visit
        __syncwarp();
        copy_bias(std::true_type{}, visits.block(visits.first()));
      }
    };
    // Waits for a block's bias. (All pass through the producers' one buffer: its parity is that of a stage of K.)
    auto await_bias = [&]() __attribute__((always_inline)) {
      if constexpr (Row::kProducersCopyBias) {
        storage.bias.full[static_cast<unsigned>(thread_index_anew()) / 128 - 1].wait(k.stage & 1);
      } else {
        await_copies<0>();
        __syncwarp();
      }
    };
    auto release_bias = [&]([[maybe_unused]] int visit) __attribute__((always_inline)) {
      __syncwarp();
      if constexpr (Row::kProducersCopyBias) {
        if (cute::elect_one_sync()) {
          storage.bias.empty[static_cast<unsigned>(thread_index_anew()) / 128 - 1].arrive();
        }
      } else {
        copy_bias(std::false_type{}, visits.block(visit) - 1);
      }
    };
    // What brings scores to powers of two. (A bias has done it.)
    auto scale_of_scores = [&]() __attribute__((always_inline)) { return kAddsBias ? 1.0F : scalars.scale_log2; };
    // ALiBi, and the additive bias. ragged: whether the block may be the sequence's last.
    auto add_biases = [&]([[maybe_unused]] auto ragged, int visit) __attribute__((always_inline)) {
      add_alibi_bias(visit);
      if constexpr (kAddsBias) {
        if constexpr (Row::kCopiesBias) {
          if (is_copied(params)) {
            await_bias();
            Traits::WarpBias::template add<cute::max(1, Traits::kBiasAtATime / 2)>(
                tSrS, scalars.scale_log2, copied_bias(), params.bias_dtype, thread_index_anew() & 31, -INFINITY);
            release_bias(visit);
            return;
          }
        }
        add_bias<decltype(ragged)::value, Traits::kTileN, Traits::kBiasAtATime>(
            tSrS, scalars.scale_log2, bias_of_head, own_row_anew(), queries_of_tile(), block_of(visit) * Traits::kTileN,
            thread_index_anew() & 3, keys_of_tile());
      }
    };
    // Behind make_p.
    auto drop = [&](int visit) __attribute__((always_inline)) {
      if constexpr (Traits::kDrops) {
        if (has_dropout(params)) {
          auto const& tile = storage.tile[q.stage];
          auto const head = static_cast<int>(read_word(tile.batch) * params.heads_q + read_word(tile.head));
          drop_weights<Traits::kTileN>(tOrP, DropoutOfHead::of(params.dropout, head), params.dropout.dropped,
                                       own_row_anew(), block_of(visit) * Traits::kTileN, thread_index_anew() & 3);
        }
      }
    };
    // Whether the next block's products are expected to be near: those of the last compared block were.
    [[maybe_unused]] bool expects_near = false;
    // What follows a product with K has what cap and ALiBi make of it in its place.
    auto modify = [&](auto ragged, int visit) __attribute__((always_inline)) {
      if constexpr (kModified) {
        if (!kIsAlibi && scalars.softcap.caps()) {
          expects_near = cap_scores<Traits::kLooksForNear, Traits::kCapsAtATime>(tSrS, scalars.softcap);
        }
        add_biases(ragged, visit);
      }
    };
    // With ALiBi alone, before the scores of a block that is exponentiated unseen: its parts (alibi.hpp).
    auto begin_unseen = [&](int visit, auto& slope_terms, float(&references)[2]) __attribute__((always_inline)) {
      if constexpr (kIsAlibi) {
        int const column = thread_index_anew() & 3;
        slope_terms(0) = column < 2 ? read_word(storage.alibi_operands().slope[q.stage][column]) : 0;
        slope_terms(1) = slope_terms(0);  // of the other row
        add_alibi_of_rows(references, slope_of_tile(), scalars.scale_log2,
                          own_row_anew() + diagonal() + 1 - (visits.block(visit) + 1) * Traits::kTileN);
      }
    };
    auto issue_unseen = [&](auto const& slope_terms) __attribute__((always_inline)) {
      if constexpr (kIsAlibi) {
        auto const places = Traits::Places::of(storage.alibi_operands().places).stage(0);
        issue_sum<typename Traits::MmaPlaces, MmaQK>(slope_terms, places, tSrQ.stage(buffer_of(q.stage)),
                                                     tSrK.stage(k.stage), tSrS);
      } else {
        issue_scores();
      }
    };
    // Behind them: it has no additive bias. With ALiBi it is before the diagonal.
    auto modify_unseen = [&](int visit, float(&references)[2]) __attribute__((always_inline)) {
      if constexpr (kIsAlibi) {
        if (!alibi_falls_apart(slope_of_tile(), scalars.scale_log2)) {
          add_alibi_bias(visit);
        }
      } else if constexpr (kModified) {
        if (scalars.softcap.caps()) {
          cap_scores<Traits::kLooksForNear, Traits::kCapsAtATime>(tSrS, scalars.softcap);
        }
        if (has_alibi(params)) {
          int const first_key = visits.block(visit) * Traits::kTileN + 2 * (thread_index_anew() & 3);
          add_alibi_unseen<Traits::kTileN>(tSrS, slope_of_tile(), scalars.scale_log2,
                                           own_row_anew() + diagonal() - first_key, wants_max_logits(params),
                                           references);
        }
      }
    };
    // Whether the cap is put on while scores are exponentiated: nothing else may look at them.
    auto caps_at_once = [&]() __attribute__((always_inline)) {
      if constexpr (kModified && !kIsAlibi && !kAddsBias) {
        return expects_near && !has_alibi(params) && !wants_max_logits(params);
      } else {
        return false;
      }
    };
    // Behind the mask.
    auto see_largest = [&]() __attribute__((always_inline)) {
      if constexpr (kModified && !kIsAlibi) {
        if (wants_max_logits(params)) {
          see_scores<Traits::kTileN>(tSrS, scale_of_scores(), own_row_anew, queries_of(scalars, storage.tile[q.stage]),
                                     storage.modifiers.largest[static_cast<unsigned>(thread_index_anew()) / 32 - 4]);
        }
      }
    };
    // The same of a block that has been compared first of all: the references are its largest scores.
    auto see_references = [&]() __attribute__((always_inline)) {
      if constexpr (kModified && !kIsAlibi) {
        auto const seen = [](float reference) { return reference == Softmax::kNoKey ? -INFINITY : reference; };
        see_rows(wants_max_logits(params), seen(softmax.reference[0]), seen(softmax.reference[1]), own_row_anew(),
                 queries_of(scalars, storage.tile[q.stage]),
                 storage.modifiers.largest[static_cast<unsigned>(thread_index_anew()) / 32 - 4]);
      }
    };
    // The K that it reads must not have been released. (Blocks that are not compared have no additive bias.)
    auto recompute_scores = [&](int visit) {
      Recompute<Traits>::scores(tSrS, storage.q[buffer_of(q.stage)], storage.k[k.stage],
                                (Row::kRenews ? self() : consumer) * Traits::kRowsApart);
      if constexpr (kModified) {
        if (!kIsAlibi && scalars.softcap.caps()) {
          cap_any<Traits::kCapsAtATime>(tSrS, scalars.softcap.factor_anew());
        }
        add_alibi_bias(visit);
      }
    };
    // A tile's first block: the diagonal's, or the ragged last one.
    auto first_softmax = [&]() __attribute__((always_inline)) {
      note_listed_block();
      modify(std::true_type{}, first_visit());
      if constexpr (kIsListed) {
        Kept kept[2];
        listed_keys(kept, q.stage, k.stage);
        hide_scores(tSrS, kept, 2 * (Traits::thread_index() % 4), -INFINITY);
        release_k();
        softmax.first_masked_block(tSrS, scale_of_scores(),
                                   {{cute::max(1, kept[0].count()), cute::max(1, kept[1].count())}});
        see_references();
        return;
      }
      if (kMask != MaskClass::Full || band.seqlen_kv % Traits::kTileN != 0 ||
          (Traits::kIsPacked && band.seqlen_kv == 0) || Row::is_compared(params)) {
        release_k();
        int const block = visits.block(visits.first());
        mask_block(visits.first());
        softmax.first_masked_block(tSrS, scale_of_scores(),
                                   keys_before_edge<kMask, Traits::kTileN>(band_of_sequence(), own_row(), block));
        see_references();
      } else if constexpr (!kAddsBias) {
        see_largest();
        // In a short tile the first block's weights are a good part of all: there a maximum is worth its time.
        if (!softmax.first_block(tSrS, scalars.scale_log2, visits.count() <= Row::kShort)) {
          recompute_scores(first_visit());
          softmax.first_masked_block(tSrS, scalars.scale_log2, {{Traits::kTileN, Traits::kTileN}});
        }
        release_k();
      }
      if constexpr (Row::kRenews) {
        consumer = self();
      }
    };

    // One block. On entry P is of the block before. The warps of a warpgroup move their rows each on its own, but
    // they may wait for a product only together (PTX ISA, wgmma.wait_group). So a warp multiplies O after that wait, if
    // at all. (The empty asm statements: or the compiler makes two paths, each with its own wait.)
    auto step = [&](auto masked, int visit) __attribute__((always_inline)) {
      storage.k_full[k.stage + consumer * Traits::kFullsApart].wait(k.parity);
      [[maybe_unused]] Kept kept[2];
      if constexpr (kIsListed && decltype(masked)::value && !kAddsBias) {
        listed_keys(kept, q.stage, k.stage);
      }
      note_listed_block();
      [[maybe_unused]] Fragment<std::uint32_t, 4> slope_terms{};
      [[maybe_unused]] float references[2] = {softmax.reference[0], softmax.reference[1]};
      if constexpr (!decltype(masked)::value) {
        begin_unseen(visit, slope_terms, references);
      }
      Turns::wait(consumer);
      if constexpr (decltype(masked)::value) {
        issue_scores();
      } else {
        issue_unseen(slope_terms);
      }
      issue_output();
      Turns::pass(consumer);
      warpgroup_wait<1>();
      warpgroup_fence_operand(tSrS);
      float rescale[2];
      if constexpr (decltype(masked)::value) {
        modify(std::bool_constant<kIsListed>{}, visit);
        constexpr float kUnmoved = -1.0F;  // no factor is negative
        rescale[0] = kUnmoved;
        if constexpr (kIsListed) {
          if constexpr (kAddsBias) {
            listed_keys(kept, q.stage, k.stage);  // not before: registers are short
          }
          hide_scores(tSrS, kept, 2 * (Traits::thread_index() % 4), -INFINITY);
        } else if constexpr (kMask != MaskClass::Full) {
          // With a bias, blocks between the edges are compared, too.
          if (!kAddsBias || visits.on_edge(visit)) {
            mask_block(visit);
          }
        }
        see_largest();
        softmax.masked_block(tSrS, scale_of_scores(), [&](float const(&factors)[2]) {
          rescale[0] = factors[0];
          rescale[1] = factors[1];
        });
        release_k();
        asm volatile("" : "+f"(rescale[0]));
        await_output();
        if (rescale[0] != kUnmoved) {
          multiply_rows(tOrO, rescale);
        }
      } else {
        // The vote depends on every exponential, and stands before the wait for the product: ptxas cannot move the
        // exponentials behind that wait, so they run while the product does. Where the scores are not needed again, K
        // is released before the wait, as its next copy takes long.
        float sums[2];
        bool stops;
        if (caps_at_once()) {
          stops = softmax.unseen_capped_block(tSrS, scalars.softcap, references, sums);
        } else {
          modify_unseen(visit, references);
          see_largest();
          stops = softmax.unseen_block(tSrS, scalars.scale_log2, references, sums);
        }
        if (!stops) {
          arrive_k();
        }
        warpgroup_fence_operand(tSrS);  // or ptxas moves registers where the ways of warps that stop and others meet
        int stopped = stops;
        asm volatile("" : "+r"(stopped));
        await_output();
        if (stopped) {
          bool const lost = Softmax::lost(sums);
          if (lost) {
            recompute_scores(visit);
            expects_near = false;
          }
          softmax.move_rows(tSrS, scalars.scale_log2, lost, visits.count(), sums, rescale);
          multiply_rows(tOrO, rescale);
          arrive_k();
        }
        k.advance();
        softmax.add(sums);
      }
      make_p();
      drop(visit);
    };

    // Behind the scores of a tile's first block, at the place that the kernel has it in.
    auto begin_tile = [&](auto at_top) __attribute__((always_inline)) {
      if constexpr (decltype(at_top)::value == Row::kBeginsAtTop) {
        first_softmax();
        make_p();
        drop(first_visit());
        clear(tOrO);
      }
    };

    Turns::begin(consumer);
    m_block = await_tile(0, 0);
    if (m_block < 0) {
      return;
    }
    bool has_blocks = true;
    if constexpr (Traits::kShares) {
      has_blocks = Shares<Traits>::visits(band, m_block).count() > first_block;
    }
    if (has_blocks) {
      int const skipped_before = enter_tile();
      copy_first_bias();
      storage.q_full[0].wait(0);
      skip_k(skipped_before);
      storage.k_full[k.stage + consumer * Traits::kFullsApart].wait(k.parity);
      Turns::wait(consumer);
      issue_scores();
      Turns::pass(consumer);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      begin_tile(std::false_type{});
      skip_v(skipped_before);
    }

    while (true) {
      if (has_blocks) {
        begin_tile(std::true_type{});
        int visit = visits.template next<Traits::kWays>(visits.first());
        if constexpr (kAddsBias) {
          for (; visits.has(visit); visit = visits.template next<Traits::kWays>(visit)) {
            step(std::true_type{}, visit);
          }
        } else if constexpr (kIsListed) {
          if (kModified && has_alibi(params)) {
            visits.free_end = 0;  // its blocks come in any order: each is compared
          }
          for (; visits.on_right_edge(visit); visit = visits.next(visit)) {
            step(std::true_type{}, visit);
          }
        } else if constexpr (kModified) {
          // As below, and beyond: with ALiBi, up to the diagonal (common/alibi.hpp).
          if (has_alibi(params)) {
            int const row = own_row_anew() / 64 * 64;  // the warpgroup's first
            int const unseen = first_unseen_block<Traits::kTileN>(slope_of_tile(), row, diagonal());
            visits.free_end = cute::min(visits.free_end, __shfl_sync(0xffffffffU, unseen, 0) + 1);
          }
          for (; visits.on_right_edge(visit); visit = visits.template next<Traits::kWays>(visit)) {
            step(std::true_type{}, visit);
          }
        } else if constexpr (kMask != MaskClass::Full) {
          // The right edge of 64 rows lies in two blocks at most. The first of them has been visited. Where two
          // warpgroups share the keys, the second was the other's. Rows that the edge kept from every key of the first
          // have no reference yet, and the masked step looks for one.
          bool const masked =
              Traits::kWays == 1 ? visits.on_right_edge(visit) : visits.has(visit) && visits.on_right_edge(visit + 1);
          if (masked) {
            step(std::true_type{}, visit);
            visit = visits.template next<Traits::kWays>(visit);
          }
        }
        if constexpr (!kAddsBias) {
          for (; visits.before_left_edge(visit); visit = visits.template next<Traits::kWays>(visit)) {
            step(std::false_type{}, visit);
          }
        }
        if constexpr (Row::kSettlesEarly) {
          softmax.settle();
          for (; visits.has(visit); visit = visits.template next<Traits::kWays>(visit)) {
            step(std::true_type{}, visit);
          }
        }
      }

      if constexpr (Traits::kShares) {
        float sums[2];
        float divisors[2];
        if (has_blocks) {
          Turns::wait(consumer);
          issue_output();
          Turns::pass(consumer);
          softmax.template finish<!Row::kSettlesEarly>(sums, divisors);
          await_output();
          int const skipped = skipped_after();
          skip_k(skipped);
          skip_v(skipped);
        } else {
          storage.q_full[0].wait(0);  // a CTA must not end while a copy to it is under way
          softmax.clear();
          softmax.template finish<false>(sums, divisors);
          clear(tOrO);
        }
        if constexpr (Traits::kTakesSingleTiles) {
          if (cluster_shares() == 1) {
            float inverse[2];
            Epilogue<Traits>::finish_rows(params, scalars, storage, 0, consumer, softmax.reference, sums, divisors,
                                          inverse);
            Epilogue<Traits>::write_output(params, scalars, storage, 0, consumer, tOrO, inverse);
            return;
          }
        }
        Shares<Traits>::finish_tile(params, scalars, storage, consumer, softmax.reference, sums, divisors, tOrO);
        return;
      }

      // The border: while this tile's last product runs, its rows are finished and the next tile is looked at; while
      // the next tile's first scores are computed, this tile's O is handed over.
      if constexpr (Traits::kWritesOutput) {
        if (cute::elect_one_sync()) {
          storage.q_empty.arrive();
        }
      }
      if constexpr (kModified && !kIsAlibi) {
        if (wants_max_logits(params)) {
          finish_max_logit(params, storage.tile[q.stage].head,
                           storage.modifiers.largest[static_cast<unsigned>(thread_index_anew()) / 32 - 4]);
        }
      }
      Turns::wait(consumer);
      issue_output();
      if constexpr (!Row::kKeepsTurn) {
        Turns::pass(consumer);
      }
      float sums[2];
      float divisors[2];
      int skipped = skipped_after();
      int const buffer = q.stage;
      q.advance();
      softmax.template finish<!Row::kSettlesEarly>(sums, divisors);
      m_block = await_tile(q.stage, q.parity);
      // After the last tile the scores are those of whatever lies in the buffers: a branch between the two products and
      // the wait for the first would make ptxas serialise them.
      int const skipped_before_next = enter_tile();
      copy_first_bias();
      skipped += m_block >= 0 ? skipped_before_next : 0;
      float inverse[2];
      if constexpr (Traits::kScoresWait) {
        Epilogue<Traits>::finish_rows(params, scalars, storage, buffer, self(), softmax.reference, sums, divisors,
                                      inverse);
        await_output();
        Epilogue<Traits>::write_output(params, scalars, storage, buffer, self(), tOrO, inverse);
        if (m_block < 0) {
          break;
        }
        skip_k(skipped);
        skip_v(skipped);
        storage.q_full[q.stage].wait(q.parity);
        storage.k_full[k.stage + consumer * Traits::kFullsApart].wait(k.parity);
        Turns::wait(consumer);
        issue_scores();
        Turns::pass(consumer);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
        begin_tile(std::false_type{});
        continue;
      }
      skip_k(skipped);
      if (m_block >= 0) {
        storage.q_full[q.stage].wait(q.parity);
        storage.k_full[k.stage + consumer * Traits::kFullsApart].wait(k.parity);
      }
      issue_scores();
      if constexpr (Row::kKeepsTurn) {
        Turns::pass(consumer);
      }
      if constexpr (Row::kProducersCopyBias) {
        consumer = self();  // or it would be kept in memory for what follows
      }
      Epilogue<Traits>::finish_rows(params, scalars, storage, buffer, consumer, softmax.reference, sums, divisors,
                                    inverse);
      warpgroup_wait<1>();
      warpgroup_fence_operand(tOrO);
      release_v();
      skip_v(skipped);
      if constexpr (Traits::kWritesOutput) {
        Epilogue<Traits>::write_output(params, scalars, storage, buffer, consumer, tOrO, inverse);
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
      } else {
        OutputLooks<Traits> const looks =
            Epilogue<Traits>::stage_output(params, scalars, storage, buffer, consumer, tOrO, inverse);
        bool const found = kLooksAtOutput<Traits> && looks.found();
        if (!found) {
          Epilogue<Traits>::hand_over(params, scalars, storage, buffer, consumer);
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(tSrS);
        if (found) {
          Epilogue<Traits>::repair(params, storage, buffer, consumer, looks, inverse[0], inverse[1]);
          Epilogue<Traits>::hand_over(params, scalars, storage, buffer, consumer);
        }
      }
      if (m_block < 0) {
        break;
      }
      begin_tile(std::false_type{});
    }
  }
};

}  // namespace hattn::sm90
