// How many multiprocessors the CTAs of a launch may run on. CTAs of once.hpp wait for each other, so that all of them
// must run at a time, and a cooperative launch of more is refused. In a capture such a refusal spoils the graph. So it
// is asked before.
//
// A green context, whose streams a program may pass here, has a part of the device's multiprocessors. So has a context
// of the Multi-Process Service with an execution affinity.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace hattn::quantize {

// A function of the driver, or null where the driver does not have it. (Nothing links libcuda.)
template <class Function>
Function* driver_function(char const* name, unsigned version) noexcept {
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cudaError_t const error = cudaGetDriverEntryPointByVersion(name, &symbol, version, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(symbol) : nullptr;
}

struct Residency {
  decltype(&cuCtxGetExecAffinity) affinity =
      driver_function<decltype(cuCtxGetExecAffinity)>("cuCtxGetExecAffinity", 11040);
  decltype(&cuStreamGetGreenCtx) green_context =
      driver_function<decltype(cuStreamGetGreenCtx)>("cuStreamGetGreenCtx", 12040);
  decltype(&cuGreenCtxGetDevResource) resource =
      driver_function<decltype(cuGreenCtxGetDevResource)>("cuGreenCtxGetDevResource", 12040);

  static Residency const& of_driver() noexcept {
    static Residency const residency;
    return residency;
  }

  // Of a stream of the current context. `device`: how many the device has.
  unsigned multiprocessors(CUstream_st* stream, unsigned device) const noexcept {
    unsigned count = device;
    CUexecAffinityParam param{};
    if (affinity != nullptr && affinity(&param, CU_EXEC_AFFINITY_TYPE_SM_COUNT) == CUDA_SUCCESS) {
      count = least(count, param.param.smCount.val);
    }
    CUgreenCtx context = nullptr;
    CUdevResource part{};
    if (green_context != nullptr && resource != nullptr && green_context(stream, &context) == CUDA_SUCCESS &&
        context != nullptr && resource(context, &part, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS) {
      count = least(count, part.sm.smCount);
    }
    return count;
  }

 private:
  // 0 is no answer.
  static unsigned least(unsigned count, unsigned answer) noexcept {
    return answer > 0 && answer < count ? answer : count;
  }
};

}  // namespace hattn::quantize
