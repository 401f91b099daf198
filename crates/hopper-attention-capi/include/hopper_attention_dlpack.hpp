// DLPack tensors in and out of Hopper Attention. Header-only, on top of hopper_attention.hpp and <dlpack/dlpack.h> 1.x.
//
// Where dlpack/dlpack.h comes from, if the machine has none: `scripts/install.sh PREFIX --dlpack` installs it beside
// this file. A copy with the same declarations serves too if it is included first, such as PyTorch's ATen/dlpack.h.
//
//   args.q = hattn::dlpack_input(*q_capsule_pointer, "q");     // DLTensor, DLManagedTensor, DLManagedTensorVersioned
//   args.o = hattn::dlpack_output(*o_capsule_pointer, "o");    // refuses a tensor that is marked read-only
//   DLTensor borrowed = hattn::dlpack_borrow(view);            // valid as long as view lives
//   hattn::DlpackPtr owned = hattn::dlpack_share(view, owner); // keeps owner, a shared_ptr, until its deleter is
//   called
//
// Ownership: views own nothing. A DLPack tensor must outlive every run that uses a view of it.
// Streams: nothing is synchronised here. Run on the stream of the tensor's producer.
#ifndef HOPPER_ATTENTION_DLPACK_HPP
#define HOPPER_ATTENTION_DLPACK_HPP

#ifndef DLPACK_MAJOR_VERSION
#if !__has_include(<dlpack/dlpack.h>)
#error "there is no dlpack/dlpack.h: 'scripts/install.sh PREFIX --dlpack' installs it; any DLPack 1.x serves"
#endif
#include <dlpack/dlpack.h>
#endif

#include <cinttypes>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "hopper_attention.hpp"

#if !defined(DLPACK_MAJOR_VERSION) || DLPACK_MAJOR_VERSION != 1
#error "dlpack/dlpack.h is not of version 1.x: 'scripts/install.sh PREFIX --dlpack' installs one that is"
#endif

namespace hattn {
inline namespace HATTN_DETAIL_NAMESPACE {

namespace detail {

// kDLFloat8_e4m3fn, by number: headers before 1.1 do not name it.
inline constexpr unsigned kDlpackE4m3fn = 10;

inline Status dlpack_dtype(const DLDataType& type, const char* name, DType& dtype) noexcept {
  const unsigned code = type.lanes == 1 ? type.code : 256U;  // vector types are refused
  if (code == kDLFloat && type.bits == 16) {
    dtype = DType::F16;
  } else if (code == kDLFloat && type.bits == 32) {
    dtype = DType::F32;
  } else if (code == kDLBfloat && type.bits == 16) {
    dtype = DType::BF16;
  } else if (code == kDlpackE4m3fn && type.bits == 8) {
    dtype = DType::E4M3;
  } else if (code == kDLInt && type.bits == 32) {
    dtype = DType::I32;
  } else {
    return refuse(Status::Dtype,
                  "%s: DLPack dtype code %u, bits %u, lanes %u; allowed: one lane of float16 (2, 16), float32 (2, 32), "
                  "bfloat16 (4, 16), float8_e4m3fn (10, 8), int32 (0, 32)",
                  name, unsigned{type.code}, unsigned{type.bits}, unsigned{type.lanes});
  }
  return Status::Ok;
}

inline Status dlpack_device(const DLDevice& from, const char* name, const std::optional<Device>& managed,
                            Device& device) noexcept {
  switch (static_cast<int>(from.device_type)) {
    case kDLCPU:
    case kDLCUDAHost:  // pinned memory is host memory
      device = Device::cpu();
      return Status::Ok;
    case kDLCUDA:
      if (from.device_id < 0) {
        return refuse(Status::Device, "%s: CUDA device_id %d; allowed: 0 and above", name, int{from.device_id});
      }
      device = Device::cuda(from.device_id);
      return Status::Ok;
    case kDLCUDAManaged:
      // Every device reaches managed memory. DLPack does not say which one uses it: device_id is always 0.
      if (!managed) {
        return refuse(Status::Device, "%s: CUDA managed memory, which is on no one device; allowed: with managed_on",
                      name);
      }
      device = *managed;
      return Status::Ok;
    default:
      return refuse(Status::Device,
                    "%s: DLPack device_type %d; allowed: kDLCPU (1), kDLCUDA (2), kDLCUDAHost (3), kDLCUDAManaged (13)",
                    name, static_cast<int>(from.device_type));
  }
}

// Writes the address of the first element to data. Null if there are no elements.
inline Status dlpack_data(const DLTensor& from, const char* name, bool empty, void*& data) noexcept {
  data = nullptr;
  if (from.data == nullptr) {
    if (empty) return Status::Ok;
    return refuse(Status::Argument, "%s: data is null; allowed: null for a tensor without elements only", name);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(from.data);
  if (from.byte_offset > std::numeric_limits<std::uintptr_t>::max() - address) {
    return refuse(Status::Layout, "%s: byte_offset %" PRIu64 "; allowed: what fits the address space", name,
                  std::uint64_t{from.byte_offset});
  }
  data = static_cast<char*>(from.data) + from.byte_offset;
  return Status::Ok;
}

template <class View>
Status dlpack_view(const DLTensor& from, const char* name, const std::optional<Device>& managed, View& view) noexcept {
  DType dtype{};
  Device device = Device::cpu();
  if (const Status status = dlpack_dtype(from.dtype, name, dtype); !ok(status)) return status;
  if (const Status status = dlpack_device(from.device, name, managed, device); !ok(status)) return status;
  if (from.ndim < 1 || from.ndim > 4) {
    return refuse(Status::Shape,
                  "%s: %d dimensions; allowed: 4, [batch, seqlen, heads, head_dim], or 1 to 3 for other tensors", name,
                  int{from.ndim});
  }
  if (from.shape == nullptr) {
    return refuse(Status::Argument, "%s: shape is null; allowed: the sizes of %d dimensions", name, int{from.ndim});
  }
  bool empty = false;
  for (int axis = 0; axis < from.ndim; ++axis) {
    if (from.shape[axis] < 0) {
      return refuse(Status::Shape, "%s: size %" PRId64 " of dimension %d; allowed: 0 and above", name,
                    std::int64_t{from.shape[axis]}, axis);
    }
    empty = empty || from.shape[axis] == 0;
  }
  void* data = nullptr;
  if (const Status status = dlpack_data(from, name, empty, data); !ok(status)) return status;

  std::int64_t sizes[4] = {};
  std::int64_t strides[4] = {};
  for (int axis = 0; axis < from.ndim; ++axis) sizes[axis] = from.shape[axis];
  const Extents shape(from.ndim, sizes);
  const Extents compact = View::compact(shape);
  // Null strides mean a row-major tensor without gaps (before DLPack 1.2). In a dimension of size 0 or 1 the stride is
  // not used, and producers write anything.
  for (int axis = 0; axis < from.ndim; ++axis) {
    strides[axis] = from.strides == nullptr || shape[axis] < 2 ? compact[axis] : std::int64_t{from.strides[axis]};
  }
  view = View::strided(data, dtype, device, shape, Extents(from.ndim, strides));
  return Status::Ok;
}

// DLTensor and DLManagedTensor have no read-only flag.
inline Status dlpack_open(const DLTensor& from, const char*, bool, const DLTensor*& tensor) noexcept {
  tensor = &from;
  return Status::Ok;
}

inline Status dlpack_open(const DLManagedTensor& from, const char*, bool, const DLTensor*& tensor) noexcept {
  tensor = &from.dl_tensor;
  return Status::Ok;
}

inline Status dlpack_open(const DLManagedTensorVersioned& from, const char* name, bool output,
                          const DLTensor*& tensor) noexcept {
  // In another major version only the fields before dl_tensor are known.
  if (from.version.major != DLPACK_MAJOR_VERSION) {
    return refuse(Status::Abi, "%s: DLPack version %u.%u; allowed: %u.x", name, unsigned{from.version.major},
                  unsigned{from.version.minor}, unsigned{DLPACK_MAJOR_VERSION});
  }
  if (output && (from.flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0) {
    return refuse(Status::Layout, "%s: a read-only DLPack tensor; allowed: for an output, one that may be written",
                  name);
  }
  tensor = &from.dl_tensor;
  return Status::Ok;
}

template <class Source, class View>
Status dlpack_import(const Source& source, const char* name, const std::optional<Device>& managed,
                     View& view) noexcept {
  const DLTensor* tensor = nullptr;
  const bool output = std::is_same_v<View, TensorView>;
  if (const Status status = dlpack_open(source, name, output, tensor); !ok(status)) return status;
  return dlpack_view(*tensor, name, managed, view);
}

}  // namespace detail

// A view of a tensor that is only read, such as Q, K or V. On failure view stays as it was.
//
// - source: a DLTensor, DLManagedTensor or DLManagedTensorVersioned. Its deleter is not called.
// - name: what errors call the tensor.
// - managed_on: the device that uses the tensor, if it is in CUDA managed memory. Required for such a tensor.
template <class Source>
[[nodiscard]] Status try_dlpack_input(const Source& source, const char* name, ConstTensorView& view,
                                      std::optional<Device> managed_on = std::nullopt) noexcept {
  return detail::dlpack_import(source, name, managed_on, view);
}

// The same for a tensor that is written, such as O or the log-sum-exp.
template <class Source>
[[nodiscard]] Status try_dlpack_output(const Source& source, const char* name, TensorView& view,
                                       std::optional<Device> managed_on = std::nullopt) noexcept {
  return detail::dlpack_import(source, name, managed_on, view);
}

#ifndef HATTN_NO_EXCEPTIONS
template <class Source>
ConstTensorView dlpack_input(const Source& source, const char* name, std::optional<Device> managed_on = std::nullopt) {
  ConstTensorView view;
  detail::check(try_dlpack_input(source, name, view, managed_on));
  return view;
}

template <class Source>
TensorView dlpack_output(const Source& source, const char* name, std::optional<Device> managed_on = std::nullopt) {
  TensorView view;
  detail::check(try_dlpack_output(source, name, view, managed_on));
  return view;
}
#endif

// Calls the deleter of a managed tensor, if it has one.
struct DlpackDelete {
  template <class Managed>
  void operator()(Managed* tensor) const noexcept {
    if (tensor != nullptr && tensor->deleter != nullptr) tensor->deleter(tensor);
  }
};
using DlpackPtr = std::unique_ptr<DLManagedTensorVersioned, DlpackDelete>;
using DlpackLegacyPtr = std::unique_ptr<DLManagedTensor, DlpackDelete>;

// A view as a DLTensor. It points to the shape and the strides in the view, so the view must live and stay unchanged as
// long as it is used. A DLTensor has no read-only flag: consumers must not write the tensor of a ConstTensorView.
template <class Void>
DLTensor dlpack_borrow(const BasicTensorView<Void>& view) noexcept {
  const hattn_tensor& from = view.c_tensor();
  DLTensor tensor{};
  tensor.data = from.data;
  tensor.device.device_type = view.device().is_cpu() ? kDLCPU : kDLCUDA;
  tensor.device.device_id = view.device().is_cpu() ? 0 : from.device;
  tensor.ndim = from.ndim;
  tensor.dtype.lanes = 1;
  switch (view.dtype()) {
    case DType::F16:
      tensor.dtype.code = kDLFloat, tensor.dtype.bits = 16;
      break;
    case DType::BF16:
      tensor.dtype.code = kDLBfloat, tensor.dtype.bits = 16;
      break;
    case DType::F32:
      tensor.dtype.code = kDLFloat, tensor.dtype.bits = 32;
      break;
    case DType::I32:
      tensor.dtype.code = kDLInt, tensor.dtype.bits = 32;
      break;
    case DType::E4M3:
      tensor.dtype.code = detail::kDlpackE4m3fn, tensor.dtype.bits = 8;
      break;
  }
  // DLPack consumers only read shape and strides.
  tensor.shape = const_cast<std::int64_t*>(from.shape);
  tensor.strides = const_cast<std::int64_t*>(from.stride);
  return tensor;
}
template <class Void>
DLTensor dlpack_borrow(const BasicTensorView<Void>&& view) = delete;  // the view would be gone

// A view as a managed tensor. It keeps owner, and with it the memory, until its deleter is called, on any thread. The
// tensor of a ConstTensorView is marked read-only. release() hands it to a consumer. Null if the host is out of memory.
template <class Void>
[[nodiscard]] DlpackPtr try_dlpack_share(const BasicTensorView<Void>& view,
                                         std::shared_ptr<const void> owner) noexcept {
  struct Shared {
    DLManagedTensorVersioned managed;
    BasicTensorView<Void> view;
    std::shared_ptr<const void> owner;
  };
  auto* shared = new (std::nothrow) Shared{DLManagedTensorVersioned{}, view, std::move(owner)};
  if (shared == nullptr) return nullptr;
  shared->managed.version.major = DLPACK_MAJOR_VERSION;
  shared->managed.version.minor = DLPACK_MINOR_VERSION;
  shared->managed.manager_ctx = shared;
  shared->managed.deleter = [](DLManagedTensorVersioned* self) { delete static_cast<Shared*>(self->manager_ctx); };
  shared->managed.flags = std::is_const_v<Void> ? DLPACK_FLAG_BITMASK_READ_ONLY : 0;
  shared->managed.dl_tensor = dlpack_borrow(shared->view);
  return DlpackPtr(&shared->managed);
}

#ifndef HATTN_NO_EXCEPTIONS
// The same. Throws std::bad_alloc in place of null.
template <class Void>
[[nodiscard]] DlpackPtr dlpack_share(const BasicTensorView<Void>& view, std::shared_ptr<const void> owner) {
  DlpackPtr shared = try_dlpack_share(view, std::move(owner));
  if (shared == nullptr) throw std::bad_alloc();
  return shared;
}
#endif

}  // namespace HATTN_DETAIL_NAMESPACE
}  // namespace hattn

#endif  // HOPPER_ATTENTION_DLPACK_HPP
