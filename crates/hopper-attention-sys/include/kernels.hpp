// The C++ door of the kernels: what a launch needs and the table of what was compiled. It sees neither CUTLASS nor cxx,
// so that both the host compiler (bridge.cc) and nvcc (the launchers) may include it.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace hattn {

// Element types. The values are shared with the Rust side; bridge.cc checks that they agree.
enum class DType : std::uint8_t { F16 = 0, BF16 = 1, E4M3 = 2, F32 = 3 };

// How a kernel's loop over key blocks is shaped; the bounds themselves are run-time values of `FwdParams`.
//   Full    every key, only the ragged last block is masked
//   Causal  keys up to a diagonal: blocks on the diagonal are masked, those left of it are not
//   Window  a band of keys: blocks on either edge are masked, those between are not
enum class MaskClass : std::uint8_t { Full = 0, Causal = 1, Window = 2 };

enum class Arch : std::uint8_t { Sm80 = 0, Sm90 = 1 };

// What a kernel of e4m3 operands sums scores in; of other operands it is F32.
//   F32  what the tensor cores keep of such sums
//   F16  sums that fit it where no element of Q and K is larger than 14 in magnitude (448 / 32): 128 * 14^2 = 25088.
//        The kernel looks at them (RangeCheck)
enum class Scores : std::uint8_t { F32 = 0, F16 = 1 };

enum class StatusCode : std::int32_t {
  Ok = 0,
  Cuda = 1,          // a CUDA runtime call failed: `detail` is the cudaError_t
  TensorMap = 2,     // the driver refused a tensor map: `detail` is the CUresult
  NoSuchRow = 3,     // the row index is outside of the table
  DriverTooOld = 4,  // the driver has no cuTensorMapEncodeTiled
};

struct Status {
  StatusCode code = StatusCode::Ok;
  std::int32_t detail = 0;
};

// A tensor [batch, seqlen, heads, head_dim] with unit stride in head_dim. Strides count elements.
struct TensorDesc {
  std::uint64_t address = 0;
  std::int64_t stride_batch = 0;
  std::int64_t stride_seqlen = 0;
  std::int64_t stride_head = 0;
};

// f32 descale factors [batch, heads, blocks of 128 rows]. Strides count elements, and are 0 where all share a factor.
struct FactorsDesc {
  std::uint64_t address = 0;
  std::int64_t stride_batch = 0;
  std::int64_t stride_head = 0;
  std::int64_t stride_block = 0;
};

// The beginning of the workspace of a row whose scores are F16, and of the row that is launched behind it with the same
// problem, whose scores are F32, and which computes all again if, and only if, a CTA of the first has found what is too
// large. It goes on with a word for each of those CTAs, which is written in any case.
struct RangeCheck {
  std::int32_t tile_counter;
  std::int32_t tile_counter_behind;  // the first row's kernel zeroes it
  std::uint32_t amax;                // the bits of what the first row found
  std::uint32_t unused;
};
constexpr std::size_t range_check_bytes(std::int32_t grid) {
  return sizeof(RangeCheck) + (sizeof(std::uint32_t) * grid + 15) / 16 * 16;
}

// One forward launch. Nothing here is checked: the safe crate has done so, and the kernel relies on it:
//   addresses and strides are multiples of 16 bytes; head dims are multiples of 8, at least 8, at most the row's;
//   batch, heads and seqlen_q are at least 1 (seqlen_kv may be 0); heads_q is a multiple of heads_kv;
//   seqlen_q + seqlen_kv < 2^30; softmax_scale is finite and above 0; 0 <= window_* <= 2^30;
//   a row whose scores are F16 has a `range_check`, and a row whose scores are F32 is launched behind it.
struct FwdParams {
  TensorDesc q, k, v, o;
  // Natural-log sum-exp, f32 [batch, heads_q, seqlen_q] with unit stride in seqlen_q; address 0: not wanted.
  std::uint64_t lse_address = 0;
  std::int64_t lse_stride_batch = 0;
  std::int64_t lse_stride_head = 0;
  std::int32_t batch = 0;
  std::int32_t heads_q = 0;
  std::int32_t heads_kv = 0;
  std::int32_t seqlen_q = 0;
  std::int32_t seqlen_kv = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  float softmax_scale = 0.0F;
  // Query i keeps the keys from i + diagonal_offset - window_left to i + diagonal_offset + window_right.
  // 2^30 means "without bound"; a row of class Full ignores both, one of class Causal ignores window_left.
  std::int32_t diagonal_offset = 0;
  std::int32_t window_left = 0;
  std::int32_t window_right = 0;
  // The order in which the grid walks the tiles (the plan chooses): CTAs (sm80: one a tile, and no counter), and heads
  // taken together.
  std::int32_t grid = 0;
  std::int32_t heads_per_group = 1;
  std::int32_t groups = 1;  // the last one has all heads that are left
  // Address of 4 bytes of workspace for a counter from which CTAs draw their tiles (the launch zeroes it in stream
  // order); 0: each CTA's tiles follow from its index.
  std::uint64_t tile_counter = 0;
  // So many tiles at the end of the list are shared out, each CTA computing as many of their blocks: 0, or at least
  // `grid` and less than twice that, of at least twice that in all, of a row with `share_bytes` and with a counter.
  // That is then the beginning, of 16 bytes or range_check_bytes, of a workspace with room for `grid` times the row's
  // share_bytes. (A row behind another one has 0.)
  std::int32_t shared_tiles = 0;
  // Of e4m3 operands alone (others have an O of their own type): head dims are multiples of 16 then.
  DType output = DType::BF16;  // of O: F16, BF16 or E4M3
  FactorsDesc descale_q, descale_k, descale_v;
  std::int32_t descale_q_group = 1;  // query heads that share a head of descale_q
  std::uint64_t scale_o = 0;         // f32 [1], what an O of e4m3 is multiplied by before it is rounded
  std::uint64_t amax = 0;            // f32 [1], written: the largest magnitude of O; 0: not wanted
  // Address of range_check_bytes of the grid of the row whose scores are F16, and that grid; 0: there is none.
  std::uint64_t range_check = 0;
  std::int32_t range_grid = 0;
};

// One backward launch; as for FwdParams nothing is checked here, and the same holds of what has the same name.
// d_o has o's sizes, d_q, d_k and d_v those of q, k and v; one of the two lengths may be 0.
struct BwdParams {
  TensorDesc q, k, v, o, d_o, d_q, d_k, d_v;
  // Natural-log sum-exp of the forward, f32 [batch, heads_q, seqlen_q] with unit stride in seqlen_q, and its gradient
  // in the same form (address 0: none).
  std::uint64_t lse_address = 0;
  std::int64_t lse_stride_batch = 0;
  std::int64_t lse_stride_head = 0;
  std::uint64_t d_lse_address = 0;
  std::int64_t d_lse_stride_batch = 0;
  std::int64_t d_lse_stride_head = 0;
  std::int32_t batch = 0;
  std::int32_t heads_q = 0;
  std::int32_t heads_kv = 0;
  std::int32_t seqlen_q = 0;
  std::int32_t seqlen_kv = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  float softmax_scale = 0.0F;
  std::int32_t diagonal_offset = 0;
  std::int32_t window_left = 0;
  std::int32_t window_right = 0;
  std::int32_t grid = 0;
  std::int32_t heads_per_group = 1;
  std::int32_t groups = 1;  // the last one has all heads that are left
  // Of the workspace, with `blocks` = batch * heads_q * ceil(seqlen_q / tile_m): 16 bytes (sm80: 8) [blocks][tile_m]
  // of statistics of the queries, f32 [blocks][tile_m * head_dim_qk of the row] sums of dQ, both aligned to 16 bytes.
  std::uint64_t statistics = 0;
  std::uint64_t sums = 0;
  // i32 [blocks]: how far the sums of each block are.
  std::uint64_t progress = 0;
  // Whether tiles add to the sums by their number, which makes the result the same on every run and needs a tile
  // counter.
  bool ordered = false;
  std::uint64_t tile_counter = 0;
};

// How many elements share a descale factor: all, those of one sequence and key head, or 128 rows of a head.
enum class Scaling : std::uint8_t { PerTensor = 0, PerHead = 1, PerBlock = 2 };

// A tensor [batch, seqlen, heads, head_dim] that is taken to e4m3.
struct QuantizeTensor {
  TensorDesc values, stored;  // of 16 bits, and e4m3
  FactorsDesc descale;
  bool given = false;  // factors are read; else they are written, from the largest magnitudes
  bool rotated = false;
  bool wanted = false;  // whether there is this tensor at all
  float most = 448.0F;  // the largest magnitude that is stored: 448, or that divided by a power of two
  std::int32_t batch = 0;
  std::int32_t seqlen = 0;
  std::int32_t heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t group = 1;  // heads that share a head of `descale`
  // Of the workspace where shares_factors says so: 16 + 8 * heads of `descale` bytes, or 4 * batch * heads *
  // ceil(seqlen / 64) where that is more.
  std::uint64_t state = 0;
};

// One launch that quantises any of Q, K and V. Nothing is checked here either:
//   addresses and strides are multiples of 16 bytes; head dims are multiples of 16, at most 128; batch * heads *
//   ceil(seqlen / 128) < 2^30.
struct QuantizeParams {
  QuantizeTensor q, k, v;
  Scaling scaling = Scaling::PerTensor;
  std::uint64_t seed = 0;  // of the signs, for what is rotated
  // f32 [3, 2] with unit stride inside, written: how many elements of q, k and v were saturated and were not finite;
  // address 0: not wanted.
  std::uint64_t counts = 0;
  std::int64_t counts_stride = 0;
  // All of the workspace, zeroed by the launch in stream order; it begins with 48 bytes for the counts.
  std::uint64_t workspace = 0;
  std::uint64_t workspace_bytes = 0;
  std::int32_t multiprocessors = 1;
};

// Whether tiles of several CTAs share a factor that is made of their values.
inline bool shares_factors(QuantizeTensor const& tensor, Scaling scaling) noexcept {
  return !tensor.given && scaling != Scaling::PerBlock;
}

// One line of a kernel list (fwd.def, bwd.def): what was compiled, and how to start it.
template <class Params>
struct Row {
  Arch arch;
  DType dtype;
  MaskClass mask;
  std::int32_t head_dim_qk;  // the largest that the row takes
  std::int32_t head_dim_vo;
  std::int32_t tile_m;  // queries a tile (backward: a block)
  std::int32_t tile_n;  // keys a block (backward: a tile)
  std::int32_t stages;  // blocks in flight, of either operand
  std::int32_t threads;
  std::int32_t smem_bytes;
  // Loads the kernel's module on the current device and raises its shared-memory limit, so that a later launch does
  // neither (a lazy load would break a graph capture).
  Status (*prepare)() noexcept;
  // Enqueues on the stream and returns. Takes no memory and does not synchronise.
  Status (*launch)(Params const& params, CUstream_st* stream) noexcept;
  // The last, since few rows have them.
  Scores scores = Scores::F32;
  std::int32_t share_bytes = 0;  // of workspace that a CTA needs where tiles are shared out; 0: they are not
};
using FwdRow = Row<FwdParams>;
using BwdRow = Row<BwdParams>;

// The quantising kernels of one source type.
struct QuantizeRow {
  Arch arch;
  DType source;
  Status (*prepare)() noexcept;
  Status (*launch)(QuantizeParams const& params, CUstream_st* stream) noexcept;
};

// Rows in the order of the lists; the pointer stays valid for the life of the process.
template <class Row>
struct Table {
  Row const* rows;
  std::size_t size;
};
using FwdTable = Table<FwdRow>;
using BwdTable = Table<BwdRow>;
using QuantizeTable = Table<QuantizeRow>;
FwdTable fwd_table() noexcept;
BwdTable bwd_table() noexcept;
QuantizeTable quantize_table() noexcept;

}  // namespace hattn
