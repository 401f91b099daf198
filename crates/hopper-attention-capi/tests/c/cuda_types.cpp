// The element types of CUDA's headers, where these come first. Compiled only where there is a toolkit; needs no GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
// The CUDA headers first: a formatter must not move this one up.
#include <hopper_attention.hpp>

#include "check.h"

namespace {

void cudas_types_and_streams_fit() {
  __half half[4];
  __nv_bfloat16 bfloat[4];
  __nv_fp8_e4m3 fp8[4];
  using hattn::Device;
  CHECK(hattn::TensorView::contiguous(half, Device::cuda(0), {1, 1, 1, 4}).dtype() == hattn::DType::F16);
  CHECK(hattn::ConstTensorView::contiguous(bfloat, Device::cuda(0), {1, 1, 1, 4}).dtype() == hattn::DType::BF16);
  CHECK(hattn::ConstTensorView::contiguous(fp8, Device::cuda(0), {1, 1, 1, 4}).dtype() == hattn::DType::E4M3);
  cudaStream_t stream = nullptr;
  CHECK(hattn::ForwardPlan().try_run(hattn::ForwardArgs{}, stream) == hattn::Status::Argument);
}

}  // namespace

int main() {
  RUN("cuda_types", cudas_types_and_streams_fit);
  return check_result();
}
