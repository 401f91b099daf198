// Compiled, never linked: torch's own header must declare what torch_shim.h says.
//   g++ -std=c++17 -fsyntax-only -I TORCH/include -I ../../crates/hopper-attention-capi/include shim_check.cc
#define USE_CUDA  // declares the function of the current stream; no header of CUDA is included
#include <ATen/Context.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <type_traits>

#include "torch_shim.h"

namespace hattn_torch {

static_assert(std::is_same_v<TensorHandle, AtenTensorHandle> && std::is_same_v<LibraryHandle, TorchLibraryHandle>);
static_assert(std::is_same_v<Error, AOTITorchError> && std::is_same_v<StableValue, StableIValue>);
#define HATTN_SAME(name, result, parameters) \
  static_assert(std::is_same_v<decltype(&::name), result(*) parameters>, "torch declares " #name " otherwise");
HATTN_TORCH_FUNCTIONS(HATTN_SAME)
HATTN_TORCH_CUDA_FUNCTIONS(HATTN_SAME)

static_assert(std::is_same_v<decltype(&at::globalContext), at::Context& (*)()>);
static_assert(std::is_same_v<decltype(&at::Context::deterministicAlgorithms), bool (at::Context::*)() const>);

}  // namespace hattn_torch
