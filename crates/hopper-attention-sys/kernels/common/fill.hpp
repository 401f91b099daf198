// The forward without a single key: O = 0 and LSE = -inf. No main kernel is started for it.
#pragma once

#include "kernels.hpp"

namespace hattn {

Status launch_fill_empty(FwdParams const& params, CUstream_st* stream) noexcept;

// Loads the module, as `prepare` of every row must.
Status prepare_fill_empty() noexcept;

}  // namespace hattn
