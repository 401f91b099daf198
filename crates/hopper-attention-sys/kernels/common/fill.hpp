// Outputs that no product reaches: a forward without keys, a backward without keys or without queries.
#pragma once

#include "kernels.hpp"

namespace hattn {

// Loads the kernel on the current device.
Status prepare_fill() noexcept;

// O = 0 and LSE = -inf.
Status launch_fill_empty(FwdParams const& params, CUstream_st* stream) noexcept;

// Gradients where one of the sequences is empty: zeros, of the sequence that is there.
Status launch_fill_gradients(BwdParams const& params, CUstream_st* stream) noexcept;

}  // namespace hattn
