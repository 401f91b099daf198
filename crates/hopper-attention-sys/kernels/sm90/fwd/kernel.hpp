// The sm_90a forward kernel: O = softmax(mask(scale Q K^T)) V for one dtype, mask class and tile shape.
//
// Words such as tile, block, stage and turn are defined in common/row.hpp.
//
// A tile is kTileM queries of one query head. A tile visits blocks of kTileN keys, from the last to the first
// (common/visits.hpp). The grid is persistent: a CTA computes tiles until the scheduler has no more
// (common/tile_scheduler.hpp). Kernels that share the keys of a tile are an exception, described below.
//
// Roles:
// - Producer warpgroup, with few registers (load.hpp). One lane of each warp works:
//   - warp 0 loads K and V;
//   - warp 1 draws tiles, loads Q and stores O;
//   - warps 2 and 3 copy an additive bias where lists say which blocks are visited (Load::biases). Elsewhere they end
//     at once.
// - Two or three consumer warpgroups, with most registers. Each computes 64 queries of the tile: both products and the
//   softmax (mma.hpp), then O and the LSE (epilogue.hpp).
//
// Before the roles part, thread 0 initialises the barriers and asks for the Q and the first K of the CTA's first tile
// (Load::begin). Rows for modified scores, packed sequences, lists and several tiles under a window leave that to the
// loading warps.
//
// Rows with tiles of 128 queries and blocks of 128 keys have a second kernel, in which the CTAs of a cluster share the
// keys of a tile (shares.hpp). Rows with tiles of 64 queries have no other: their two consumer warpgroups have the same
// queries, and each visits every second block. In these kernels a CTA computes one tile and ends: warp 1 does nothing.
// So launches with a tile for each CTA take the second kernel, too, without a cluster. Consumers then write O to memory
// themselves. The grid's second dimension is the clusters that share a tile, nearly always one.
//
// Rows with tiles of 128 queries or more and blocks of 128 keys have a third kernel, for sequences whose lengths the
// device knows (Traits::kIsPacked). A tile then carries its sequence's place and lengths, the band follows from these,
// and the tensor maps have five dimensions (encode_packed_map in sm90/tensor_map.hpp). Everything else is the same.
//
// Rows for modified scores have kernels of their own: a product with K is followed by the cap (common/softcap.hpp), by
// ALiBi (common/alibi.hpp), by the mask, and by a look for the largest score (common/max_logits.hpp), each where it is
// asked for. Their tiles are not shared.
//
// Such rows of head dims 64 and 128, but for class Blocks, have two kernels more for ALiBi and no other modifier
// (alibi.hpp), one of them for sequences whose lengths the device knows. Its operands take 2 KB of shared memory.
//
// Such rows of class Window have two kernels more, for problems with an additive bias and any mask (common/bias.hpp):
// one of them for sequences whose lengths the device knows. All of their blocks are compared with what came before: no
// block says what the bias of the next one is. (In one kernel with the others they would spill.) Rows of class Blocks
// have one, too, without dropout. There warps 2 and 3 of the producers copy the bias, each that of a consumer's
// queries.
//
// Barriers in shared memory. "Full" hands a buffer to the consumers, "empty" hands it back.
//
//     barrier          one for          arrivals                        completes when
//     k_full, v_full   stage            1, and the bytes of the copy    K or V of a block is there
//     k_empty, v_empty stage            1 a warp that reads the block   the warp's products have read the buffer
//     q_full           buffer of Q      1, and the bytes of the copy    Q of a tile is there
//     o_full           buffer, consumer 1 a warp of that consumer       its rows of O are in the buffer of Q
//     q_empty          CTA (see below)  1 a warp                        the tile's last scores are there
//     tile_full        buffer of Q      1                               tile[] says whose Q the buffer is for
//     next_wanted      CTA              1                               warp 0 has come to the tile's last K but one
//     bias.full        consumer (lists) 1 a lane of the copying warp    the bias of its queries and a block is there
//     bias.empty       consumer (lists) 1 a warp of that consumer       the warp has added it
//     table_full       CTA (packed)     1, and the bytes of the copy    a copy of a small table of sequences is there
//
// next_wanted tells warp 1 to draw the next tile, where tiles are drawn late (draws_late, common/tile_scheduler.hpp).
//
// Above head dim 128 there is one buffer of Q (Traits::kWritesOutput). Consumers hand it back by q_empty, and write O
// to memory themselves. tile_full and q_full are of a record of a tile then.
//
// K and V have separate barriers, because the product with V lags behind the product with K by a block. A buffer of Q
// has no empty barrier: after o_full, warp 1 stores O from it, and only then loads the Q of the tile kBuffersQ later.
//
// Named barriers 1 to kConsumers pass the turn to issue products around (sm90/turns.hpp). The one after them keeps the
// consumers together where tiles are shared.
//
// Head dims of 8 more than a multiple of 16 put heads in the middle of a sector of memory. Rows of head dim 96 have
// second versions of their kernels for them (RotatedTraits in rotation.hpp): such a head is rotated in its tiles, and
// consumers store O from the buffer of Q, not warp 1.
//
// Shared memory, in slabs of 64 columns with swizzled rows of 128 bytes (common/slab.hpp). At head dims 96 and 160
// slabs have 32 columns and rows of 64 bytes. Barriers take less than 1 KB. O overwrites its own Q.
//
//     head dim  tile     Q          K          V
//     128       128x128  2 x 32 KB  2 x 32 KB  2 x 32 KB
//     64        192x128  2 x 24 KB  3 x 16 KB  3 x 16 KB
//     96        192x96   2 x 36 KB  3 x 18 KB  3 x 18 KB
//     96        128x128  2 x 24 KB  3 x 24 KB  3 x 24 KB
//     64        128x128  3 x 16 KB  4 x 16 KB  4 x 16 KB
//     128       128x80   4 x 32 KB  2 x 20 KB  2 x 20 KB
//     64        128x80   4 x 16 KB  3 x 10 KB  3 x 10 KB
//     128       64x128   1 x 16 KB  3 x 32 KB  3 x 32 KB
//     96        64x128   1 x 12 KB  3 x 24 KB  3 x 24 KB
//     160       128x128  1 x 40 KB  2 x 40 KB  2 x 40 KB
//     192, 128  128x128  1 x 48 KB  2 x 48 KB  2 x 32 KB
//     192       128x96   1 x 48 KB  2 x 36 KB  2 x 36 KB
//     256       128x80   1 x 64 KB  2 x 40 KB  2 x 40 KB
//     64        64x128   1 x 8 KB   5 x 16 KB  5 x 16 KB
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/max_logits.hpp"
#include "common/start.hpp"
#include "common/thread.hpp"
#include "sm90/fwd/load.hpp"
#include "sm90/fwd/mma.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    fwd_kernel(__grid_constant__ FwdParams const params, __grid_constant__ typename Traits::Scalars const scalars,
               __grid_constant__ CUtensorMap const map_q, __grid_constant__ CUtensorMap const map_k,
               __grid_constant__ CUtensorMap const map_v, __grid_constant__ CUtensorMap const map_o) {
  auto& storage = shared_storage<typename Traits::SharedStorage>();
  int const warpgroup = warpgroup_index();
  if (threadIdx.x == 0) {
    prefetch_maps(map_q, map_k, map_v, map_o);
    constexpr int kReadingWarps = 4 * Traits::kConsumers / Traits::kWays;  // of a block
    init_barriers(storage.tile_full, 1);
    init_barriers(storage.q_full, 1);
    for (auto& consumers : storage.o_full) {
      init_barriers(consumers, 4);
    }
    storage.next_wanted.init(1);
    if constexpr (Traits::kWritesOutput) {
      storage.q_empty.init(4 * Traits::kConsumers);
    }
    if constexpr (Traits::kIsPacked) {
      storage.table_full.init(1);
    }
    if constexpr (Traits::kAddsBias && Traits::kProducersCopyBias) {
      init_barriers(storage.bias.full, 32);
      init_barriers(storage.bias.empty, 4);
    }
    if constexpr (Traits::kModifiers == Modifiers::Always) {
      for (auto& largest : storage.modifiers.largest) {
        largest.clear();
      }
    }
    init_barriers(storage.k_full, 1);
    init_barriers(storage.v_full, 1);
    init_barriers(storage.k_empty, kReadingWarps);
    init_barriers(storage.v_empty, kReadingWarps);
    fence_mbarrier_init();
    if constexpr (Load<Traits>::kBegins) {
      Load<Traits>::begin(params, scalars, map_q, map_k, storage);
    }
  }
  if constexpr (Traits::kIsAlibi) {
    if (threadIdx.x < Traits::kTileN) {
      storage.alibi_operands().write_place(static_cast<int>(threadIdx.x));
    }
    fence_proxy_async();
  }
  __syncthreads();

  if constexpr (Traits::kIsPacked || Traits::kIsListed) {
    await_kernel_before();  // which makes the table of sequences, or lists of blocks
  }
  [[maybe_unused]] FwdScheduler const scheduler = fwd_scheduler<Traits>(params, scalars, scalars.tile_counter);
  Band const band = band_of(scalars);

  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    int const warp = warp_index();
    if (warp == 0 && cute::elect_one_sync()) {
      Load<Traits>::keys_and_values(params, scalars, map_k, map_v, band, storage);
    } else if (!Traits::kShares && warp == 1 && cute::elect_one_sync()) {
      if constexpr (Traits::kIsPacked) {
        Load<Traits>::queries_and_outputs(params, scalars, map_q, map_o,
                                          Load<Traits>::packed_scheduler(scalars, storage), storage);
      } else {
        Load<Traits>::queries_and_outputs(params, scalars, map_q, map_o, scheduler, storage);
      }
    }
    if constexpr (Traits::kAddsBias && Traits::kProducersCopyBias) {
      if (warp >= 2 && is_copied(params)) {
        Load<Traits>::biases(params, scalars, storage);
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Mma<Traits>::run(params, scalars, band, storage, warpgroup - 1);
  }
}

}  // namespace hattn::sm90
