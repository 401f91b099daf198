// The sm_90a forward kernel of e4m3 operands, for one mask class and tile shape.
//
// Roles. One producer warpgroup (warp 0 loads K and V and works out their factors, warp 1 draws tiles, loads Q and
// looks whether scores fit f16, range.hpp, warps 2 and 3 transpose V, load.hpp) and two consumer warpgroups of 64 query
// rows each, or three where registers allow (mma.hpp, softmax.hpp, weights.hpp; epilogue.hpp writes O itself). The grid
// is persistent; tile_scheduler.hpp says which tiles a CTA takes and split.hpp which parts of the last ones, mask.hpp
// which key blocks a tile visits. A block is 128 keys, which share their factors.
//
// Barriers. Full barriers of what is copied (one arrival and its bytes): q, k (another for the block's factors) and v;
// empty ones (an arrival a consumer warp, of k warp 1's too; of v one a transposing warp). vt_full (an arrival a
// transposing warp) and vt_empty hand on V^T. tile_full and tile_empty (all who read it) name a buffer's tile and hand
// its Q back. Named barriers 1 and 2 pass the turn to issue products between two consumers.
//
// Shared memory (head dim 128, 3 stages, 4 of three consumers and no mask): Q 2 x 16 KB (24 KB of three consumers), K 3
// x 16 KB, V^T 3 x 17 KB, V 2 x 16 KB. Head dim 64, 4 stages: Q 2 x 8 KB (12 KB of three consumers), K 4 x 8 KB, V^T 4
// x 9 KB, V 2 x 8 KB. Rows of Q, K and V are swizzled over their 128 or 64 bytes, those of V^T hold the 128 keys of a
// column; eight more of each stage hold ones.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/thread.hpp"
#include "sm90/fp8/load.hpp"
#include "sm90/fp8/mma.hpp"
#include "sm90/fp8/range.hpp"

namespace hattn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fp8_fwd_kernel(__grid_constant__ Fp8KernelParams const params, __grid_constant__ CUtensorMap const map_q,
                   __grid_constant__ CUtensorMap const map_k, __grid_constant__ CUtensorMap const map_v) {
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  int const warpgroup = warpgroup_index();
  if (!Fp8Range<Traits>::is_wanted(params)) {
    return;
  }
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&map_q);
    cute::prefetch_tma_descriptor(&map_k);
    cute::prefetch_tma_descriptor(&map_v);
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    for (int i = 0; i < Traits::kBuffersQ; ++i) {
      storage.tile_full[i].init(1);
      storage.tile_empty[i].init(kConsumerWarps + 2 + Traits::kTransposers);
      storage.q_full[i].init(1);
    }
    for (int i = 0; i < Traits::kStages; ++i) {
      storage.k_full[i].init(2);
      storage.k_empty[i].init(kConsumerWarps + 1);
      storage.vt_full[i].init(Traits::kTransposers);
      storage.vt_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < Traits::kStagesRaw; ++i) {
      storage.v_full[i].init(1);
      storage.v_empty[i].init(Traits::kTransposers);
    }
    fence_mbarrier_init();
  }
  Fp8Load<Traits>::ones(storage);
  __syncthreads();
  Fp8Scheduler const scheduler{(params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM,
                               params.heads_q,
                               params.batch,
                               params.heads_per_group,
                               params.groups,
                               Traits::kMask != MaskClass::Full,
                               params.tile_counter};
  Band const band = band_of(params);
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = warp_index();
    if (warp == 0) {
      Fp8Load<Traits>::keys_and_values(params, map_k, map_v, band, storage);
    } else if (warp == 1) {
      Fp8Load<Traits>::queries(params, map_q, band, scheduler, storage);
    } else if (warp >= 2) {
      Fp8Load<Traits>::transpose(band, storage, warp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Fp8Mma<Traits>{params, band, storage, warpgroup - 1}.run();
  }
}

}  // namespace hattn::sm90
