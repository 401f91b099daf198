// The numbers that a kernel reads beside the operands of its launch: copies of the parameters' scalars, and what
// follows from them. They are worked out here, once a launch and on the host.
//
// Kernels read operands (TensorDesc) from the parameters themselves, and may read any other field there. These structs
// exist for two reasons. What follows from several fields is computed in one place. And the order of fields is fixed:
// ptxas loads neighbouring 32-bit numbers in pairs, so that another order is other code in every kernel, some of it
// slower (in one FP8 row the products are serialised). A new number goes to the end, or stays in the parameters.
#pragma once

#include <cute/numeric/math.hpp>

#include "common/bias.hpp"
#include "common/mask.hpp"
#include "common/sequences.hpp"
#include "common/softcap.hpp"
#include "kernels.hpp"

namespace hattn {

// Of a forward of 16-bit operands.
struct FwdScalars {
  float* lse;             // or null
  int heads_per_kv_head;  // query heads that read one key head
  int seqlen_q;
  int seqlen_kv;
  int left_offset;  // of a Band
  int right_offset;
  int heads_per_group;
  int groups;
  int* tile_counter;  // or null
  float scale_log2;   // forward_factor
  MaskEdges edges;
  Softcap softcap;
};

// Of a forward whose sequences have lengths that the device knows (sequences.hpp).
struct PackedFwdScalars : FwdScalars {
  SequenceTable table;
  int table_bytes;
  int heads_q;
  // Rows from a batch entry to the next, of each operand: 0 where it is packed.
  int rows_apart_q;
  int rows_apart_k;
  int rows_apart_v;
  int rows_apart_o;
};

// Of a backward.
struct BwdScalars {
  void const* statistics;
  float* sums;
  int* progress;
  bool ordered;
  int batch;
  int heads_q;
  int heads_kv;
  int heads_per_kv_head;
  int seqlen_q;
  int seqlen_kv;
  int m_blocks;  // blocks of kTileM queries in a sequence
  int n_tiles;   // tiles of kTileN keys in a sequence
  int left_offset;
  int right_offset;
  int heads_per_group;
  int groups;
  int* tile_counter;
  int head_dim_qk;
  int head_dim_vo;
  float softmax_scale;
  float scale_log2;        // backward_factor
  float* key_sums;         // or null
  void const* share_list;  // sm80: null
  int listed;              // entries of that list
  MaskEdges edges;
  Softcap softcap;
};

// What scores are multiplied by, to be in powers of two. Arithmetic flushes numbers below 2^-126 to 0, which would make
// NaN of a masked score. A scale below that counts as 2^-126: scores of products up to 2^100 are 0 in either case. (The
// largest scales would become infinite, and make NaN of a product of 0.)
CUTE_HOST_DEVICE float exponent_factor(float softmax_scale) {
  return cute::min(cute::max(softmax_scale * kLog2E, 0x1p-126F), 0x1.fffffep127F);
}

// The softmax scale where something is divided by it (the LSE in the backward, a bias, the slopes of ALiBi): no float
// that a problem may have makes the quotient overflow.
CUTE_HOST_DEVICE float exponent_scale(float softmax_scale) { return cute::max(softmax_scale, 0x1p-90F); }

// What the forward multiplies a score by: a product q k, or what a cap makes of it.
CUTE_HOST_DEVICE float forward_factor(FwdParams const& params) {
  bool const divides = has_bias(params) || params.alibi.address != 0;
  float const scale = divides ? exponent_scale(params.softmax_scale) : params.softmax_scale;
  return exponent_factor(params.softcap == 0.0F ? scale : params.softcap);
}

// Of a gradient, at its end. This product alone takes a scale below 2^-126 as it is: the sum may be large.
CUTE_DEVICE float scaled(float sum, float softmax_scale) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(sum), "f"(softmax_scale));
  return product;
}

// What the backward multiplies a score by, to be in powers of two: a product q k, or what a cap makes of it.
CUTE_HOST_DEVICE float backward_factor(BwdParams const& params) {
  return exponent_factor(params.softcap == 0.0F ? exponent_scale(params.softmax_scale) : params.softcap);
}

// Whether a backward has modified scores or weights. Statistics of queries may then have another form (Statistics in
// sm90/bwd/traits.hpp).
CUTE_HOST_DEVICE bool has_modifiers(BwdParams const& params) {
  return params.softcap != 0.0F || params.alibi.address != 0 || params.dropout.dropped != 0 || has_bias(params);
}

// Rows from a batch entry to the next. (Where lengths are the device's, it is a whole number: Rust has checked it.)
inline int rows_apart(TensorDesc const& tensor) noexcept {
  return tensor.stride_row == 0 ? 0 : static_cast<int>(tensor.stride_batch / tensor.stride_row);
}

// Packed backward: rows of the statistics from a batch entry to the next, and from a head to the next.
CUTE_HOST_DEVICE int statistics_rows_apart(BwdParams const& params) {
  return params.sequences.cu_seqlens_q != 0 ? 0 : params.seqlen_q;
}
CUTE_HOST_DEVICE std::int64_t statistics_rows(BwdParams const& params) {
  return params.sequences.cu_seqlens_q != 0 ? params.seqlen_q : std::int64_t{params.seqlen_q} * params.batch;
}

// What all of them have.
template <class Scalars, class Params>
Scalars common_scalars(Params const& params) noexcept {
  Scalars scalars{};
  scalars.heads_per_kv_head = params.heads_q / params.heads_kv;
  scalars.seqlen_q = params.seqlen_q;
  scalars.seqlen_kv = params.seqlen_kv;
  scalars.left_offset = params.diagonal_offset - params.window_left;
  scalars.right_offset = params.diagonal_offset + params.window_right;
  scalars.heads_per_group = params.heads_per_group;
  scalars.groups = params.groups;
  scalars.tile_counter = reinterpret_cast<int*>(params.tile_counter);
  scalars.scale_log2 = exponent_factor(params.softmax_scale);
  scalars.edges = params.edges;
  return scalars;
}

inline FwdScalars fwd_scalars(FwdParams const& params) noexcept {
  FwdScalars scalars = common_scalars<FwdScalars>(params);
  scalars.lse = reinterpret_cast<float*>(params.lse.address);
  scalars.softcap = Softcap::of(params.softmax_scale, params.softcap);
  scalars.scale_log2 = forward_factor(params);
  return scalars;
}

inline PackedFwdScalars packed_fwd_scalars(FwdParams const& params) noexcept {
  PackedFwdScalars scalars{};
  static_cast<FwdScalars&>(scalars) = fwd_scalars(params);
  scalars.table = {params.sequences.table, params.batch};
  scalars.table_bytes = scalars.table.bytes(params.sequences.list_size);
  scalars.heads_q = params.heads_q;
  scalars.rows_apart_q = rows_apart(params.q);
  scalars.rows_apart_k = rows_apart(params.k);
  scalars.rows_apart_v = rows_apart(params.v);
  scalars.rows_apart_o = rows_apart(params.o);
  return scalars;
}

template <class Traits>
BwdScalars bwd_scalars(BwdParams const& params) noexcept {
  BwdScalars scalars = common_scalars<BwdScalars>(params);
  scalars.statistics = reinterpret_cast<void const*>(params.statistics);
  scalars.sums = reinterpret_cast<float*>(params.sums);
  scalars.progress = reinterpret_cast<int*>(params.progress);
  scalars.ordered = params.ordered;
  scalars.batch = params.batch;
  scalars.heads_q = params.heads_q;
  scalars.heads_kv = params.heads_kv;
  scalars.m_blocks = (params.seqlen_q + Traits::kTileM - 1) / Traits::kTileM;
  scalars.n_tiles = (params.seqlen_kv + Traits::kTileN - 1) / Traits::kTileN;
  scalars.head_dim_qk = params.head_dim_qk;
  scalars.head_dim_vo = params.head_dim_vo;
  scalars.softmax_scale = params.softmax_scale;
  scalars.scale_log2 = backward_factor(params);
  scalars.softcap = Softcap::of(params.softmax_scale, params.softcap);
  scalars.key_sums = reinterpret_cast<float*>(params.key_sums);
  scalars.share_list = reinterpret_cast<void const*>(params.share_list);
  scalars.listed = scalars.n_tiles * params.heads_kv * params.batch + params.cut_tiles * (params.shares - 1);
  return scalars;
}

// The band of a launch, from its parameters.
template <class Params>
CUTE_DEVICE Band band_of_launch(Params const& params) {
  return {params.diagonal_offset - params.window_left, params.diagonal_offset + params.window_right, params.seqlen_q,
          params.seqlen_kv, params.edges};
}

// The same from its scalars.
template <class Scalars>
CUTE_DEVICE Band band_of(Scalars const& scalars) {
  return {scalars.left_offset, scalars.right_offset, scalars.seqlen_q, scalars.seqlen_kv, scalars.edges};
}

}  // namespace hattn
