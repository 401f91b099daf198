// What Rust calls: a row index to its functions. Parameters pass through untouched, since both sides read one
// definition of them (src/params.rs). Nothing here checks more than the index.
#include "bridge.h"

#include <cuda_runtime_api.h>

#include <string>

#include "hopper-attention-sys/src/lib.rs.h"

namespace hattn::bridge {
namespace {

// What was compiled, row by row.
template <class Info, class Params>
rust::Vec<Info> rows(Table<TableRow<Info, Params>> const& table) noexcept {
  rust::Vec<Info> rows;
  rows.reserve(table.size);
  for (std::size_t i = 0; i < table.size; ++i) {
    rows.push_back(table.rows[i].info);
  }
  return rows;
}

template <class Row>
Status prepare(Table<Row> const& table, std::uint32_t row) noexcept {
  if (row >= table.size) {
    return {StatusCode::NoSuchRow, static_cast<std::int32_t>(row)};
  }
  Status const status = table.rows[row].prepare();  // first: it says if the driver is too old
  return status.code == StatusCode::Ok ? prepare_fill() : status;
}

template <class Row, class Params>
Status launch(Table<Row> const& table, std::uint32_t row, Params const& params, CUstream_st* stream) noexcept {
  return row < table.size ? table.rows[row].launch(params, stream)
                          : Status{StatusCode::NoSuchRow, static_cast<std::int32_t>(row)};
}

}  // namespace

rust::Vec<RowInfo> fwd_rows() noexcept { return rows(fwd_table()); }
rust::Vec<RowInfo> bwd_rows() noexcept { return rows(bwd_table()); }
rust::Vec<QuantizeRowInfo> quantize_rows() noexcept { return rows(quantize_table()); }

Status fwd_prepare(std::uint32_t row) noexcept { return prepare(fwd_table(), row); }
Status bwd_prepare(std::uint32_t row) noexcept { return prepare(bwd_table(), row); }
Status quantize_prepare(std::uint32_t row) noexcept { return prepare(quantize_table(), row); }

Status fwd_launch(std::uint32_t row, FwdParams const& params, CUstream_st* stream) noexcept {
  return launch(fwd_table(), row, params, stream);
}
Status bwd_launch(std::uint32_t row, BwdParams const& params, CUstream_st* stream) noexcept {
  return launch(bwd_table(), row, params, stream);
}
Status quantize_launch(std::uint32_t row, QuantizeParams const& params, CUstream_st* stream) noexcept {
  return launch(quantize_table(), row, params, stream);
}

rust::String status_text(Status status) noexcept {
  std::string const detail = std::to_string(status.detail);
  switch (status.code) {
    case StatusCode::Ok:
      return "ok";
    case StatusCode::Cuda: {
      auto const error = static_cast<cudaError_t>(status.detail);
      return std::string(cudaGetErrorName(error)) + " (" + detail + "): " + cudaGetErrorString(error);
    }
    case StatusCode::TensorMap:
      return "the driver refused a tensor map (CUresult " + detail + ")";
    case StatusCode::NoSuchRow:
      return "the kernel table has no row " + detail;
    case StatusCode::DriverTooOld:
      return "the driver has no cuTensorMapEncodeTiled: CUDA 12 or newer is needed";
  }
  return "unknown status " + std::to_string(static_cast<std::int32_t>(status.code)) + " (" + detail + ")";
}

}  // namespace hattn::bridge
