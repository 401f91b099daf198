// Hopper Attention for C++17: hopper_attention.h with RAII, typed tensor views and exceptions. Header-only. It needs
// the standard library and the C header, and adds no symbol to the library. The C header says more about each option.
//
//   hattn::ForwardProblem problem(hattn::DType::F32);
//   problem.batch(2).seqlens(512, 512).heads(8, 2).head_dims(64, 64).causal();
//   hattn::ForwardPlan plan(problem, hattn::Device::cpu());
//
//   hattn::ForwardArgs args;
//   args.q = hattn::ConstTensorView::contiguous(q, hattn::Device::cpu(), problem.q_shape());
//   args.k = hattn::ConstTensorView::contiguous(k, hattn::Device::cpu(), problem.k_shape());
//   args.v = hattn::ConstTensorView::contiguous(v, hattn::Device::cpu(), problem.v_shape());
//   args.o = hattn::TensorView::contiguous(o, hattn::Device::cpu(), problem.o_shape());
//   plan.run(args, nullptr);
//
// BackwardProblem(problem), BackwardPlan and BackwardArgs do the same for the gradients.
//
// Errors: a call that fails throws hattn::Error. Each function that throws has a twin that does not. The twin of a
// constructor is create. Other twins begin with try_, such as try_run. A twin returns a Status and writes its result
// through a reference. With -fno-exceptions, or with HATTN_NO_EXCEPTIONS defined, there are only the twins. A call that
// refuses its arguments launches and writes nothing.
//
// Ownership: views, problems and arguments own nothing. Memory, streams and workspaces belong to the caller.
#ifndef HOPPER_ATTENTION_HPP
#define HOPPER_ATTENTION_HPP

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "hopper_attention.h"

#if !defined(HATTN_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define HATTN_NO_EXCEPTIONS 1
#endif

#ifndef HATTN_NO_EXCEPTIONS
#include <stdexcept>
#include <string>
#endif

static_assert(HATTN_ABI_VERSION == 1, "hopper_attention.hpp and hopper_attention.h are of different versions");

// The inline namespace of all classes and functions here, such as v0_2 or v0_2_noexcept. It follows from the version in
// the C header. All C++ headers use this macro.
//
// - A minor version may add members to a class.
// - Without exceptions, classes have fewer members.
//
// Object files of different versions and of both kinds may be linked into one program: each has classes of its own. An
// object that is passed from one to the other is a link error.
#define HATTN_DETAIL_VERSION_OF(major, minor, kind) v##major##_##minor##kind
#define HATTN_DETAIL_VERSION(major, minor, kind) HATTN_DETAIL_VERSION_OF(major, minor, kind)
#ifdef HATTN_NO_EXCEPTIONS
#define HATTN_DETAIL_NAMESPACE HATTN_DETAIL_VERSION(HATTN_VERSION_MAJOR, HATTN_VERSION_MINOR, _noexcept)
#else
#define HATTN_DETAIL_NAMESPACE HATTN_DETAIL_VERSION(HATTN_VERSION_MAJOR, HATTN_VERSION_MINOR, )
#endif

namespace hattn {
inline namespace HATTN_DETAIL_NAMESPACE {

// How a call ended. last_error() is the text of a failure.
enum class Status : hattn_status {
  Ok = HATTN_OK,
  Argument = HATTN_ERROR_ARGUMENT,        // a null pointer, or an unknown constant
  Abi = HATTN_ERROR_ABI,                  // library and header have different versions
  Shape = HATTN_ERROR_SHAPE,              // a tensor has another shape than the problem says
  Layout = HATTN_ERROR_LAYOUT,            // address, alignment, strides, overlap
  Dtype = HATTN_ERROR_DTYPE,              // an element type that is not allowed here
  Value = HATTN_ERROR_VALUE,              // a number out of range, or a tensor missing or not wanted
  Unsupported = HATTN_ERROR_UNSUPPORTED,  // a valid problem without a kernel on this device
  Workspace = HATTN_ERROR_WORKSPACE,      // the workspace is null or too small
  Device = HATTN_ERROR_DEVICE,            // a tensor or the stream is on another device
  Capture = HATTN_ERROR_CAPTURE,          // not possible while the stream is captured
  Driver = HATTN_ERROR_DRIVER,            // the CUDA driver returned an error
  Launch = HATTN_ERROR_LAUNCH,            // a kernel could not be loaded or launched
  NoDevice = HATTN_ERROR_NO_DEVICE,       // no such GPU, no driver, or no CUDA in the library
  Internal = HATTN_ERROR_INTERNAL,        // a bug of the library
  Memory = HATTN_ERROR_MEMORY,            // no memory for the buffers of a run on the CPU
  Threads = HATTN_ERROR_THREADS,          // the threads of the CPU backend cannot be started
};

constexpr bool ok(Status status) noexcept { return status == Status::Ok; }

// The name of a status, such as "HATTN_ERROR_SHAPE".
inline const char* name(Status status) noexcept { return hattn_status_name(static_cast<hattn_status>(status)); }

namespace detail {

// The text of this thread's last failure, if a C++ header refused the call itself (own). Otherwise the library has it.
struct Note {
  bool own;
  char text[512];
};

inline Note& note() noexcept {
  thread_local Note note{};
  return note;
}

inline Status from_library(hattn_status status) noexcept {
  if (status != HATTN_OK) note().own = false;
  return static_cast<Status>(status);
}

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
inline Status
refuse(Status status, const char* format, ...) noexcept {
  Note& here = note();
  here.own = true;
  std::va_list values;
  va_start(values, format);
  static_cast<void>(std::vsnprintf(here.text, sizeof(here.text), format, values));
  va_end(values);
  return status;
}

// A struct of the C header with its size and version filled in. Everything else is 0.
template <class T>
constexpr T tagged() noexcept {
  T empty{};
  empty.struct_size = static_cast<std::uint32_t>(sizeof(T));
  empty.abi_version = HATTN_ABI_VERSION;
  return empty;
}

// The C functions of all passes under one name each, so that templates can call them. For the forward pass this makes
//   hattn_status c_supported(const hattn_forward_problem*, hattn_device)    which calls hattn_forward_supported
// and c_create, c_destroy, c_describe and c_workspace_size. They are inline: a program that does not use a pass needs
// none of its symbols.
#define HATTN_DETAIL_PASS(pass)                                                                          \
  inline hattn_status c_supported(const hattn_##pass##_problem* problem, hattn_device device) noexcept { \
    return hattn_##pass##_supported(problem, device);                                                    \
  }                                                                                                      \
  inline hattn_status c_create(const hattn_##pass##_problem* problem, hattn_device device,               \
                               hattn_##pass##_plan** plan) noexcept {                                    \
    return hattn_##pass##_plan_create(problem, device, plan);                                            \
  }                                                                                                      \
  inline void c_destroy(hattn_##pass##_plan* plan) noexcept { hattn_##pass##_plan_destroy(plan); }       \
  inline hattn_status c_describe(const hattn_##pass##_plan* plan, char* text, std::size_t capacity,      \
                                 std::size_t* length) noexcept {                                         \
    return hattn_##pass##_plan_describe(plan, text, capacity, length);                                   \
  }                                                                                                      \
  inline hattn_status c_workspace_size(const hattn_##pass##_plan* plan, std::size_t* bytes) noexcept {   \
    return hattn_##pass##_plan_workspace_size(plan, bytes);                                              \
  }
HATTN_DETAIL_PASS(forward)
HATTN_DETAIL_PASS(backward)
HATTN_DETAIL_PASS(quantize)
#undef HATTN_DETAIL_PASS

inline void c_destroy(hattn_tuning* tuning) noexcept { hattn_tuning_destroy(tuning); }

struct Destroy {
  template <class C>
  void operator()(C* owned) const noexcept {
    c_destroy(owned);
  }
};

// Whether the library that was linked or loaded has the ABI version of this header. The library is asked once.
inline Status check_abi() noexcept {
  static const std::uint32_t found = hattn_abi_version();
  if (found == HATTN_ABI_VERSION) return Status::Ok;
  return refuse(Status::Abi, "library: ABI version %u; allowed: %u, that of hopper_attention.h",
                static_cast<unsigned>(found), static_cast<unsigned>(HATTN_ABI_VERSION));
}

}  // namespace detail

// The text of this thread's last failure: what was wrong, what it was, and what is allowed. "" before the first
// failure. Valid until the thread's next failure.
inline const char* last_error() noexcept { return detail::note().own ? detail::note().text : hattn_last_error(); }

// The version of the library, such as "0.2.0".
inline const char* version() noexcept { return hattn_version(); }

#ifndef HATTN_NO_EXCEPTIONS
// A call that failed. what() is the name of the status and last_error().
class Error : public std::runtime_error {
 public:
  Error(Status status, const char* text)
      : std::runtime_error(std::string(hattn::name(status)) + ": " + text), status_(status) {}

  Status status() const noexcept { return status_; }

 private:
  Status status_;
};

namespace detail {
inline void check(Status status) {
  if (!ok(status)) throw Error(status, last_error());
}
}  // namespace detail
#endif

// Element types. GPUs compute F16, BF16 and E4M3. The CPU also computes F32.
enum class DType : hattn_dtype { F16 = HATTN_F16, BF16 = HATTN_BF16, F32 = HATTN_F32, E4M3 = HATTN_E4M3 };

// The DType of a C++ type. CUDA's types are known if their headers are included before this one. For types of your own:
//   template <> struct hattn::dtype_of<my::half> { static constexpr hattn::DType value = hattn::DType::F16; };
template <class T>
struct dtype_of;

template <>
struct dtype_of<float> : std::integral_constant<DType, DType::F32> {};
#ifdef __CUDA_FP16_TYPES_EXIST__
template <>
struct dtype_of<__half> : std::integral_constant<DType, DType::F16> {};
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
template <>
struct dtype_of<__nv_bfloat16> : std::integral_constant<DType, DType::BF16> {};
#endif
#ifdef __CUDA_FP8_TYPES_EXIST__
template <>
struct dtype_of<__nv_fp8_e4m3> : std::integral_constant<DType, DType::E4M3> {};
#endif

// The CPU, or a GPU by its ordinal, in the order of the CUDA driver and cudaSetDevice.
class Device {
 public:
  static constexpr Device cpu() noexcept { return Device(HATTN_CPU); }
  // A negative ordinal gives a device that every call refuses. It is not the CPU, whose number in C is -1.
  static constexpr Device cuda(int ordinal) noexcept {
    return Device(ordinal < 0 ? std::numeric_limits<hattn_device>::min() : ordinal);
  }

  constexpr bool is_cpu() const noexcept { return value_ == HATTN_CPU; }
  constexpr hattn_device c_value() const noexcept { return value_; }

  friend constexpr bool operator==(Device a, Device b) noexcept { return a.value_ == b.value_; }
  friend constexpr bool operator!=(Device a, Device b) noexcept { return a.value_ != b.value_; }

 private:
  explicit constexpr Device(hattn_device value) noexcept : value_(value) {}

  hattn_device value_;
};

// The number of GPUs that the CUDA driver shows. 0 without a driver. Creates no context.
[[nodiscard]] inline Status try_device_count(int& count) noexcept {
  if (const Status status = detail::check_abi(); !ok(status)) return status;
  std::int32_t found = 0;
  const Status status = detail::from_library(hattn_device_count(&found));
  if (ok(status)) count = found;
  return status;
}

#ifndef HATTN_NO_EXCEPTIONS
inline int device_count() {
  int count = 0;
  detail::check(try_device_count(count));
  return count;
}
#endif

// Sizes or strides of up to four dimensions, outermost first.
class Extents {
 public:
  // Q, K, V, O and their gradients.
  constexpr Extents(std::int64_t batch, std::int64_t seqlen, std::int64_t heads, std::int64_t head_dim) noexcept
      : size_(4), values_{batch, seqlen, heads, head_dim} {}

  // A log-sum-exp or its gradient. Also descale factors: [batch, heads, blocks].
  constexpr Extents(std::int64_t batch, std::int64_t heads, std::int64_t seqlen) noexcept
      : size_(3), values_{batch, heads, seqlen, 0} {}

  // Two dimensions, and one.
  constexpr Extents(std::int64_t rows, std::int64_t columns) noexcept : size_(2), values_{rows, columns, 0, 0} {}
  explicit constexpr Extents(std::int64_t size) noexcept : size_(1), values_{size, 0, 0, 0} {}
  // The first `count` of four values.
  constexpr Extents(std::int32_t count, const std::int64_t (&of)[4]) noexcept
      : size_(count), values_{of[0], of[1], of[2], of[3]} {}

  constexpr std::int32_t size() const noexcept { return size_; }
  constexpr std::int64_t operator[](std::int32_t axis) const noexcept { return values_[axis]; }
  constexpr const std::int64_t* begin() const noexcept { return values_; }
  constexpr const std::int64_t* end() const noexcept { return values_ + size_; }

  // The product of the sizes: the number of elements of a shape.
  constexpr std::int64_t elements() const noexcept {
    std::int64_t count = 1;
    for (const std::int64_t size : *this) count *= size;
    return count;
  }

 private:
  std::int32_t size_;
  std::int64_t values_[4];
};

// A tensor in memory of the caller: address, element type, device, shape and strides. It owns nothing, as std::span.
//
// - The order of the dimensions is fixed: [batch, seqlen, heads, head_dim]. A log-sum-exp is [batch, heads, seqlen].
// - Strides are in elements and give the order in memory. The innermost one is 1.
// - A view is not checked when it is made. The call that takes it checks it.
//
// A TensorView is written. A ConstTensorView is only read. The first converts to the second.
template <class Void>
class BasicTensorView {
  static_assert(std::is_void_v<Void>, "use TensorView or ConstTensorView");

 public:
  // No tensor. Every call refuses it.
  constexpr BasicTensorView() noexcept = default;

  // NOLINTNEXTLINE(google-explicit-constructor): as std::span<T> to std::span<const T>.
  template <class Other, class = std::enable_if_t<std::is_const_v<Void> && !std::is_same_v<Other, Void>>>
  constexpr BasicTensorView(const BasicTensorView<Other>& other) noexcept : tensor_(other.c_tensor()) {}

  // A row-major tensor without gaps.
  static constexpr BasicTensorView contiguous(Void* data, DType dtype, Device device, const Extents& shape) noexcept {
    return BasicTensorView(data, dtype, device, shape, compact(shape));
  }

  // A tensor with any strides, in elements.
  static constexpr BasicTensorView strided(Void* data, DType dtype, Device device, const Extents& shape,
                                           const Extents& stride) noexcept {
    return BasicTensorView(data, dtype, device, shape, stride);
  }

  // The same two, with the element type of the pointer.
  template <class T>
  static constexpr BasicTensorView contiguous(T* data, Device device, const Extents& shape) noexcept {
    return contiguous(checked(data), dtype_of<std::remove_cv_t<T>>::value, device, shape);
  }

  template <class T>
  static constexpr BasicTensorView strided(T* data, Device device, const Extents& shape,
                                           const Extents& stride) noexcept {
    return strided(checked(data), dtype_of<std::remove_cv_t<T>>::value, device, shape, stride);
  }

  // The strides of a row-major tensor without gaps. A stride that overflows becomes the largest int64, which the
  // library refuses.
  static constexpr Extents compact(const Extents& shape) noexcept {
    std::int64_t stride[4] = {1, 1, 1, 1};
    for (std::int32_t axis = shape.size() - 1; axis > 0; --axis) {
      // An empty dimension counts as 1. Otherwise the outer strides would be 0.
      const std::int64_t size = shape[axis] < 1 ? 1 : shape[axis];
      const bool fits = stride[axis] <= std::numeric_limits<std::int64_t>::max() / size;
      stride[axis - 1] = fits ? stride[axis] * size : std::numeric_limits<std::int64_t>::max();
    }
    return {shape.size(), stride};
  }

  // The same memory with two dimensions exchanged. For memory that is [batch, heads, seqlen, head_dim]:
  //   contiguous(p, device, {batch, heads, seqlen, head_dim}).transposed(1, 2)
  // An axis that does not exist gives a view that is no tensor.
  constexpr BasicTensorView transposed(int a, int b) const noexcept {
    if (a < 0 || b < 0 || a >= ndim() || b >= ndim()) return BasicTensorView();
    BasicTensorView other = *this;
    other.tensor_.shape[a] = tensor_.shape[b];
    other.tensor_.shape[b] = tensor_.shape[a];
    other.tensor_.stride[a] = tensor_.stride[b];
    other.tensor_.stride[b] = tensor_.stride[a];
    return other;
  }

  constexpr Void* data() const noexcept { return tensor_.data; }
  constexpr DType dtype() const noexcept { return static_cast<DType>(tensor_.dtype); }
  constexpr Device device() const noexcept {
    return tensor_.device == HATTN_CPU ? Device::cpu() : Device::cuda(tensor_.device);
  }
  constexpr int ndim() const noexcept { return tensor_.ndim; }
  constexpr std::int64_t shape(int axis) const noexcept { return tensor_.shape[axis]; }
  constexpr std::int64_t stride(int axis) const noexcept { return tensor_.stride[axis]; }

  // The struct that the C functions take.
  constexpr const hattn_tensor& c_tensor() const noexcept { return tensor_; }

 private:
  constexpr BasicTensorView(Void* data, DType dtype, Device device, const Extents& shape,
                            const Extents& stride) noexcept {
    // The C struct is the same for inputs and outputs. The library only reads inputs.
    tensor_.data = const_cast<void*>(data);
    tensor_.dtype = static_cast<hattn_dtype>(dtype);
    tensor_.device = device.c_value();
    // There must be as many strides as sizes. A tensor with 0 dimensions is refused.
    tensor_.ndim = shape.size() == stride.size() ? shape.size() : 0;
    for (std::int32_t axis = 0; axis < tensor_.ndim; ++axis) {
      tensor_.shape[axis] = shape[axis];
      tensor_.stride[axis] = stride[axis];
    }
  }

  template <class T>
  static constexpr Void* checked(T* data) noexcept {
    static_assert(std::is_convertible_v<T*, Void*>, "a TensorView is written: use ConstTensorView for const memory");
    return data;
  }

  hattn_tensor tensor_ = detail::tagged<hattn_tensor>();
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// Which keys a query attends to.
enum class Mask : hattn_mask { Full = HATTN_MASK_FULL, Causal = HATTN_MASK_CAUSAL, Window = HATTN_MASK_WINDOW };

// How causal masks and windows are aligned. The aligned key of query i has the number i + seqlen_kv - seqlen_q
// (BottomRight) or i (TopLeft).
enum class Corner : hattn_corner { BottomRight = HATTN_BOTTOM_RIGHT, TopLeft = HATTN_TOP_LEFT };

// The instruction set of the kernels that compute a problem. Own: the newest one that the GPU runs.
enum class Arch : hattn_arch { Own = HATTN_ARCH_OWN, Sm80 = HATTN_ARCH_SM80, Sm90 = HATTN_ARCH_SM90 };

// Which elements of Q, K and V of E4M3 share a descale factor.
// PerTensor: all. PerHead: those of a sequence and KV head. PerBlock: those of 128 rows of a head.
enum class Scaling : hattn_scaling {
  PerTensor = HATTN_PER_TENSOR,
  PerHead = HATTN_PER_HEAD,
  PerBlock = HATTN_PER_BLOCK
};

// No bound on this side of a window.
inline constexpr std::int64_t kUnbounded = HATTN_UNBOUNDED;

namespace detail {

// What the problems of both passes have in common. Self is the derived class.
template <class Self, class CProblem>
class Problem {
 public:
  constexpr DType dtype() const noexcept { return static_cast<DType>(problem_.dtype); }
  constexpr Extents q_shape() const noexcept {
    return {problem_.batch, problem_.seqlen_q, problem_.heads_q, problem_.head_dim_qk};
  }
  constexpr Extents k_shape() const noexcept {
    return {problem_.batch, problem_.seqlen_kv, problem_.heads_kv, problem_.head_dim_qk};
  }
  constexpr Extents v_shape() const noexcept {
    return {problem_.batch, problem_.seqlen_kv, problem_.heads_kv, problem_.head_dim_vo};
  }
  constexpr Extents o_shape() const noexcept {
    return {problem_.batch, problem_.seqlen_q, problem_.heads_q, problem_.head_dim_vo};
  }
  constexpr Extents lse_shape() const noexcept { return {problem_.batch, problem_.heads_q, problem_.seqlen_q}; }

  // Ok: the device computes the problem. Unsupported: there is no kernel. NoDevice: there is no such device. Any other
  // status says what is wrong with the problem. Creates no context, loads nothing and never throws.
  [[nodiscard]] Status supported(Device device) const noexcept {
    if (const Status status = check_abi(); !ok(status)) return status;
    return from_library(c_supported(&problem_, device.c_value()));
  }

  // The struct that the C functions take.
  constexpr const CProblem& c_problem() const noexcept { return problem_; }

 protected:
  constexpr Problem() noexcept = default;

  // Sets a field of problem_. A bool becomes 0 or 1, and an enum its C value.
  template <class Field, class Value>
  constexpr Self& set(Field& field, Value value) noexcept {
    field = static_cast<Field>(value);
    return static_cast<Self&>(*this);
  }

  CProblem problem_ = tagged<CProblem>();
};

}  // namespace detail

// A forward pass, as numbers: O = softmax(mask(softmax_scale * Q K^T)) V.
//
// Setters return the problem, so that they can be chained. Defaults: batch 1, a full mask, the scale
// 1 / sqrt(head_dim_qk), no optional output. Numbers are checked when the problem is used. Other sizes that were not
// set are refused then.
class ForwardProblem : public detail::Problem<ForwardProblem, hattn_forward_problem> {
 public:
  // The element type of Q, K and V. It is also that of O, unless it is E4M3 (see output).
  explicit constexpr ForwardProblem(DType dtype) noexcept {
    problem_.dtype = static_cast<hattn_dtype>(dtype);
    problem_.batch = 1;
    problem_.seqlen_q = problem_.seqlen_kv = HATTN_UNSET;
  }

  constexpr ForwardProblem& batch(std::int64_t sequences) noexcept { return set(problem_.batch, sequences); }

  constexpr ForwardProblem& seqlens(std::int64_t q, std::int64_t kv) noexcept {
    return set(problem_.seqlen_q, q).set(problem_.seqlen_kv, kv);
  }

  // q is a multiple of kv. Head h of Q reads head h / (q / kv) of K and V.
  constexpr ForwardProblem& heads(std::int64_t q, std::int64_t kv) noexcept {
    return set(problem_.heads_q, q).set(problem_.heads_kv, kv);
  }

  // qk: number of elements of a query and of a key. vo: number of elements of a value and of an output.
  constexpr ForwardProblem& head_dims(std::int64_t qk, std::int64_t vo) noexcept {
    return set(problem_.head_dim_qk, qk).set(problem_.head_dim_vo, vo);
  }

  // For Mask::Window, call window() instead: it also sets the bounds.
  constexpr ForwardProblem& mask(Mask mask) noexcept { return set(problem_.mask, mask); }

  // The keys up to the aligned key (Corner), with that key.
  constexpr ForwardProblem& causal(Corner corner = Corner::BottomRight) noexcept {
    return mask(Mask::Causal).corner(corner);
  }

  // The keys from `left` before the aligned key (Corner) to `right` after it, both included. kUnbounded: all of them.
  constexpr ForwardProblem& window(std::int64_t left, std::int64_t right,
                                   Corner corner = Corner::BottomRight) noexcept {
    return set(problem_.window_left, left).set(problem_.window_right, right).mask(Mask::Window).corner(corner);
  }

  constexpr ForwardProblem& corner(Corner corner) noexcept { return set(problem_.corner, corner); }

  // The factor on Q K^T, finite and above 0. 0 stands for 1 / sqrt(head_dim_qk).
  constexpr ForwardProblem& softmax_scale(float scale) noexcept { return set(problem_.softmax_scale, scale); }

  // Restricts plans to kernels of one instruction set. The CPU takes Arch::Own only.
  constexpr ForwardProblem& arch(Arch arch) noexcept { return set(problem_.arch, arch); }

  // Whether the log-sum-exp of each query is an output: natural logarithm, F32, [batch, heads_q, seqlen_q].
  constexpr ForwardProblem& lse(bool wanted) noexcept { return set(problem_.lse, wanted); }

  // The options from here on are for E4M3 operands only. hopper_attention_fp8.hpp makes such operands.

  // The element type of O: BF16 (the default), F16 or E4M3.
  constexpr ForwardProblem& output(DType dtype) noexcept { return set(problem_.output, dtype); }

  // Which elements share a descale factor. Default: PerTensor.
  constexpr ForwardProblem& scaling(Scaling scaling) noexcept { return set(problem_.scaling, scaling); }

  // Whether the largest magnitude of O, before scale_o and rounding, is an output: F32 [1].
  constexpr ForwardProblem& amax(bool wanted) noexcept { return set(problem_.amax, wanted); }

  // Allows f16 score accumulation on a GPU. It is fast if no stored element of Q and K is larger than 14 in magnitude.
  constexpr ForwardProblem& half_scores(bool wanted) noexcept { return set(problem_.half_scores, wanted); }
};

// The gradients of a forward pass with respect to Q, K and V, as numbers. dQ, dK, dV and dO (the gradient of the
// output) have the shapes of Q, K, V and O. Setters return the problem.
class BackwardProblem : public detail::Problem<BackwardProblem, hattn_backward_problem> {
 public:
  // The gradients of this forward pass. The log-sum-exp is an input, whether or not `forward` has lse(true). Defaults:
  // no gradient of the log-sum-exp, not deterministic.
  explicit constexpr BackwardProblem(const ForwardProblem& forward) noexcept {
    const hattn_forward_problem& of = forward.c_problem();
    problem_.dtype = of.dtype;
    problem_.mask = of.mask;
    problem_.corner = of.corner;
    problem_.batch = of.batch;
    problem_.seqlen_q = of.seqlen_q;
    problem_.seqlen_kv = of.seqlen_kv;
    problem_.heads_q = of.heads_q;
    problem_.heads_kv = of.heads_kv;
    problem_.head_dim_qk = of.head_dim_qk;
    problem_.head_dim_vo = of.head_dim_vo;
    problem_.window_left = of.window_left;
    problem_.window_right = of.window_right;
    problem_.softmax_scale = of.softmax_scale;
    problem_.arch = of.arch;
  }

  // Whether a gradient of the log-sum-exp is an input: F32, [batch, heads_q, seqlen_q].
  constexpr BackwardProblem& d_lse(bool given) noexcept { return set(problem_.d_lse, given); }

  // Whether the same inputs, plan and device always give the same bits. This may cost time on a GPU.
  constexpr BackwardProblem& deterministic(bool wanted) noexcept { return set(problem_.deterministic, wanted); }
};

// Scratch memory on the plan's device: at least plan.workspace_bytes() bytes, aligned to 16 bytes.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// What a forward pass reads (ConstTensorView) and writes (TensorView).
struct ForwardArgs {
  ConstTensorView q{};              // [batch, seqlen_q, heads_q, head_dim_qk]
  ConstTensorView k{};              // [batch, seqlen_kv, heads_kv, head_dim_qk]
  ConstTensorView v{};              // [batch, seqlen_kv, heads_kv, head_dim_vo]
  TensorView o{};                   // [batch, seqlen_q, heads_q, head_dim_vo]
  std::optional<TensorView> lse{};  // F32 [batch, heads_q, seqlen_q]; given exactly if the problem has lse(true)
  Workspace workspace{};
  // Descale factors: F32 [batch, heads, blocks]. Given exactly with E4M3 operands.
  std::optional<ConstTensorView> descale_q{}, descale_k{}, descale_v{};
  std::optional<ConstTensorView> scale_o{};  // F32 [1], the factor on O; given exactly with an output of E4M3
  std::optional<TensorView> amax{};  // F32 [1], the largest magnitude of O; given exactly if the problem has amax(true)
};

// What a backward pass reads and writes. Outputs are overwritten, not added to.
struct BackwardArgs {
  ConstTensorView q{};                     // [batch, seqlen_q, heads_q, head_dim_qk]
  ConstTensorView k{};                     // [batch, seqlen_kv, heads_kv, head_dim_qk]
  ConstTensorView v{};                     // [batch, seqlen_kv, heads_kv, head_dim_vo]
  ConstTensorView o{};                     // [batch, seqlen_q, heads_q, head_dim_vo], written by the forward pass
  ConstTensorView lse{};                   // F32 [batch, heads_q, seqlen_q], written by the forward pass
  ConstTensorView d_o{};                   // as o
  std::optional<ConstTensorView> d_lse{};  // as lse; given exactly if the problem has d_lse(true)
  TensorView d_q{};                        // as q
  TensorView d_k{};                        // as k, summed over the query heads that read a key
  TensorView d_v{};                        // as v, summed likewise
  Workspace workspace{};
};

namespace detail {

template <class View>
const hattn_tensor* c_tensor(const std::optional<View>& view) noexcept {
  return view ? &view->c_tensor() : nullptr;
}

// The C struct of a pass, with the arguments that both passes have filled in.
template <class C, class Args>
C c_args(const Args& args) noexcept {
  auto c = tagged<C>();
  c.q = &args.q.c_tensor();
  c.k = &args.k.c_tensor();
  c.v = &args.v.c_tensor();
  c.o = &args.o.c_tensor();
  c.workspace = args.workspace.data;
  c.workspace_bytes = args.workspace.bytes;
  return c;
}

// Owns a struct that the library made, such as a plan. Movable, not copyable.
template <class C>
class Owner {
 public:
  C* get() const noexcept { return owned_.get(); }
  explicit operator bool() const noexcept { return owned_ != nullptr; }

 protected:
  Owner() noexcept = default;

  // Takes ownership of what `make` writes to its argument. On failure this stays as it was.
  template <class Make>
  Status take(const Make& make) noexcept {
    if (const Status status = check_abi(); !ok(status)) return status;
    C* made = nullptr;
    const Status status = from_library(make(&made));
    if (ok(status)) owned_.reset(made);
    return status;
  }

  std::unique_ptr<C, Destroy> owned_{};
};

// What all plans have in common. Self is the derived class. It must have try_run.
template <class Self, class ItsProblem, class ItsArgs, class C>
class Plan : public Owner<C> {
 public:
#ifndef HATTN_NO_EXCEPTIONS
  // Chooses a kernel and, on a GPU, loads it.
  Plan(const ItsProblem& problem, Device device) { check(take_for(problem, device)); }
#endif

  // The same without exceptions. On failure `plan` stays as it was.
  [[nodiscard]] static Status create(const ItsProblem& problem, Device device, Self& plan) noexcept {
    return plan.take_for(problem, device);
  }

  // adopt takes ownership of a plan that C functions made. release gives ownership up.
  static Self adopt(C* plan) noexcept {
    Self owner;
    owner.owned_.reset(plan);
    return owner;
  }
  [[nodiscard]] C* release() noexcept { return this->owned_.release(); }

  // The size of the workspace in bytes. Runs that may overlap in time need one workspace each.
  [[nodiscard]] Status try_workspace_bytes(std::size_t& bytes) const noexcept {
    return from_library(c_workspace_size(this->get(), &bytes));
  }

  // Writes as much of the description as fits into `capacity` bytes, with a final 0. `length` becomes the length of the
  // whole text, without the 0.
  [[nodiscard]] Status try_describe(char* text, std::size_t capacity, std::size_t& length) const noexcept {
    return from_library(c_describe(this->get(), text, capacity, &length));
  }

#ifndef HATTN_NO_EXCEPTIONS
  std::size_t workspace_bytes() const {
    std::size_t bytes = 0;
    check(try_workspace_bytes(bytes));
    return bytes;
  }

  // What the plan computes, with which kernel, and in which order.
  std::string describe() const {
    std::size_t length = 0;
    check(try_describe(nullptr, 0, length));
    std::string text(length, '\0');
    check(try_describe(text.data(), length + 1, length));
    return text;
  }

  void run(const ItsArgs& args, CUstream_st* stream) const {
    check(static_cast<const Self&>(*this).try_run(args, stream));
  }
#endif

 protected:
  Plan() noexcept = default;

 private:
  Status take_for(const ItsProblem& problem, Device device) noexcept {
    const auto& c = problem.c_problem();
    return this->take([&](C** made) { return c_create(&c, device.c_value(), made); });
  }
};

}  // namespace detail

// Which kernel was measured to be the fastest, for each version of the library, card and problem. `hattn tune` writes
// it. Movable, not copyable. Calls refuse an empty one (default-constructed or moved from).
class Tuning : public detail::Owner<hattn_tuning> {
 public:
  Tuning() noexcept = default;

#ifndef HATTN_NO_EXCEPTIONS
  // Reads the text that `hattn tune` wrote. The caller reads the file.
  explicit Tuning(const std::string& text) { detail::check(create(text.data(), text.size(), *this)); }
#endif

  // The same without exceptions. On failure `tuning` stays as it was.
  [[nodiscard]] static Status create(const char* text, std::size_t length, Tuning& tuning) noexcept {
    return tuning.take([&](hattn_tuning** made) { return hattn_tuning_create(text, length, made); });
  }
};

// How a problem is computed on a device. A plan is made once and run as often as wanted, by any threads and on any
// streams at once. Movable, not copyable. Calls refuse an empty plan (default-constructed or moved from).
//
// Inherited from detail::Plan: ForwardPlan(problem, device), create, run, workspace_bytes, describe, adopt, release.
class ForwardPlan : public detail::Plan<ForwardPlan, ForwardProblem, ForwardArgs, hattn_forward_plan> {
 public:
  using Plan::create;
  using Plan::Plan;
  ForwardPlan() noexcept = default;

#ifndef HATTN_NO_EXCEPTIONS
  // Uses the kernel that the tuning has for the problem on this card, if it has one.
  ForwardPlan(const ForwardProblem& problem, Device device, const Tuning& tuning) {
    detail::check(create(problem, device, tuning, *this));
  }
#endif

  // The same without exceptions. On failure `plan` stays as it was.
  [[nodiscard]] static Status create(const ForwardProblem& problem, Device device, const Tuning& tuning,
                                     ForwardPlan& plan) noexcept {
    return plan.take([&](hattn_forward_plan** made) {
      return hattn_forward_plan_create_tuned(&problem.c_problem(), device.c_value(), tuning.get(), made);
    });
  }

  // Computes the problem. On a GPU the work is enqueued on the stream (null: the default stream). The call allocates
  // nothing and waits for nothing. Tensors and workspace must stay valid until the work is done. On the CPU the work is
  // done on return, and the stream is not used.
  [[nodiscard]] Status try_run(const ForwardArgs& args, CUstream_st* stream) const noexcept {
    auto c = detail::c_args<hattn_forward_args>(args);
    c.lse = detail::c_tensor(args.lse);
    c.descale_q = detail::c_tensor(args.descale_q);
    c.descale_k = detail::c_tensor(args.descale_k);
    c.descale_v = detail::c_tensor(args.descale_v);
    c.scale_o = detail::c_tensor(args.scale_o);
    c.amax = detail::c_tensor(args.amax);
    return detail::from_library(hattn_forward_run(get(), &c, stream));
  }
};

// How the gradients of a problem are computed on a device. Used as ForwardPlan.
class BackwardPlan : public detail::Plan<BackwardPlan, BackwardProblem, BackwardArgs, hattn_backward_plan> {
 public:
  using Plan::Plan;
  BackwardPlan() noexcept = default;

  // Computes the gradients. Rules as for ForwardPlan::try_run.
  [[nodiscard]] Status try_run(const BackwardArgs& args, CUstream_st* stream) const noexcept {
    auto c = detail::c_args<hattn_backward_args>(args);
    c.lse = &args.lse.c_tensor();
    c.d_o = &args.d_o.c_tensor();
    c.d_lse = detail::c_tensor(args.d_lse);
    c.d_q = &args.d_q.c_tensor();
    c.d_k = &args.d_k.c_tensor();
    c.d_v = &args.d_v.c_tensor();
    return detail::from_library(hattn_backward_run(get(), &c, stream));
  }
};

}  // namespace HATTN_DETAIL_NAMESPACE
}  // namespace hattn

#endif  // HOPPER_ATTENTION_HPP
