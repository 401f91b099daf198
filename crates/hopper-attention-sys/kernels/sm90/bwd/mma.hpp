// The consumer warpgroups of the backward (Dao 2023, FlashAttention-2, algorithm 2, with keys outside and queries
// inside).
//
//   P = exp(S - LSE)    dV += P^T dO    dP = dO V^T    dS = P o (dP - delta)    dK += dS^T Q    dQ += dS K
//
// All the blocks of a CTA's tiles form one stream. For each, the products are issued in the order dQ of the block
// before, dP, dV, dK, and S of the next block. dQ needs dS of both warpgroups, and comes a block late so that neither
// waits for the other: while one does its exponentials, which stand alone, the tensor cores work for the other one. A
// step begins and ends with nothing in flight, and dQ leaves its registers before dP, which shares them, is issued.
#pragma once

#include "common/mask.hpp"
#include "common/scalars.hpp"
#include "common/softmax.hpp"
#include "common/thread.hpp"
#include "sm90/bwd/traits.hpp"
#include "sm90/product.hpp"

namespace hattn::sm90 {

template <class Traits>
struct BwdMma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  static_assert(Traits::kStages == 2, "dS has as many buffers as Q and dO");
  static constexpr MaskClass kMask = Traits::kMask;

  // A thread's place in its warpgroup, as a new value at each call. Where registers are shortest it is even read again.
  CUTE_DEVICE static int thread_in_group_anew(int thread) {
    // The mask tells the compiler the range, too.
    return (Traits::kTileM == 128 ? thread_index_anew() : anew(thread)) & 127;
  }

  CUTE_DEVICE static void run(BwdParams const& params, BwdScalars const& scalars, Band const& band, Storage& storage,
                              int consumer) {
    using namespace cute;
    int const thread_in_group = static_cast<int>(threadIdx.x) % 128;

    typename Traits::template MmaScores<Traits::kHeadDimQK> mma_s;
    typename Traits::template MmaScores<Traits::kHeadDimVO> mma_d_p;
    typename Traits::template MmaKeys<Traits::kHeadDimVO> mma_d_v;
    typename Traits::template MmaKeys<Traits::kHeadDimQK> mma_d_k;
    typename Traits::MmaQueries mma_d_q;
    typename Traits::MmaStatistics mma_statistics;
    // Operands in shared memory are descriptors, the same for every thread: made from thread 0's slice they stay
    // uniform.
    auto const slice_s = mma_s.get_slice(0);
    auto const slice_d_p = mma_d_p.get_slice(0);
    auto const slice_d_v = mma_d_v.get_slice(0);
    auto const slice_d_k = mma_d_k.get_slice(0);
    auto const slice_d_q = mma_d_q.get_slice(0);
    auto const slice_statistics = mma_statistics.get_slice(0);

    constexpr int kM = Traits::kTileM;
    constexpr int kN = Traits::kTileN;
    constexpr int kQK = Traits::kHeadDimQK;
    constexpr int kVO = Traits::kHeadDimVO;
    constexpr int kStages = Traits::kStages;
    constexpr int kBuffers = Traits::kBuffersK;
    auto rows = [](Element* tile, auto layout) { return make_tensor(make_smem_ptr(tile), layout); };
    Tensor sK = rows(storage.k[0], typename Traits::template SmemRows<kN, kQK, kBuffers>{});
    Tensor sV = rows(storage.v, typename Traits::template SmemRows<kN, kVO, 2>{});
    Tensor sQ = rows(storage.q[0], typename Traits::template SmemRows<kM, kQK, kStages>{});
    Tensor sdO = rows(storage.d_o[0], typename Traits::template SmemRows<kM, kVO, kStages>{});
    Tensor sKt = rows(storage.k[0], typename Traits::template SmemColumns<kN, kQK, kBuffers>{});
    Tensor sQt = rows(storage.q[0], typename Traits::template SmemColumns<kM, kQK, kStages>{});
    Tensor sdOt = rows(storage.d_o[0], typename Traits::template SmemColumns<kM, kVO, kStages>{});
    Tensor sStatistics =
        make_tensor(make_smem_ptr(storage.statistics[0][0].minus_lse), typename Traits::SmemStatistics{});
    Tensor sOnes = make_tensor(make_smem_ptr(storage.ones[0]), typename Traits::SmemOnes{});
    // Written [key][query], and read as [query][key].
    Tensor sdS = rows(storage.d_s[0], typename Traits::template SmemColumns<kN, kM, 2>{});

    Tensor sK_rows = local_tile(sK, Shape<_64, Int<kQK>>{}, make_coord(consumer, _0{}, _));
    Tensor sV_rows = local_tile(sV, Shape<_64, Int<kVO>>{}, make_coord(consumer, _0{}, _));
    Tensor tSrK = slice_s.make_fragment_A(slice_s.partition_A(sK_rows));
    Tensor tSrQ = slice_s.make_fragment_B(slice_s.partition_B(sQ));
    Tensor tSrOnes = slice_statistics.make_fragment_A(slice_statistics.partition_A(sOnes));
    Tensor tSrStatistics = slice_statistics.make_fragment_B(slice_statistics.partition_B(sStatistics));
    Tensor tPrV = slice_d_p.make_fragment_A(slice_d_p.partition_A(sV_rows));
    Tensor tPrdO = slice_d_p.make_fragment_B(slice_d_p.partition_B(sdO));
    Tensor tVrdO = slice_d_v.make_fragment_B(slice_d_v.partition_B(sdOt));
    Tensor tKrQ = slice_d_k.make_fragment_B(slice_d_k.partition_B(sQt));
    // dQ: the warpgroup's half of the columns, or of the queries.
    int const half_columns = Traits::kSplitsColumns ? consumer : 0;
    int const half_queries = Traits::kSplitsColumns ? 0 : consumer;
    Tensor sdS_half = local_tile(sdS, Shape<_64, Int<kN>>{}, make_coord(half_queries, _0{}, _));
    Tensor sKt_half = local_tile(sKt, Shape<Int<Traits::kColumnsQ>, Int<kN>>{}, make_coord(half_columns, _0{}, _));
    Tensor tQrdS = slice_d_q.make_fragment_A(slice_d_q.partition_A(sdS_half));
    Tensor tQrK = slice_d_q.make_fragment_B(slice_d_q.partition_B(sKt_half));

    Tensor tS = partition_fragment_C(mma_s, Shape<_64, Int<kM>>{});
    Tensor tdP = partition_fragment_C(mma_d_p, Shape<_64, Int<kM>>{});
    Tensor tdV = partition_fragment_C(mma_d_v, Shape<_64, Int<kVO>>{});
    Tensor tdK = partition_fragment_C(mma_d_k, Shape<_64, Int<kQK>>{});
    Tensor tdQ = partition_fragment_C(mma_d_q, Shape<_64, Int<Traits::kColumnsQ>>{});
    // The A operands of dV and dK: for 16-bit types the accumulator's element order is the operand's.
    Tensor tP = make_tensor<Element>(partition_shape_A(mma_d_v, Shape<_64, Int<kM>>{}));
    Tensor tdS = make_tensor<Element>(partition_shape_A(mma_d_k, Shape<_64, Int<kM>>{}));
    static_assert(size(tP) == size(tS) && size(tdS) == size(tdP));

    // The warp's first key in the tile.
    auto warp_row = [&](int thread) { return consumer * 64 + thread / 32 * 16; };

    RingPosition<kStages> ring;  // of Q and dO, and of dS as well
    RingPosition<kBuffers> k;    // of K; V, in one buffer, has the parity of its stage
    int n_block = 0;
    QueryRange range{0, 0};
    int m_block = 0;
    int remaining = 0;  // blocks of this tile, all heads of the group together
    auto warp_value = [](int value) { return __shfl_sync(0xffffffffU, value, 0); };

    // The tile in a buffer; the shuffles tell the compiler that it is the same in the whole warp.
    auto await_tile = [&]() __attribute__((always_inline)) {
      storage.tile_full[k.stage].wait(k.parity);
      return warp_value(storage.tile[k.stage].batch) >= 0;
    };
    auto enter_tile = [&]() __attribute__((always_inline)) {
      Tile const tile = storage.tile[k.stage];
      n_block = warp_value(tile.block);
      range = query_range<kMask, kM, kN>(band, n_block);
      remaining = scalars.heads_per_kv_head * (range.end - range.begin);
      m_block = range.begin;
    };
    auto next_block = [&]() __attribute__((always_inline)) {
      --remaining;
      ++m_block;
      if (m_block == range.end) {  // the group's next query head
        m_block = range.begin;
      }
    };

    auto issue_scores = [&]() __attribute__((always_inline)) {
      issue_sum(mma_statistics, tSrOnes(_, _, _, 0), tSrStatistics(_, _, _, ring.stage), mma_s, tSrK(_, _, _, k.stage),
                tSrQ(_, _, _, ring.stage), tS);
    };
    auto release = [&](Mbarrier& barrier) {
      if (elect_one_sync()) {
        barrier.arrive();
      }
    };
    auto pack = [&](auto& operand, auto const& values) __attribute__((always_inline)) {
      Tensor packed = recast<std::uint32_t>(operand);
      CUTE_UNROLL
      for (int i = 0; i < size(packed); ++i) {
        packed(i) = pack_pair<Element>(values(2 * i), values(2 * i + 1));
      }
    };
    // P, from the scores of the block that comes.
    auto exponentials = [&]() __attribute__((always_inline)) {
      if (!is_free<kMask, kM, kN>(band, m_block, n_block)) {
        int const thread = thread_in_group_anew(thread_in_group);
        apply_mask_transposed<kMask, kM>(tS, band, n_block * kN + warp_row(thread) + thread % 32 / 4,
                                         m_block * kM + 2 * (thread % 4));
      }
      CUTE_UNROLL
      for (int i = 0; i < size(tS); ++i) {
        tS(i) = exp2_approx(tS(i) * scalars.scale_log2);
      }
    };
    auto write_gradient = [&](auto columns, TensorDesc const& tensor, Tile const& tile, int head_dim,
                              auto const& values, float scale) __attribute__((always_inline)) {
      int const thread = thread_in_group_anew(thread_in_group);
      write_pairs<columns>(tensor.address + 2 * (tile.batch * tensor.stride_batch + tile.head * tensor.stride_head),
                           2 * tensor.stride_row, tile.block * kN + warp_row(thread), scalars.seqlen_kv, head_dim,
                           thread % 32, [&](int i, int j) {
                             int const at = 8 * i + 2 * j;
                             return pack_pair<Element>(values(at) * scale, values(at + 1) * scale);
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
      for (int i = 0; i < size(tdQ) / 4; ++i) {
        half[128 * i] = float4{tdQ(4 * i), tdQ(4 * i + 1), tdQ(4 * i + 2), tdQ(4 * i + 3)};
      }
    };
    auto report_queries = [&]() __attribute__((always_inline)) {
      fence_proxy_async();
      __syncwarp();
      release(storage.d_q_full[slot.stage]);
      next_slot();
    };
    // A tile's dK and dV. Its name may be replaced then, and K as well.
    auto hand_over = [&](int buffer) __attribute__((always_inline)) {
      Tile const tile = storage.tile[buffer];
      __syncwarp();
      release(storage.k_empty[buffer]);
      write_gradient(Int<kVO>{}, params.d_v, tile, scalars.head_dim_vo, tdV, 1.0F);
      write_gradient(Int<kQK>{}, params.d_k, tile, scalars.head_dim_qk, tdK, scalars.softmax_scale);
    };

    if (!await_tile()) {
      return;  // the others drew them all before this CTA had a place
    }
    enter_tile();
    storage.k_full[0].wait(0);
    storage.q_full[0].wait(0);
    issue_scores();
    warpgroup_wait<0>();
    warpgroup_fence_operand(tS);

    // dQ of the block before, of both warpgroups' dS; `after` is what must have been computed by then.
    auto finish_queries = [&](int k_stage, std::uint32_t after) __attribute__((always_inline)) {
      int const stage = ring.stage ^ 1;
      auto const nought = static_cast<std::uint32_t>(scalars.batch >> 31);  // which only we know
      named_barrier_sync(1 + 2 * stage + consumer + (after & nought), 256);
      issue_product<false>(mma_d_q, tQrdS(_, _, _, stage), tQrK(_, _, _, k_stage), tdQ);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tdQ);
      store_queries();
    };
    bool more = true;    // whether there is a tile whose first scores are there
    bool any = false;    // whether there was one before it
    bool fresh = false;  // whether the scores are of a new tile
    // One block: from its scores to the next one's.
    auto step = [&](auto is_first) __attribute__((always_inline)) {
      exponentials();
      warpgroup_fence_operand(tS);
      // ptxas would move the exponentials behind the products, where registers are short: the barrier before dQ depends
      // on all of them.
      std::uint32_t after = 0;
      Tensor bits = recast<std::uint32_t>(tS);
      CUTE_UNROLL
      for (int i = 0; i < size(bits); ++i) {
        after |= bits(i);
      }
      storage.d_o_full[ring.stage].wait(ring.parity);
      if constexpr (is_first) {
        if (any) {
          finish_queries(k.stage ^ 1, after);
          report_queries();
          hand_over(k.stage ^ 1);
        }
        any = true;
        clear(tdV);
        clear(tdK);
        storage.v_full.wait(k.stage);
      } else {
        finish_queries(k.stage, after);
      }
      // V's place is a new value: held for the whole loop, the descriptors of an operand with one buffer would take
      // every uniform register there is.
      issue_sum(mma_statistics, tSrOnes(_, _, _, 1), tSrStatistics(_, _, _, ring.stage), mma_d_p,
                tPrV(_, _, _, opaque_zero()), tPrdO(_, _, _, ring.stage), tdP);
      pack(tP, tS);
      issue_product<true>(mma_d_v, tP, tVrdO(_, _, _, ring.stage), tdV);
      if constexpr (!is_first) {
        report_queries();
      }
      fresh = remaining == 1;
      warpgroup_wait<1>();
      warpgroup_fence_operand(tdP);
      CUTE_UNROLL
      for (int i = 0; i < size(tS); ++i) {
        tS(i) *= tdP(i);
      }
      pack(tdS, tS);
      Tensor pairs = recast<std::uint32_t>(tdS);
      int const thread = thread_in_group_anew(thread_in_group);
      store_pairs<kN, kM>(storage.d_s[ring.stage], warp_row(thread), thread % 32,
                          [&](int i, int j) { return pairs(4 * i + j); });
      issue_product<true>(mma_d_k, tdS, tKrQ(_, _, _, ring.stage), tdK);
      fence_proxy_async();
      named_barrier_arrive(1 + 2 * ring.stage + 1 - consumer, 256);

      warpgroup_wait<0>();
      warpgroup_fence_operand(tdV);
      warpgroup_fence_operand(tdK);
      release(storage.block_empty[ring.stage]);
      ring.advance();
      if (fresh) {
        release(storage.v_empty);
        k.advance();
        more = await_tile();
        if (more) {
          storage.k_full[k.stage].wait(k.parity);
        }
      }
      // After the last tile the scores are those of whatever lies in the buffers, for nobody.
      if (more) {
        storage.q_full[ring.stage].wait(ring.parity);
      }
      issue_scores();
      warpgroup_wait<0>();
      warpgroup_fence_operand(tS);
      if (fresh) {
        enter_tile();
      } else {
        next_block();
      }
    };
    while (more) {
      step(true_type{});
      while (!fresh) {
        step(false_type{});
      }
    }
    finish_queries(k.stage ^ 1, 0);
    report_queries();
    hand_over(k.stage ^ 1);
  }
};

}  // namespace hattn::sm90
