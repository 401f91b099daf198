// The producer warpgroup of the FP8 forward: warp 0 streams K and V, warp 1 draws tiles and loads Q, warps 2 and 3
// transpose V.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "common/mask.hpp"
#include "common/matrices.hpp"
#include "sm90/element.hpp"
#include "sm90/fp8/traits.hpp"
#include "sm90/tma.hpp"

namespace hattn::sm90 {

template <class Traits>
struct Fp8Load {
  using Storage = typename Traits::SharedStorage;

  // What each role does for every tile of the CTA.
  template <class Visit>
  CUTE_DEVICE static void tiles(Storage& storage, Visit const& visit) {
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersQ> q;; q.advance()) {
      storage.tile_full[q.stage].wait(q.parity);
      Tile const tile = storage.tile[q.stage];
      if (!tile.valid()) {
        break;
      }
      visit(tile, q);
    }
  }

  CUTE_DEVICE static void keys_and_values(Fp8KernelParams const& params, CUtensorMap const& map_k,
                                          CUtensorMap const& map_v, Band const& band, Storage& storage) {
    RingPosition<Traits::kStages> k;
    RingPosition<Traits::kStagesRaw> v;
    tiles(storage, [&](Tile const& tile, auto const& q) {
      BlockRange const range = block_range<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, tile.block);
      int const head = tile.head / params.heads_per_kv_head;
      storage.tile_empty[q.stage].arrive();
      CUTE_NO_UNROLL
      for (int n = range.end - 1; n >= range.begin; --n) {
        // Asked for before the wait, which hides them.
        BlockFactors const factors{factor(params.descale_k, tile.batch, head, n),
                                   factor(params.descale_v, tile.batch, head, n)};
        storage.k_empty[k.stage].wait(k.parity ^ 1);
        storage.factors[k.stage] = factors;
        storage.k_full[k.stage].arrive_expect_bytes(Traits::kBytesK);
        cute::SM90_TMA_LOAD_4D::copy(&map_k, &storage.k_full[k.stage].word, kEvictLast, storage.k[k.stage], 0,
                                     n * Traits::kTileN, head, tile.batch);
        k.advance();
        storage.v_empty[v.stage].wait(v.parity ^ 1);
        storage.v_full[v.stage].arrive_expect_bytes(Traits::kBytesV);
        cute::SM90_TMA_LOAD_4D::copy(&map_v, &storage.v_full[v.stage].word, kEvictLast, storage.v[v.stage], 0,
                                     n * Traits::kTileN, head, tile.batch);
        v.advance();
      }
    });
  }

  CUTE_DEVICE static void queries(Fp8KernelParams const& params, CUtensorMap const& map_q,
                                  Fp8Scheduler const& scheduler, Storage& storage) {
    int round = 0;
    CUTE_NO_UNROLL
    for (RingPosition<Traits::kBuffersQ> q;; q.advance()) {
      storage.tile_empty[q.stage].wait(q.parity ^ 1);
      Tile const tile = scheduler.tile(scheduler.draw(round++));
      storage.tile[q.stage] = tile;
      if (tile.valid()) {
        storage.q_full[q.stage].arrive_expect_bytes(Traits::kBytesQ);
        cute::SM90_TMA_LOAD_4D::copy(&map_q, &storage.q_full[q.stage].word, kEvictFirst, storage.q[q.stage], 0,
                                     tile.block * Traits::kTileM, tile.head, tile.batch);
      }
      storage.tile_full[q.stage].arrive();
      if (!tile.valid()) {
        break;
      }
    }
  }

  // Whole warps: V^T, since the FP8 product wants both operands with keys side by side. 16 tokens by 32 columns at a
  // time: pairs of columns move as 16-bit elements, and a byte permutation parts them. It leaves the tokens of each 16
  // in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, which is the order in which a lane has its P.
  CUTE_DEVICE static void transpose(Fp8KernelParams const& params, Band const& band, Storage& storage, int transposer) {
    constexpr int kRowBytes = Traits::kHeadDimVO;
    int const lane = static_cast<int>(threadIdx.x) % 32;
    // Where the lane reads of the first 16 tokens and 32 columns (a token's row, 16 columns of it), and where it
    // writes: even columns, then odd ones. Other columns and tokens are those addresses with bits flipped, or an offset
    // away.
    int const token = transposer * 16 + lane % 16;
    int const swizzle_from = kRowBytes == 128 ? token % 8 : token / 2 % 4;
    int const lane_from = token * kRowBytes + (lane / 16 ^ swizzle_from) * 16;
    int const column = lane / 16 * 16 + 2 * (lane % 8) + lane / 8 % 2;
    int const lane_to = column * 128 + (transposer ^ column % 8) * 16;
    RingPosition<Traits::kStagesRaw> v;
    RingPosition<Traits::kStages> vt;
    tiles(storage, [&](Tile const& tile, auto const& q) {
      BlockRange const range = block_range<Traits::kMask, Traits::kTileM, Traits::kTileN>(band, tile.block);
      __syncwarp();
      if (lane == 0) {
        storage.tile_empty[q.stage].arrive();
      }
      CUTE_NO_UNROLL
      for (int n = range.end - 1; n >= range.begin; --n) {
        storage.v_full[v.stage].wait(v.parity);
        storage.vt_empty[vt.stage].wait(vt.parity ^ 1);
        std::uint32_t const from = cute::cast_smem_ptr_to_uint(storage.v[v.stage]) + lane_from;
        std::uint32_t const to = cute::cast_smem_ptr_to_uint(storage.vt[vt.stage]) + lane_to;
        CUTE_UNROLL
        for (int columns = 0; columns < kRowBytes; columns += 32) {
          CUTE_UNROLL
          for (int tokens = 0; tokens < Traits::kTileN; tokens += 16 * Traits::kTransposers) {
            std::uint32_t r[4];
            load_transposed((from ^ columns) + tokens * kRowBytes, r);
            store_matrices((to ^ tokens) + columns * 128, __byte_perm(r[0], r[1], 0x6420),
                           __byte_perm(r[0], r[1], 0x7531), __byte_perm(r[2], r[3], 0x6420),
                           __byte_perm(r[2], r[3], 0x7531));
          }
        }
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
          storage.v_empty[v.stage].arrive();
          storage.vt_full[vt.stage].arrive();
        }
        v.advance();
        vt.advance();
      }
    });
  }
};

}  // namespace hattn::sm90
