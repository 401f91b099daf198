// The kernels that make the lists of a mask of class Blocks (blocks.hpp) of the caller's.
//
// The caller's lists may hold anything. Here alone they are read, and what is no block of keys is left out. So nothing
// that they hold makes a kernel read or write outside of the tensors.
#include <cuda_runtime.h>

#include "common/blocks.hpp"
#include "common/start.hpp"
#include "common/status.hpp"

namespace hattn {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// What a block of keys is in a row's lists: full, at a place of the partial ones (+ 1), or in none.
constexpr int kFull = 0;
constexpr int kNone = 0x7fffffff;

// How many threads before this one, and how many in all, say `holds`. By all threads of the CTA together.
__device__ int before(bool holds, int& all, int (&totals)[kWarps]) {
  int const warp = static_cast<int>(threadIdx.x) / 32;
  unsigned const of_warp = __ballot_sync(0xffffffffU, holds);
  __syncthreads();  // the totals of the call before are read
  if (threadIdx.x % 32 == 0) {
    totals[warp] = __popc(of_warp);
  }
  __syncthreads();
  int count = __popc(of_warp & ((1U << threadIdx.x % 32) - 1));
  all = 0;
  for (int i = 0; i < kWarps; ++i) {
    count += i < warp ? totals[i] : 0;
    all += totals[i];
  }
  return count;
}

// Of one list of the caller's: its first `count` indices, clamped to `most`.
__device__ void take(int const* list, int count, int most, int k_blocks, bool full, int* places) {
  int const entries = cute::max(0, cute::min(count, most));
  for (int i = static_cast<int>(threadIdx.x); i < entries; i += kThreads) {
    int const block = list[i];
    if (block >= 0 && block < k_blocks) {
      atomicMin(&places[block], full ? kFull : i + 1);  // of a block that is there twice, the first place counts
    }
  }
}

// A CTA has a row: the lists of one block of queries. Forward: writes its entries. Backward: a row of the matrix.
// `counter`: that CTAs of the launch draw their tiles from, or null. It becomes 0.
__global__ void __launch_bounds__(kThreads)
    list_rows(__grid_constant__ BlockLists const lists, __grid_constant__ Band const band, int* counter) {
  extern __shared__ int places[];
  __shared__ int totals[kWarps];
  let_next_start();
  if (counter != nullptr && blockIdx.x == 0 && threadIdx.x == 0) {
    *counter = 0;
  }
  int const row = static_cast<int>(blockIdx.x);
  int const q_block = row % lists.q_blocks;
  int const thread = static_cast<int>(threadIdx.x);
  int const k_blocks = lists.k_blocks;
  for (int block = thread; block < k_blocks; block += kThreads) {
    places[block] = kNone;
  }
  __syncthreads();
  auto const list = [&](TensorDesc const& tensor) {
    return reinterpret_cast<int const*>(given_list(lists, tensor, row));
  };
  if (lists.full_block_cnt.address != 0) {
    take(list(lists.full_block_idx), *list(lists.full_block_cnt), k_blocks, k_blocks, true, places);
  }
  take(list(lists.mask_block_idx), *list(lists.mask_block_cnt), lists.most_partial, k_blocks, false, places);
  __syncthreads();

  auto const entry_of = [&](int block) -> BlockEntry {
    constexpr MaskClass kBand = MaskClass::Window;  // says what other bands keep, too
    if (block >= k_blocks || places[block] == kNone ||
        is_hidden<kBand, kListedBlock, kListedBlock>(band, q_block, block)) {
      return {kNotListed};
    }
    bool const cut = !is_free<kBand, kListedBlock, kListedBlock>(band, q_block, block);
    bool const full = places[block] == kFull;
    return BlockEntry::of(block, full ? 0 : places[block] - 1, (full ? 0 : kEntryBits) | (cut ? kEntryEdges : 0));
  };
  auto const is_masked = [](BlockEntry const& entry) {
    return entry.word != kNotListed && (entry.word & (kEntryBits | kEntryEdges)) != 0;
  };
  auto* const entries = reinterpret_cast<std::uint32_t*>(lists.entries) + static_cast<std::int64_t>(row) * k_blocks;
  int masked = 0;
  for (int first = 0; first < k_blocks; first += kThreads) {
    masked += __syncthreads_count(is_masked(entry_of(first + thread)));
  }
  int masked_before = 0;
  int total = 0;
  for (int first = 0; first < k_blocks; first += kThreads) {
    BlockEntry const entry = entry_of(first + thread);
    bool const listed = entry.word != kNotListed;
    int of_chunk = 0;
    int const place = total + before(listed, of_chunk, totals);
    if (lists.key_entries != 0) {
      if (first + thread < k_blocks) {
        entries[first + thread] =
            listed ? BlockEntry::of(place, entry.place(), entry.word & (kEntryBits | kEntryEdges)).word : kNotListed;
      }
    } else {
      int masked_of_chunk = 0;
      int const among = masked_before + before(is_masked(entry), masked_of_chunk, totals);
      if (listed) {
        entries[is_masked(entry) ? among : masked + place - among] = entry.word;
      }
      masked_before += masked_of_chunk;
    }
    total += of_chunk;
  }
  if (thread == 0) {
    if (lists.key_entries == 0 && total == 0) {
      entries[0] = kEntryNothing;
      masked = total = 1;
    } else if (masked > 0 && masked < total) {
      ++masked;
    }
    reinterpret_cast<int2*>(lists.counts)[row] = {masked, total};
  }
}

// The lists of 32 tiles of keys, of one list of the caller's: columns of the matrix. A lane has a tile, and a warp some
// of the blocks of queries. `parts`: of a block of the lists, as many as the backward visits.
__global__ void __launch_bounds__(kThreads) list_keys(__grid_constant__ BlockLists const lists, int parts) {
  __shared__ int counts[kWarps][32];
  int const chunks = (lists.k_blocks + 31) / 32;
  int const list = static_cast<int>(blockIdx.x) / chunks;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const n_block = (static_cast<int>(blockIdx.x) - list * chunks) * 32 + lane;
  bool const exists = n_block < lists.k_blocks;
  int const each = (lists.q_blocks + kWarps - 1) / kWarps;
  int const begin = cute::min(warp * each, lists.q_blocks);
  int const end = cute::min(begin + each, lists.q_blocks);
  std::uint32_t const* const column = entries_of_row(lists, list * lists.q_blocks) + n_block;
  auto const word_of = [&](int q_block) {
    return exists ? column[static_cast<std::int64_t>(q_block) * lists.k_blocks] : kNotListed;
  };
  auto const parts_of = [&](int q_block) { return cute::min(parts, lists.m_blocks - q_block * parts); };
  int count = 0;
#pragma unroll 4
  for (int q_block = begin; q_block < end; ++q_block) {
    count += word_of(q_block) == kNotListed ? 0 : parts_of(q_block);
  }
  counts[warp][lane] = count;
  __syncthreads();
  int place = 0;
  int total = 0;
  for (int i = 0; i < kWarps; ++i) {
    place += i < warp ? counts[i][lane] : 0;
    total += counts[i][lane];
  }
  if (!exists) {
    return;
  }
  std::int64_t const tile = list * std::int64_t{lists.k_blocks} + n_block;
  auto* const entries = reinterpret_cast<QueryEntry*>(lists.key_entries) + tile * lists.m_blocks;
#pragma unroll 4
  for (int q_block = begin; q_block < end; ++q_block) {
    BlockEntry const entry{word_of(q_block)};
    if (entry.word != kNotListed) {
      for (int part = 0; part < parts_of(q_block); ++part) {
        entries[place++] = QueryEntry::of(q_block * parts + part, entry);
      }
    }
  }
  if (warp == 0) {
    reinterpret_cast<int*>(lists.key_counts)[tile] = total;
  }
}

// The bits of partial blocks, with keys as rows. A CTA has a place of a row's list.
__global__ void __launch_bounds__(kThreads) transpose_bits(__grid_constant__ BlockLists const lists) {
  int const row = static_cast<int>(blockIdx.x) / lists.most_partial;
  int const place = static_cast<int>(blockIdx.x) - row * lists.most_partial;
  if (place >= *reinterpret_cast<int const*>(given_list(lists, lists.mask_block_cnt, row))) {
    return;
  }
  auto const* const from = reinterpret_cast<std::uint32_t const*>(given_list(lists, lists.mask_bits, row) +
                                                                  static_cast<std::int64_t>(place) * kBytesBits);
  auto* const to = reinterpret_cast<std::uint32_t*>(key_bits(lists, row, place));
  int const lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < 16; i += kWarps) {
    int const queries = i / 4;
    int const keys = i % 4;
    std::uint32_t const word = from[(32 * queries + lane) * 4 + keys];
    std::uint32_t of_key = 0;
    CUTE_UNROLL
    for (int j = 0; j < 32; ++j) {
      std::uint32_t const column = __ballot_sync(0xffffffffU, (word >> j & 1) != 0);
      of_key = lane == j ? column : of_key;
    }
    to[(32 * keys + lane) * 4 + queries] = of_key;
  }
}

}  // namespace

Status prepare_blocks() noexcept {
  constexpr int kMost = kMostListed * sizeof(int);
  Status status = to_status(cudaFuncSetAttribute(list_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost));
  status = is_ok(status) ? load_kernel(list_keys) : status;
  return is_ok(status) ? load_kernel(transpose_bits) : status;
}

Status launch_blocks(BlockLists const& lists, Band const& band, int tile_m, int* counter,
                     CUstream_st* stream) noexcept {
  int const of_lists = lists.batch * lists.heads;
  int const rows = of_lists * lists.q_blocks;
  list_rows<<<rows, kThreads, lists.k_blocks * sizeof(int), stream>>>(lists, band, counter);
  if (lists.key_entries != 0) {
    list_keys<<<of_lists*((lists.k_blocks + 31) / 32), kThreads, 0, stream>>>(lists, kListedBlock / tile_m);
    if (lists.most_partial > 0) {
      transpose_bits<<<rows * lists.most_partial, kThreads, 0, stream>>>(lists);
    }
  }
  return to_status(cudaGetLastError());
}

}  // namespace hattn
