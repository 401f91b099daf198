// Which keys a query keeps, and how scores of the others are masked. The bounds are run-time values. Only the class of
// the mask (full, causal, window) changes the shape of the code. visits.hpp says which blocks a tile visits.
#pragma once

#include <cute/numeric/math.hpp>

#include "kernels.hpp"

namespace hattn {

// The keys that a mask keeps. Query i keeps one interval of them, from first_key(i) to last_key(i). Neither end falls
// from one query to the next, and all that asks for the keys of several queries relies on it.
//
// Without edges the ends are i + left_offset and i + right_offset, both already shifted by the diagonal. MaskEdges
// (params.rs) says how they differ under the other masks.
struct Band {
  int left_offset;   // diagonal_offset - window_left
  int right_offset;  // diagonal_offset + window_right
  int seqlen_q;
  int seqlen_kv;
  MaskEdges edges;  // class Window alone

  // The same without what the class does not read, to be kept where that costs something.
  template <MaskClass kMask>
  CUTE_DEVICE void keep(Band const& band) {
    left_offset = band.left_offset;
    right_offset = band.right_offset;
    seqlen_q = band.seqlen_q;
    seqlen_kv = band.seqlen_kv;
    if constexpr (kMask == MaskClass::Window) {
      edges = band.edges;
    }
  }

  // The first key that a query keeps, 0 or more. It may be past its last key: then the query keeps none.
  template <MaskClass kMask>
  CUTE_DEVICE int first_key(int query) const {
    if constexpr (kMask == MaskClass::Window) {
      return rounded_down(cute::max(0, query + left_offset + edges.step - 1));
    } else {
      return 0;
    }
  }
  // The last key that a query keeps. It may be past the end of the keys (class Full: it is), or below 0.
  template <MaskClass kMask>
  CUTE_DEVICE int last_key(int query) const {
    int const last = query + right_offset;
    return kMask == MaskClass::Window ? cute::max(last, edges.prefix_last) : last;
  }

  // The first query that keeps a key, if any does, 0 or more.
  template <MaskClass kMask>
  CUTE_DEVICE int first_query(int key) const {
    int const first = cute::max(0, key - right_offset);
    if constexpr (kMask == MaskClass::Window) {
      return key <= edges.prefix_last ? 0 : first;
    } else {
      return first;
    }
  }
  // The last query whose first key is no later than a key. It may be past the end of the queries, or below 0. (Class
  // Window.)
  CUTE_DEVICE int last_query(int key) const { return rounded_down(key) - left_offset; }

 private:
  // A key, 0 to 2^31 - 1, rounded down to where the left edge may be.
  CUTE_DEVICE int rounded_down(int key) const {
    return static_cast<int>(__umulhi(2 * static_cast<std::uint32_t>(key), edges.multiplier) >> edges.shift) *
           edges.step;
  }
};

// (By reference: passed by value, ptxas gets other code of the same numbers.)
CUTE_DEVICE constexpr int ceil_div(int const& a, int const& b) { return (a + b - 1) / b; }

// Whether a block of queries sees all of a tile of keys. Keys past the end are masked with every query.
template <MaskClass kMask, int kTileM, int kTileN>
CUTE_DEVICE bool is_free(Band const& band, int m_block, int n_block) {
  int const keys_end = (n_block + 1) * kTileN;
  bool free = keys_end <= band.seqlen_kv;
  if constexpr (kMask != MaskClass::Full) {
    free = free && keys_end - 1 <= band.last_key<kMask>(m_block * kTileM);
  }
  if constexpr (kMask == MaskClass::Window) {
    free = free && keys_end - kTileN >= band.first_key<kMask>((m_block + 1) * kTileM - 1);
  }
  return free;
}

// Whether the mask hides all of a tile of keys from a block of queries. Keys past the end count as seen.
template <MaskClass kMask, int kTileM, int kTileN>
CUTE_DEVICE bool is_hidden(Band const& band, int m_block, int n_block) {
  bool hidden = false;
  if constexpr (kMask != MaskClass::Full) {
    hidden = n_block * kTileN > band.last_key<kMask>((m_block + 1) * kTileM - 1);
  }
  if constexpr (kMask == MaskClass::Window) {
    hidden = hidden || (n_block + 1) * kTileN - 1 < band.first_key<kMask>(m_block * kTileM);
  }
  return hidden;
}

// Sets the scores of masked keys in one block to -inf. `scores` holds a thread's elements of an m64 accumulator:
// element (c, r, i) is row `row + 8 r`, column `8 i + column + c` of the block.
template <MaskClass kMask, int kTileN, class Scores>
CUTE_DEVICE void apply_mask(Scores& scores, Band const& band, int row, int column, int n_block) {
  int const origin = n_block * kTileN + column;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int last = band.seqlen_kv - 1 - origin;
    if constexpr (kMask != MaskClass::Full) {
      last = cute::min(last, band.last_key<kMask>(row + 8 * r) - origin);
    }
    int first = 0;
    if constexpr (kMask == MaskClass::Window) {
      first = band.first_key<kMask>(row + 8 * r) - origin;
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

// The same for transposed scores: element (c, r, i) is key `key + 8 r`, query `8 i + query + c`. `fill` stands for a
// masked score.
template <MaskClass kMask, int kTileM, class Scores>
CUTE_DEVICE void apply_mask_transposed(Scores& scores, Band const& band, int key, int query, float fill = -INFINITY) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int const at_key = key + 8 * r;
    int first = 0;
    if constexpr (kMask != MaskClass::Full) {
      first = at_key - band.right_offset - query;
    }
    int last = 0;
    if constexpr (kMask == MaskClass::Window) {
      first = at_key <= band.edges.prefix_last ? 0 : first;
      last = band.last_query(at_key) - query;
    }
    first = at_key < band.seqlen_kv ? first : kTileM;
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
        score = drop ? fill : score;
      }
    }
  }
}

// How many keys of a block of kTileN the edge to the right leaves to rows `row` and `row + 8`. At least 1.
struct KeysOfRows {
  int of[2];
};
template <MaskClass kMask, int kTileN>
CUTE_DEVICE KeysOfRows keys_before_edge(Band const& band, int row, int n_block) {
  KeysOfRows keys;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    int end = band.seqlen_kv;
    if constexpr (kMask != MaskClass::Full) {
      end = cute::min(end, band.last_key<kMask>(row + 8 * r) + 1);
    }
    keys.of[r] = cute::max(1, cute::min(kTileN, end - n_block * kTileN));
  }
  return keys;
}

}  // namespace hattn
