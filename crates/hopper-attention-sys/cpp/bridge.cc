// Rust's structs to the kernels' structs, and a row index to its functions. Nothing here checks more than the index.
#include "bridge.h"

#include <cuda_runtime_api.h>

#include <string>
#include <type_traits>

#include "hopper-attention-sys/src/lib.rs.h"

namespace hattn::bridge {
namespace {

// Both sides declare the enums; cxx checks the values, and these the widths that a table row and a status rely on.
static_assert(std::is_same_v<std::underlying_type_t<hattn::DType>, std::uint8_t>);
static_assert(std::is_same_v<std::underlying_type_t<hattn::MaskClass>, std::uint8_t>);
static_assert(std::is_same_v<std::underlying_type_t<hattn::Arch>, std::uint8_t>);
static_assert(std::is_same_v<std::underlying_type_t<hattn::Scaling>, std::uint8_t>);
static_assert(std::is_same_v<std::underlying_type_t<hattn::Scores>, std::uint8_t>);
static_assert(std::is_same_v<std::underlying_type_t<hattn::StatusCode>, std::int32_t>);
// A field added on one side only changes one of the sizes: add it to src/lib.rs and to to_kernel() below.
static_assert(sizeof(TensorDesc) == sizeof(hattn::TensorDesc));
static_assert(sizeof(FactorsDesc) == sizeof(hattn::FactorsDesc));
static_assert(sizeof(FwdParams) == sizeof(hattn::FwdParams));
static_assert(sizeof(BwdParams) == sizeof(hattn::BwdParams));
static_assert(sizeof(QuantizeTensor) == sizeof(hattn::QuantizeTensor));
static_assert(sizeof(QuantizeParams) == sizeof(hattn::QuantizeParams));
static_assert(sizeof(Status) == sizeof(hattn::Status));

Status to_rust(hattn::Status status) noexcept { return Status{status.code, status.detail}; }

hattn::TensorDesc to_kernel(TensorDesc const& tensor) noexcept {
  hattn::TensorDesc out;
  out.address = tensor.address;
  out.stride_batch = tensor.stride_batch;
  out.stride_seqlen = tensor.stride_seqlen;
  out.stride_head = tensor.stride_head;
  return out;
}

hattn::FactorsDesc to_kernel(FactorsDesc const& factors) noexcept {
  hattn::FactorsDesc out;
  out.address = factors.address;
  out.stride_batch = factors.stride_batch;
  out.stride_head = factors.stride_head;
  out.stride_block = factors.stride_block;
  return out;
}

hattn::FwdParams to_kernel(FwdParams const& params) noexcept {
  hattn::FwdParams out;
  out.q = to_kernel(params.q);
  out.k = to_kernel(params.k);
  out.v = to_kernel(params.v);
  out.o = to_kernel(params.o);
  out.lse_address = params.lse_address;
  out.lse_stride_batch = params.lse_stride_batch;
  out.lse_stride_head = params.lse_stride_head;
  out.batch = params.batch;
  out.heads_q = params.heads_q;
  out.heads_kv = params.heads_kv;
  out.seqlen_q = params.seqlen_q;
  out.seqlen_kv = params.seqlen_kv;
  out.head_dim_qk = params.head_dim_qk;
  out.head_dim_vo = params.head_dim_vo;
  out.softmax_scale = params.softmax_scale;
  out.diagonal_offset = params.diagonal_offset;
  out.window_left = params.window_left;
  out.window_right = params.window_right;
  out.grid = params.grid;
  out.heads_per_group = params.heads_per_group;
  out.groups = params.groups;
  out.tile_counter = params.tile_counter;
  out.shared_tiles = params.shared_tiles;
  out.output = params.output;
  out.descale_q = to_kernel(params.descale_q);
  out.descale_k = to_kernel(params.descale_k);
  out.descale_v = to_kernel(params.descale_v);
  out.descale_q_group = params.descale_q_group;
  out.scale_o = params.scale_o;
  out.amax = params.amax;
  out.range_check = params.range_check;
  out.range_grid = params.range_grid;
  return out;
}

hattn::BwdParams to_kernel(BwdParams const& params) noexcept {
  hattn::BwdParams out;
  out.q = to_kernel(params.q);
  out.k = to_kernel(params.k);
  out.v = to_kernel(params.v);
  out.o = to_kernel(params.o);
  out.d_o = to_kernel(params.d_o);
  out.d_q = to_kernel(params.d_q);
  out.d_k = to_kernel(params.d_k);
  out.d_v = to_kernel(params.d_v);
  out.lse_address = params.lse_address;
  out.lse_stride_batch = params.lse_stride_batch;
  out.lse_stride_head = params.lse_stride_head;
  out.d_lse_address = params.d_lse_address;
  out.d_lse_stride_batch = params.d_lse_stride_batch;
  out.d_lse_stride_head = params.d_lse_stride_head;
  out.batch = params.batch;
  out.heads_q = params.heads_q;
  out.heads_kv = params.heads_kv;
  out.seqlen_q = params.seqlen_q;
  out.seqlen_kv = params.seqlen_kv;
  out.head_dim_qk = params.head_dim_qk;
  out.head_dim_vo = params.head_dim_vo;
  out.softmax_scale = params.softmax_scale;
  out.diagonal_offset = params.diagonal_offset;
  out.window_left = params.window_left;
  out.window_right = params.window_right;
  out.grid = params.grid;
  out.heads_per_group = params.heads_per_group;
  out.groups = params.groups;
  out.statistics = params.statistics;
  out.sums = params.sums;
  out.progress = params.progress;
  out.ordered = params.ordered;
  out.tile_counter = params.tile_counter;
  return out;
}

hattn::QuantizeTensor to_kernel(QuantizeTensor const& tensor) noexcept {
  hattn::QuantizeTensor out;
  out.values = to_kernel(tensor.values);
  out.stored = to_kernel(tensor.stored);
  out.descale = to_kernel(tensor.descale);
  out.given = tensor.given;
  out.rotated = tensor.rotated;
  out.wanted = tensor.wanted;
  out.most = tensor.most;
  out.batch = tensor.batch;
  out.seqlen = tensor.seqlen;
  out.heads = tensor.heads;
  out.head_dim = tensor.head_dim;
  out.group = tensor.group;
  out.state = tensor.state;
  return out;
}

hattn::QuantizeParams to_kernel(QuantizeParams const& params) noexcept {
  hattn::QuantizeParams out;
  out.q = to_kernel(params.q);
  out.k = to_kernel(params.k);
  out.v = to_kernel(params.v);
  out.scaling = params.scaling;
  out.seed = params.seed;
  out.counts = params.counts;
  out.counts_stride = params.counts_stride;
  out.workspace = params.workspace;
  out.workspace_bytes = params.workspace_bytes;
  out.multiprocessors = params.multiprocessors;
  return out;
}

template <class Row>
rust::Vec<RowInfo> describe(hattn::Table<Row> const& table) noexcept {
  rust::Vec<RowInfo> rows;
  rows.reserve(table.size);
  for (std::size_t i = 0; i < table.size; ++i) {
    Row const& row = table.rows[i];
    rows.push_back(RowInfo{row.arch, row.dtype, row.mask, row.head_dim_qk, row.head_dim_vo, row.tile_m, row.tile_n,
                           row.stages, row.threads, row.smem_bytes, row.scores, row.share_bytes});
  }
  return rows;
}

// What `use` makes of a row of the table, if there is such a row.
template <class Row, class Use>
Status with_row(hattn::Table<Row> const& table, std::uint32_t row, Use const& use) noexcept {
  if (row >= table.size) {
    return Status{hattn::StatusCode::NoSuchRow, static_cast<std::int32_t>(row)};
  }
  return to_rust(use(table.rows[row]));
}

}  // namespace

rust::Vec<RowInfo> fwd_rows() noexcept { return describe(hattn::fwd_table()); }
rust::Vec<RowInfo> bwd_rows() noexcept { return describe(hattn::bwd_table()); }

Status fwd_prepare(std::uint32_t row) noexcept {
  return with_row(hattn::fwd_table(), row, [](hattn::FwdRow const& found) { return found.prepare(); });
}

Status bwd_prepare(std::uint32_t row) noexcept {
  return with_row(hattn::bwd_table(), row, [](hattn::BwdRow const& found) { return found.prepare(); });
}

Status fwd_launch(std::uint32_t row, FwdParams const& params, CUstream_st* stream) noexcept {
  return with_row(hattn::fwd_table(), row,
                  [&](hattn::FwdRow const& found) { return found.launch(to_kernel(params), stream); });
}

Status bwd_launch(std::uint32_t row, BwdParams const& params, CUstream_st* stream) noexcept {
  return with_row(hattn::bwd_table(), row,
                  [&](hattn::BwdRow const& found) { return found.launch(to_kernel(params), stream); });
}

rust::Vec<QuantizeRowInfo> quantize_rows() noexcept {
  hattn::QuantizeTable const table = hattn::quantize_table();
  rust::Vec<QuantizeRowInfo> rows;
  for (std::size_t i = 0; i < table.size; ++i) {
    rows.push_back(QuantizeRowInfo{table.rows[i].arch, table.rows[i].source});
  }
  return rows;
}

Status quantize_prepare(std::uint32_t row) noexcept {
  return with_row(hattn::quantize_table(), row, [](hattn::QuantizeRow const& found) { return found.prepare(); });
}

Status quantize_launch(std::uint32_t row, QuantizeParams const& params, CUstream_st* stream) noexcept {
  return with_row(hattn::quantize_table(), row,
                  [&](hattn::QuantizeRow const& found) { return found.launch(to_kernel(params), stream); });
}

rust::String status_text(Status status) noexcept {
  std::string const detail = std::to_string(status.detail);
  switch (status.code) {
    case hattn::StatusCode::Ok:
      return "ok";
    case hattn::StatusCode::Cuda: {
      auto const error = static_cast<cudaError_t>(status.detail);
      return std::string(cudaGetErrorName(error)) + " (" + detail + "): " + cudaGetErrorString(error);
    }
    case hattn::StatusCode::TensorMap:
      return "the driver refused a tensor map (CUresult " + detail + ")";
    case hattn::StatusCode::NoSuchRow:
      return "the kernel table has no row " + detail;
    case hattn::StatusCode::DriverTooOld:
      return "the driver has no cuTensorMapEncodeTiled: CUDA 12 or newer is needed";
  }
  return "unknown status " + std::to_string(static_cast<std::int32_t>(status.code)) + " (" + detail + ")";
}

}  // namespace hattn::bridge
