// The sm_80 forward kernel: O = softmax(mask(scale Q K^T)) V for one dtype, mask class and tile shape.
//
// Roles. A block computes one tile of 128 queries of one head with four warps of 32 queries each (split Q: no warp
// needs another's scores). All of them do everything: each thread copies its share of Q, K and V to shared memory
// (cp.async, load.hpp), each warp reads its operands from there (ldmatrix), multiplies (mma.sync m16n8k16) and
// exponentiates (mma.hpp), and writes its rows of O and of the log-sum-exp (epilogue.hpp). The grid has a block for
// each tile, in the order of tile_scheduler.hpp: under a mask the GPU starts the longest first. Two blocks share a
// multiprocessor, so that one multiplies while the other exponentiates or ends; mask.hpp says which key blocks a tile
// visits, and a warp passes over those in which its own rows have no key.
//
// Pipeline. With two stages, the next K and V are copied while this block of keys is used: a wait for one's own copies
// and one __syncthreads a block. With one stage, V arrives during the first product and the softmax, and the next K
// during the second product: two of each.
//
// Shared memory (head dim 128, 128x64, 2 stages): Q 32 KB, K 2 x 16 KB, V 2 x 16 KB, all as slabs of 64 columns in
// swizzled rows of 128 bytes (copy.hpp); 1 stage: 64 KB. Head dim 64, 2 stages: Q 16 KB, K and V 2 x 8 KB; the operand
// Q then stays in registers. Registers: O, the scores (which become P in place) and one step's operands are all but
// some 20 of 255, which is why little else is kept from block to block.
#pragma once

#include "sm80/fwd/epilogue.hpp"
#include "sm80/fwd/load.hpp"
#include "sm80/fwd/mma.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    fwd_kernel(__grid_constant__ FwdParams const params, __grid_constant__ FwdScalars const scalars) {
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  FwdScheduler const scheduler = fwd_scheduler<Traits>(params, scalars, nullptr);
  Band const band = band_of(scalars);
  Mma<Traits>::run(params, scalars, scheduler, band, storage);
}

}  // namespace hattn::sm80
