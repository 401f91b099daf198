// Lists of blocks: which blocks of 128 queries and 128 keys a mask of class Blocks keeps (BlockLists in params.rs).
//
// The caller's lists are device memory, in any order and with any contents. The launch's first kernels (blocks.cu) read
// them, by the rule of BlockMask (the safe crate), and make lists of their own in the workspace. All other kernels read
// those alone. Blocks that the mask's band hides are in none of them, and those that it cuts are marked.
//
// A forward's tile of queries has a list of *entries*, one for each block of keys that it visits: first those in which
// pairs are masked, then the others. Where there are both, the first of the others counts as masked too: then each row
// looks for its maximum in a block whose keys it has. A tile without a block has one entry that hides everything.
//
// A backward's tile of keys has a list for each query head: an entry for each block of queries (of tile_m, half a block
// of the lists where these are 64) that visits it. The lists of a tile may all be empty.
//
// On sm80 tiles and blocks are smaller than 128, too. Then several tiles read one list, and visit parts of its blocks.
#pragma once

#include <cstdint>
#include <cute/config.hpp>
#include <cute/numeric/math.hpp>

#include "common/mask.hpp"
#include "kernels.hpp"

namespace hattn {

constexpr int kListedBlock = 128;                  // queries of a block, and keys
constexpr int kBytesBits = 128 * 128 / 8;          // of a partial block
constexpr int kMostListed = 1 << 14;               // blocks of queries, and of keys
constexpr std::uint32_t kNotListed = ~0U;          // no entry
constexpr std::uint32_t kEntryBits = 1U << 28;     // the bits of a partial block say which pairs are kept
constexpr std::uint32_t kEntryEdges = 1U << 29;    // the mask's band cuts the block, or the keys end in it
constexpr std::uint32_t kEntryNothing = 1U << 30;  // nothing is kept

// An entry of a tile of queries: the block of keys, its place among the partial blocks of the caller's list, and marks.
// In the matrix of a backward the number of the block's turn stands in place of the block (BlockLists::entries).
struct BlockEntry {
  std::uint32_t word;

  CUTE_DEVICE static BlockEntry of(int block, int place, std::uint32_t marks) {
    return {static_cast<std::uint32_t>(block) | static_cast<std::uint32_t>(place) << 14 | marks};
  }
  CUTE_DEVICE int block() const { return static_cast<int>(word & (kMostListed - 1)); }
  CUTE_DEVICE int place() const { return static_cast<int>(word >> 14 & (kMostListed - 1)); }
  CUTE_DEVICE bool has(std::uint32_t mark) const { return (word & mark) != 0; }
};

// An entry of a tile of keys: the block of queries with marks, and place and turn.
struct alignas(8) QueryEntry {
  std::uint32_t word;
  std::uint32_t rest;

  CUTE_DEVICE static QueryEntry of(int m_block, BlockEntry const& entry) {
    return {static_cast<std::uint32_t>(m_block) | (entry.word & ~((1U << 28) - 1)),
            static_cast<std::uint32_t>(entry.place()) | static_cast<std::uint32_t>(entry.block()) << 16};
  }
  CUTE_DEVICE int block() const { return static_cast<int>(word & ((1U << 28) - 1)); }
  CUTE_DEVICE std::uint32_t marks() const { return word >> 28 << 28; }
  CUTE_DEVICE int place() const { return static_cast<int>(rest & 0xffff); }
  // How many tiles of keys come to the block of queries before this one, where they come in order.
  CUTE_DEVICE int turn() const { return static_cast<int>(rest >> 16); }
};

// Which of the lists a batch entry and query head have.
CUTE_DEVICE int list_of(BlockLists const& lists, int batch, int head) {
  return (lists.batch == 1 ? 0 : batch) * lists.heads + (lists.heads == 1 ? 0 : head);
}
// The row of the lists of a block of 128 queries.
CUTE_DEVICE int row_of_lists(BlockLists const& lists, int batch, int head, int q_block) {
  return list_of(lists, batch, head) * lists.q_blocks + q_block;
}
// Masked entries of a row, and all.
CUTE_DEVICE int2 counts_of_row(BlockLists const& lists, int row) {
  return reinterpret_cast<int2 const*>(lists.counts)[row];
}
CUTE_DEVICE std::uint32_t const* entries_of_row(BlockLists const& lists, int row) {
  return reinterpret_cast<std::uint32_t const*>(lists.entries) + static_cast<std::int64_t>(row) * lists.k_blocks;
}
// Where the list of a row lies in one of the caller's tensors.
CUTE_DEVICE std::uint64_t given_list(BlockLists const& lists, TensorDesc const& tensor, int row) {
  int const list = row / lists.q_blocks;
  int const batch = list / lists.heads;
  return tensor.address + 4 * (batch * tensor.stride_batch + (list - batch * lists.heads) * tensor.stride_head +
                               (row - list * lists.q_blocks) * tensor.stride_row);
}
// The same in two steps, with fewer divisions.
CUTE_DEVICE std::uint64_t given_bits(BlockLists const& lists, int batch, int head, int q_block) {
  TensorDesc const& tensor = lists.mask_bits;
  return tensor.address + 4 * ((lists.batch == 1 ? 0 : batch) * tensor.stride_batch +
                               (lists.heads == 1 ? 0 : head) * tensor.stride_head + q_block * tensor.stride_row);
}
// Entries of a tile of keys, in a query head: how many, and the first.
CUTE_DEVICE int key_count(BlockLists const& lists, int batch, int head, int n_block) {
  return reinterpret_cast<int const*>(lists.key_counts)[list_of(lists, batch, head) * lists.k_blocks + n_block];
}
CUTE_DEVICE QueryEntry const* key_entries(BlockLists const& lists, int batch, int head, int n_block) {
  std::int64_t const tile = list_of(lists, batch, head) * std::int64_t{lists.k_blocks} + n_block;
  return reinterpret_cast<QueryEntry const*>(lists.key_entries) + tile * lists.m_blocks;
}
// The bits of a partial block with keys as rows.
CUTE_DEVICE std::uint64_t key_bits(BlockLists const& lists, int row, int place) {
  return lists.key_bits + (row * std::int64_t{lists.most_partial} + place) * kBytesBits;
}

// Whether the lists of a backward keep a pair that the band keeps.
CUTE_DEVICE bool is_listed(BlockLists const& lists, int batch, int head, int query, int key) {
  int const row = row_of_lists(lists, batch, head, query / kListedBlock);
  BlockEntry const entry{entries_of_row(lists, row)[key / kListedBlock]};
  if (entry.word == kNotListed || !entry.has(kEntryBits)) {
    return entry.word != kNotListed;
  }
  std::uint64_t const bits = given_bits(lists, batch, head, query / kListedBlock) +
                             static_cast<std::int64_t>(entry.place()) * kBytesBits + query % kListedBlock * 16 +
                             key % kListedBlock / 32 * 4;
  return (*reinterpret_cast<std::uint32_t const*>(bits) >> key % 32 & 1) != 0;
}

// Bits [first, last] of a word, cut to it.
CUTE_DEVICE std::uint32_t bits_between(int first, int last) {
  int const begin = cute::max(first, 0);
  int const end = cute::min(last + 1, 32);
  std::uint32_t const below_end = end >= 32 ? ~0U : (1U << cute::max(end, 0)) - 1;
  std::uint32_t const below_begin = begin >= 32 ? ~0U : (1U << begin) - 1;
  return below_end & ~below_begin;
}

// Which of 32 * kWords keys a query keeps, or the other way round: bit j % 32 of word j / 32.
template <int kWords>
struct KeptBits {
  std::uint32_t of[kWords];

  CUTE_DEVICE void fill(std::uint32_t word) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      of[i] = word;
    }
  }
  CUTE_DEVICE void load(std::uint64_t address) {
    if constexpr (kWords == 4) {
      uint4 const words = __ldg(reinterpret_cast<uint4 const*>(address));
      of[0] = words.x;
      of[1] = words.y;
      of[2] = words.z;
      of[3] = words.w;
    } else if constexpr (kWords == 2) {
      uint2 const words = __ldg(reinterpret_cast<uint2 const*>(address));
      of[0] = words.x;
      of[1] = words.y;
    } else {
      static_assert(kWords == 1);
      of[0] = __ldg(reinterpret_cast<std::uint32_t const*>(address));
    }
  }
  CUTE_DEVICE void keep_between(int first, int last) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      of[i] &= bits_between(first - 32 * i, last - 32 * i);
    }
  }
  CUTE_DEVICE int count() const {
    int count = 0;
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) {
      count += __popc(of[i]);
    }
    return count;
  }
};

// Writes `fill` over the scores of an m64 accumulator that row r of a thread's two rows does not keep. `column` is the
// thread's first column: element (c, r, i) is column `8 i + column + c`.
template <int kWords, class Scores>
CUTE_DEVICE void hide_scores(Scores& scores, KeptBits<kWords> const& kept, int r, int column, float fill) {
  CUTE_UNROLL
  for (int word = 0; word < kWords; ++word) {
    std::uint32_t const own = kept.of[word] >> column;
    CUTE_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        float& score = scores(4 * (4 * word + j) + 2 * r + c);
        score = (own >> (8 * j + c) & 1) != 0 ? score : fill;
      }
    }
  }
}
// The same of both rows.
template <int kWords, class Scores>
CUTE_DEVICE void hide_scores(Scores& scores, KeptBits<kWords> const (&kept)[2], int column, float fill) {
  hide_scores(scores, kept[0], 0, column, fill);
  hide_scores(scores, kept[1], 1, column, fill);
}

// The keys of a block that a query keeps, or of part `part` of its keys, of 32 kWords each. `bits`: of its row, in the
// first partial block of its list.
template <int kWords = 4>
CUTE_DEVICE KeptBits<kWords> kept_keys(BlockEntry const& entry, std::uint64_t bits, Band const& band, int query,
                                       int part = 0) {
  KeptBits<kWords> kept;
  kept.fill(entry.has(kEntryNothing) ? 0U : ~0U);
  if (entry.has(kEntryBits)) {
    kept.load(bits + static_cast<std::int64_t>(entry.place()) * kBytesBits + part * (4 * kWords));
  }
  if (entry.has(kEntryEdges)) {
    int const origin = entry.block() * kListedBlock + part * (32 * kWords);
    int const last = cute::min(band.seqlen_kv - 1, band.last_key<MaskClass::Window>(query));
    kept.keep_between(band.first_key<MaskClass::Window>(query) - origin, last - origin);
  }
  return kept;
}

// What a backward has to know of the block of queries that a tile of keys visits in a step.
struct alignas(16) ListedStep {
  int m_block;
  std::uint32_t marks;  // of its entry
  std::uint64_t bits;   // where they are: of the tile's first key, from the block's first query on
};

// Of tile `n_block` of kTileN keys, with blocks of kTileM queries.
template <int kTileM, int kTileN>
CUTE_DEVICE ListedStep listed_step(BlockLists const& lists, int batch, int head, int n_block, QueryEntry const& entry) {
  constexpr int kParts = kListedBlock / kTileM;
  int const m_block = entry.block();
  ListedStep step{m_block, entry.marks(), 0};
  if ((step.marks & kEntryBits) != 0) {
    int const row = row_of_lists(lists, batch, head, m_block / kParts);
    step.bits = key_bits(lists, row, entry.place()) + m_block % kParts * (kTileM / 8);
    if constexpr (kTileN < kListedBlock) {
      step.bits += n_block % (kListedBlock / kTileN) * (kTileN * 16);
    }
  }
  return step;
}

// Writes over the transposed scores of the pairs that a step does not keep. They are of kQueries queries, chunk `chunk`
// of the step's block. `key`: the thread's first key in its tile, which begins with key `origin`.
template <int kTileM, int kQueries, class Scores>
CUTE_DEVICE void hide_listed(Scores& scores, ListedStep const& step, int chunk, Band const& band, int origin, int key,
                             int column, float fill) {
  if ((step.marks & kEntryBits) != 0) {
    KeptBits<kQueries / 32> kept[2];
    kept[0].load(step.bits + key * 16 + chunk * (kQueries / 8));
    kept[1].load(step.bits + (key + 8) * 16 + chunk * (kQueries / 8));
    hide_scores(scores, kept, column, fill);
  }
  if ((step.marks & kEntryEdges) != 0) {
    apply_mask_transposed<MaskClass::Window, kQueries>(scores, band, origin + key,
                                                       step.m_block * kTileM + chunk * kQueries + column, fill);
  }
}

// Loads the kernels of blocks.cu on the current device.
Status prepare_blocks() noexcept;
// Makes the lists of a launch, in stream order, and 0 of the counter that its CTAs draw tiles from, where there is one.
// `tile_m`: queries of a block that a backward visits. 0: of a forward. The kernel after it may start early
// (common/start.hpp).
Status launch_blocks(BlockLists const& lists, Band const& band, int tile_m, int* counter, CUstream_st* stream) noexcept;

// The same from the parameters of a launch.
template <class Params>
Status launch_blocks(Params const& params, int tile_m, CUstream_st* stream) noexcept {
  Band const band{params.diagonal_offset - params.window_left, params.diagonal_offset + params.window_right,
                  params.seqlen_q, params.seqlen_kv, params.edges};
  return launch_blocks(params.blocks, band, tile_m, reinterpret_cast<int*>(params.tile_counter), stream);
}

}  // namespace hattn
