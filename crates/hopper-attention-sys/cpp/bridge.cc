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
static_assert(std::is_same_v<std::underlying_type_t<hattn::StatusCode>, std::int32_t>);
// A field added on one side only changes one of the sizes: add it to src/lib.rs and to to_kernel() below.
static_assert(sizeof(TensorDesc) == sizeof(hattn::TensorDesc));
static_assert(sizeof(FwdParams) == sizeof(hattn::FwdParams));
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
  out.tile_counter = params.tile_counter;
  return out;
}

hattn::FwdRow const* find(std::uint32_t row) noexcept {
  hattn::FwdTable const table = hattn::fwd_table();
  return row < table.size ? table.rows + row : nullptr;
}

Status no_such_row(std::uint32_t row) noexcept {
  return Status{hattn::StatusCode::NoSuchRow, static_cast<std::int32_t>(row)};
}

}  // namespace

rust::Vec<FwdRowInfo> fwd_rows() noexcept {
  hattn::FwdTable const table = hattn::fwd_table();
  rust::Vec<FwdRowInfo> rows;
  rows.reserve(table.size);
  for (std::size_t i = 0; i < table.size; ++i) {
    hattn::FwdRow const& row = table.rows[i];
    rows.push_back(FwdRowInfo{row.arch, row.dtype, row.mask, row.head_dim_qk, row.head_dim_vo, row.tile_m, row.tile_n,
                              row.stages, row.threads, row.smem_bytes});
  }
  return rows;
}

Status fwd_prepare(std::uint32_t row) noexcept {
  hattn::FwdRow const* const found = find(row);
  return found == nullptr ? no_such_row(row) : to_rust(found->prepare());
}

Status fwd_launch(std::uint32_t row, FwdParams const& params, CUstream_st* stream) noexcept {
  hattn::FwdRow const* const found = find(row);
  return found == nullptr ? no_such_row(row) : to_rust(found->launch(to_kernel(params), stream));
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
