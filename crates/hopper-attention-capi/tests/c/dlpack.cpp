// hopper_attention_dlpack.hpp: what comes in is what was meant or is refused by name, what goes out comes back.
#include <algorithm>
#include <hopper_attention_dlpack.hpp>
#include <iterator>
#include <utility>
#include <vector>

#include "check.h"
#include "reference_packed.h"

using hattn::ConstTensorView;
using hattn::Device;
using hattn::DlpackPtr;
using hattn::DType;
using hattn::Status;
using hattn::TensorView;

namespace {

// A DLTensor as a framework makes one: dense f32 of the CPU until a test changes it.
struct Made {
  float data[120] = {};
  std::int64_t shape[5] = {1, 3, 4, 5, 1};
  std::int64_t strides[5] = {60, 20, 5, 1, 1};
  DLTensor tensor{};

  Made() {
    tensor.data = data;
    tensor.device.device_type = kDLCPU;
    tensor.ndim = 4;
    tensor.dtype = {kDLFloat, 32, 1};
    tensor.shape = shape;
    tensor.strides = strides;
  }
  Made(const Made&) = delete;
  Made& operator=(const Made&) = delete;
};

DLManagedTensorVersioned managed(const DLTensor& tensor, std::uint64_t flags) {
  DLManagedTensorVersioned made{};
  made.version.major = 1;
  made.version.minor = 0;
  made.flags = flags;
  made.dl_tensor = tensor;
  return made;
}

// The status of the import as an output; the view stays as it was on failure.
template <class Source>
Status import(const Source& source) {
  TensorView view;
  const Status status = hattn::try_dlpack_output(source, "o", view);
  CHECK(hattn::ok(status) == (view.ndim() != 0));
  return status;
}

void a_dense_tensor_comes_in() {
  Made made;
  const TensorView o = hattn::dlpack_output(made.tensor, "o");
  CHECK(o.data() == made.data && o.dtype() == DType::F32 && o.device() == Device::cpu() && o.ndim() == 4);
  CHECK(o.shape(0) == 1 && o.shape(1) == 3 && o.shape(2) == 4 && o.shape(3) == 5);
  CHECK(o.stride(1) == 20 && o.stride(2) == 5 && o.stride(3) == 1);
  made.tensor.ndim = 3;
  made.strides[0] = 12, made.strides[1] = 4, made.strides[2] = 1;
  const ConstTensorView lse = hattn::dlpack_input(made.tensor, "lse");
  CHECK(lse.ndim() == 3 && lse.shape(2) == 4 && lse.stride(1) == 4 && lse.data() == made.data);
  made.tensor.ndim = 2;
  const TensorView counts = hattn::dlpack_output(made.tensor, "counts");
  CHECK(counts.ndim() == 2 && counts.shape(1) == 3 && counts.stride(1) == 4);
  made.tensor.ndim = 1;
  const ConstTensorView amax = hattn::dlpack_input(made.tensor, "amax");
  CHECK(amax.ndim() == 1 && amax.shape(0) == 1 && amax.stride(0) == 1);
}

void null_strides_are_compact() {
  Made made;
  made.tensor.strides = nullptr;
  const ConstTensorView q = hattn::dlpack_input(made.tensor, "q");
  CHECK(q.stride(0) == 60 && q.stride(1) == 20 && q.stride(2) == 5 && q.stride(3) == 1);
}

void strides_of_single_elements_say_nothing() {
  Made made;
  made.shape[0] = made.shape[3] = 1;
  made.strides[0] = -7, made.strides[1] = 4, made.strides[2] = 1, made.strides[3] = 99;
  const ConstTensorView q = hattn::dlpack_input(made.tensor, "q");
  CHECK(q.stride(3) == 1 && q.stride(0) == 12 && q.stride(1) == 4 && q.stride(2) == 1);
}

void the_byte_offset_counts() {
  Made made;
  made.tensor.byte_offset = 8;
  CHECK(hattn::dlpack_input(made.tensor, "q").data() == made.data + 2);
  made.tensor.byte_offset = UINT64_MAX;
  CHECK(import(made.tensor) == Status::Layout);
  CHECK_TEXT(hattn::last_error(), "o: byte_offset 18446744073709551615; allowed: what fits the address space");
}

void element_types_are_told_apart() {
  const struct {
    DLDataType type;
    DType dtype;
  } known[] = {{{kDLFloat, 16, 1}, DType::F16},
               {{kDLBfloat, 16, 1}, DType::BF16},
               {{kDLFloat, 32, 1}, DType::F32},
               {{kDLFloat8_e4m3fn, 8, 1}, DType::E4M3},
               {{kDLInt, 32, 1}, DType::I32}};
  Made made;
  for (const auto& each : known) {
    made.tensor.dtype = each.type;
    CHECK(hattn::dlpack_input(made.tensor, "q").dtype() == each.dtype);
  }
  const DLDataType refused[] = {{kDLFloat, 64, 1},          {kDLFloat, 32, 4},      {kDLInt, 64, 1},
                                {kDLBfloat, 32, 1},         {kDLFloat8_e4m3, 8, 1}, {kDLUInt, 16, 1},
                                {kDLFloat8_e4m3fnuz, 8, 1}, {kDLFloat, 16, 0},      {kDLFloat8_e5m2, 8, 1},
                                {kDLUInt, 32, 1},           {kDLInt, 32, 2},        {kDLInt, 16, 1}};
  for (const DLDataType& type : refused) {
    made.tensor.dtype = type;
    CHECK(import(made.tensor) == Status::Dtype);
  }
  made.tensor.dtype = {kDLFloat, 64, 1};
  CHECK(import(made.tensor) == Status::Dtype);
  CHECK_TEXT(hattn::last_error(), "o: DLPack dtype code 2, bits 64, lanes 1; allowed: one lane of float16 (2, 16)");
}

void devices_are_told_apart() {
  Made made;
  made.tensor.device = {kDLCUDA, 2};
  CHECK(hattn::dlpack_input(made.tensor, "q").device() == Device::cuda(2));
  made.tensor.device = {kDLCUDAHost, 0};
  CHECK(hattn::dlpack_input(made.tensor, "q").device() == Device::cpu());
  made.tensor.device = {kDLCUDAManaged, 0};
  CHECK(hattn::dlpack_input(made.tensor, "q", Device::cuda(1)).device() == Device::cuda(1));
  CHECK(hattn::dlpack_output(made.tensor, "q", Device::cpu()).device() == Device::cpu());
  CHECK(import(made.tensor) == Status::Device);
  CHECK_TEXT(hattn::last_error(), "o: CUDA managed memory, which is on no one device; allowed: with managed_on");
  made.tensor.device = {kDLROCM, 0};
  CHECK(import(made.tensor) == Status::Device);
  CHECK_TEXT(hattn::last_error(), "o: DLPack device_type 10; allowed: kDLCPU (1), kDLCUDA (2)");
  made.tensor.device = {kDLCUDA, -1};
  CHECK(import(made.tensor) == Status::Device);
  CHECK_TEXT(hattn::last_error(), "o: CUDA device_id -1; allowed: 0 and above");
}

void ranks_and_sizes_are_refused_by_name() {
  Made made;
  for (const int ndim : {-1, 0, 5}) {
    made.tensor.ndim = ndim;
    CHECK(import(made.tensor) == Status::Shape);
  }
  CHECK_TEXT(hattn::last_error(), "o: 5 dimensions; allowed: 4, [batch, seqlen, heads, head_dim]");
  made.tensor.ndim = 4;
  made.shape[2] = -4;
  CHECK(import(made.tensor) == Status::Shape);
  CHECK_TEXT(hattn::last_error(), "o: size -4 of dimension 2; allowed: 0 and above");
  made.tensor.shape = nullptr;
  CHECK(import(made.tensor) == Status::Argument);
  CHECK_TEXT(hattn::last_error(), "o: shape is null; allowed: the sizes of 4 dimensions");
}

void null_data_has_no_elements() {
  Made made;
  made.tensor.data = nullptr;
  CHECK(import(made.tensor) == Status::Argument);
  CHECK_TEXT(hattn::last_error(), "o: data is null; allowed: null for a tensor without elements only");
  made.shape[1] = 0;
  made.tensor.byte_offset = 64;
  CHECK(hattn::dlpack_output(made.tensor, "o").data() == nullptr);
}

void read_only_is_no_output() {
  Made made;
  const DLManagedTensorVersioned read_only = managed(made.tensor, DLPACK_FLAG_BITMASK_READ_ONLY);
  CHECK(hattn::dlpack_input(read_only, "q").data() == made.data);
  CHECK(import(read_only) == Status::Layout);
  CHECK_TEXT(hattn::last_error(), "o: a read-only DLPack tensor; allowed: for an output, one that may be written");
  CHECK(import(managed(made.tensor, DLPACK_FLAG_BITMASK_IS_COPIED)) == Status::Ok);
  DLManagedTensor old{};
  old.dl_tensor = made.tensor;
  CHECK(import(old) == Status::Ok);
}

void another_major_version_is_not_looked_into() {
  DLManagedTensorVersioned other{};
  other.version.major = 2;
  other.version.minor = 7;
  CHECK(import(other) == Status::Abi);
  CHECK_TEXT(hattn::last_error(), "o: DLPack version 2.7; allowed: 1.x");
}

void errors_are_thrown_with_their_text() {
  Made made;
  made.tensor.dtype.lanes = 2;
  bool caught = false;
  try {
    static_cast<void>(hattn::dlpack_input(made.tensor, "the queries"));
  } catch (const hattn::Error& error) {
    caught = error.status() == Status::Dtype;
    CHECK_TEXT(error.what(), "HATTN_ERROR_DTYPE: the queries: DLPack dtype code 2, bits 32, lanes 2");
  }
  CHECK(caught);
}

template <class View>
bool same(const View& a, const ConstTensorView& b) {
  bool equal = a.data() == b.data() && a.dtype() == b.dtype() && a.device() == b.device() && a.ndim() == b.ndim();
  for (int axis = 0; equal && axis < a.ndim(); ++axis) {
    equal = a.shape(axis) == b.shape(axis) && a.stride(axis) == b.stride(axis);
  }
  return equal;
}

void what_is_borrowed_comes_back() {
  std::uint16_t memory[64] = {};
  for (const DType dtype : {DType::F16, DType::BF16, DType::F32, DType::E4M3, DType::I32}) {
    for (const Device device : {Device::cpu(), Device::cuda(0), Device::cuda(3)}) {
      const TensorView view = TensorView::strided(memory, dtype, device, {2, 2, 3, 4}, {0, 4, 8, 1});
      CHECK(same(hattn::dlpack_input(hattn::dlpack_borrow(view), "view"), view));
      const ConstTensorView lse = ConstTensorView::contiguous(memory, dtype, device, {2, 2, 3});
      const DLTensor out = hattn::dlpack_borrow(lse);
      CHECK(out.shape == lse.c_tensor().shape && out.ndim == 3 && out.byte_offset == 0);
      CHECK(same(hattn::dlpack_input(out, "lse"), lse));
      // Of packed sequences, and a list of their lengths.
      const TensorView packed = TensorView::strided(memory, dtype, device, {5, 3, 4}, {4, 20, 1});
      CHECK(same(hattn::dlpack_output(hattn::dlpack_borrow(packed), "packed"), packed));
      const ConstTensorView list = ConstTensorView::contiguous(memory, dtype, device, hattn::Extents(7));
      CHECK(same(hattn::dlpack_input(hattn::dlpack_borrow(list), "list"), list));
    }
  }
}

// Counts what is alive.
struct Owner {
  explicit Owner(int& count) : alive(count) { ++alive; }
  ~Owner() { --alive; }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  int& alive;
  float memory[24] = {};
};

void what_is_shared_lives_until_its_deleter_is_called() {
  int alive = 0;
  DLManagedTensorVersioned* handed_on = nullptr;
  {
    const auto owner = std::make_shared<Owner>(alive);
    const TensorView view = TensorView::contiguous(owner->memory, Device::cpu(), {1, 2, 3, 4});
    DlpackPtr shared = hattn::dlpack_share(view, owner);
    CHECK(shared->version.major == 1 && shared->flags == 0 && owner.use_count() == 2);
    CHECK(same(hattn::dlpack_output(*shared, "o"), view));
    handed_on = shared.release();
    // Read-only when the view is; freed here.
    const DlpackPtr read_only = hattn::dlpack_share(ConstTensorView(view), owner);
    CHECK(read_only->flags == DLPACK_FLAG_BITMASK_READ_ONLY && import(*read_only) == Status::Layout);
    CHECK(owner.use_count() == 3);
  }
  // View and shared_ptr are gone, the consumer's tensor is not.
  CHECK(alive == 1 && handed_on->dl_tensor.shape[3] == 4 && handed_on->dl_tensor.strides[0] == 24);
  static_cast<float*>(handed_on->dl_tensor.data)[23] = 1.0F;
  handed_on->deleter(handed_on);
  CHECK(alive == 0);
  // A producer's tensor without a deleter is left alone.
  DLManagedTensor without{};
  hattn::DlpackLegacyPtr{&without}.reset();
}

void attention_of_dlpack_tensors() {
  const auto problem = hattn::ForwardProblem(DType::F32).batch(1).seqlens(3, 3).heads(4, 4).head_dims(5, 5).causal();
  const hattn::ForwardPlan plan(problem, Device::cpu());
  Made q, k, v, o;
  reference_fill(q.data, 60, 1);
  reference_fill(k.data, 60, 2);
  reference_fill(v.data, 60, 3);
  hattn::ForwardArgs args;
  args.q = hattn::dlpack_input(managed(q.tensor, DLPACK_FLAG_BITMASK_READ_ONLY), "q");
  args.k = hattn::dlpack_input(k.tensor, "k");
  args.v = hattn::dlpack_input(v.tensor, "v");
  args.o = hattn::dlpack_output(managed(o.tensor, 0), "o");
  plan.run(args, nullptr);
  auto c = hattn::detail::tagged<hattn_forward_args>();
  c.q = &args.q.c_tensor(), c.k = &args.k.c_tensor(), c.v = &args.v.c_tensor(), c.o = &args.o.c_tensor();
  CHECK(reference_distance(&problem.c_problem(), &c) < 1e-6);
}

// A list of offsets or of lengths, as a framework makes one.
struct List {
  std::vector<std::int32_t> numbers;
  std::int64_t shape[1], strides[1] = {1};
  DLTensor tensor{};

  explicit List(std::vector<std::int32_t> of)
      : numbers(std::move(of)), shape{static_cast<std::int64_t>(numbers.size())} {
    tensor.data = numbers.data();
    tensor.device.device_type = kDLCPU;
    tensor.ndim = 1;
    tensor.dtype = {kDLInt, 32, 1};
    tensor.shape = shape;
    tensor.strides = strides;
  }
  List(const List&) = delete;
  List& operator=(const List&) = delete;
};

// A tensor of a rank below 4, dense.
void reshape(Made& made, std::vector<std::int64_t> sizes) {
  made.tensor.ndim = static_cast<std::int32_t>(sizes.size());
  made.tensor.strides = nullptr;
  std::copy(sizes.begin(), sizes.end(), made.shape);
}

// Packed queries beside dense keys with used lengths, both passes: all tensors and lists come from DLPack.
void packed_attention_of_dlpack_tensors() {
  const auto problem = hattn::ForwardProblem(DType::F32)
                           .batch(2)
                           .seqlens(6, 3)
                           .heads(4, 2)
                           .head_dims(5, 5)
                           .lse(true)
                           .packed(true, false)
                           .used(false, true);
  Made q, k, v, o, lse, d_o, d_q, d_k, d_v;
  for (Made* made : {&q, &o, &d_o, &d_q}) reshape(*made, {6, 4, 5});
  for (Made* made : {&k, &v, &d_k, &d_v}) reshape(*made, {2, 3, 2, 5});
  reshape(lse, {4, 6});
  List offsets({1, 3, 6}), used({3, 2});
  reference_fill(q.data, 120, 1), reference_fill(k.data, 60, 2), reference_fill(v.data, 60, 3);
  reference_fill(d_o.data, 120, 4);
  for (Made* made : {&o, &d_q, &d_k, &d_v}) std::fill(std::begin(made->data), std::end(made->data), -7.0F);
  const auto in = [](const Made& made, const char* name) { return hattn::dlpack_input(made.tensor, name); };
  const auto out = [](const Made& made, const char* name) { return hattn::dlpack_output(made.tensor, name); };

  hattn::ForwardArgs args;
  args.q = in(q, "q"), args.k = in(k, "k"), args.v = in(v, "v"), args.o = out(o, "o"), args.lse = out(lse, "lse");
  // A read-only list, and one without strides.
  args.cu_seqlens_q = hattn::dlpack_input(managed(offsets.tensor, DLPACK_FLAG_BITMASK_READ_ONLY), "cu_seqlens_q");
  used.tensor.strides = nullptr;
  args.seqused_kv = hattn::dlpack_input(used.tensor, "seqused_kv");
  CHECK(args.cu_seqlens_q->dtype() == DType::I32 && args.cu_seqlens_q->ndim() == 1);
  CHECK(args.cu_seqlens_q->shape(0) == 3 && args.seqused_kv->data() == used.numbers.data());
  CHECK(args.q.ndim() == 3 && args.q.stride(0) == 20 && args.lse->ndim() == 2);
  hattn::ForwardPlan(problem, Device::cpu()).run(args, nullptr);
  auto c = hattn::detail::tagged<hattn_forward_args>();
  c.q = &args.q.c_tensor(), c.k = &args.k.c_tensor(), c.v = &args.v.c_tensor(), c.o = &args.o.c_tensor();
  c.lse = &args.lse->c_tensor();
  c.cu_seqlens_q = &args.cu_seqlens_q->c_tensor(), c.seqused_kv = &args.seqused_kv->c_tensor();
  CHECK(reference_packed_distance(&problem.c_problem(), &c) < 1e-6);
  // The row before the first sequence.
  for (int i = 0; i < 20; ++i) CHECK(o.data[i] == -7.0F);

  hattn::BackwardArgs back;
  back.q = args.q, back.k = args.k, back.v = args.v, back.o = args.o, back.lse = *args.lse;
  back.d_o = in(d_o, "d_o"), back.d_q = out(d_q, "d_q"), back.d_k = out(d_k, "d_k"), back.d_v = out(d_v, "d_v");
  back.cu_seqlens_q = args.cu_seqlens_q, back.seqused_kv = args.seqused_kv;
  hattn::BackwardPlan(hattn::BackwardProblem(problem), Device::cpu()).run(back, nullptr);
  auto b = hattn::detail::tagged<hattn_backward_args>();
  b.q = &back.q.c_tensor(), b.k = &back.k.c_tensor(), b.v = &back.v.c_tensor(), b.o = &back.o.c_tensor();
  b.lse = &back.lse.c_tensor(), b.d_o = &back.d_o.c_tensor(), b.d_q = &back.d_q.c_tensor();
  b.d_k = &back.d_k.c_tensor(), b.d_v = &back.d_v.c_tensor();
  b.cu_seqlens_q = c.cu_seqlens_q, b.seqused_kv = c.seqused_kv;
  CHECK(reference_packed_gradient_distance(&problem.c_problem(), &b) < 1e-5);
  // The last key of the second sequence is not used.
  for (int i = 50; i < 60; ++i) CHECK(d_k.data[i] == -7.0F && d_v.data[i] == -7.0F);

  // A framework's 64-bit lengths are refused where they come in, and other types where they are used.
  offsets.tensor.dtype.bits = 64;
  CHECK(import(offsets.tensor) == Status::Dtype);
  CHECK_TEXT(hattn::last_error(), "o: DLPack dtype code 0, bits 64, lanes 1; allowed: one lane of float16 (2, 16)");
  offsets.tensor.dtype = {kDLFloat, 32, 1};
  args.cu_seqlens_q = hattn::dlpack_input(offsets.tensor, "cu_seqlens_q");
  CHECK(hattn::ForwardPlan(problem, Device::cpu()).try_run(args, nullptr) == Status::Dtype);
  CHECK_TEXT(hattn::last_error(), "cu_seqlens_q: dtype f32; allowed: i32");
}

}  // namespace

int main() {
  RUN("dlpack", a_dense_tensor_comes_in);
  RUN("dlpack", null_strides_are_compact);
  RUN("dlpack", strides_of_single_elements_say_nothing);
  RUN("dlpack", the_byte_offset_counts);
  RUN("dlpack", element_types_are_told_apart);
  RUN("dlpack", devices_are_told_apart);
  RUN("dlpack", ranks_and_sizes_are_refused_by_name);
  RUN("dlpack", null_data_has_no_elements);
  RUN("dlpack", read_only_is_no_output);
  RUN("dlpack", another_major_version_is_not_looked_into);
  RUN("dlpack", errors_are_thrown_with_their_text);
  RUN("dlpack", what_is_borrowed_comes_back);
  RUN("dlpack", what_is_shared_lives_until_its_deleter_is_called);
  RUN("dlpack", attention_of_dlpack_tensors);
  RUN("dlpack", packed_attention_of_dlpack_tensors);
  return check_result();
}
