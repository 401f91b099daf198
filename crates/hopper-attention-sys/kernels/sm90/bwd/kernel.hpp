// The sm_90a backward kernel: dK and dV of a tile, and what the tile adds to dQ, for one dtype, mask class and tile
// shape.
//
// Words such as tile, block, stage and ordered are defined in common/row.hpp.
//
// The grid is persistent. A tile is kTileN keys of one key head. It visits the blocks of kTileM queries that attend to
// its keys, in every query head that reads the key head (common/visits.hpp). dK and dV stay in registers meanwhile.
//
// Where there are few tiles, a CTA takes a share of a tile (share.hpp). Below, "tile" is such a share too. There are
// two ways to sum the dK and dV of the shares:
// - Each CTA adds its own to sums in global memory.
// - A row's second kernel (SharedTraits): the CTAs of a cluster have one tile, and sum through each other's shared
//   memory (cluster.hpp). A CTA computes one share and ends.
//
// A row's third kernel is for sequences whose lengths the device knows (Traits::kIsPacked, PackedShare in share.hpp). A
// tile then carries its sequence's place and lengths, the band follows from these, and the tensor maps have five
// dimensions (encode_packed_map in sm90/tensor_map.hpp). Where a sequence has one tile, this kernel writes dQ itself.
//
// Rows for modified scores (Traits::kModifiers, common/softcap.hpp) have the same three kernels, in which S begins with
// 0 and dS has one factor more. They have a kernel more for ALiBi alone (alibi.hpp), and at head dim 128 one for
// dropout alone (draw.hpp). The kernels around them are those of the other rows.
//
// Two kernels run around this one (common/around.hpp). The one before writes the statistics of each query: what S and
// dP begin with, from its LSE and delta (Statistics in traits.hpp). It also lists the tiles. The one after converts the
// f32 sums of dQ, and those of dK and dV, to the gradients. The starts of the three overlap (common/start.hpp). What
// the kernel before does not write is loaded before that kernel has ended: K and V of a CTA's first tile, Q and dO of
// its first block.
//
// Scores are transposed: keys are rows, queries are columns. So P^T and dS^T are the register operands of dV += P^T dO
// and dK += dS^T Q. Only dS goes through shared memory, for dQ = dS K.
//
// Roles:
// - Producer warpgroup (load.hpp). One lane of each warp works:
//   - warp 0 loads Q with its statistics, and dO;
//   - warp 1 draws tiles from the list and loads K and V;
//   - warp 2 works in an ordered backward only: it reports each block whose dQ has been added, so that the next tile
//     may add to that block;
//   - warp 3 adds dQ of each block to the sums in global memory.
// - In kernels for dropout, a warpgroup that draws its numbers (draw.hpp).
// - Two consumer warpgroups of 64 keys each (mma.hpp). They write dK and dV straight to global memory (clusters:
//   after their sums), and dQ to shared memory.
//
// Barriers in shared memory. "Full" hands a buffer on, "empty" hands it back. A half of dQ is what one consumer
// computes of a block's dQ: half of the columns where a block is 64 queries, half of the queries where it is 128.
//
//     barrier      one for       arrivals                      completes when
//     q_full       stage         1, and the bytes of copies    Q and the statistics of a block are there
//     d_o_full     stage         1, and the bytes of the copy  dO of a block is there
//     block_empty  stage         1 a consumer warp             Q, dO and the statistics have been read
//     k_full       buffer of K   1, and the bytes of the copy  K of a tile is there
//     k_empty      buffer of K   1 a consumer warp, and        K and tile[] have been read
//                                1 a producer warp that reads tile[]
//     v_full       CTA           1, and the bytes of the copy  V of a tile is there
//     v_empty      CTA           1 a consumer warp             V has been read
//     d_q_full     half of dQ    1 a warp of its consumer      dQ of a block is written to it
//     d_q_empty    half of dQ    1                             the copy engine has read it
//     tile_full    buffer of K   1                             tile[] says whose K the buffer is for
//     next_wanted  CTA           1                             warp 0 has asked for all of the tile's blocks
//     sent_full    place of 2    1                             dQ of a block has been added (ordered only)
//     sent_empty   place of 2    1                             warp 2 has read sent_step[] (ordered only)
//     wanted       stage         1, and 1 a consumer warp      block[] names a block, and dS has been read (*)
//     full         stage         4                             the block's numbers are where its dS goes later (*)
//
// (*) in kernels for dropout
//
// sent_full and sent_empty belong to sent_step[], a ring of two places. Through it warp 3 tells warp 2 what to report.
//
// Named barriers 1 to 4, one for each buffer of dS and warpgroup: the other warpgroup has written its dS. 5: both are
// done with their products, where sums are written over what those read. 6 to 9, one for each two warps of a warpgroup:
// each has given the other its random numbers (common/dropout.hpp).
//
// Shared memory:
//
//     head dim  block x tile  K          V      Q, dO           dS         dQ     statistics  all
//     128       64x128        2 x 32 KB  32 KB  2 x 16 KB each  2 x 16 KB  32 KB  2 KB        226 KB
//     64        128x128       2 x 16 KB  16 KB  2 x 16 KB each  2 x 32 KB  32 KB  4 KB        212 KB
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/start.hpp"
#include "common/thread.hpp"
#include "sm90/bwd/draw.hpp"
#include "sm90/bwd/load.hpp"
#include "sm90/bwd/mma.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(__grid_constant__ BwdParams const params, __grid_constant__ typename Traits::Scalars const scalars,
               __grid_constant__ CUtensorMap const map_q, __grid_constant__ CUtensorMap const map_k,
               __grid_constant__ CUtensorMap const map_v, __grid_constant__ CUtensorMap const map_d_o) {
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  int const warpgroup = warpgroup_index();
  if (threadIdx.x == 0) {
    prefetch_maps(map_q, map_k, map_v, map_d_o);
    init_barriers(storage.tile_full, 1);
    init_barriers(storage.k_full, 1);
    init_barriers(storage.k_empty, Traits::kWarps + (scalars.ordered ? 3 : 2));  // and the lanes that read the tile
    init_barriers(storage.d_q_full, 4);
    init_barriers(storage.d_q_empty, 1);
    init_barriers(storage.sent_full, 1);
    init_barriers(storage.sent_empty, 1);
    storage.next_wanted.init(1);
    storage.v_full.init(1);
    storage.v_empty.init(Traits::kWarps);
    init_barriers(storage.q_full, 1);
    init_barriers(storage.d_o_full, 1);
    init_barriers(storage.block_empty, Traits::kWarps);
    if constexpr (Traits::kDraws) {
      init_barriers(storage.drawing.wanted, 1 + Traits::kWarps);
      init_barriers(storage.drawing.full, 4);
    }
    fence_mbarrier_init();
  }
  if (threadIdx.x < 3 * 64) {
    // Three operands of rows of eight: ones for the terms of -LSE, zeros, ones for the terms of -delta.
    int const operand = static_cast<int>(threadIdx.x) / 64;
    int const term = static_cast<int>(threadIdx.x) % 8 / 3;
    bool const picked = (operand == 0 && term == 0) || (operand == 2 && term == 1);
    storage.ones[operand][threadIdx.x % 64] = cutlass::bfloat16_t{picked ? 1.0F : 0.0F};
    fence_proxy_async();
  }
  BwdScheduler const scheduler = bwd_scheduler(scalars);
  Band const band = band_of(scalars);
  bool const starts_early = BwdLoad<Traits>::starts_early(scalars);
  if constexpr (BwdLoad<Traits>::kMayStartEarly) {
    if (starts_early && threadIdx.x == 3 * 64) {
      storage.tile[0] = ShareList<Traits>{params, band}.at(static_cast<int>(blockIdx.x));
    }
  }
  __syncthreads();
  if (!starts_early || warp_index() > 1) {
    await_kernel_before();
  }

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = warp_index();
    if (warp == 0 && cute::elect_one_sync()) {
      BwdLoad<Traits>::blocks(params, scalars, map_q, map_d_o, band, storage);
    } else if (warp == 1 && cute::elect_one_sync()) {
      BwdLoad<Traits>::tiles(scalars, map_k, map_v, scheduler, storage);
    } else if (warp == 2 && scalars.ordered && cute::elect_one_sync()) {
      BwdLoad<Traits>::report_sent(params, scalars, band, storage);
    } else if (warp == 3 && cute::elect_one_sync()) {
      BwdLoad<Traits>::query_gradients(params, scalars, band, storage);
    }
  } else if (Traits::kDraws && warpgroup > Traits::kConsumers) {
    if constexpr (Traits::kDraws) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kDrawerRegisters>();
      BwdDraw<Traits>::run(params, storage);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    BwdMma<Traits>::run(params, scalars, band, storage, warpgroup - 1);
  }
}

}  // namespace hattn::sm90
