// Heads that begin in the middle of a sector of memory: where their columns lie in the tiles.
#pragma once

#include <cute/config.hpp>

#include "kernels.hpp"
#include "sm90/fwd/traits.hpp"

namespace hattn::sm90 {

// The traits of a row's kernels for head dims of 8 more than a multiple of 16, of Q and K or of V. Other head dims
// would pay for the rotation too, in each tile: 4 to 5% at 512 tokens (benches/LOG.md, entry 70). With modified scores
// there are too few registers for it.
template <class Row>
struct RotatedTraits : Row {
  static constexpr bool kRotates = true;
  static constexpr bool kMayRotate = false;
  static constexpr bool kTakesSingleTiles = false;  // consumers store O by rows there, as it lies in the tile
  using Packed = RotatedTraits<typename Row::Packed>;
};

// By how many columns a head is rotated in its tiles: column c of the head is column (c + rotation) mod 96 of the tile.
// 0, 8 or -8.
//
// Rows of a head dim of 8 more than a multiple of 16 put every second head in the middle of a sector (32 bytes). Where
// a box of the copy engine begins there, L2 is asked for 16 bytes at a time (benches/LOG.md, entries 69 and 70). So the
// boxes of such a head begin 8 columns later, at a sector, and the last of them, which holds nothing else, brings the
// first 8 columns: it begins 24 columns before the head. Above head dim 72 the last box is needed. There all of them
// begin 8 columns earlier. What lies before a head's first column arrives as zeros.
//
// Loads alone can do it: a store from before the first column of a tensor is an illegal instruction.
template <class Traits>
CUTE_DEVICE int rotation_of(TensorDesc const& tensor, int head_dim, int head) {
  if constexpr (Traits::kRotates) {
    asm volatile("" : "+r"(head), "+r"(head_dim));  // worked out anew where it is needed: registers are short
    if (head_dim % 16 == 8 && (tensor.stride_row | tensor.stride_batch) % 16 == 0) {
      int const begin = static_cast<int>(tensor.address);  // in bytes
      int const apart = 2 * static_cast<int>(tensor.stride_head);
      int const columns = (begin + apart * head & 16) / 2;
      return head_dim > 72 ? columns : -columns;
    }
  }
  return 0;
}
// That of the accumulator of O, which has the columns of V, and that of Q, whose columns meet those of K.
template <class Traits, class TileRecord, class Scalars>
CUTE_DEVICE int rotation_of_output(FwdParams const& params, Scalars const& scalars, TileRecord const& tile) {
  return rotation_of<Traits>(params.v, params.head_dim_vo, tile.head / scalars.heads_per_kv_head);
}
template <class Traits, class TileRecord, class Scalars>
CUTE_DEVICE int rotation_of_queries(FwdParams const& params, Scalars const& scalars, TileRecord const& tile) {
  return rotation_of<Traits>(params.k, params.head_dim_qk, tile.head / scalars.heads_per_kv_head);
}

// Whether consumers store O themselves. The copy engine stores such a head, too, 16 bytes at a time, and other copies
// wait.
template <class Traits>
CUTE_DEVICE bool stores_own_rows(FwdParams const& params) {
  return Traits::kRotates && params.head_dim_vo % 16 == 8;
}

// A column of a tile or of a head after such a rotation.
template <class Traits>
CUTE_DEVICE int rotated(int column, int rotation) {
  if constexpr (Traits::kRotates) {
    constexpr int kColumns = Traits::kHeadDimVO;
    column += rotation;
    return column < 0 ? column + kColumns : column < kColumns ? column : column - kColumns;
  }
  return column;
}

}  // namespace hattn::sm90
