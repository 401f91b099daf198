// Hopper Attention for C++17: hopper_attention.h with RAII, typed tensor views and exceptions. Header-only; it needs
// the standard library and the C header, and adds no symbol to the library.
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
// Whatever fails throws hattn::Error. Each function that throws has a twin that does not: it returns a Status, takes
// its result as a reference, and is called try_ or create. With -fno-exceptions, or with HATTN_NO_EXCEPTIONS defined,
// only the twins are there. Nothing is launched or written by a call that is refused.
//
// Views, problems and arguments are values without ownership: memory, streams and workspaces stay the caller's.
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

// Classes have fewer members without exceptions, so they are other classes there: objects of both kinds may be linked
// into one program, and a view that is passed between them does not link instead of going wrong.
#ifdef HATTN_NO_EXCEPTIONS
#define HATTN_DETAIL_NAMESPACE v1_noexcept
#else
#define HATTN_DETAIL_NAMESPACE v1
#endif

namespace hattn {
inline namespace HATTN_DETAIL_NAMESPACE {

// How a call went. The text that goes with a failure is last_error().
enum class Status : hattn_status {
  Ok = HATTN_OK,
  Argument = HATTN_ERROR_ARGUMENT,        // a null pointer, or a number that names nothing
  Abi = HATTN_ERROR_ABI,                  // library and header do not fit each other
  Shape = HATTN_ERROR_SHAPE,              // not the shape that the problem has
  Layout = HATTN_ERROR_LAYOUT,            // address, alignment, strides, overlap
  Dtype = HATTN_ERROR_DTYPE,              // not an element type for this place
  Value = HATTN_ERROR_VALUE,              // a number out of range, or an option missing or not wanted
  Unsupported = HATTN_ERROR_UNSUPPORTED,  // a legal problem that this build has no kernel for
  Workspace = HATTN_ERROR_WORKSPACE,      // too small
  Device = HATTN_ERROR_DEVICE,            // something is not where the plan is
  Capture = HATTN_ERROR_CAPTURE,          // not possible while the stream is captured
  Driver = HATTN_ERROR_DRIVER,            // the CUDA driver failed
  Launch = HATTN_ERROR_LAUNCH,            // the kernel could not be loaded or launched
  NoDevice = HATTN_ERROR_NO_DEVICE,       // the device that was asked for is not there
  Internal = HATTN_ERROR_INTERNAL,        // a bug of the library
};

constexpr bool ok(Status status) noexcept { return status == Status::Ok; }

// "HATTN_ERROR_SHAPE", say.
inline const char* name(Status status) noexcept { return hattn_status_name(static_cast<hattn_status>(status)); }

namespace detail {

// What this header or the DLPack one refused by itself; what the library refused has its text there.
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

// An empty struct of the C header's that says how large it is and for which version it was written.
template <class T>
constexpr T tagged() noexcept {
  T empty{};
  empty.struct_size = static_cast<std::uint32_t>(sizeof(T));
  empty.abi_version = HATTN_ABI_VERSION;
  return empty;
}

// The C functions of each pass by one name, so that templates find them by what they take. A program that uses none of
// a pass asks no library for its functions.
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

// Whether the library that was linked or loaded speaks the version of the header. Asked once; whatever struct crosses
// the boundary carries the version as well.
inline Status check_abi() noexcept {
  static const std::uint32_t found = hattn_abi_version();
  if (found == HATTN_ABI_VERSION) return Status::Ok;
  return refuse(Status::Abi, "library: ABI version %u; allowed: %u, that of hopper_attention.h",
                static_cast<unsigned>(found), static_cast<unsigned>(HATTN_ABI_VERSION));
}

}  // namespace detail

// What was wrong with this thread's last call that failed, what it got and what is allowed; "" before any. Valid until
// the thread's next failure.
inline const char* last_error() noexcept { return detail::note().own ? detail::note().text : hattn_last_error(); }

// The library's version, "0.1.0", say.
inline const char* version() noexcept { return hattn_version(); }

#ifndef HATTN_NO_EXCEPTIONS
// A call that failed: what() is the status's name and last_error().
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

// Element types. The GPU computes F16, BF16 and E4M3, the CPU F32 as well.
enum class DType : hattn_dtype { F16 = HATTN_F16, BF16 = HATTN_BF16, F32 = HATTN_F32, E4M3 = HATTN_E4M3 };

// The DType of a C++ type. Specialise it for types of your own:
//   template <> struct hattn::dtype_of<my::half> { static constexpr hattn::DType value = hattn::DType::F16; };
// CUDA's types are known when their headers were included before this one.
template <class T>
struct dtype_of;

template <>
struct dtype_of<float> {
  static constexpr DType value = DType::F32;
};
#ifdef __CUDA_FP16_TYPES_EXIST__
template <>
struct dtype_of<__half> {
  static constexpr DType value = DType::F16;
};
#endif
#ifdef __CUDA_BF16_TYPES_EXIST__
template <>
struct dtype_of<__nv_bfloat16> {
  static constexpr DType value = DType::BF16;
};
#endif
#ifdef __CUDA_FP8_TYPES_EXIST__
template <>
struct dtype_of<__nv_fp8_e4m3> {
  static constexpr DType value = DType::E4M3;
};
#endif

// The CPU, or a GPU by its ordinal in the CUDA driver's order (which the runtime's cudaSetDevice follows).
class Device {
 public:
  static constexpr Device cpu() noexcept { return Device(HATTN_CPU); }
  static constexpr Device cuda(int ordinal) noexcept { return Device(ordinal); }

  constexpr bool is_cpu() const noexcept { return value_ == HATTN_CPU; }
  constexpr hattn_device c_value() const noexcept { return value_; }

  friend constexpr bool operator==(Device a, Device b) noexcept { return a.value_ == b.value_; }
  friend constexpr bool operator!=(Device a, Device b) noexcept { return a.value_ != b.value_; }

 private:
  explicit constexpr Device(hattn_device value) noexcept : value_(value) {}

  hattn_device value_;
};

// GPUs that the CUDA driver shows; 0 without a driver. Opens no context.
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
  // Of Q, K, V and O.
  constexpr Extents(std::int64_t batch, std::int64_t seqlen, std::int64_t heads, std::int64_t head_dim) noexcept
      : size_(4), values_{batch, seqlen, heads, head_dim} {}

  // Of the log-sum-exp, and of factors: [batch, heads, blocks].
  constexpr Extents(std::int64_t batch, std::int64_t heads, std::int64_t seqlen) noexcept
      : size_(3), values_{batch, heads, seqlen, 0} {}

  // Of counts, and of a single number.
  constexpr Extents(std::int64_t rows, std::int64_t columns) noexcept : size_(2), values_{rows, columns, 0, 0} {}
  explicit constexpr Extents(std::int64_t size) noexcept : size_(1), values_{size, 0, 0, 0} {}
  // The first of these, at most 4.
  constexpr Extents(std::int32_t count, const std::int64_t (&of)[4]) noexcept
      : size_(count), values_{of[0], of[1], of[2], of[3]} {}

  constexpr std::int32_t size() const noexcept { return size_; }
  constexpr std::int64_t operator[](std::int32_t axis) const noexcept { return values_[axis]; }
  constexpr const std::int64_t* begin() const noexcept { return values_; }
  constexpr const std::int64_t* end() const noexcept { return values_ + size_; }

  // The product: how many elements a shape has.
  constexpr std::int64_t elements() const noexcept {
    std::int64_t count = 1;
    for (const std::int64_t size : *this) count *= size;
    return count;
  }

 private:
  std::int32_t size_;
  std::int64_t values_[4];
};

// A tensor by the address of its first element: the library's std::span. The logical order is
// [batch, seqlen, heads, head_dim], that of the log-sum-exp [batch, heads, seqlen]; memory orders are strides, in
// elements, of which the innermost is 1. A view checks nothing: the call that takes it does.
//
// TensorView is written, ConstTensorView is only read; the first converts to the second.
template <class Void>
class BasicTensorView {
  static_assert(std::is_void_v<Void>, "use TensorView or ConstTensorView");

 public:
  // No tensor: refused wherever it is given.
  constexpr BasicTensorView() noexcept = default;

  // NOLINTNEXTLINE(google-explicit-constructor): as std::span<T> to std::span<const T>.
  template <class Other, class = std::enable_if_t<std::is_const_v<Void> && !std::is_same_v<Other, Void>>>
  constexpr BasicTensorView(const BasicTensorView<Other>& other) noexcept : tensor_(other.c_tensor()) {}

  // Row-major without gaps.
  static constexpr BasicTensorView contiguous(Void* data, DType dtype, Device device, const Extents& shape) noexcept {
    return BasicTensorView(data, dtype, device, shape, compact(shape));
  }

  // Any strides, in elements.
  static constexpr BasicTensorView strided(Void* data, DType dtype, Device device, const Extents& shape,
                                           const Extents& stride) noexcept {
    return BasicTensorView(data, dtype, device, shape, stride);
  }

  // The same with the element type taken from the pointer.
  template <class T>
  static constexpr BasicTensorView contiguous(T* data, Device device, const Extents& shape) noexcept {
    return contiguous(checked(data), dtype_of<std::remove_cv_t<T>>::value, device, shape);
  }

  template <class T>
  static constexpr BasicTensorView strided(T* data, Device device, const Extents& shape,
                                           const Extents& stride) noexcept {
    return strided(checked(data), dtype_of<std::remove_cv_t<T>>::value, device, shape, stride);
  }

  // The strides of a row-major tensor without gaps. One that does not fit becomes the largest number, which the library
  // refuses wherever it matters.
  static constexpr Extents compact(const Extents& shape) noexcept {
    std::int64_t stride[4] = {1, 1, 1, 1};
    for (std::int32_t axis = shape.size() - 1; axis > 0; --axis) {
      // An empty dimension would give the outer ones stride 0; nothing is there, but this keeps them regular.
      const std::int64_t size = shape[axis] < 1 ? 1 : shape[axis];
      const bool fits = stride[axis] <= std::numeric_limits<std::int64_t>::max() / size;
      stride[axis - 1] = fits ? stride[axis] * size : std::numeric_limits<std::int64_t>::max();
    }
    return {shape.size(), stride};
  }

  // The same memory with two dimensions exchanged: contiguous(p, device, {b, heads, seqlen, d}).transposed(1, 2) is
  // memory that is [batch, heads, seqlen, head_dim] in the logical order. Axes that are not there give no tensor.
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

  // What the C functions take.
  constexpr const hattn_tensor& c_tensor() const noexcept { return tensor_; }

 private:
  constexpr BasicTensorView(Void* data, DType dtype, Device device, const Extents& shape,
                            const Extents& stride) noexcept {
    // Inputs are only read through it: the C struct is the same for both.
    tensor_.data = const_cast<void*>(data);
    tensor_.dtype = static_cast<hattn_dtype>(dtype);
    tensor_.device = device.c_value();
    // As many strides as sizes; with 0 dimensions it is refused.
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

// Which ends of the two sequences meet when they differ in length: the last query and the last key, or the first ones.
enum class Corner : hattn_corner { BottomRight = HATTN_BOTTOM_RIGHT, TopLeft = HATTN_TOP_LEFT };

// The instruction set of the kernels that compute a problem: a GPU's own, or one by name.
enum class Arch : hattn_arch { Own = HATTN_ARCH_OWN, Sm80 = HATTN_ARCH_SM80, Sm90 = HATTN_ARCH_SM90 };

// How many elements of Q, K and V of E4M3 share a descale factor: all, those of a sequence and key head, or 128 rows.
enum class Scaling : hattn_scaling {
  PerTensor = HATTN_PER_TENSOR,
  PerHead = HATTN_PER_HEAD,
  PerBlock = HATTN_PER_BLOCK
};

// A window's bound that keeps all keys on its side.
inline constexpr std::int64_t kUnbounded = HATTN_UNBOUNDED;

namespace detail {

// What the problems of both passes say of their tensors.
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

  // Ok when the device computes it; Unsupported or NoDevice when it does not; else what is wrong with the problem.
  // Opens no context and loads nothing. Never throws: the answer is the result.
  [[nodiscard]] Status supported(Device device) const noexcept {
    if (const Status status = check_abi(); !ok(status)) return status;
    return from_library(c_supported(&problem_, device.c_value()));
  }

  // What the C functions take.
  constexpr const CProblem& c_problem() const noexcept { return problem_; }

 protected:
  constexpr Problem() noexcept = default;

  template <class T>
  constexpr Self& set(T& field, T value) noexcept {
    field = value;
    return static_cast<Self&>(*this);
  }

  CProblem problem_ = tagged<CProblem>();
};

}  // namespace detail

// O = softmax(mask(softmax_scale * Q K^T)) V as numbers. Every setter returns the problem; what is not set is 0, a full
// mask, the scale 1 / sqrt(head_dim_qk) and no log-sum-exp. The numbers are checked where the problem is used.
class ForwardProblem : public detail::Problem<ForwardProblem, hattn_forward_problem> {
 public:
  // The element type of Q, K, V and O. One sequence, until batch() says otherwise.
  explicit constexpr ForwardProblem(DType dtype) noexcept {
    problem_.dtype = static_cast<hattn_dtype>(dtype);
    problem_.batch = 1;
  }

  constexpr ForwardProblem& batch(std::int64_t sequences) noexcept { return set(problem_.batch, sequences); }

  constexpr ForwardProblem& seqlens(std::int64_t q, std::int64_t kv) noexcept {
    problem_.seqlen_q = q;
    problem_.seqlen_kv = kv;
    return *this;
  }

  // q is a multiple of kv: head h of Q reads head h / (q / kv) of K and V.
  constexpr ForwardProblem& heads(std::int64_t q, std::int64_t kv) noexcept {
    problem_.heads_q = q;
    problem_.heads_kv = kv;
    return *this;
  }

  // qk: the length of a query and of a key, vo: that of a value and of an output.
  constexpr ForwardProblem& head_dims(std::int64_t qk, std::int64_t vo) noexcept {
    problem_.head_dim_qk = qk;
    problem_.head_dim_vo = vo;
    return *this;
  }

  // Mask::Window takes its bounds from window().
  constexpr ForwardProblem& mask(Mask mask) noexcept { return set(problem_.mask, static_cast<hattn_mask>(mask)); }

  // The keys up to the one where the query stands.
  constexpr ForwardProblem& causal(Corner corner = Corner::BottomRight) noexcept {
    return mask(Mask::Causal).corner(corner);
  }

  // The keys from left before to right after the one where the query stands, both included; kUnbounded: all of them.
  constexpr ForwardProblem& window(std::int64_t left, std::int64_t right,
                                   Corner corner = Corner::BottomRight) noexcept {
    problem_.window_left = left;
    problem_.window_right = right;
    return mask(Mask::Window).corner(corner);
  }

  constexpr ForwardProblem& corner(Corner corner) noexcept {
    return set(problem_.corner, static_cast<hattn_corner>(corner));
  }

  // Finite and above 0; 0 stands for 1 / sqrt(head_dim_qk).
  constexpr ForwardProblem& softmax_scale(float scale) noexcept { return set(problem_.softmax_scale, scale); }

  // Unsupported where the GPU does not run such kernels or the build has none, and on the CPU but for Arch::Own.
  constexpr ForwardProblem& arch(Arch arch) noexcept { return set(problem_.arch, static_cast<hattn_arch>(arch)); }

  // Whether the log-sum-exp of each row is an output: natural log, f32, [batch, heads_q, seqlen_q].
  constexpr ForwardProblem& lse(bool wanted) noexcept { return set(problem_.lse, wanted ? 1 : 0); }

  // Of E4M3 operands (hopper_attention_fp8.hpp makes them): O's type, BF16 unless set; who shares a factor; O's amax;
  // whether scores may be summed in f16, which is faster where no stored Q and K is beyond 14 in magnitude.
  constexpr ForwardProblem& output(DType dtype) noexcept {
    return set(problem_.output, static_cast<hattn_dtype>(dtype));
  }
  constexpr ForwardProblem& scaling(Scaling scaling) noexcept {
    return set(problem_.scaling, static_cast<hattn_scaling>(scaling));
  }
  constexpr ForwardProblem& amax(bool wanted) noexcept { return set(problem_.amax, wanted ? 1 : 0); }
  constexpr ForwardProblem& half_scores(bool wanted) noexcept { return set(problem_.half_scores, wanted ? 1 : 0); }
};

// The gradients of a forward pass with respect to Q, K and V, as numbers: its sizes, type, mask, scale and arch. dQ,
// dK, dV and dO, the gradient of the output, have the shapes of Q, K, V and O. Every setter returns the problem.
class BackwardProblem : public detail::Problem<BackwardProblem, hattn_backward_problem> {
 public:
  // Of this forward pass, whether or not it was made with its log-sum-exp, which is an input here. Without a gradient
  // of the log-sum-exp, and in whatever order of summation is fastest.
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

  // Whether a gradient of the log-sum-exp is an input: f32, [batch, heads_q, seqlen_q].
  constexpr BackwardProblem& d_lse(bool given) noexcept { return set(problem_.d_lse, given ? 1 : 0); }

  // Whether the same inputs, plan and device give the same bits. It may cost time on a GPU; the CPU does so in any
  // case.
  constexpr BackwardProblem& deterministic(bool wanted) noexcept { return set(problem_.deterministic, wanted ? 1 : 0); }
};

// Scratch memory of the caller's, where the plan is: at least plan.workspace_bytes(), of 16-byte alignment on a GPU.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// What a forward pass reads and writes.
struct ForwardArgs {
  ConstTensorView q{};  // [batch, seqlen_q, heads_q, head_dim_qk]
  ConstTensorView k{};  // [batch, seqlen_kv, heads_kv, head_dim_qk]
  ConstTensorView v{};  // [batch, seqlen_kv, heads_kv, head_dim_vo]
  TensorView o{};       // [batch, seqlen_q, heads_q, head_dim_vo]
  // f32 [batch, heads_q, seqlen_q]: given exactly when the problem says lse(true).
  std::optional<TensorView> lse{};
  Workspace workspace{};
  // With E4M3 operands, and then always: f32 [batch, heads, blocks].
  std::optional<ConstTensorView> descale_q{}, descale_k{}, descale_v{};
  std::optional<ConstTensorView> scale_o{};  // f32 [1], on O before it is rounded: given exactly with an output of E4M3
  std::optional<TensorView> amax{};          // f32 [1]: given exactly when the problem says amax(true)
};

// What a backward pass reads and writes. Outputs are overwritten, not added to.
struct BackwardArgs {
  ConstTensorView q{};    // [batch, seqlen_q, heads_q, head_dim_qk]
  ConstTensorView k{};    // [batch, seqlen_kv, heads_kv, head_dim_qk]
  ConstTensorView v{};    // [batch, seqlen_kv, heads_kv, head_dim_vo]
  ConstTensorView o{};    // [batch, seqlen_q, heads_q, head_dim_vo], what the forward pass gave
  ConstTensorView lse{};  // f32 [batch, heads_q, seqlen_q], what the forward pass gave
  ConstTensorView d_o{};  // as o
  // As lse: given exactly when the problem says d_lse(true).
  std::optional<ConstTensorView> d_lse{};
  TensorView d_q{};  // as q
  TensorView d_k{};  // as k: the sum over the query heads that read a key
  TensorView d_v{};  // as v: the same
  Workspace workspace{};
};

namespace detail {

template <class View>
const hattn_tensor* c_tensor(const std::optional<View>& view) noexcept {
  return view ? &view->c_tensor() : nullptr;
}

// What the arguments of both passes have in common, for C.
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

// A struct that the library made and frees; movable and not copyable.
template <class C>
class Owner {
 public:
  C* get() const noexcept { return owned_.get(); }
  explicit operator bool() const noexcept { return owned_ != nullptr; }

 protected:
  Owner() noexcept = default;

  // Takes what a C function makes; stays as it was on failure.
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

// What every plan has; Self also has try_run.
template <class Self, class ItsProblem, class ItsArgs, class C>
class Plan : public Owner<C> {
 public:
#ifndef HATTN_NO_EXCEPTIONS
  // Chooses the kernel and, on a GPU, loads it.
  Plan(const ItsProblem& problem, Device device) { check(take_for(problem, device)); }
#endif

  // The same; plan stays as it was on failure.
  [[nodiscard]] static Status create(const ItsProblem& problem, Device device, Self& plan) noexcept {
    return plan.take_for(problem, device);
  }

  // Takes a plan of the C functions, and gives one back to them.
  static Self adopt(C* plan) noexcept {
    Self owner;
    owner.owned_.reset(plan);
    return owner;
  }
  [[nodiscard]] C* release() noexcept { return this->owned_.release(); }

  // The workspace that each run in flight needs.
  [[nodiscard]] Status try_workspace_bytes(std::size_t& bytes) const noexcept {
    return from_library(c_workspace_size(this->get(), &bytes));
  }

  // Writes as much of the description as fits, 0-terminated unless capacity is 0; length is that of the whole.
  [[nodiscard]] Status try_describe(char* text, std::size_t capacity, std::size_t& length) const noexcept {
    return from_library(c_describe(this->get(), text, capacity, &length));
  }

#ifndef HATTN_NO_EXCEPTIONS
  std::size_t workspace_bytes() const {
    std::size_t bytes = 0;
    check(try_workspace_bytes(bytes));
    return bytes;
  }

  // The kernel, its tiles and the order in which they are walked.
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

// Which kernel was measured to be the fastest, by version of the library, card and shape: what the program `hattn tune`
// writes. Owned, movable and not copyable. An empty one (default-made or moved from) is refused by every call.
class Tuning : public detail::Owner<hattn_tuning> {
 public:
  Tuning() noexcept = default;

#ifndef HATTN_NO_EXCEPTIONS
  // Reads the text of a file that `hattn tune` wrote; opening it is the caller's.
  explicit Tuning(const std::string& text) { detail::check(create(text.data(), text.size(), *this)); }
#endif

  // The same; tuning stays as it was on failure.
  [[nodiscard]] static Status create(const char* text, std::size_t length, Tuning& tuning) noexcept {
    return tuning.take([&](hattn_tuning** made) { return hattn_tuning_create(text, length, made); });
  }
};

// How a problem is computed on a device; owned, movable and not copyable. Made once, run often, by any threads and
// streams at once. An empty one (default-made or moved from) is refused by every call. detail::Plan has what it shares
// with other plans: ForwardPlan(problem, device) and create, run, workspace_bytes, describe, adopt and release.
class ForwardPlan : public detail::Plan<ForwardPlan, ForwardProblem, ForwardArgs, hattn_forward_plan> {
 public:
  using Plan::create;
  using Plan::Plan;
  ForwardPlan() noexcept = default;

#ifndef HATTN_NO_EXCEPTIONS
  // The kernel that the tuning holds for the problem on this card, where it holds one.
  ForwardPlan(const ForwardProblem& problem, Device device, const Tuning& tuning) {
    detail::check(create(problem, device, tuning, *this));
  }
#endif

  // The same; plan stays as it was on failure.
  [[nodiscard]] static Status create(const ForwardProblem& problem, Device device, const Tuning& tuning,
                                     ForwardPlan& plan) noexcept {
    return plan.take([&](hattn_forward_plan** made) {
      return hattn_forward_plan_create_tuned(&problem.c_problem(), device.c_value(), tuning.get(), made);
    });
  }

  // Computes the problem. On the CPU it is done on return, and the stream is not looked at. On a GPU it is enqueued on
  // the stream (null: the default one) and returns, without allocating, waiting or loading anything; tensors and
  // workspace stay valid until the stream is past it. The thread's current CUDA context is left as it was.
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

// How the gradients of a problem are computed on a device; otherwise as ForwardPlan.
class BackwardPlan : public detail::Plan<BackwardPlan, BackwardProblem, BackwardArgs, hattn_backward_plan> {
 public:
  using Plan::Plan;
  BackwardPlan() noexcept = default;

  // Computes the gradients, under the rules of ForwardPlan::try_run.
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
