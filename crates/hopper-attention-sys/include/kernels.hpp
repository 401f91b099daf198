// The C++ interface of the kernels: what was compiled, and how a launch is started.
//
// The structs that Rust fills and reads (FwdParams, BwdParams, QuantizeParams, RowInfo, Status, ...) are defined once,
// in src/params.rs. cxx makes the first header below of it. What each field means, its unit and its range stand there,
// and are copied into the header.
//
// Both the host compiler (cpp/bridge.cc) and nvcc (the launchers) include this file. It sees the standard library only:
// no CUTLASS, no rust/cxx.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hopper-attention-sys/src/params.rs.h"

struct CUstream_st;

namespace hattn {

// The beginning of the workspace of a row with scores in f16, and of its fallback row with scores in f32.
//
// Both rows are launched with the same problem, the fallback row behind the other. The first row looks for elements of
// Q and K that are too large for scores in f16. Only if one of its CTAs has found one does the fallback row compute
// everything again; else its CTAs return at once.
//
// The header is followed by one word for each CTA of the first row: not 0 where that CTA has found such an element.
// Every CTA writes its word.
struct RangeCheck {
  std::int32_t tile_counter;         // of the first row
  std::int32_t tile_counter_behind;  // of the fallback row; the first row's kernel zeroes it
  std::uint32_t amax;                // the bits of the first row's largest magnitude of O
  std::uint32_t unused;
};

// Bytes of the RangeCheck and of the words of `grid` CTAs, rounded up to 16.
constexpr std::size_t range_check_bytes(std::int32_t grid) {
  return sizeof(RangeCheck) + (sizeof(std::uint32_t) * grid + 15) / 16 * 16;
}

// Whether tiles of several CTAs share a descale factor that is made of their values.
inline bool shares_factors(QuantizeTensor const& tensor, Scaling scaling) noexcept {
  return !tensor.given && scaling != Scaling::PerBlock;
}

// One row of a launch table: what was compiled, and how to start it.
template <class Info, class Params>
struct TableRow {
  Info info;
  // Loads the row's kernels on the current device and raises their limit of shared memory. A later launch then does
  // neither: a lazy load would break a graph capture.
  Status (*prepare)() noexcept;
  // Enqueues the row's kernels on the stream and returns. Takes no memory and does not synchronise.
  Status (*launch)(Params const& params, CUstream_st* stream) noexcept;
};
using FwdRow = TableRow<RowInfo, FwdParams>;
using BwdRow = TableRow<RowInfo, BwdParams>;
using QuantizeRow = TableRow<QuantizeRowInfo, QuantizeParams>;

// The rows of a table, in the order of the lists of kernels (*.def). The pointer stays valid for the life of the
// process.
template <class Row>
struct Table {
  Row const* rows;
  std::size_t size;
};
Table<FwdRow> fwd_table() noexcept;
Table<BwdRow> bwd_table() noexcept;
Table<QuantizeRow> quantize_table() noexcept;

}  // namespace hattn
