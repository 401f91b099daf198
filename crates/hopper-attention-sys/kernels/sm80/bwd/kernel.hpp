// The sm_80 backward kernel: dK and dV of a tile, and what the tile adds to dQ, for one dtype, mask class and tile
// shape.
//
// Words such as tile, block, chunk and ordered are defined in common/row.hpp.
//
// A CTA computes one tile of kTileN keys of one key head, and ends. The tile visits the blocks of kTileM queries that
// attend to its keys, in every query head that reads the key head (common/visits.hpp). dK and dV stay in registers
// meanwhile.
//
// Two kernels run around this one (common/around.hpp). The one before writes the statistics of each query, from its LSE
// and delta (Statistics in traits.hpp). The one after converts the f32 sums of dQ to dQ.
//
// Scores are transposed: keys are rows, queries are columns. So P^T and dS^T are the register operands of the products
// dV += P^T dO and dK += dS^T Q.
//
// Roles. Two warps form a pair and share keys: 32 keys at head dim 128, 64 keys at head dim 64. dV (or dK) of so many
// keys fills half of a warp's registers.
// - The P warp of a pair computes S, P and dV. The dS warp computes dP, dS and dK. Both run the same sequence of
//   products on different operands. While one exponentiates, the other multiplies.
// - The P warp hands P to the dS warp through shared memory. dS then overwrites P there.
// - All warps of the CTA compute dQ = dS K of a block, each for 32 queries and some columns. They add it in f32 to the
//   sums in global memory. dQ is computed a block late, when all of dS is there. P warps compute dQ after their other
//   products and dS warps before, so that both warps of a pair come to their named barrier together.
// - All threads copy K and V once, and Q with its statistics and dO block by block (cp.async, load.hpp).
//
// Where scores are capped (common/softcap.hpp), the P warp hands over P (1 - t^2) in place of P. It is a run-time
// branch.
//
// Ordered: tiles add to a block's dQ in the order of their numbers. A warp waits until every warp of the tile before
// has added. An ordered launch draws tiles from a counter. So the tiles that a CTA waits for are running.
//
// A row has a second kernel, for sequences whose lengths the device knows (Traits::kIsPacked). A CTA finds its tile in
// the table of sequences (common/sequences.hpp). The grid is as large as there can be tiles: the CTAs that are left
// over end at once. The tile's band lies in shared memory, where the other kernel reads constants. Rows of class Blocks
// have no such kernel: lists say which blocks visit their tiles (listed.hpp).
//
// Barriers:
// - One __syncthreads a block: its Q and dO have arrived, Q and dO of the block before may be overwritten, and dS of
//   the block before is whole.
// - Named barriers of 64 threads, from 1 + 3 pair on: the first part of P is written, the second is, and the first is
//   read. At head dim 64 from 1 + 2 pair on: P of an even chunk of queries is written, and of an odd one.
//
// Shared memory, in slabs of 64 columns with swizzled rows of 128 bytes (common/slab.hpp):
//
//     head dim  block x tile  K      V      Q, dO           dS         statistics  all
//     128       64x128        32 KB  32 KB  2 x 16 KB each  2 x 16 KB  1 KB        161 KB
//     64        64x128        16 KB  16 KB  2 x 8 KB each   2 x 16 KB  1 KB        97 KB
#pragma once

#include "sm80/bwd/load.hpp"
#include "sm80/bwd/mma.hpp"
#include "sm80/bwd/traits.hpp"

namespace hattn::sm80 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtas)
    bwd_kernel(__grid_constant__ BwdParams const params, __grid_constant__ typename Traits::Scalars const scalars) {
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
  if constexpr (Traits::kIsPacked) {
    int const tiles = scalars.table.header()->tiles;
    PackedScheduler const of_sequences{scalars.table, nullptr, scalars.heads_kv, scalars.heads_per_group, false, tiles};
    PackedTile const tile = of_sequences.tile(index);
    if (tile.valid() && tile.q_len == 0) {
      BwdMma<Traits>::clear_gradients(params, tile);
    } else if (tile.valid()) {
      storage.packed.band.template keep<Traits::kMask>(band_of_tile(params, tile));  // by every thread the same
      BwdMma<Traits>::run(params, scalars, tile, storage.packed.band, storage);
    }
  } else {
    Band const band = band_of(scalars);
    BwdMma<Traits>::run(params, scalars, scheduler.tile(index), band, storage);
  }
}

}  // namespace hattn::sm80
