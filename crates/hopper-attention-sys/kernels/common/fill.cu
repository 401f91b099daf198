// One thread a (row, 8-column group): rows are (batch, head, query), the copy is 16 bytes wide, and the first group of
// a row writes its LSE. Bound by memory and rarely used, so it has no other design.
#include <cuda_runtime.h>

#include <cmath>

#include "common/fill.hpp"

namespace hattn {
namespace {

__global__ void fill_empty(FwdParams const params) {
  std::int64_t const groups = params.head_dim_vo / 8;
  std::int64_t const total = groups * params.seqlen_q * params.heads_q * params.batch;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < total;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::int64_t rest = i;
    std::int64_t const group = rest % groups;
    rest /= groups;
    std::int64_t const query = rest % params.seqlen_q;
    rest /= params.seqlen_q;
    std::int64_t const head = rest % params.heads_q;
    std::int64_t const batch = rest / params.heads_q;
    std::int64_t const at =
        batch * params.o.stride_batch + query * params.o.stride_seqlen + head * params.o.stride_head;
    reinterpret_cast<uint4*>(params.o.address + 2 * at)[group] = uint4{0, 0, 0, 0};
    if (group == 0 && params.lse_address != 0) {
      reinterpret_cast<float*>(
          params.lse_address)[batch * params.lse_stride_batch + head * params.lse_stride_head + query] = -INFINITY;
    }
  }
}

}  // namespace

Status prepare_fill_empty() noexcept {
  cudaFuncAttributes attributes;
  cudaError_t const error = cudaFuncGetAttributes(&attributes, fill_empty);
  return error == cudaSuccess ? Status{} : Status{StatusCode::Cuda, error};
}

Status launch_fill_empty(FwdParams const& params, CUstream_st* stream) noexcept {
  fill_empty<<<params.grid, 256, 0, stream>>>(params);
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : Status{StatusCode::Cuda, error};
}

}  // namespace hattn
