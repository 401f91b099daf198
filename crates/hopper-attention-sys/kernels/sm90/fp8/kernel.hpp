// The sm_90a forward kernel of e4m3 operands, for one mask class and tile shape.
//
// Words such as tile, block, stage and turn are defined in common/row.hpp.
//
// A tile is kTileM queries of one head. A block is kTileN keys: 128, or 64 at head dim 256 with scores in f32. All keys
// of a block have the same descale factor, and so have its values. The grid is persistent: a CTA computes one tile
// after another. common/tile_scheduler.hpp says which tiles. The last tiles may be split into pieces, which different
// CTAs compute (split.hpp).
//
// The factors of a block are made of the descale factors: what a score is multiplied by (of Q and K, with the softmax
// scale), and what the block's P V is multiplied by (of V). The latter is relative to largest_v, the largest descale
// factor of V's head. O is multiplied by largest_v at the end.
//
// Rows with scores in f32 have a second kernel up to head dim 128, without a window: there the CTAs of a cluster share
// the keys of a tile (shares.hpp). A CTA computes one share and ends.
//
// A row may have one more, for sequences whose lengths the device knows (common/sequences.hpp). It draws its
// tiles from their table. Key blocks and factors per block begin with the sequence, and no tile is split.
//
// Rows of class Blocks have one kernel. Its tiles visit the blocks of lists (sm90/listed.hpp): warp 1 looks up a tile's
// list, and warp 0 walks it and puts the entry of each visit beside its K. The consumers read the bits of masked blocks
// in memory.
//
// Roles
//
//     producer warpgroup       load.hpp
//       warp 0                 loads K and V, and works out the factors of each block
//       warp 1                 draws tiles, loads Q, and checks whether scores fit f16 (range.hpp)
//       warps 2 and 3          transpose V in shared memory
//     2 or 3 consumers         mma.hpp: a warpgroup of 64 queries each. Both products, the softmax between them
//                              (softmax.hpp, weights.hpp), and O (epilogue.hpp)
//
// Barriers in shared memory: what a completed phase says, and who arrives
//
//     tile_full    the buffer's next tile and piece are named    warp 1
//     tile_empty   the buffer's tile, Q and largest_v were read  warps 0 and 1, transposers, consumer warps
//     q_full       Q has come                                    warp 1, with the bytes
//     k_full       K, the block's factors and entry have come    warp 0 twice, once with the bytes
//     k_empty      K and the factors were read                   warp 1, consumer warps
//     v_full       V has come                                    warp 0, with the bytes
//     v_empty      V was transposed                              transposers (warps 2 and 3)
//     vt_full      V^T is there                                  transposers
//     vt_empty     V^T was multiplied                            consumer warps
//
// Named barriers 1 and 2 pass the turn to issue products between two consumers (sm90/turns.hpp).
//
// Shared memory, in KB. Where two numbers of stages stand, the second is for rows with a mask.
//
//     head dim            128            128             64            64
//     consumers             2              3              2             3
//     Q                2 x 16         2 x 24          2 x 8        2 x 12
//     K                3 x 16   4 or 3 x 16           4 x 8         4 x 8
//     V^T              3 x 17   4 or 3 x 17           4 x 9         4 x 9
//     V                2 x 16         2 x 16          2 x 8         2 x 8
//
//     head dim        192/128        192/128    256, f16 scores  256, f32 scores
//     consumers             2              3                  2                2
//     Q                2 x 24         2 x 36             2 x 32           2 x 32
//     K                3 x 24         2 x 24             2 x 32           3 x 16
//     V^T              3 x 17         2 x 17             2 x 33         3 x 16.5
//     V                2 x 16         2 x 16      2 x 16 (halves)         2 x 16
//
// A kernel for such sequences has 8 KB more, for a copy of the table.
//
// Rows of Q, K and V lie in slabs of 128 or 64 bytes, over which they are swizzled (common/slab.hpp). A row of V^T is
// the keys of one column, 128 or 64. Each stage of V^T has eight more rows, of ones: the product with V^T then sums the
// weights too (mma.hpp).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/start.hpp"
#include "common/thread.hpp"
#include "sm90/fp8/load.hpp"
#include "sm90/fp8/mma.hpp"
#include "sm90/fp8/range.hpp"

namespace hattn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fp8_fwd_kernel(__grid_constant__ typename Traits::Params const params, __grid_constant__ CUtensorMap const map_q,
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
    if constexpr (Traits::kIsPacked) {
      storage.table_full.init(1);
    }
    fence_mbarrier_init();
    if constexpr (Traits::kMask != MaskClass::Full) {
      for (auto& leak : storage.leak) {
        leak.noted = 0;
      }
    }
  }
  Fp8Load<Traits>::ones(storage);
  __syncthreads();
  if constexpr (Traits::kIsPacked || Traits::kIsListed) {
    await_kernel_before();  // which makes the table of sequences, or lists of blocks
  }
  [[maybe_unused]] Fp8Scheduler const scheduler{(params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM,
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
      if constexpr (Traits::kIsPacked) {
        Fp8Load<Traits>::queries(params, map_q, band, Fp8Load<Traits>::packed_scheduler(params, storage), storage);
      } else {
        Fp8Load<Traits>::queries(params, map_q, band, scheduler, storage);
      }
    } else if (warp >= 2) {
      Fp8Load<Traits>::transpose(params, band, storage, warp - 2);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kShares) {
      Fp8Mma<Traits>{params, band, storage, warpgroup - 1}.run_share();
    } else {
      Fp8Mma<Traits>{params, band, storage, warpgroup - 1}.run();
    }
  }
}

}  // namespace hattn::sm90
