// The consumer warpgroups: both products and the softmax between them.
//
// A CTA's tiles and their key blocks form one stream. In each step a warpgroup issues S = Q K_j^T together with
// O += P_{j-1} V_{j-1}, then exponentiates S while the second product still runs. At a tile's border the first S of the
// next tile is issued together with the last product of this one, so the border costs an epilogue and no idle step.
// The warpgroups take turns at issuing (ping-pong), so that one exponentiates while the other multiplies.
#pragma once

#include <cute/algorithm/gemm.hpp>

#include "common/mask.hpp"
#include "common/softmax.hpp"
#include "common/tile_scheduler.hpp"
#include "sm90/fwd/epilogue.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

// Issues one product and commits it; the result may be read after a `warpgroup_wait`.
template <bool kAccumulate, class Mma, class A, class B, class C>
CUTE_DEVICE void issue_product(Mma& mma, A const& a, B const& b, C& c) {
  cute::warpgroup_fence_operand(c);
  cute::warpgroup_arrive();
  mma.accumulate_ = kAccumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), c);
    mma.accumulate_ = cute::SM90::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
}

template <class Traits>
struct Mma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  using Scheduler = TileScheduler<Traits::kMask>;
  using Softmax = OnlineSoftmax<Traits::kTileN>;
  static constexpr MaskClass kMask = Traits::kMask;

  // Named barriers 1 .. kConsumers: warpgroup w waits for its turn at 1 + w, where its predecessor arrives.
  CUTE_DEVICE static void turn_wait(int consumer) { named_barrier_sync(1 + consumer, 256); }
  CUTE_DEVICE static void turn_pass(int consumer) {
    named_barrier_arrive(consumer + 1 == Traits::kConsumers ? 1 : 2 + consumer, 256);
  }

  CUTE_DEVICE static void run(KernelParams const& params, Scheduler const& scheduler, Band const& band,
                              Storage& storage, int consumer) {
    using namespace cute;

    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    // Operands in shared memory are descriptors, the same for every thread: made from thread 0's slice they stay
    // uniform.
    auto const slice_qk = mma_qk.get_slice(0);
    auto const slice_pv = mma_pv.get_slice(0);
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[0]), typename Traits::SmemLayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(storage.k[0]), typename Traits::SmemLayoutK{});
    Tensor sVt = make_tensor(make_smem_ptr(storage.v[0]), typename Traits::SmemLayoutVt{});
    Tensor sQ_rows = local_tile(sQ, Shape<_64, Int<Traits::kHeadDimQK>>{}, make_coord(consumer, _0{}, _));
    Tensor tSrQ = slice_qk.make_fragment_A(slice_qk.partition_A(sQ_rows));
    Tensor tSrK = slice_qk.make_fragment_B(slice_qk.partition_B(sK));
    Tensor tOrV = slice_pv.make_fragment_B(slice_pv.partition_B(sVt));

    Tensor tSrS = partition_fragment_C(mma_qk, Shape<_64, Int<Traits::kTileN>>{});
    Tensor tOrO = partition_fragment_C(mma_pv, Shape<_64, Int<Traits::kHeadDimVO>>{});
    // P is the A operand of the second product. For 16-bit types the accumulator's element order is the operand's
    // order, so making P is a conversion in place.
    Tensor tOrP = make_tensor<Element>(partition_shape_A(mma_pv, Shape<_64, Int<Traits::kTileN>>{}));
    static_assert(size(tOrP) == size(tSrS));
    auto make_p = [&]() {
      Tensor packed = recast<std::uint32_t>(tOrP);
      CUTE_UNROLL
      for (int i = 0; i < size(packed); ++i) {
        packed(i) = pack_pair<Element>(tSrS(2 * i), tSrS(2 * i + 1));
      }
    };

    int const lane = static_cast<int>(threadIdx.x) % 32;
    int const warp = static_cast<int>(threadIdx.x) / 32 % 4;
    bool const elected = static_cast<int>(threadIdx.x) % 128 == 0;
    int const row_in_tile = consumer * 64 + warp * 16 + lane / 4;
    int const column = 2 * (lane % 4);
    float const headroom = Softmax::kHeadroom / params.scale_log2;

    Softmax softmax;
    RingPosition<Traits::kStages> k;
    RingPosition<Traits::kStages> v;
    RingPosition<2> q;

    int const count = scheduler.count();
    Tile tile = scheduler.tile(0);
    BlockRange range = block_range<kMask, Traits::kTileM, Traits::kTileN>(band, tile.m_block);

    auto release_k = [&]() {
      if (elected) {
        storage.k_empty[k.stage].arrive();
      }
      k.advance();
    };
    auto release_v = [&]() {
      if (elected) {
        storage.v_empty[v.stage].arrive();
      }
      v.advance();
    };
    auto mask_block = [&](int m_block, int n_block) {
      apply_mask<kMask, Traits::kTileN>(tSrS, band, m_block * Traits::kTileM + row_in_tile, column, n_block);
    };
    auto mask_first_block = [&](int m_block, int n_block) {
      // A full mask only cuts the ragged last block, which a tile visits first.
      if (kMask != MaskClass::Full || band.seqlen_kv % Traits::kTileN != 0) {
        mask_block(m_block, n_block);
      }
    };
    auto issue_scores = [&]() { issue_product<false>(mma_qk, tSrQ(_, _, _, q.stage), tSrK(_, _, _, k.stage), tSrS); };
    auto issue_output = [&]() {
      storage.v_full[v.stage].wait(v.parity);
      issue_product<true>(mma_pv, tOrP, tOrV(_, _, _, v.stage), tOrO);
    };
    auto await_scores = [&]() {
      warpgroup_wait<1>();
      warpgroup_fence_operand(tSrS);
      release_k();
    };
    // The wait for the next K stands between the exponentials and the wait for the product: ptxas moves neither across
    // it, so the exponentials run while the product does.
    auto await_output = [&](bool more_blocks) {
      if (more_blocks) {
        storage.k_full[k.stage].wait(k.parity);
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(tOrO);
      release_v();
    };

    // One key block: on entry P is of the block before, and K of this one has arrived.
    auto step = [&](auto masked, int n_block, bool more_blocks) {
      turn_wait(consumer);
      issue_scores();
      issue_output();
      turn_pass(consumer);
      await_scores();
      if constexpr (decltype(masked)::value) {
        mask_block(tile.m_block, n_block);
      }
      float rescale[2];
      bool const moved = softmax.next_block(tSrS, params.scale_log2, headroom, rescale);
      await_output(more_blocks);
      if (moved) {
        CUTE_UNROLL
        for (int i = 0; i < size(tOrO); ++i) {
          tOrO(i) *= rescale[i / 2 % 2];
        }
      }
      make_p();
    };

    if (consumer + 1 == Traits::kConsumers) {
      turn_pass(consumer);
    }  // the first turn is the first warpgroup's

    storage.q_full[0].wait(0);
    storage.k_full[0].wait(0);
    turn_wait(consumer);
    issue_scores();
    turn_pass(consumer);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tSrS);
    release_k();
    mask_first_block(tile.m_block, range.end - 1);
    softmax.first_block(tSrS, params.scale_log2);
    make_p();
    clear(tOrO);
    if (count > 1 || range.end - range.begin > 1) {
      storage.k_full[k.stage].wait(k.parity);
    }

    for (int round = 0; round < count; ++round) {
      bool const last_tile = round + 1 == count;
      int n = range.end - 2;
      if constexpr (kMask != MaskClass::Full) {
        for (; n >= cute::max(range.begin, range.free_end); --n) {
          step(true_type{}, n, !last_tile || n > range.begin);
        }
      }
      for (; n >= cute::max(range.begin, range.free_begin); --n) {
        step(false_type{}, n, !last_tile || n > range.begin);
      }
      if constexpr (kMask == MaskClass::Window) {
        for (; n >= range.begin; --n) {
          step(true_type{}, n, !last_tile || n > range.begin);
        }
      }

      int const buffer = round % 2;
      if (last_tile) {
        issue_output();
        warpgroup_wait<0>();
        warpgroup_fence_operand(tOrO);
        Epilogue<Traits>::write(params, storage, tile, buffer, consumer, tOrO, softmax);
      } else {
        // The border: the next tile's first scores are issued with this tile's last product.
        Tile const next = scheduler.tile(round + 1);
        range = block_range<kMask, Traits::kTileM, Traits::kTileN>(band, next.m_block);
        q.advance();
        storage.q_full[q.stage].wait(q.parity);
        turn_wait(consumer);
        issue_scores();
        issue_output();
        turn_pass(consumer);
        await_scores();
        mask_first_block(next.m_block, range.end - 1);
        Softmax next_softmax;
        next_softmax.first_block(tSrS, params.scale_log2);
        await_output(round + 2 < count || range.end - range.begin > 1);
        Epilogue<Traits>::write(params, storage, tile, buffer, consumer, tOrO, softmax);
        clear(tOrO);
        make_p();
        softmax = next_softmax;
        tile = next;
      }
    }
  }
};

}  // namespace hattn::sm90
