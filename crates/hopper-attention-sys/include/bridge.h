// The Rust door of the kernels: what src/lib.rs declares, over kernels.hpp. Only the host compiler sees it.
#pragma once

#include <cstdint>

#include "kernels.hpp"
#include "rust/cxx.h"

namespace hattn::bridge {

// Shared structs, defined in the header that cxx makes from src/lib.rs.
struct FwdParams;
struct BwdParams;
struct QuantizeParams;
struct QuantizeRowInfo;
struct RowInfo;
struct Status;

rust::Vec<RowInfo> fwd_rows() noexcept;
Status fwd_prepare(std::uint32_t row) noexcept;
Status fwd_launch(std::uint32_t row, FwdParams const& params, CUstream_st* stream) noexcept;
rust::Vec<RowInfo> bwd_rows() noexcept;
Status bwd_prepare(std::uint32_t row) noexcept;
Status bwd_launch(std::uint32_t row, BwdParams const& params, CUstream_st* stream) noexcept;
rust::Vec<QuantizeRowInfo> quantize_rows() noexcept;
Status quantize_prepare(std::uint32_t row) noexcept;
Status quantize_launch(std::uint32_t row, QuantizeParams const& params, CUstream_st* stream) noexcept;
rust::String status_text(Status status) noexcept;

}  // namespace hattn::bridge
