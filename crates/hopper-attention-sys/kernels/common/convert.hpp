// The kernel after the backward: dQ from its sums, and dK and dV from theirs where tiles have shares. It also puts
// right what has leaked into the gradients from under a mask (leak_bwd.hpp).
#pragma once

#include <cuda_runtime.h>

#include "common/around.hpp"
#include "common/element.hpp"
#include "common/key_pieces.hpp"
#include "common/launch.hpp"
#include "common/leak_bwd.hpp"
#include "common/start.hpp"
#include "common/status.hpp"
#include "kernels.hpp"

namespace hattn {

// CTAs that convert dK and dV.
template <class Traits>
CUTE_HOST_DEVICE int key_pieces(BwdParams const& params) {
  return params.key_sums == 0 ? 0 : params.cut_tiles * KeyPieces<Traits>::kCount;
}

// The tiles of keys of a launch, in the order of its list.
template <class Traits>
CUTE_DEVICE BwdScheduler key_tiles(BwdParams const& params) {
  int const blocks = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN;
  return bwd_scheduler(params, params.heads_kv, anew(blocks), nullptr);
}

// The tile that sums are of (write_shares in sm90/bwd/share.hpp).
template <class Traits>
CUTE_DEVICE Tile tile_of_sums(BwdParams const& params, int sums) {
  BwdScheduler const tiles = key_tiles<Traits>(params);
  int const whole = tiles.total() - params.cut_tiles;
  if (whole > 0) {
    return tiles.tile(whole + sums);
  }
  int const batch_head = sums / tiles.blocks;
  int const batch = batch_head / params.heads_kv;
  return {sums - batch_head * tiles.blocks, batch_head - batch * params.heads_kv, batch};
}

// Looks through a piece of a tile's dV or dK.
template <class Traits>
CUTE_DEVICE void repair_piece(BwdParams const& params, int batch, int head, int n_block, int piece) {
  using Pieces = KeyPieces<Traits>;
  int const first = Pieces::column(piece);
  int const columns = Pieces::is_v(piece) ? params.head_dim_vo : params.head_dim_qk;
  int const range_end = cute::min(first + Pieces::kColumns, columns);
  RepairGradients<Traits> const repair(params, batch);
  int const end = cute::min((n_block + 1) * Traits::kTileN, params.seqlen_kv);
  for (int key = n_block * Traits::kTileN + static_cast<int>(threadIdx.x) / 32; key < end;
       key += Traits::ThreadSums::kThreads / 32) {
    repair.key(head, key, {first, Pieces::is_v(piece) ? first : range_end},
               {first, Pieces::is_v(piece) ? range_end : first});
  }
}

// A piece of a tile's dV or dK, from the sums of all shares, in the order of the shares where each has its own.
template <class Traits>
CUTE_DEVICE void convert_keys(BwdParams const& params, int index) {
  using Pieces = KeyPieces<Traits>;
  using KeySums = typename Traits::KeySums;
  static_assert(KeySums::kThreads == Traits::ThreadSums::kThreads);
  std::int64_t const tiles = params.cut_tiles;
  int const of_tile = index / Pieces::kCount;
  int const piece = index % Pieces::kCount;
  int const thread = static_cast<int>(threadIdx.x);
  float const* sums = reinterpret_cast<float const*>(params.key_sums) + of_tile * std::int64_t{KeySums::kElements} +
                      Pieces::offset(piece, thread);
  float4 fours[Pieces::kFours] = {};
  int const copies = params.ordered ? params.shares : 1;
  for (int copy = 0; copy < copies; ++copy, sums += tiles * KeySums::kElements) {
    CUTE_UNROLL
    for (int i = 0; i < Pieces::kFours; ++i) {
      Pieces::add(fours, i, *reinterpret_cast<float4 const*>(sums + KeySums::offset(i, 0)));
    }
  }
  Tile const tile = tile_of_sums<Traits>(params, of_tile);
  if (__syncthreads_or(Pieces::write(params, tile.block, tile.head, tile.batch, piece, fours, thread))) {
    repair_piece<Traits>(params, tile.batch, tile.head, tile.block, piece);
  }
}

// Looks through the dQ of a block.
template <class Traits>
CUTE_DEVICE void repair_queries(BwdParams const& params, std::int64_t block) {
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  int const m_block = static_cast<int>(block % m_blocks);
  int const head = static_cast<int>(block / m_blocks % params.heads_q);
  RepairGradients<Traits> const repair(params, static_cast<int>(block / m_blocks / params.heads_q));
  int const end = cute::min((m_block + 1) * Traits::kTileM, params.seqlen_q);
  for (int query = m_block * Traits::kTileM + static_cast<int>(threadIdx.x) / 32; query < end;
       query += Traits::ThreadSums::kThreads / 32) {
    repair.query(head, query);
  }
}

// Looks through the dK and dV of all keys whose tiles are whole: CTA `cta` of `ctas` through some. (Those that convert
// pieces of dK and dV are not among them.)
template <class Traits>
CUTE_DEVICE void repair_keys(BwdParams const& params, int cta, int ctas) {
  constexpr int kWarps = Traits::ThreadSums::kThreads / 32;
  auto const is_whole = [&](int n_block, int batch_head) {
    BwdScheduler const tiles = key_tiles<Traits>(params);
    return tiles.index_of(n_block, batch_head) < tiles.total() - (params.key_sums == 0 ? 0 : params.cut_tiles);
  };
  int const pieces = (params.seqlen_kv + kWarps - 1) / kWarps;
  auto const total = [&]() { return static_cast<std::int64_t>(anew(pieces)) * params.heads_kv * params.batch; };
  for (std::int64_t i = cta; i < total(); i += ctas) {
    std::int64_t const batch_head = i / pieces;
    int const key = static_cast<int>(i - batch_head * pieces) * kWarps + static_cast<int>(threadIdx.x) / 32;
    if (key < params.seqlen_kv && is_whole(key / Traits::kTileN, static_cast<int>(batch_head))) {
      RepairGradients<Traits> const repair(params, static_cast<int>(batch_head / params.heads_kv));
      repair.key(static_cast<int>(batch_head % params.heads_kv), key, {0, params.head_dim_qk}, {0, params.head_dim_vo});
    }
  }
}

// dQ of block `m_block` of one head of a sequence. Whether some of it is not finite.
//
// Block `block` of the sums is read. Its sums lie in memory as they lay in the accumulators of the warps that made
// them. Traits::ThreadSums is what a thread had of them: strips of 16 queries a warp. The first row of dQ lies `offset`
// elements from the tensor's address, and the sequence has `rows` rows.
template <class Traits>
CUTE_DEVICE bool convert_queries(BwdParams const& params, std::int64_t block, int m_block, std::int64_t offset,
                                 int rows) {
  using Element = typename Traits::Element;
  using ThreadSums = typename Traits::ThreadSums;
  // A block that no tile visits has no sums. Zeros have been written as its dQ. (The sums are asked for before that is
  // known, or small problems would wait twice.)
  ThreadSums thread_sums;
  thread_sums.load(reinterpret_cast<float const*>(params.sums), block);
  if (reinterpret_cast<int const*>(params.progress)[block] == kUnvisited) {
    return false;
  }
  int const column = ThreadSums::column();
  std::uint64_t const first = params.d_q.address + 2 * (offset + column);
  FiniteLook<Element> look;
  CUTE_UNROLL
  for (int strip = 0; strip < ThreadSums::kStrips; ++strip) {
    write_pairs<ThreadSums::kWidth>(first, 2 * params.d_q.stride_row,
                                    m_block * Traits::kTileM + ThreadSums::row() + 16 * strip, rows,
                                    params.head_dim_qk - column, static_cast<int>(threadIdx.x) % 32, [&](int i, int j) {
                                      float2 const pair = thread_sums.pair(strip, i, j);
                                      return look.see(pack_pair<Element>(scaled(pair.x, params.softmax_scale),
                                                                         scaled(pair.y, params.softmax_scale)));
                                    });
  }
  return __syncthreads_or(look.found()) != 0;
}

// The same of a dense tensor, whose blocks of sums are those of all batches and heads in turn.
template <class Traits>
CUTE_DEVICE bool convert_dense_queries(BwdParams const& params, std::int64_t block) {
  int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  std::int64_t const batch_head = block / m_blocks;
  int const m_block = static_cast<int>(block % m_blocks);
  std::int64_t const batch = batch_head / params.heads_q;
  std::int64_t const head = batch_head % params.heads_q;
  std::int64_t const offset = batch * params.d_q.stride_batch + head * params.d_q.stride_head;
  return convert_queries<Traits>(params, block, m_block, offset, params.seqlen_q);
}

// (With 768 threads on a multiprocessor. Without this bound ptxas keeps to fewer registers, and spills. Lists of blocks
// take more of them.)
template <class Traits>
__global__ void __launch_bounds__(Traits::ThreadSums::kThreads,
                                  (Traits::kMask == MaskClass::Blocks ? 512 : 768) / Traits::ThreadSums::kThreads)
    bwd_convert(__grid_constant__ BwdParams const params) {
  if constexpr (Traits::kOverlaps) {
    await_kernel_before();
  }
  // From the last block to the first: the sums that were written last are still in L2.
  std::int64_t block = gridDim.x - 1 - blockIdx.x;
  if constexpr (Traits::kTakesShares) {
    int const pieces = key_pieces<Traits>(params);
    if (block < pieces) {
      convert_keys<Traits>(params, static_cast<int>(block));
      return;
    }
    block -= pieces;
  }
  bool const keys_leak = *reinterpret_cast<int const*>(params.leak_flag) != 0;
  bool const queries_leak = convert_dense_queries<Traits>(params, block);
  if (!keys_leak && !queries_leak) {
    return;
  }
  if (queries_leak) {
    repair_queries<Traits>(params, block);
  }
  if (keys_leak) {
    int ctas = static_cast<int>(gridDim.x);
    if constexpr (Traits::kTakesShares) {
      ctas -= key_pieces<Traits>(params);
    }
    repair_keys<Traits>(params, ctas - 1 - static_cast<int>(blockIdx.x), ctas);
  }
}

// The same of a packed sequence.
template <class Traits>
CUTE_DEVICE bool convert_packed_queries(BwdParams const& params, Sequence const& sequence, int m_block, int head) {
  std::int64_t const block =
      static_cast<std::int64_t>(head) * params.sequences.sum_blocks + sequence.first_block + m_block;
  std::int64_t const offset = sequence.index * params.d_q.stride_batch + head * params.d_q.stride_head +
                              sequence.q_begin * params.d_q.stride_row;
  return convert_queries<Traits>(params, block, m_block, offset, sequence.q_len);
}

// The same where the kernel before has written dQ: it is only looked at.
template <class Traits>
CUTE_DEVICE bool look_at_packed_queries(BwdParams const& params, Sequence const& sequence, int m_block, int head) {
  using Element = typename Traits::Element;
  int const chunks = params.head_dim_qk / 8;
  int const rows = cute::min(int{Traits::kTileM}, sequence.q_len - m_block * Traits::kTileM);
  FiniteLook<Element> look;
  for (int i = static_cast<int>(threadIdx.x); i < rows * chunks; i += Traits::ThreadSums::kThreads) {
    std::int64_t const row = sequence.q_begin + m_block * Traits::kTileM + i / chunks;
    std::int64_t const at = sequence.index * params.d_q.stride_batch + row * params.d_q.stride_row +
                            head * params.d_q.stride_head + i % chunks * 8;
    uint4 const words = *reinterpret_cast<uint4 const*>(params.d_q.address + 2 * at);
    look.see(words.x);
    look.see(words.y);
    look.see(words.z);
    look.see(words.w);
  }
  return __syncthreads_or(look.found()) != 0;
}

// The kernel after a packed backward: a CTA has a block of queries of one head, if there are so many. `sum_blocks`
// counts the sequences that have sums; the others come after them. (sm80: with 512 threads on a multiprocessor. With
// 768 it spills.)
template <class Traits>
__global__ void __launch_bounds__(Traits::ThreadSums::kThreads,
                                  (Traits::kOverlaps ? 768 : 512) / Traits::ThreadSums::kThreads)
    bwd_convert_packed(__grid_constant__ BwdParams const params) {
  if constexpr (Traits::kOverlaps) {
    await_kernel_before();
  }
  constexpr int kWarps = Traits::ThreadSums::kThreads / 32;
  SequenceTable const table{params.sequences.table, params.batch};
  int const warp = static_cast<int>(threadIdx.x) / 32;
  // From the last block to the first: the sums that were written last are still in L2.
  int const from_last = static_cast<int>(blockIdx.x) / params.heads_q;
  int const head = static_cast<int>(blockIdx.x) - from_last * params.heads_q;
  int const entry = table.header()->blocks - 1 - from_last;
  if (entry >= 0) {
    Sequence const sequence = table.records()[table.block_list(params.sequences.list_size)[entry]];
    int const m_block = entry - sequence.first_block;
    bool found = false;
    if constexpr (Traits::kWritesQueries) {
      found = sequence.kv_len > Traits::kTileN ? convert_packed_queries<Traits>(params, sequence, m_block, head)
                                               : look_at_packed_queries<Traits>(params, sequence, m_block, head);
    } else {
      found = convert_packed_queries<Traits>(params, sequence, m_block, head);
    }
    if (found) {
      RepairGradients<Traits> const repair(params, sequence);
      int const end = cute::min((m_block + 1) * Traits::kTileM, sequence.q_len);
      for (int query = m_block * Traits::kTileM + warp; query < end; query += kWarps) {
        repair.query(head, query);
      }
    }
  }
  if (*reinterpret_cast<int const*>(params.leak_flag) == 0) {
    return;
  }
  // Each CTA looks through every so many-th tile of keys.
  for (int i = static_cast<int>(blockIdx.x); i < table.header()->tiles; i += static_cast<int>(gridDim.x)) {
    int const tile = i / params.heads_kv;
    Sequence const sequence = table.records()[table.list()[tile]];
    int const first = (tile - sequence.first_tile) * Traits::kTileN;
    RepairGradients<Traits> const repair(params, sequence);
    for (int key = first + warp; key < sequence.kv_len; key += kWarps) {
      repair.key(i - tile * params.heads_kv, key, {0, params.head_dim_qk}, {0, params.head_dim_vo});
      // (The tile's last key of this warp. An end kept beside the key is a register more, which there is not.)
      if (key % Traits::kTileN >= Traits::kTileN - kWarps) {
        break;
      }
    }
  }
}

// The shared memory that a CTA of such a launch asks for, though it uses none. Few CTAs would gather on the
// multiprocessors that the kernel before leaves first, three on each, and would share the bandwidth of these. So up to
// 132 CTAs ask for more than half of the shared memory: each is alone on a multiprocessor. Up to 264 ask for more than
// a third: two share one at most.
inline int spreading_bytes(int ctas) {
  constexpr int kMultiprocessors = 132;
  return ctas <= kMultiprocessors ? 116 << 10 : ctas <= 2 * kMultiprocessors ? 76 << 10 : 0;
}

template <class Traits>
Status BwdConvert<Traits>::load() noexcept {
  if constexpr (Traits::kIsPacked) {
    return load_kernel(bwd_convert_packed<Traits>);
  } else if constexpr (Traits::kOverlaps) {
    return prepare_kernel(bwd_convert<Traits>, spreading_bytes(1));
  } else {
    return load_kernel(bwd_convert<Traits>);
  }
}

template <class Traits>
void BwdConvert<Traits>::launch(BwdParams const& params, cudaStream_t stream) noexcept {
  constexpr int kThreads = Traits::ThreadSums::kThreads;
  if constexpr (Traits::kIsPacked) {
    // One CTA at least, for what has leaked into keys where there are no queries.
    int const grid = cute::max(1, params.heads_q * params.sequences.block_list_size);
    start_kernel({grid, kThreads, 0, stream, 1, Traits::kOverlaps}, bwd_convert_packed<Traits>, params);
  } else {
    int const m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
    int blocks = params.batch * params.heads_q * m_blocks;
    if constexpr (Traits::kTakesShares) {
      blocks += key_pieces<Traits>(params);
    }
    if constexpr (Traits::kOverlaps) {
      start_kernel({blocks, kThreads, spreading_bytes(blocks), stream, 1, true}, bwd_convert<Traits>, params);
    } else {
      bwd_convert<Traits><<<blocks, kThreads, 0, stream>>>(params);
    }
  }
}

}  // namespace hattn
