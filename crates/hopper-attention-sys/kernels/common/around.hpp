// The kernels that run before and after a backward kernel, as its launch sees them.
//
// bwd_prepare (prepare.hpp) and bwd_convert (convert.hpp) depend on fewer columns than a row has, and are compiled once
// for all the rows of a list, in a unit of their own. A row's unit calls the functions declared here; the other unit
// defines them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.hpp"

namespace hattn {

// The progress of a block of queries that no tile of keys sees.
constexpr int kNobody = -(1 << 30);

// bwd_prepare of one row's traits.
template <class Traits>
struct Prepare {
  // Loads the kernel's module on the current device.
  static cudaError_t load() noexcept;
  static void launch(BwdParams const& params, cudaStream_t stream) noexcept;
};

// bwd_convert of `Traits::Unmasked`: it does not depend on the mask.
template <class Traits>
struct Convert {
  static cudaError_t load() noexcept;
  static void launch(BwdParams const& params, cudaStream_t stream) noexcept;
};

}  // namespace hattn
