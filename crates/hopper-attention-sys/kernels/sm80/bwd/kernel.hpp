// The sm_80 backward kernel: dK, dV of a tile of keys, and its part of dQ, for one dtype, mask class and tile shape.
//
// A block computes one tile of kTileN keys of one key head: it walks the blocks of kTileM queries that see them, of
// every query head of the group, and keeps dK and dV in registers meanwhile. Scores are transposed (keys are rows), so
// that P^T and dS^T come out as the register operands of dV += P^T dO and dK += dS^T Q.
//
// Roles. Two warps, a pair, have 32 keys at head dim 128 and 64 at 64, so that dV of them, or dK, fills half a warp's
// registers. One warp of a pair makes S, P and dV, the other dP, dS and dK: the same products with other operands, and
// while one exponentiates the other multiplies. P goes from the one to the other through shared memory, where dS takes
// its place. All warps of the block make dQ = dS K of a block, each 32 queries of some columns, and add it in f32 to
// the sums in global memory: a block late, when all of dS is there; the warps of P after their other products, those of
// dS before, so that they come to a pair's meeting together. All threads copy K and V once, and Q with its statistics
// and dO block by block (cp.async, load.hpp). In turns a block's parts are added in the order of the tiles: a warp
// waits until every warp of the tile before has added, and tiles are drawn, so that those they wait for run.
//
// Barriers. One __syncthreads a block of queries: its Q and dO have arrived, those of the block before may be replaced,
// and dS of the block before is whole. Named barriers 1 + 2 pair + chunk % 2 of 64 threads: P of a chunk of queries is
// written.
//
// Shared memory (head dim 128, 64x128): K 32 KB, V 32 KB, Q and dO 2 x 32 KB, dS 2 x 16 KB, statistics 1 KB: 161 KB.
// Head dim 64, 64x128: 97 KB. All as slabs of 64 columns in swizzled rows of 128 bytes (copy.hpp).
#pragma once

#include "sm80/bwd/load.hpp"
#include "sm80/bwd/mma.hpp"
#include "sm80/bwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    bwd_kernel(__grid_constant__ BwdParams const params, __grid_constant__ BwdScalars const scalars) {
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  BwdScheduler const scheduler = bwd_scheduler(scalars);
  int index = static_cast<int>(blockIdx.x);
  if (scalars.tile_counter != nullptr) {
    if (threadIdx.x == 0) {
      storage.drawn = scheduler.draw(0);
    }
    __syncthreads();
    index = storage.drawn;
  }
  Band const band = band_of(scalars);
  BwdMma<Traits>::run(params, scalars, scheduler.tile(index), band, storage);
}

}  // namespace hattn::sm80
