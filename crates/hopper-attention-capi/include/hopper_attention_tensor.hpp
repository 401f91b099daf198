// What all calls of the C++ layer share: statuses and errors, element types, devices, and views of tensors.
// hopper_attention.hpp includes this file, and says what holds for errors and ownership.
#ifndef HOPPER_ATTENTION_TENSOR_HPP
#define HOPPER_ATTENTION_TENSOR_HPP

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <type_traits>

#include "hopper_attention.h"

#if !defined(HATTN_NO_EXCEPTIONS) && !defined(__cpp_exceptions)
#define HATTN_NO_EXCEPTIONS 1
#endif

#ifndef HATTN_NO_EXCEPTIONS
#include <stdexcept>
#include <string>
#endif

static_assert(HATTN_ABI_VERSION == 1, "the C++ headers and hopper_attention.h are of different versions");

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

// Element types. GPUs compute F16, BF16 and E4M3. The CPU also computes F32. Offsets and lengths of sequences are I32.
enum class DType : hattn_dtype {
  F16 = HATTN_F16,
  BF16 = HATTN_BF16,
  F32 = HATTN_F32,
  E4M3 = HATTN_E4M3,
  I32 = HATTN_I32
};

// The DType of a C++ type. CUDA's types are known if their headers are included before this one. For types of your own:
//   template <> struct hattn::dtype_of<my::half> { static constexpr hattn::DType value = hattn::DType::F16; };
template <class T>
struct dtype_of;

template <>
struct dtype_of<float> : std::integral_constant<DType, DType::F32> {};
template <>
struct dtype_of<std::int32_t> : std::integral_constant<DType, DType::I32> {};
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

}  // namespace HATTN_DETAIL_NAMESPACE
}  // namespace hattn

#endif  // HOPPER_ATTENTION_TENSOR_HPP
