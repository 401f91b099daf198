// The sm_90a backward kernel: dK, dV of a tile of keys, and its part of dQ, for one dtype, mask class and tile shape.
//
// A tile is kTileN keys of one key head; a CTA walks the blocks of kTileM queries that see them, of every query head of
// the group, and keeps dK and dV in registers meanwhile. Scores are transposed (keys are rows), so that P^T and dS^T
// come out as the register operands of dV += P^T dO and dK += dS^T Q, and only dS goes through shared memory, for dQ =
// dS K.
//
// Roles. One producer warpgroup (warp 0 streams Q, the statistics and dO, warp 1 K and V; warp 3 adds dQ to its sums,
// warp 2 passes on the turns to do so; load.hpp) and two consumer warpgroups of 64 keys each (mma.hpp). dQ leaves the
// registers through shared memory, dK and dV straight for global memory. The grid is persistent.
//
// Barriers. Full barriers (one arrival and the bytes of a copy), empty ones (one arrival a consumer warp): q (with the
// statistics) and d_o per stage, which empty together, k per buffer, v. d_q_full of each consumer warpgroup's half (an
// arrival a warp: it is written) and d_q_empty (one: the copy engine has read it). With one arrival each: tile_full (a
// buffer's tile is named), next_wanted (another should be), turn_full and turn_empty (a block's part has been added).
// Named barriers 1 to 4, for each buffer of dS and warpgroup: the other warpgroup's dS is written.
//
// Shared memory (head dim 128, 64x128): K 2 x 32 KB, V 32 KB, Q and dO 2 x 32 KB, dS 2 x 16 KB, dQ 32 KB, statistics
// 2 KB: 226 KB. Head dim 64, 128x128: K 2 x 16 KB, V 16 KB, Q and dO 2 x 32 KB, dS 2 x 32 KB, dQ 32 KB, statistics 4
// KB: 212 KB.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/thread.hpp"
#include "sm90/bwd/load.hpp"
#include "sm90/bwd/mma.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(__grid_constant__ BwdParams const params, __grid_constant__ BwdScalars const scalars,
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
    fence_mbarrier_init();
  }
  if (threadIdx.x < 3 * 64) {
    // Rows of eight: ones for the terms of -LSE, none, ones for those of -delta.
    int const part = static_cast<int>(threadIdx.x) / 64;
    int const term = static_cast<int>(threadIdx.x) % 8 / 3;
    bool const picked = (part == 0 && term == 0) || (part == 2 && term == 1);
    storage.ones[part][threadIdx.x % 64] = cutlass::bfloat16_t{picked ? 1.0F : 0.0F};
    fence_proxy_async();
  }
  __syncthreads();

  BwdScheduler const scheduler = bwd_scheduler(scalars);

  Band const band = band_of(scalars);

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = warp_index();
    if (warp == 0 && cute::elect_one_sync()) {
      BwdLoad<Traits>::blocks(params, scalars, map_q, map_d_o, band, storage);
    } else if (warp == 1 && cute::elect_one_sync()) {
      BwdLoad<Traits>::tiles(map_k, map_v, scheduler, storage);
    } else if (warp == 2 && scalars.ordered && cute::elect_one_sync()) {
      BwdLoad<Traits>::report_sent(params, scalars, band, storage);
    } else if (warp == 3 && cute::elect_one_sync()) {
      BwdLoad<Traits>::query_gradients(params, scalars, band, storage);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    BwdMma<Traits>::run(params, scalars, band, storage, warpgroup - 1);
  }
}

}  // namespace hattn::sm90
