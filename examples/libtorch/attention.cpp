// A custom op of torch in C++, computed by Hopper Attention: hattn_example::attention.
//
//   cmake -B build -DCMAKE_PREFIX_PATH=PREFIX && cmake --build build && ctest --test-dir build
//
// PREFIX is where scripts/install.sh has installed the library. The op comes out as build/libattention.so. In Python
// torch.ops.load_library("build/libattention.so") makes it torch.ops.hattn_example.attention, as check.py shows. A C++
// program loads the same file with dlopen, and calls the op through torch's dispatcher.
//
// - It is built with the headers of torch's stable ABI (torch/csrc/stable). One file runs with every torch from 2.10
// on.
// - It needs no CUDA toolkit. On a GPU the library uses the driver, and torch says which stream is the current one.
// - It is a forward pass without options. python/torch_op has the gradients, and says how to serve torch 2.8 too.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <hopper_attention.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

hattn::DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Half:
      return hattn::DType::F16;
    case ScalarType::BFloat16:
      return hattn::DType::BF16;
    case ScalarType::Float:
      return hattn::DType::F32;
    default:
      throw std::runtime_error("attention takes float16, bfloat16 and float32");
  }
}

// Both count GPUs as the CUDA driver does.
hattn::Device device_of(const Tensor& tensor) {
  return tensor.is_cuda() ? hattn::Device::cuda(tensor.get_device_index()) : hattn::Device::cpu();
}

// A tensor as it lies in memory. Nothing is copied.
hattn::TensorView view_of(const Tensor& tensor) {
  if (tensor.dim() != 4) throw std::runtime_error("attention takes tensors [batch, seqlen, heads, head_dim]");
  const hattn::Extents shape{tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3)};
  const hattn::Extents stride{tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
  return hattn::TensorView::strided(tensor.mutable_data_ptr(), dtype_of(tensor), device_of(tensor), shape, stride);
}

// The plan of a problem. A plan is made once, and never destroyed: a process has few shapes, and a plan is small.
const hattn::ForwardPlan& plan_of(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  const hattn::Device device = device_of(q);
  const std::array<std::int64_t, 10> numbers{device.c_value(), static_cast<std::int64_t>(dtype_of(q)),
                                             q.size(0),        q.size(1),
                                             k.size(1),        q.size(2),
                                             k.size(2),        q.size(3),
                                             v.size(3),        causal};
  static std::mutex mutex;
  static auto& plans = *new std::map<std::array<std::int64_t, 10>, std::unique_ptr<const hattn::ForwardPlan>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<const hattn::ForwardPlan>& plan = plans[numbers];
  if (plan == nullptr) {
    hattn::ForwardProblem problem(dtype_of(q));
    problem.batch(q.size(0)).seqlens(q.size(1), k.size(1)).heads(q.size(2), k.size(2)).head_dims(q.size(3), v.size(3));
    if (causal) problem.causal();
    plan = std::make_unique<const hattn::ForwardPlan>(problem, device);
  }
  return *plan;
}

CUstream_st* current_stream(const Tensor& tensor) {
  void* stream = nullptr;
#ifdef EXAMPLE_CUDA
  if (tensor.is_cuda()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  }
#else
  if (tensor.is_cuda()) throw std::runtime_error("this op was built with a torch without CUDA");
#endif
  return static_cast<CUstream_st*>(stream);
}

// q is [batch, seqlen_q, heads_q, head_dim], k and v are [batch, seqlen_kv, heads_kv, head_dim]. The last query meets
// the last key. What the library does not compute it refuses with an exception, which torch gives to Python.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
  hattn::ForwardArgs args;
  args.q = view_of(q);
  args.k = view_of(k);
  args.v = view_of(v);
  const hattn::ForwardPlan& plan = plan_of(q, k, v, causal);
  // torch's allocator gives memory of the current stream to later work of that stream only. So the workspace may be
  // freed when this function returns, while the kernel still runs.
  Tensor o = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2), v.size(3)});
  args.o = view_of(o);
  const auto bytes = static_cast<std::int64_t>(plan.workspace_bytes());
  Tensor workspace = torch::stable::new_empty(q, {bytes}, ScalarType::Byte);
  if (bytes > 0) args.workspace = {workspace.mutable_data_ptr(), static_cast<std::size_t>(bytes)};
  plan.run(args, current_stream(q));
  return o;
}

}  // namespace

STABLE_TORCH_LIBRARY(hattn_example, library) {
  library.def("attention(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(hattn_example, CPU, library) { library.impl("attention", TORCH_BOX(&attention)); }
STABLE_TORCH_LIBRARY_IMPL(hattn_example, CUDA, library) { library.impl("attention", TORCH_BOX(&attention)); }
