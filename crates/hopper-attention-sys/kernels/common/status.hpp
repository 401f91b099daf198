// What a CUDA runtime call said, as a launch reports it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels.hpp"

namespace hattn {

inline Status to_status(cudaError_t error) noexcept {
  return error == cudaSuccess ? Status{} : Status{StatusCode::Cuda, static_cast<std::int32_t>(error)};
}

}  // namespace hattn
