// The C++ interface of the kernels: what was compiled, and how a launch is started.
//
// What was compiled is listed in launch tables. There are three tables: forward, backward, quantiser. A *row* of a
// table is one compiled kernel, with the small kernels that its launch runs around it. (A row of the quantiser has all
// kernels of one source type.) A row has
// - info: what was compiled (element type, mask class, head dims, tile, ...);
// - prepare: loads its kernels on the current device, once, ahead of the first launch;
// - launch: enqueues its kernels on a stream, for one problem.
//
// (Elsewhere a row is also a row of a tensor: the elements of one token in one head.)
//
// How a call comes here: Rust chooses a row by its info, fills a struct of parameters (FwdParams, BwdParams or
// QuantizeParams), and names the row by its index in the table (bridge.h, cpp/bridge.cc). Nothing on this side checks
// the parameters: the safe crate has checked them.
//
// Where the rest is:
// - src/params.rs defines the structs that both languages use (the parameters, RowInfo, Status, ...). cxx makes a
//   header of that file: the first one that is included below. The meaning, unit and range of each field stand in
//   params.rs, and are copied into the header.
// - kernels/ARCH/PASS/PASS.def is the list of rows of an architecture and pass. launch.hpp beside it defines their
//   prepare and launch. kernels/table.cc makes the tables from the lists.
// - kernels/common/row.hpp defines the words that the kernels use: tile, block, stage, turn.
//
// Both the host compiler (cpp/bridge.cc) and nvcc (the launchers) include this file. It sees the standard library
// only: no CUTLASS, no rust/cxx.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hopper-attention-sys/src/params.rs.h"

struct CUstream_st;

namespace hattn {

// The header of the workspace that a row with scores in f16 shares with its fallback row, whose scores are in f32.
//
// FP8 only. Q K^T may be summed in f16, which is faster, where no element of Q and K is too large. The fallback row is
// for the other case. Both rows are launched with the same problem: first the row with scores in f16, then the fallback
// row.
// 1. The first row computes the result. It also looks for elements of Q and K that are too large for scores in f16.
// 2. The fallback row reads what the first row has found. If there is such an element, it computes everything again.
//    Else its CTAs return at once.
//
// After the header comes one word for each CTA of the first row. Every CTA writes its word: not 0 if it has found such
// an element.
struct RangeCheck {
  std::int32_t tile_counter;         // of the first row; its launch zeroes it
  std::int32_t tile_counter_behind;  // of the fallback row; the first row's kernel zeroes it
  std::uint32_t amax;                // largest magnitude of O, the bits of an f32; the first row writes it
  std::uint32_t unused;
};

// Bytes of the RangeCheck and of the words of `grid` CTAs after it. The words are rounded up to a multiple of 16.
constexpr std::size_t range_check_bytes(std::int32_t grid) {
  return sizeof(RangeCheck) + (sizeof(std::uint32_t) * grid + 15) / 16 * 16;
}

// Whether a descale factor is made of the values of several tiles, so that CTAs must tell each other what they
// measured.
inline bool shares_factors(QuantizeTensor const& tensor, Scaling scaling) noexcept {
  return !tensor.given && scaling != Scaling::PerBlock;
}

// One row of a launch table.
template <class Info, class Params>
struct TableRow {
  Info info;
  // Loads the row's kernels on the current device and raises their limit of shared memory. A later launch then loads
  // nothing: a lazy load would break a graph capture.
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

// Loads the kernels that launches of any row may need (kernels/common/fill.hpp) on the current device.
Status prepare_fill() noexcept;

}  // namespace hattn
