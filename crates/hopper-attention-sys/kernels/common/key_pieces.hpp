// How sums of a tile's dV and dK, of several shares, become the gradients.
#pragma once

#include "common/dropout.hpp"
#include "common/element.hpp"
#include "common/leak_bwd.hpp"
#include "kernels.hpp"

namespace hattn {

// dV and dK of a tile are converted in pieces of kColumns columns, those of dV first. The sums lie as Traits::KeySums
// says, dK's after dV's, so that a piece's fours follow those of the piece before.
template <class Traits>
struct KeyPieces {
  using Element = typename Traits::Element;
  using KeySums = typename Traits::KeySums;
  static constexpr int kColumns = 32;  // as many as are written in one access of a quad of lanes
  static constexpr int kOfV = Traits::kHeadDimVO / kColumns;
  static constexpr int kCount = kOfV + Traits::kHeadDimQK / kColumns;
  static constexpr int kFours = kColumns / 8;  // of a thread

  // Where the sums of a thread are, in those of the tile.
  CUTE_DEVICE static int offset(int piece, int thread) { return KeySums::offset(piece * kFours, thread); }

  CUTE_DEVICE static void add(float4 (&fours)[kFours], int i, float4 const& more) {
    fours[i].x += more.x;
    fours[i].y += more.y;
    fours[i].z += more.z;
    fours[i].w += more.w;
  }

  CUTE_DEVICE static bool is_v(int piece) { return piece < kOfV; }
  CUTE_DEVICE static int column(int piece) { return (is_v(piece) ? piece : piece - kOfV) * kColumns; }

  // Writes a piece of tile `n_block` of a key head. `thread` counts those that have sums. Whether something of the
  // thread's is not finite.
  CUTE_DEVICE static bool write(BwdParams const& params, int n_block, int head, int batch, int piece,
                                float4 const (&fours)[kFours], int thread) {
    TensorDesc const& tensor = is_v(piece) ? params.d_v : params.d_k;
    float const scale = is_v(piece) ? dropout_factor(params) : params.softmax_scale;
    FiniteLook<Element> look;
    write_pairs<kColumns>(
        tensor.address + 2 * (batch * tensor.stride_batch + head * tensor.stride_head + column(piece)),
        2 * tensor.stride_row, n_block * Traits::kTileN + KeySums::row(thread), params.seqlen_kv,
        (is_v(piece) ? params.head_dim_vo : params.head_dim_qk) - column(piece), thread % 32, [&](int i, int j) {
          float4 const four = fours[2 * i + j / 2];
          return look.see(j % 2 == 0 ? pack_pair<Element>(scaled(four.x, scale), scaled(four.y, scale))
                                     : pack_pair<Element>(scaled(four.z, scale), scaled(four.w, scale)));
        });
    return look.found();
  }
};

}  // namespace hattn
