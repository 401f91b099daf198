// torch's C shim (torch/csrc/inductor/aoti_torch/c/shim.h), as far as the op uses it: the functions, and a table of
// them.
//
// The shim is a C interface that torch keeps compatible from version to version. All functions here are in torch 2.8
// and in every version since. The op looks them up in the torch that the process has loaded. So building it needs no
// torch, one file serves every version, and that file names no library of torch which a loader would have to find.
//
// shim_check.cc compares the types below with torch's own header.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>

struct AtenTensorOpaque;
struct TorchLibraryOpaque;

namespace hattn_torch {

// A tensor of torch, a reference that its holder deletes.
using TensorHandle = AtenTensorOpaque*;
// Registrations of kernels. They go when it is deleted.
using LibraryHandle = TorchLibraryOpaque*;
// 0: the call worked. Otherwise torch has logged what went wrong.
using Error = int32_t;
// An argument or a result of an op: a number, or the address of something. An optional value is the address of another
// one, or null.
using StableValue = uint64_t;
// An op: it takes its arguments from the stack, owns them from then on, and leaves its results there.
using Kernel = void (*)(StableValue* stack, uint64_t arguments, uint64_t results);

// F(name, result, parameters)
#define HATTN_TORCH_FUNCTIONS(F)                                                                            \
  F(aoti_torch_device_type_cpu, int32_t, ())                                                                \
  F(aoti_torch_device_type_cuda, int32_t, ())                                                               \
  F(aoti_torch_dtype_bfloat16, int32_t, ())                                                                 \
  F(aoti_torch_dtype_float16, int32_t, ())                                                                  \
  F(aoti_torch_dtype_float32, int32_t, ())                                                                  \
  F(aoti_torch_dtype_int64, int32_t, ())                                                                    \
  F(aoti_torch_dtype_uint8, int32_t, ())                                                                    \
  F(aoti_torch_get_data_ptr, Error, (TensorHandle, void**))                                                 \
  F(aoti_torch_get_dtype, Error, (TensorHandle, int32_t*))                                                  \
  F(aoti_torch_get_device_type, Error, (TensorHandle, int32_t*))                                            \
  F(aoti_torch_get_device_index, Error, (TensorHandle, int32_t*))                                           \
  F(aoti_torch_get_dim, Error, (TensorHandle, int64_t*))                                                    \
  F(aoti_torch_get_numel, Error, (TensorHandle, int64_t*))                                                  \
  F(aoti_torch_get_sizes, Error, (TensorHandle, int64_t**))                                                 \
  F(aoti_torch_get_strides, Error, (TensorHandle, int64_t**))                                               \
  F(aoti_torch_empty_strided, Error,                                                                        \
    (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, TensorHandle*))                    \
  F(aoti_torch_grad_mode_is_enabled, bool, ())                                                              \
  F(aoti_torch_new_tensor_handle, Error, (TensorHandle, TensorHandle*))                                     \
  F(aoti_torch_copy_, Error, (TensorHandle, TensorHandle, int32_t))                                         \
  F(aoti_torch_delete_tensor_object, Error, (TensorHandle))                                                 \
  F(aoti_torch_library_init_impl, Error, (const char*, const char*, const char*, uint32_t, LibraryHandle*)) \
  F(aoti_torch_library_impl, Error, (LibraryHandle, const char*, Kernel))                                   \
  F(aoti_torch_delete_library_object, Error, (LibraryHandle))

// In torch's CUDA library, which a torch without CUDA lacks.
#define HATTN_TORCH_CUDA_FUNCTIONS(F) F(aoti_torch_get_current_cuda_stream, Error, (int32_t, void**))

struct Torch {
#define HATTN_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  HATTN_TORCH_FUNCTIONS(HATTN_MEMBER)
  HATTN_TORCH_CUDA_FUNCTIONS(HATTN_MEMBER)
#undef HATTN_MEMBER
  // at::globalContext and at::Context::deterministicAlgorithms. They are C++, which the shim has no function for. Null
  // in a torch that has other ones.
  void* (*global_context)() = nullptr;
  bool (*deterministic_algorithms)(const void* context) = nullptr;

  bool tells_deterministic() const { return global_context != nullptr && deterministic_algorithms != nullptr; }
  bool deterministic() const { return deterministic_algorithms(global_context()); }
};

// A function of a loaded library. Its name is in the error if it is not there.
template <typename Function>
void look_up(void* library, const char* path, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string(path) + " has no function " + name);
}

// The functions of the torch that this process has loaded.
inline Torch load_torch() {
  const char* path = "libtorch_cpu.so";
  void* cpu = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
  if (cpu == nullptr) throw std::runtime_error("libtorch_cpu.so is not loaded; import torch first");
  Torch torch;
#define HATTN_LOOK_UP(name, result, parameters) look_up(cpu, path, #name, torch.name);
  HATTN_TORCH_FUNCTIONS(HATTN_LOOK_UP)
#undef HATTN_LOOK_UP
  torch.global_context = reinterpret_cast<void* (*)()>(dlsym(cpu, "_ZN2at13globalContextEv"));
  torch.deterministic_algorithms =
      reinterpret_cast<bool (*)(const void*)>(dlsym(cpu, "_ZNK2at7Context23deterministicAlgorithmsEv"));
  path = "libtorch_cuda.so";
  if (void* cuda = dlopen(path, RTLD_NOW | RTLD_NOLOAD)) {
#define HATTN_LOOK_UP(name, result, parameters) look_up(cuda, path, #name, torch.name);
    HATTN_TORCH_CUDA_FUNCTIONS(HATTN_LOOK_UP)
#undef HATTN_LOOK_UP
  }
  return torch;
}

}  // namespace hattn_torch
