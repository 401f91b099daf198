// The sm_90a forward kernel: O = softmax(mask(scale Q K^T)) V for one dtype, mask class and tile shape.
//
// Roles. One producer warpgroup (few registers: warp 0 loads K and V, warp 1 loads Q and stores O, load.hpp) and two or
// three consumer warpgroups of 64 query rows each (most registers: products and softmax, mma.hpp; epilogue.hpp). The
// grid is persistent; tile_scheduler.hpp says which tiles a CTA takes, mask.hpp which key blocks a tile visits.
//
// Barriers. Full barriers (one arrival and the bytes of a copy) hand a buffer to the consumers, empty ones (one arrival
// a consumer warp, after its wgmma wait) hand it back: k_full/k_empty and v_full/v_empty per stage, so that V may
// lag behind K by a block. q_full per Q buffer; its way back is o_full (one arrival a warp and consumer), after which
// warp 1 stores O and only then loads the Q of the tile kBuffersQ later. tile_full names a buffer's tile; next_wanted
// asks warp 1 for another. Named barriers 1..3 pass the turn to issue products around.
//
// Shared memory (head dim 128, 128x128, 2 stages): Q 2 x 32 KB, K 2 x 32 KB, V 2 x 32 KB, all as 64-column slabs of
// 128-byte swizzled rows; barriers < 1 KB. O is staged over its own Q. Head dim 64, 192x128, 3 stages: Q 2 x 24 KB, K
// and V 3 x 16 KB; 128x128, 4 stages: Q 3 x 16 KB, K and V 4 x 16 KB.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/thread.hpp"
#include "sm90/fwd/load.hpp"
#include "sm90/fwd/mma.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_kernel(__grid_constant__ FwdParams const params, __grid_constant__ FwdScalars const scalars,
               __grid_constant__ CUtensorMap const map_q, __grid_constant__ CUtensorMap const map_k,
               __grid_constant__ CUtensorMap const map_v, __grid_constant__ CUtensorMap const map_o) {
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  int const warpgroup = warpgroup_index();
  if (threadIdx.x == 0) {
    prefetch_maps(map_q, map_k, map_v, map_o);
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    init_barriers(storage.tile_full, 1);
    init_barriers(storage.q_full, 1);
    for (auto& consumers : storage.o_full) {
      init_barriers(consumers, 4);
    }
    storage.next_wanted.init(1);
    init_barriers(storage.k_full, 1);
    init_barriers(storage.v_full, 1);
    init_barriers(storage.k_empty, kConsumerWarps);
    init_barriers(storage.v_empty, kConsumerWarps);
    fence_mbarrier_init();
  }
  __syncthreads();

  FwdScheduler const scheduler = fwd_scheduler<Traits>(params, scalars, scalars.tile_counter);
  Band const band = band_of(scalars);

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = warp_index();
    if (warp == 0 && cute::elect_one_sync()) {
      Load<Traits>::keys_and_values(scalars, map_k, map_v, band, storage);
    } else if (warp == 1 && cute::elect_one_sync()) {
      Load<Traits>::queries_and_outputs(params, scalars, map_q, map_o, scheduler, storage);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Mma<Traits>::run(params, scalars, band, storage, warpgroup - 1);
  }
}

}  // namespace hattn::sm90
