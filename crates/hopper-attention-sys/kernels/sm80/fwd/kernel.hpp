// The sm_80 forward kernel: O = softmax(mask(scale Q K^T)) V for one dtype, mask class and tile shape.
//
// Words such as tile, block and stage are defined in common/row.hpp.
//
// A CTA computes one tile of 128 queries of one query head, and ends. The grid has a CTA for each tile, in the order of
// common/tile_scheduler.hpp: under a mask the GPU starts the longest tiles first. Two CTAs share a multiprocessor, so
// that one multiplies while the other exponentiates or writes O. (At head dims 192 and 256 of V a CTA of eight warps is
// alone.) A tile visits blocks of kTileN keys, from the last to the first (common/visits.hpp).
//
// Roles. A CTA has four warps of 32 queries each: two strips of 16. Tiles of 64 queries have four warps of one strip.
// Where V has more than 128 columns, tiles of 128 queries have eight warps of one strip. No warp needs the scores of
// another. Each warp takes part in every step:
// 1. every thread copies its share of Q, K and V to shared memory (cp.async, load.hpp);
// 2. a warp reads operands from there (ldmatrix), multiplies (mma.sync m16n8k16) and exponentiates (mma.hpp);
// 3. a warp writes its rows of O and of the log-sum-exp (epilogue.hpp).
// A warp skips the products of blocks in which its own rows have no key.
//
// A row has a second kernel, for sequences whose lengths the device knows (Traits::kIsPacked). A CTA finds its tile in
// the table of sequences (common/sequences.hpp). The grid is as large as there can be tiles: the CTAs that are left
// over end at once. The tile's band lies in shared memory, where the other kernel reads constants. Rows of class Blocks
// have no such kernel: their tiles visit the blocks of lists (listed.hpp).
//
// Barriers. __syncthreads only, each after a wait for the thread's own copies:
// - two stages: one a block. The next K and V are copied while this block is used.
// - one stage: two a block. V arrives during the first product and the softmax, the next K during the second product.
// - Q in the place of a stage: one more, before Q is read into registers.
//
// Shared memory, in slabs of 64 columns with swizzled rows of 128 bytes (common/slab.hpp):
//
//     head dims  tile    stages  warps  Q      K          V          all
//     256/256    128x32  2       8      64 KB  2 x 16 KB  2 x 16 KB  96 KB, Q over one stage
//     256/256    64x64   1       4      32 KB  32 KB      32 KB      96 KB
//     192/192    128x64  2       8      48 KB  2 x 24 KB  2 x 24 KB  96 KB, Q over one stage
//     192/192    64x64   1       4      24 KB  24 KB      24 KB      72 KB
//     192/128    128x64  1       4      48 KB  24 KB      16 KB      88 KB
//     128/128    128x64  2       4      32 KB  2 x 16 KB  2 x 16 KB  96 KB
//     128/128    128x64  1       4      32 KB  16 KB      16 KB      64 KB
//     96/96      128x64  2       4      32 KB  2 x 16 KB  2 x 16 KB  96 KB, a quarter of it unused
//     64/64      128x64  2       4      16 KB  2 x 8 KB   2 x 8 KB   48 KB
//
// Two CTAs with tiles of 64 queries copy K and V twice as often as one of 128, and are 8 to 16% faster all the same:
// one multiplies while the other waits or exponentiates (benches/LOG.md, entry 67).
//
// Registers of a thread:
//
//     head dims  strips  O    scores  Q
//     256/256    1       128  16      64     128x32
//     256/256    1       128  32      (64)   64x64
//     192/192    1       96   32      48
//     192/128    2       128  64      (96)
//     128/128    2       128  64      (64)
//     96/96      2       96   64      (48)
//     64/64      2       64   64      32
//
// Where it fits, the operand Q stays in registers. At 128/128, 192/128 and 96/96 it does not: at 128 columns of V, O,
// the scores (which become P in place) and the operands of one step take all but some 20 of 255. So little else is kept
// from block to block.
#pragma once

#include "sm80/fwd/epilogue.hpp"
#include "sm80/fwd/load.hpp"
#include "sm80/fwd/mma.hpp"
#include "sm80/fwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    fwd_kernel(__grid_constant__ FwdParams const params, __grid_constant__ typename Traits::Scalars const scalars) {
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  if constexpr (Traits::kIsPacked) {
    Mma<Traits>::run(params, scalars, packed_scheduler<Traits>(scalars, scalars.table), storage.packed.band, storage);
  } else {
    FwdScheduler const scheduler = fwd_scheduler<Traits>(params, scalars, nullptr);
    Band const band = band_of(scalars);
    Mma<Traits>::run(params, scalars, scheduler, band, storage);
  }
}

}  // namespace hattn::sm80
