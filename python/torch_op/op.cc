// torch's ops hopper_attention::forward, forward_lse, backward, forward_sinks and backward_sinks, computed through the
// C ABI. A call from Python takes less time than through ctypes. The package defines the ops. hattn_torch_register
// gives them these kernels for CPU and CUDA.
//
// An op runs on the current stream of its tensors' device, and takes outputs and workspace from torch's allocator. The
// allocator gives memory of a stream to later work of that stream only. So a workspace may be freed right after the
// launch.
#include <cstdio>
#include <memory>

#include "library.h"

namespace hattn_torch {
namespace {

struct State {
  explicit State(const char* path) : path(path), library(path), torch(load_torch()) {}
  const std::string path;
  const Library library;
  const Torch torch;
  // torch's numbers for element types and kinds of device.
  const int32_t f16 = torch.aoti_torch_dtype_float16();
  const int32_t bf16 = torch.aoti_torch_dtype_bfloat16();
  const int32_t f32 = torch.aoti_torch_dtype_float32();
  const int32_t u8 = torch.aoti_torch_dtype_uint8();
  const int32_t i64 = torch.aoti_torch_dtype_int64();
  const int32_t cpu = torch.aoti_torch_device_type_cpu();
  const int32_t cuda = torch.aoti_torch_device_type_cuda();
  Plans<hattn_forward_problem> forward_plans{library};
  Plans<hattn_backward_problem> backward_plans{library};
  // A tensor without elements, where an op has to give one. Made before the op is registered.
  TensorHandle nothing = nullptr;
};

// Set once, before any kernel is registered. Never freed: torch may call kernels until the process ends.
State* state = nullptr;

// `what` failed in torch, which has logged why.
[[noreturn]] void torch_failed(const std::string& what) { throw std::runtime_error("hopper_attention: " + what); }

// A tensor of torch, or none, and how the library describes it. The handle is owned.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(TensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(view_, other.view_);
    std::swap(dtype_, other.dtype_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) state->torch.aoti_torch_delete_tensor_object(handle_);
  }

  // Dense and not written yet.
  static Tensor empty(int32_t ndim, const int64_t* shape, int32_t dtype, hattn_device device) {
    int64_t stride[4];
    int64_t elements = 1;
    for (int32_t i = ndim - 1; i >= 0; --i) {
      stride[i] = elements;
      elements *= shape[i] > 1 ? shape[i] : 1;
    }
    const Torch& torch = state->torch;
    TensorHandle handle = nullptr;
    const bool gpu = device != HATTN_CPU;
    if (torch.aoti_torch_empty_strided(ndim, shape, stride, dtype, gpu ? state->cuda : state->cpu, gpu ? device : 0,
                                       &handle) != 0) {
      // Programs that try a smaller batch look for the words "CUDA out of memory.".
      torch_failed("torch gave no memory for " + std::to_string(elements) + " elements on " +
                   (gpu ? "cuda:" + std::to_string(device) + " (most often: CUDA out of memory.)" : "the CPU") +
                   "; its log says why");
    }
    Tensor tensor;
    tensor.handle_ = handle;
    hattn_tensor& view = tensor.view_;
    torch.aoti_torch_get_data_ptr(handle, &view.data);
    tensor.dtype_ = dtype;
    view.dtype = tensor.library_dtype();
    view.device = device;
    view.ndim = ndim;
    std::memcpy(view.shape, shape, sizeof(int64_t) * ndim);
    std::memcpy(view.stride, stride, sizeof(int64_t) * ndim);
    return tensor;
  }
  // Another reference to a tensor.
  static Tensor again(TensorHandle handle) {
    TensorHandle other = nullptr;
    if (state->torch.aoti_torch_new_tensor_handle(handle, &other) != 0) torch_failed("torch gave no reference");
    return Tensor(other);
  }
  // Dense and not written yet, with the type, device and shape of this one.
  Tensor empty_like() const { return empty(view_.ndim, view_.shape, dtype_, view_.device); }

  // Null where there is no tensor.
  const hattn_tensor* view() const { return handle_ == nullptr ? nullptr : &view_; }
  const hattn_tensor* operator->() const { return &view_; }
  int32_t torch_dtype() const { return dtype_; }

  // Asks torch where the tensor is and how it lies there. There must be a tensor.
  void describe(int32_t ndim, const char* name, const char* dimensions) {
    const Torch& torch = state->torch;
    int32_t device_type = 0, device_index = 0;
    int64_t its_ndim = 0, *shape = nullptr, *stride = nullptr;
    if (torch.aoti_torch_get_dtype(handle_, &dtype_) != 0 ||
        torch.aoti_torch_get_device_type(handle_, &device_type) != 0 ||
        torch.aoti_torch_get_device_index(handle_, &device_index) != 0 ||
        torch.aoti_torch_get_dim(handle_, &its_ndim) != 0 || torch.aoti_torch_get_sizes(handle_, &shape) != 0 ||
        torch.aoti_torch_get_strides(handle_, &stride) != 0 ||
        torch.aoti_torch_get_data_ptr(handle_, &view_.data) != 0) {
      torch_failed(std::string(name) + " is no tensor with memory of its own; torch's log says why");
    }
    view_.dtype = library_dtype();
    if (view_.dtype == 0) {
      throw std::runtime_error(std::string(name) +
                               ": allowed element types: float16, bfloat16, float32 (HATTN_ERROR_DTYPE)");
    }
    if (device_type != state->cuda && device_type != state->cpu) {
      throw std::runtime_error(std::string(name) + ": allowed devices: cpu, cuda (HATTN_ERROR_DEVICE)");
    }
    if (its_ndim != ndim) {
      throw std::runtime_error(std::string(name) + ": " + std::to_string(its_ndim) + " dimensions; allowed: " +
                               std::to_string(ndim) + ", " + dimensions + " (HATTN_ERROR_SHAPE)");
    }
    view_.device = device_type == state->cuda ? device_index : HATTN_CPU;
    view_.ndim = ndim;
    std::memcpy(view_.shape, shape, sizeof(int64_t) * ndim);
    std::memcpy(view_.stride, stride, sizeof(int64_t) * ndim);
    // A dimension of one element may have any stride in torch. The library wants the last one to be 1 all the same.
    if (shape[ndim - 1] == 1) view_.stride[ndim - 1] = 1;
  }

  // Replaces a gradient that the library cannot read by a dense copy. Nobody chose how a gradient lies in memory: the
  // one of o.sum() has strides of 0.
  void make_readable() {
    if (readable()) return;
    Tensor copy = empty_like();
    if (state->torch.aoti_torch_copy_(copy.handle_, handle_, 0) != 0)
      torch_failed("torch could not copy a gradient; its log says why");
    *this = std::move(copy);
  }

  explicit operator bool() const { return handle_ != nullptr; }

  // Copies `count` integers of a dense tensor of the CPU. Says `refusal` if it is none of that size. Copies nothing of
  // a tensor without elements: autograd saves one where there is no tensor.
  void read(int32_t dtype, int64_t* into, int64_t count, const char* refusal) const {
    const Torch& torch = state->torch;
    int32_t its_dtype = 0, device_type = 0;
    int64_t elements = 0, ndim = 0, *shape = nullptr, *stride = nullptr;
    void* data = nullptr;
    if (torch.aoti_torch_get_numel(handle_, &elements) == 0 && elements == 0) return;
    if (torch.aoti_torch_get_dtype(handle_, &its_dtype) != 0 ||
        torch.aoti_torch_get_device_type(handle_, &device_type) != 0 || torch.aoti_torch_get_dim(handle_, &ndim) != 0 ||
        torch.aoti_torch_get_sizes(handle_, &shape) != 0 || torch.aoti_torch_get_strides(handle_, &stride) != 0 ||
        torch.aoti_torch_get_data_ptr(handle_, &data) != 0 || its_dtype != dtype || device_type != state->cpu ||
        ndim != 1 || shape[0] != count || stride[0] != 1) {
      throw std::runtime_error(std::string(refusal) + " (HATTN_ERROR_ARGUMENT)");
    }
    std::memcpy(into, data, sizeof(int64_t) * count);
  }

  // Gives the tensor to torch.
  StableValue release() {
    StableValue value = reinterpret_cast<StableValue>(handle_);
    handle_ = nullptr;
    return value;
  }

 private:
  hattn_dtype library_dtype() const {
    return dtype_ == state->bf16 ? HATTN_BF16 : dtype_ == state->f16 ? HATTN_F16 : dtype_ == state->f32 ? HATTN_F32 : 0;
  }

  bool readable() const {
    const int32_t last = view_.ndim - 1;
    if (view_.stride[last] != 1) return false;
    // A GPU's kernels copy tensors of 4 dimensions in units of 16 bytes.
    const bool units = view_.ndim == 4 && view_.device != HATTN_CPU;
    const int64_t unit = view_.dtype == HATTN_F32 ? 4 : 8;
    if (units && reinterpret_cast<uintptr_t>(view_.data) % 16 != 0) return false;
    for (int32_t i = 0; i < last; ++i) {
      if (view_.shape[i] > 1 && (view_.stride[i] <= 0 || (units && view_.stride[i] % unit != 0))) return false;
    }
    return true;
  }

  TensorHandle handle_ = nullptr;
  hattn_tensor view_ = HATTN_TENSOR_INIT;
  int32_t dtype_ = 0;
};

// Takes the arguments of a call from the stack, in the order of the schema.
//
// A call owns its arguments. So all of them are taken before anything can throw, and described after that.
class Arguments {
 public:
  explicit Arguments(StableValue* stack) : next_(stack) {}
  Tensor tensor() { return Tensor(reinterpret_cast<TensorHandle>(*next_++)); }
  Tensor optional_tensor() {
    // The value is in memory of its own, which was handed over with it.
    std::unique_ptr<StableValue> value(reinterpret_cast<StableValue*>(*next_++));
    return value == nullptr ? Tensor() : Tensor(reinterpret_cast<TensorHandle>(*value));
  }
  int64_t integer() { return static_cast<int64_t>(*next_++); }
  bool boolean() { return (*next_++ & 0xff) != 0; }
  double real() { return real_of(*next_++); }
  double optional_real(double otherwise) {
    std::unique_ptr<StableValue> value(reinterpret_cast<StableValue*>(*next_++));
    return value == nullptr ? otherwise : real_of(*value);
  }

 private:
  static double real_of(StableValue bits) {
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  StableValue* next_;
};

const char* const kOrder = "[batch, seqlen, heads, head_dim]";
const char* const kOrderOfLse = "[batch, heads, seqlen]";
const char* const kOrderOfSinks = "[heads]";

// Scale, mask and margin in the ABI's terms.
struct Numbers {
  float scale;
  int64_t others[5];  // mask, corner, window_left, window_right, sm_margin

  // Takes all but the margin.
  explicit Numbers(Arguments& arguments) : scale(static_cast<float>(arguments.real())), others{} {
    for (int i = 0; i < 4; ++i) others[i] = arguments.integer();
  }
  Numbers(double scale, bool causal)
      : scale(static_cast<float>(scale)),
        others{causal ? HATTN_MASK_CAUSAL : HATTN_MASK_FULL, HATTN_BOTTOM_RIGHT, 0, 0, 0} {}

  // The margin as the ABI has it. One that does not fit becomes the nearest that does, which no GPU has.
  int32_t sm_margin() const {
    const int64_t margin = others[4];
    return static_cast<int32_t>(margin < INT32_MIN ? INT32_MIN : margin > INT32_MAX ? INT32_MAX : margin);
  }
};

// The fields that both passes' problems share. Describes q, k and v.
template <typename Problem>
Problem problem_of(Tensor& q, Tensor& k, Tensor& v, const Numbers& numbers, Problem problem) {
  q.describe(4, "q", kOrder);
  k.describe(4, "k", kOrder);
  v.describe(4, "v", kOrder);
  problem.dtype = q->dtype;
  problem.batch = q->shape[0];
  problem.seqlen_q = q->shape[1];
  problem.seqlen_kv = k->shape[1];
  problem.heads_q = q->shape[2];
  problem.heads_kv = k->shape[2];
  problem.head_dim_qk = q->shape[3];
  problem.head_dim_vo = v->shape[3];
  problem.softmax_scale = numbers.scale;
  problem.mask = static_cast<hattn_mask>(numbers.others[0]);
  problem.corner = static_cast<hattn_corner>(numbers.others[1]);
  problem.window_left = numbers.others[2];
  problem.window_right = numbers.others[3];
  problem.sm_margin = numbers.sm_margin();
  return problem;
}

// Runs a plan with a workspace on the device's current stream.
template <typename Problem, typename Args>
void run(const HeldPlan<Problem>& plan, hattn_device device, Args& args) {
  void* stream = nullptr;
  if (device != HATTN_CPU) {
    const auto current_stream = state->torch.aoti_torch_get_current_cuda_stream;
    if (current_stream == nullptr || current_stream(device, &stream) != 0)
      torch_failed("torch has no current CUDA stream");
  }
  Tensor workspace;
  if (const int64_t bytes = static_cast<int64_t>(plan->workspace_bytes())) {
    workspace = Tensor::empty(1, &bytes, state->u8, device);
    args.workspace = workspace->data;
    args.workspace_bytes = static_cast<size_t>(bytes);
  }
  plan->run(args, stream);
}

// Refuses what has no gradients. Before the forward pass, which some devices compute at more head dims: a program that
// trains learns it here, and not after a forward pass of the whole model.
void require_gradients(Tensor& q, Tensor& k, Tensor& v, const Numbers& numbers) {
  hattn_backward_problem problem = problem_of(q, k, v, numbers, hattn_backward_problem HATTN_BACKWARD_PROBLEM_INIT);
  problem.deterministic = state->torch.deterministic();
  try {
    state->backward_plans.get(problem, q->device);
  } catch (const std::runtime_error& refusal) {
    // The status's name stays at the end. `_torch.py` says the same.
    std::string text = refusal.what();
    const size_t end = text.rfind(" (HATTN_ERROR_UNSUPPORTED");
    if (end != std::string::npos) text.insert(end, ". Without gradients, as under torch.no_grad(), it is computed");
    throw std::runtime_error(text);
  }
}

// `sinks`: the attention sinks, or no tensor.
void forward(Tensor q, Tensor k, Tensor v, Tensor sinks, const Numbers& numbers, bool with_lse, bool for_gradients,
             StableValue* results) {
  hattn_forward_problem problem = problem_of(q, k, v, numbers, hattn_forward_problem HATTN_FORWARD_PROBLEM_INIT);
  problem.lse = with_lse;
  if (sinks) {
    sinks.describe(1, "sinks", kOrderOfSinks);
    problem.sinks = sinks->dtype;
  }
  const auto plan = state->forward_plans.get(problem, q->device);
  if (for_gradients && !plan->has_gradients.load(std::memory_order_relaxed)) {
    require_gradients(q, k, v, numbers);
    plan->has_gradients.store(true, std::memory_order_relaxed);
  }
  const int64_t o_shape[4] = {problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_vo};
  Tensor o = Tensor::empty(4, o_shape, q.torch_dtype(), q->device), lse;
  if (with_lse) {
    const int64_t lse_shape[3] = {problem.batch, problem.heads_q, problem.seqlen_q};
    lse = Tensor::empty(3, lse_shape, state->f32, q->device);
  }
  hattn_forward_args args = HATTN_FORWARD_ARGS_INIT;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.o = o.view();
  args.lse = lse.view();
  args.sinks = sinks.view();
  run(plan, q->device, args);
  results[0] = o.release();
  if (with_lse) results[1] = lse.release();
}

// `sinks`: the attention sinks, whose gradient is then the fourth result, or no tensor.
void backward(Tensor d_o, Tensor d_lse, Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor o, Tensor lse,
              const Numbers& numbers, bool deterministic, StableValue* results) {
  hattn_backward_problem problem = problem_of(q, k, v, numbers, hattn_backward_problem HATTN_BACKWARD_PROBLEM_INIT);
  problem.deterministic = deterministic;
  problem.d_lse = d_lse.view() != nullptr;
  o.describe(4, "o", kOrder);
  lse.describe(3, "lse", kOrderOfLse);
  d_o.describe(4, "d_o", kOrder);
  d_o.make_readable();
  if (problem.d_lse != 0) {
    d_lse.describe(3, "d_lse", kOrderOfLse);
    d_lse.make_readable();
  }
  Tensor d_sinks;
  if (sinks) {
    sinks.describe(1, "sinks", kOrderOfSinks);
    problem.sinks = sinks->dtype;
    problem.d_sinks = 1;
    d_sinks = Tensor::empty(1, sinks->shape, state->f32, q->device);
  }
  Tensor d_q = q.empty_like(), d_k = k.empty_like(), d_v = v.empty_like();
  hattn_backward_args args = HATTN_BACKWARD_ARGS_INIT;
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.o = o.view();
  args.lse = lse.view();
  args.d_o = d_o.view();
  args.d_lse = d_lse.view();
  args.d_q = d_q.view();
  args.d_k = d_k.view();
  args.d_v = d_v.view();
  args.sinks = sinks.view();
  args.d_sinks = d_sinks.view();
  run(state->backward_plans.get(problem, q->device), q->device, args);
  results[0] = d_q.release();
  results[1] = d_k.release();
  results[2] = d_v.release();
  if (d_sinks) results[3] = d_sinks.release();
}

void forward_kernel(StableValue* stack, bool with_lse) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  Numbers numbers(arguments);
  numbers.others[4] = arguments.integer();
  forward(std::move(q), std::move(k), std::move(v), Tensor(), numbers, with_lse, false, stack);
}
void plain_forward_kernel(StableValue* stack, uint64_t, uint64_t) { forward_kernel(stack, false); }
void forward_lse_kernel(StableValue* stack, uint64_t, uint64_t) { forward_kernel(stack, true); }

void forward_sinks_kernel(StableValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), sinks = arguments.tensor();
  Numbers numbers(arguments);
  numbers.others[4] = arguments.integer();
  forward(std::move(q), std::move(k), std::move(v), std::move(sinks), numbers, true, false, stack);
}

void any_backward_kernel(StableValue* stack, bool with_sinks) {
  Arguments arguments(stack);
  Tensor d_o = arguments.tensor(), d_lse = arguments.optional_tensor();
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor(), sinks;
  if (with_sinks) sinks = arguments.tensor();
  Tensor o = arguments.tensor(), lse = arguments.tensor();
  Numbers numbers(arguments);
  const bool deterministic = arguments.boolean();
  numbers.others[4] = arguments.integer();
  backward(std::move(d_o), std::move(d_lse), std::move(q), std::move(k), std::move(v), std::move(sinks), std::move(o),
           std::move(lse), numbers, deterministic, stack);
}
void backward_kernel(StableValue* stack, uint64_t, uint64_t) { any_backward_kernel(stack, false); }
void backward_sinks_kernel(StableValue* stack, uint64_t, uint64_t) { any_backward_kernel(stack, true); }

// The arguments of torch's own op after its tensors: dropout_p, is_causal, attn_mask, scale. The package gives mask and
// margin as attn_mask, if is_causal cannot say them.
Numbers numbers_of_recorded(Arguments& arguments) {
  const double dropout = arguments.real();
  const bool causal = arguments.boolean();
  Tensor mask = arguments.optional_tensor();
  Numbers numbers(arguments.optional_real(0), causal);
  if (dropout != 0) throw std::runtime_error("dropout_p is not 0; allowed: 0 (HATTN_ERROR_VALUE)");
  if (mask) mask.read(state->i64, numbers.others, 5, "attn_mask: not what hopper_attention.attention() gives");
  return numbers;
}

void recorded_forward_kernel(StableValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  const Numbers numbers = numbers_of_recorded(arguments);
  // Without gradients nobody needs the log-sum-exp. The op has to give some tensor.
  const bool with_lse = state->torch.aoti_torch_grad_mode_is_enabled();
  forward(std::move(q), std::move(k), std::move(v), Tensor(), numbers, with_lse, with_lse, stack);
  if (!with_lse) stack[1] = Tensor::again(state->nothing).release();
}

void recorded_backward_kernel(StableValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor d_o = arguments.tensor(), q = arguments.tensor(), k = arguments.tensor(), v = arguments.tensor();
  Tensor o = arguments.tensor(), lse = arguments.tensor();
  const Numbers numbers = numbers_of_recorded(arguments);
  const bool deterministic = state->torch.deterministic();
  backward(std::move(d_o), Tensor(), std::move(q), std::move(k), std::move(v), Tensor(), std::move(o), std::move(lse),
           numbers, deterministic, stack);
}

void register_kernels(const Torch& torch) {
  for (const char* key : {"CPU", "CUDA"}) {
    // Never deleted: the kernels stay until the process ends.
    LibraryHandle library = nullptr;
    if (torch.aoti_torch_library_init_impl("hopper_attention", key, "hopper_attention/_torch_op.so", 0, &library) !=
            0 ||
        torch.aoti_torch_library_impl(library, "forward", plain_forward_kernel) != 0 ||
        torch.aoti_torch_library_impl(library, "forward_lse", forward_lse_kernel) != 0 ||
        torch.aoti_torch_library_impl(library, "backward", backward_kernel) != 0 ||
        torch.aoti_torch_library_impl(library, "forward_sinks", forward_sinks_kernel) != 0 ||
        torch.aoti_torch_library_impl(library, "backward_sinks", backward_sinks_kernel) != 0) {
      torch_failed(std::string("torch refused the kernels for ") + key + "; its log says why");
    }
  }
}

// A call of torch's op _scaled_dot_product_flash_attention_for_cpu is recorded by autograd without any Python, and its
// gradient is another op. Neither has a kernel for CUDA. So the package gives both one.
void register_recorded(const char* key) {
  if (state == nullptr) throw std::runtime_error("hattn_torch_register comes first");
  const Torch& torch = state->torch;
  if (!torch.tells_deterministic()) throw std::runtime_error("torch does not say whether algorithms are deterministic");
  if (state->nothing == nullptr) {
    const int64_t none = 0;
    state->nothing = reinterpret_cast<TensorHandle>(Tensor::empty(1, &none, state->f32, HATTN_CPU).release());
  }
  // Never deleted, as above.
  LibraryHandle library = nullptr;
  const std::string name = "_scaled_dot_product_flash_attention_for_cpu";
  if (torch.aoti_torch_library_init_impl("aten", key, "hopper_attention/_torch_op.so", 0, &library) != 0 ||
      torch.aoti_torch_library_impl(library, name.c_str(), recorded_forward_kernel) != 0 ||
      torch.aoti_torch_library_impl(library, (name + "_backward").c_str(), recorded_backward_kernel) != 0) {
    torch_failed("torch refused the kernels of aten::" + name + "; its log says why");
  }
}

// Registrations come one at a time.
std::mutex registering;

int failed(const std::exception& failure, char* error, size_t capacity) {
  if (capacity > 0) std::snprintf(error, capacity, "%s", failure.what());
  return 1;
}

}  // namespace
}  // namespace hattn_torch

// Registers the kernels, once in a process. `library` is the path of libhopper_attention.so. The ops must have been
// defined.
//
// Returns 0, also when they are registered already with this library. Otherwise 1, and up to `capacity` bytes of
// `error`, with a final 0, say why.
extern "C" __attribute__((visibility("default"))) int hattn_torch_register(const char* library, char* error,
                                                                           size_t capacity) {
  using namespace hattn_torch;
  const std::lock_guard<std::mutex> lock(registering);
  try {
    if (state != nullptr) {
      if (state->path == library) return 0;
      throw std::runtime_error("the ops are registered with " + state->path + "; not again with " + library);
    }
    auto made = std::make_unique<State>(library);
    state = made.get();
    try {
      register_kernels(state->torch);
    } catch (...) {
      state = nullptr;
      throw;
    }
    made.release();
    return 0;
  } catch (const std::exception& failure) {
    return failed(failure, error, capacity);
  }
}

// Registers the kernels of the op that autograd records for a dispatch key, which is "CUDA" but in tests. The package
// has made sure that the op is as this file knows it, and has no kernel for the key. Returns as the function above.
extern "C" __attribute__((visibility("default"))) int hattn_torch_register_recorded(const char* key, char* error,
                                                                                    size_t capacity) {
  using namespace hattn_torch;
  const std::lock_guard<std::mutex> lock(registering);
  try {
    register_recorded(key);
    return 0;
  } catch (const std::exception& failure) {
    return failed(failure, error, capacity);
  }
}
