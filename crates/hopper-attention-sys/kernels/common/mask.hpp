// Which key blocks a query tile visits, and which of them need a mask. The bounds are run-time values; only the class
// of the mask (full, causal, window) changes the shape of the code.
#pragma once

#include <cute/numeric/math.hpp>

#include "kernels.hpp"

namespace hattn {

// Query i keeps the keys from i + left_offset to i + right_offset; both are already shifted by the diagonal.
struct Band {
  int left_offset;   // diagonal_offset - window_left
  int right_offset;  // diagonal_offset + window_right
  int seqlen_q;
  int seqlen_kv;
};

// Blocks [begin, end) are visited, from end - 1 down to begin; those in [free_begin, free_end) are kept whole.
// At least one block is always visited (a tile without keys visits one that is masked whole), so that every tile takes
// the same path; free_begin <= free_end holds only where some block is free.
struct BlockRange {
  int begin;
  int end;
  int free_begin;
  int free_end;
};

// (By reference: passed by value, ptxas gets other code of the same numbers.)
CUTE_DEVICE constexpr int ceil_div(int const& a, int const& b) { return (a + b - 1) / b; }

template <MaskClass kMask, int kTileM, int kTileN>
CUTE_DEVICE BlockRange block_range(Band const& band, int m_block) {
  int const blocks = ceil_div(band.seqlen_kv, kTileN);
  if constexpr (kMask == MaskClass::Full) {
    return {0, blocks, 0, band.seqlen_kv / kTileN};
  } else {
    int const first_row = m_block * kTileM;
    int const last_row = cute::min(first_row + kTileM, band.seqlen_q) - 1;
    int const keys_end = cute::min(band.seqlen_kv, last_row + band.right_offset + 1);
    int const free_keys_end = cute::min(band.seqlen_kv, first_row + band.right_offset + 1);
    BlockRange range;
    range.begin = 0;
    range.free_begin = 0;
    if constexpr (kMask == MaskClass::Window) {
      range.begin = cute::min(cute::max(0, first_row + band.left_offset) / kTileN, blocks - 1);
      range.free_begin = ceil_div(cute::max(0, last_row + band.left_offset), kTileN);
    }
    range.end = cute::max(ceil_div(cute::max(0, keys_end), kTileN), range.begin + 1);
    range.free_end = cute::max(0, free_keys_end) / kTileN;
    return range;
  }
}

// The backward's ranges: the blocks [begin, end) of kTileM queries that see a tile of kTileN keys. At least one, too.
struct QueryRange {
  int begin;
  int end;
};

template <MaskClass kMask, int kTileM, int kTileN>
CUTE_DEVICE QueryRange query_range(Band const& band, int n_block) {
  QueryRange range{0, ceil_div(band.seqlen_q, kTileM)};
  int const first_key = n_block * kTileN;
  if constexpr (kMask != MaskClass::Full) {
    range.begin = cute::min(cute::max(0, first_key - band.right_offset) / kTileM, range.end - 1);
  }
  if constexpr (kMask == MaskClass::Window) {
    int const last_key = cute::min(first_key + kTileN, band.seqlen_kv) - 1;
    int const queries_end = cute::min(band.seqlen_q, last_key - band.left_offset + 1);
    range.end = cute::max(ceil_div(cute::max(0, queries_end), kTileM), range.begin + 1);
  }
  return range;
}

// The other way round: the tiles [begin, end) of kTileN keys that see a block of queries, by their query_range. There
// may be none.
struct TileRange {
  int begin;
  int end;
};

template <MaskClass kMask, int kTileM, int kTileN>
CUTE_DEVICE TileRange tile_range(Band const& band, int m_block) {
  int const tiles = ceil_div(band.seqlen_kv, kTileN);
  if constexpr (kMask == MaskClass::Full) {
    return {0, tiles};
  }
  // Both ends of the tiles' ranges never fall from one tile to the next.
  auto const first = [&](auto const& holds) {
    int low = 0;
    int high = tiles;
    while (low < high) {
      int const middle = (low + high) / 2;
      bool const found = holds(query_range<kMask, kTileM, kTileN>(band, middle));
      high = found ? middle : high;
      low = found ? low : middle + 1;
    }
    return low;
  };
  TileRange range;
  range.begin = first([&](QueryRange const& seen) { return seen.end > m_block; });
  range.end = first([&](QueryRange const& seen) { return seen.begin > m_block; });
  return range;
}

// Whether a block of queries sees all of a tile of keys. Keys past the end are masked with every query.
template <MaskClass kMask, int kTileM, int kTileN>
CUTE_DEVICE bool is_free(Band const& band, int m_block, int n_block) {
  int const keys_end = (n_block + 1) * kTileN;
  bool free = keys_end <= band.seqlen_kv;
  if constexpr (kMask != MaskClass::Full) {
    free = free && keys_end - 1 <= m_block * kTileM + band.right_offset;
  }
  if constexpr (kMask == MaskClass::Window) {
    free = free && keys_end - kTileN >= (m_block + 1) * kTileM - 1 + band.left_offset;
  }
  return free;
}

// Whether a block of queries sees none of a tile of keys, of those that the mask is for: keys past the end count as
// seen.
template <MaskClass kMask, int kTileM, int kTileN>
CUTE_DEVICE bool is_hidden(Band const& band, int m_block, int n_block) {
  bool hidden = false;
  if constexpr (kMask != MaskClass::Full) {
    hidden = n_block * kTileN > (m_block + 1) * kTileM - 1 + band.right_offset;
  }
  if constexpr (kMask == MaskClass::Window) {
    hidden = hidden || (n_block + 1) * kTileN - 1 < m_block * kTileM + band.left_offset;
  }
  return hidden;
}

// The blocks that some of a tile's rows visit, kept inside the tile's own range and never empty.
template <MaskClass kMask>
CUTE_DEVICE BlockRange within(BlockRange part, BlockRange const& tile) {
  part.end = cute::max(cute::min(part.end, tile.end), tile.begin + 1);
  if constexpr (kMask == MaskClass::Window) {
    part.begin = cute::max(cute::min(part.begin, part.end - 1), tile.begin);
  }
  return part;
}

// Sets the scores of masked keys in one block to -inf. `scores` holds a thread's part of an m64 accumulator: element
// (c, r, i) is row `row + 8 r`, column `8 i + column + c` of the block.
template <MaskClass kMask, int kTileN, class Scores>
CUTE_DEVICE void apply_mask(Scores& scores, Band const& band, int row, int column, int n_block) {
  int const origin = n_block * kTileN + column;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int last = band.seqlen_kv - 1 - origin;
    if constexpr (kMask != MaskClass::Full) {
      last = cute::min(last, row + 8 * r + band.right_offset - origin);
    }
    int first = 0;
    if constexpr (kMask == MaskClass::Window) {
      first = row + 8 * r + band.left_offset - origin;
    }
    CUTE_UNROLL
    for (int i = 0; i < kTileN / 8; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        int const at = 8 * i + c;
        bool drop = at > last;
        if constexpr (kMask == MaskClass::Window) {
          drop = drop || at < first;
        }
        auto& score = scores(4 * i + 2 * r + c);
        score = drop ? static_cast<cute::remove_cvref_t<decltype(score)>>(-INFINITY) : score;
      }
    }
  }
}

// The same for transposed scores: element (c, r, i) is key `key + 8 r`, query `8 i + query + c`.
template <MaskClass kMask, int kTileM, class Scores>
CUTE_DEVICE void apply_mask_transposed(Scores& scores, Band const& band, int key, int query) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const at_key = key + 8 * r;
    int first = 0;
    if constexpr (kMask != MaskClass::Full) {
      first = at_key - band.right_offset - query;
    }
    first = at_key < band.seqlen_kv ? first : kTileM;
    int const last = at_key - band.left_offset - query;
    CUTE_UNROLL
    for (int i = 0; i < kTileM / 8; ++i) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        int const at = 8 * i + c;
        bool drop = at < first;
        if constexpr (kMask == MaskClass::Window) {
          drop = drop || at > last;
        }
        float& score = scores(4 * i + 2 * r + c);
        score = drop ? -INFINITY : score;
      }
    }
  }
}

}  // namespace hattn
