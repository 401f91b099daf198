// The Rust interface of the kernels: the functions that src/lib.rs declares, over kernels.hpp. Only the host compiler
// sees this file.
#pragma once

#include <cstdint>

#include "kernels.hpp"
#include "rust/cxx.h"

namespace hattn::bridge {

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
