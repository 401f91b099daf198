// What a CUDA runtime call said, as a launch reports it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels.hpp"

namespace hattn {

inline Status to_status(cudaError_t error) noexcept {
  return error == cudaSuccess ? Status{} : Status{StatusCode::Cuda, static_cast<std::int32_t>(error)};
}

inline bool is_ok(Status const& status) noexcept { return status.code == StatusCode::Ok; }

// Loads the module of a kernel on the current device. It sets the kernel's split of L1 and shared memory to what it is,
// since that takes one call of the driver. (cudaFuncGetAttributes loads a module, too, and takes sixteen.)
template <class Kernel>
Status load_kernel(Kernel* kernel) noexcept {
  return to_status(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutDefault));
}

}  // namespace hattn
