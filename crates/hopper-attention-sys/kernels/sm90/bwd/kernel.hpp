// The sm_90a backward kernel: dK, dV of a tile of keys, and its part of dQ, for one dtype, mask class and tile shape.
//
// A tile is kTileN keys of one key head; a CTA walks the blocks of kTileM queries that see them, of every query head of
// the group, and keeps dK and dV in registers meanwhile. Scores are transposed (keys are rows), so that P^T and dS^T
// come out as the register operands of dV += P^T dO and dK += dS^T Q, and only dS goes through shared memory, for dQ =
// dS K.
//
// Roles. One producer warpgroup (warp 0 streams Q, dO and the statistics, warp 1 loads K and V and stores dK and dV,
// load.hpp) and two consumer warpgroups of 64 keys each (mma.hpp). The grid is persistent.
//
// Barriers. Full barriers (one arrival and the bytes of a copy), empty ones (one arrival a consumer warp):
// q_full/q_empty (with the statistics) and d_o_full/d_o_empty per stage, kv_full per buffer of K and V, whose way back
// is d_kv_full (one arrival a warp and consumer: dK and dV are in the place of K and V). Named barrier 1: both
// warpgroups' dS is written; or, at a tile's end, both have read K.
//
// Shared memory (head dim 128, 64x128): K and V 2 x 64 KB, Q and dO 2 x 32 KB, dS 2 x 16 KB, statistics 1 KB: 225 KB.
// Head dim 64, 128x128: K and V 2 x 32 KB, Q and dO 2 x 32 KB, dS 2 x 32 KB.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/bwd/load.hpp"
#include "sm90/bwd/mma.hpp"
#include "sm90/bwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    bwd_kernel(__grid_constant__ BwdKernelParams const params, __grid_constant__ CUtensorMap const map_q,
               __grid_constant__ CUtensorMap const map_k, __grid_constant__ CUtensorMap const map_v,
               __grid_constant__ CUtensorMap const map_d_o, __grid_constant__ CUtensorMap const map_d_k,
               __grid_constant__ CUtensorMap const map_d_v) {
  extern __shared__ __align__(1024) unsigned char shared[];
  auto& storage = *reinterpret_cast<typename Traits::SharedStorage*>(shared);

  // Warp-uniform by construction, and known to the compiler as such.
  int const warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0);

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&map_q);
    cute::prefetch_tma_descriptor(&map_k);
    cute::prefetch_tma_descriptor(&map_v);
    cute::prefetch_tma_descriptor(&map_d_o);
    cute::prefetch_tma_descriptor(&map_d_k);
    cute::prefetch_tma_descriptor(&map_d_v);
    for (int i = 0; i < Traits::kBuffersKV; ++i) {
      storage.tile_full[i].init(1);
      storage.kv_full[i].init(1);
      for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
        storage.d_kv_full[i][consumer].init(4);
      }
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      storage.q_full[i].init(1);
      storage.d_o_full[i].init(1);
      storage.q_empty[i].init(4 * Traits::kConsumers);
      storage.d_o_empty[i].init(4 * Traits::kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  // The first keys are seen by the most queries under a causal mask, so the order of the list is theirs.
  BwdScheduler const scheduler{(params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN, params.heads_kv, params.batch,
                               params.heads_per_group, params.tile_counter};
  Band const band{params.left_offset, params.right_offset, params.seqlen_q, params.seqlen_kv};

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0 && cute::elect_one_sync()) {
      BwdLoad<Traits>::queries(params, map_q, map_d_o, band, storage);
    } else if (warp == 1 && cute::elect_one_sync()) {
      BwdLoad<Traits>::tiles(map_k, map_v, map_d_k, map_d_v, scheduler, storage);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    BwdMma<Traits>::run(params, band, storage, warpgroup - 1);
  }
}

}  // namespace hattn::sm90
