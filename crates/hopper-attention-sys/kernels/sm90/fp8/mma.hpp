// The consumer warpgroups of the FP8 forward: both products and the softmax between them.
//
// Within a tile the scores of a block of keys are issued together with the product of the block before, and
// exponentiated while that runs. A block's P V has accumulators of its own, which are added to O in f32: the tensor
// cores' own sums carry some 13 bits, so that those of a long sequence would drift. The same addition corrects O for a
// maximum that has moved.
//
// With x = scale_log2 descale_q descale_k (q . k), fold = log2(descale_v / the largest descale_v of the head) and
// the largest x + fold so far as `max`, P = 2^(x + fold - max + kOffset) is at most 2^kOffset and rounded to e4m3; its
// sum, from before rounding, is taken times 2^-fold. So factors of V cost no product.
#pragma once

#include "common/mask.hpp"
#include "common/softmax.hpp"
#include "sm90/fp8/epilogue.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/product.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Mma {
  using Element = typename Traits::Element;
  using Storage = typename Traits::SharedStorage;
  static constexpr MaskClass kMask = Traits::kMask;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  // A factor of V below this part of the largest counts as it, which keeps sums in the range of f32.
  static constexpr float kLeastRatio = 0x1p-100F;

  // Of a head's blocks; the whole warp asks.
  CUTE_DEVICE static float largest_factor(FactorsDesc const& factors, int batch, int head, int seqlen_kv, int lane) {
    if (factors.stride_block == 0) {
      return factor(factors, batch, head, 0);
    }
    float largest = 0.0F;
    CUTE_NO_UNROLL
    for (int block = lane; block * kTileN < seqlen_kv; block += 32) {
      largest = fmaxf(largest, factor(factors, batch, head, block));
    }
    return __uint_as_float(__reduce_max_sync(0xffffffffU, __float_as_uint(largest)));
  }

  CUTE_DEVICE static void run(Fp8KernelParams const& params, Band const& band, Storage& storage, int consumer) {
    using namespace cute;
    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    auto const slice_qk = mma_qk.get_slice(0);
    auto const slice_pv = mma_pv.get_slice(0);
    Tensor sQ = make_tensor(make_smem_ptr(storage.q[0]), typename Traits::SmemLayoutQ{});
    Tensor sK = make_tensor(make_smem_ptr(storage.k[0]), typename Traits::SmemLayoutK{});
    Tensor sVt = make_tensor(make_smem_ptr(storage.vt[0]), typename Traits::SmemLayoutVt{});
    Tensor sQ_rows = local_tile(sQ, Shape<_64, Int<Traits::kHeadDimQK>>{}, make_coord(consumer, _0{}, _));
    Tensor tSrQ = slice_qk.make_fragment_A(slice_qk.partition_A(sQ_rows));
    Tensor tSrK = slice_qk.make_fragment_B(slice_qk.partition_B(sK));
    Tensor tOrV = slice_pv.make_fragment_B(slice_pv.partition_B(sVt));
    Tensor tSrS = partition_fragment_C(mma_qk, Shape<_64, Int<kTileN>>{});
    Tensor tOrT = partition_fragment_C(mma_pv, Shape<_64, Int<Traits::kHeadDimVO>>{});
    Tensor tOrO = partition_fragment_C(mma_pv, Shape<_64, Int<Traits::kHeadDimVO>>{});
    Tensor tOrP = make_tensor<Element>(partition_shape_A(mma_pv, Shape<_64, Int<kTileN>>{}));
    static_assert(size(tOrP) == size(tSrS));

    int const thread = static_cast<int>(threadIdx.x) % 128;
    int const lane = thread % 32;
    int const row_in_tile = consumer * 64 + thread / 32 * 16 + lane / 4;

    RingPosition<Traits::kStages> k;
    RingPosition<Traits::kStages> v;
    auto release = [&](Mbarrier& barrier) {
      if (elect_one_sync()) {
        barrier.arrive();
      }
    };
    auto make_p = [&]() {
      Tensor packed = recast<std::uint32_t>(tOrP);
      CUTE_UNROLL
      for (int step = 0; step < kTileN / 32; ++step) {
        CUTE_UNROLL
        for (int part = 0; part < 4; ++part) {  // upper or lower row, first or second 16 keys
          int const r = part % 2;
          int const at = 16 * step + 8 * (part / 2) + 2 * r;
          packed(4 * step + part) = pack_e4m3(tSrS(at), tSrS(at + 1), tSrS(at + 4), tSrS(at + 5));
        }
      }
    };
    auto issue_scores = [&](int q) { issue_product<false>(mma_qk, tSrQ(_, _, _, q), tSrK(_, _, _, k.stage), tSrS); };
    auto issue_output = [&]() {
      storage.vt_full[v.stage].wait(v.parity);
      issue_product<false>(mma_pv, tOrP, tOrV(_, _, _, v.stage), tOrT);
    };

    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersQ> q;; q.advance()) {
      storage.tile_full[q.stage].wait(q.parity);
      int const m_block = __shfl_sync(0xffffffffU, storage.tile[q.stage].valid() ? storage.tile[q.stage].block : -1, 0);
      if (m_block < 0) {
        break;
      }
      BlockRange const range = block_range<kMask, kTileM, kTileN>(band, m_block);
      float unit_q;     // what a product of stored values is multiplied by, without K's factor
      float largest_v;  // factor of V
      {
        Tile const tile = storage.tile[q.stage];
        unit_q = params.scale_log2 * factor(params.descale_q, tile.batch, tile.head / params.descale_q_group, m_block);
        largest_v =
            largest_factor(params.descale_v, tile.batch, tile.head / params.heads_per_kv_head, band.seqlen_kv, lane);
      }
      float max[2] = {-INFINITY, -INFINITY};
      float row_sum[2] = {0.0F, 0.0F};
      float correction[2];
      clear(tOrO);

      // P of a block and its sums, which are of the weights before rounding.
      auto softmax = [&](int n, float product, float ratio) __attribute__((always_inline)) {
        // Factors of zeros are so small that their product is nought, which would make NaN of a masked score.
        float const unit = product == 0.0F ? 0x1p-126F : product;
        bool free;
        if constexpr (kMask == MaskClass::Full) {
          free = (n + 1) * kTileN <= band.seqlen_kv;
        } else {
          free = n >= range.free_begin && n < range.free_end;
        }
        if (!free) {
          apply_mask<kMask, kTileN>(tSrS, band, m_block * kTileM + row_in_tile, 2 * (lane % 4), n);
        }
        float const fold = log2_approx(fmaxf(ratio, kLeastRatio));
        float const unfold = reciprocal_approx(fmaxf(ratio, kLeastRatio));
        CUTE_UNROLL
        for (int r = 0; r < 2; ++r) {
          float block_max = fmaxf(tSrS(2 * r), tSrS(2 * r + 1));
          CUTE_UNROLL
          for (int i = 1; i < kTileN / 8; ++i) {
            block_max = fmaxf(block_max, fmaxf(tSrS(4 * i + 2 * r), tSrS(4 * i + 2 * r + 1)));
          }
          float const moved = fmaxf(max[r], fmaf(quad_max(block_max), unit, fold));
          float const shift = moved == -INFINITY ? 0.0F : moved;  // any will do where no key is kept
          correction[r] = exp2_approx(max[r] - shift);
          max[r] = moved;
          float const offset = Traits::kOffset + fold - shift;
          float sums[2] = {0.0F, 0.0F};
          CUTE_UNROLL
          for (int i = 0; i < kTileN / 8; ++i) {
            CUTE_UNROLL
            for (int c = 0; c < 2; ++c) {
              float& score = tSrS(4 * i + 2 * r + c);
              score = exp2_approx(fmaf(score, unit, offset));
              sums[c] += score;
            }
          }
          row_sum[r] = fmaf(row_sum[r], correction[r], (sums[0] + sums[1]) * unfold);
        }
      };
      auto await_keys = [&]() __attribute__((always_inline)) {
        storage.k_full[k.stage].wait(k.parity);
        return storage.factors[k.stage];
      };
      auto release_keys = [&]() __attribute__((always_inline)) {
        release(storage.k_empty[k.stage]);
        k.advance();
      };
      // The block before's part of O, whose rows were corrected since.
      auto add_output = [&](float const(&correct)[2]) __attribute__((always_inline)) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(tOrT);
        release(storage.vt_empty[v.stage]);
        v.advance();
        CUTE_UNROLL
        for (int i = 0; i < size(tOrO); ++i) {
          tOrO(i) = fmaf(tOrO(i), correct[i / 2 % 2], tOrT(i));
        }
      };

      storage.q_full[q.stage].wait(q.parity);
      BlockFactors factors = await_keys();
      issue_scores(q.stage);
      warpgroup_wait<0>();
      warpgroup_fence_operand(tSrS);
      release_keys();
      softmax(range.end - 1, unit_q * factors.k, factors.v / largest_v);
      make_p();
      for (int n = range.end - 2; n >= range.begin; --n) {
        factors = await_keys();
        issue_scores(q.stage);
        issue_output();
        warpgroup_wait<1>();
        warpgroup_fence_operand(tSrS);
        release_keys();
        float const correct[2] = {correction[0], correction[1]};
        softmax(n, unit_q * factors.k, factors.v / largest_v);
        add_output(correct);
        make_p();
      }
      issue_output();
      add_output(correction);
      Tile const tile = storage.tile[q.stage];
      __syncwarp();
      release(storage.tile_empty[q.stage]);
      Fp8Epilogue<Traits>::run(params, tile, consumer, max, row_sum, largest_v, tOrO);
    }
  }
};

}  // namespace hattn::sm90
