// One of several translation units of one program, compiled with HATTN_PART naming it: all headers, and all that they
// define used. One of the parts is compiled without exceptions. Another one has headers of another minor version, in
// which a class has one more member.
#include <hopper_attention.h>

#include <hopper_attention.hpp>
#include <hopper_attention_dlpack.hpp>

#include "reference.h"

#ifdef HATTN_TEST_GROWN
static_assert(sizeof(hattn::ForwardArgs::added) > 0, "the headers of the other version are not those that were made");
#endif

// Attention by one part; the status's number, or 100 for a wrong result.
int HATTN_PART();
int HATTN_PART() {
  const auto device = hattn::Device::cpu();
  auto problem = hattn::ForwardProblem(hattn::DType::F32).batch(1).seqlens(2, 3).heads(2, 1).head_dims(4, 4).causal();
  float q[16], kv[12], o[16] = {};
  reference_fill(q, 16, 1);
  reference_fill(kv, 12, 2);
  const auto kv_view = hattn::ConstTensorView::contiguous(kv, device, problem.k_shape());
  const DLTensor borrowed = hattn::dlpack_borrow(kv_view);
  hattn::ForwardArgs args;
  args.q = hattn::ConstTensorView::contiguous(q, device, problem.q_shape());
  args.o = hattn::TensorView::contiguous(o, device, problem.o_shape());
  hattn::ForwardPlan plan;
  hattn::Status status = hattn::ForwardPlan::create(problem, device, plan);
  if (hattn::ok(status)) status = hattn::try_dlpack_input(borrowed, "k", args.k);
  if (hattn::ok(status)) status = hattn::try_dlpack_input(borrowed, "v", args.v);
#ifdef HATTN_NO_EXCEPTIONS
  if (hattn::ok(status)) status = plan.try_run(args, nullptr);
#else
  if (hattn::ok(status)) plan.run(args, nullptr);
#endif
  hattn::BackwardPlan gradients;
  if (hattn::ok(status)) status = hattn::BackwardPlan::create(hattn::BackwardProblem(problem), device, gradients);
  std::size_t bytes = 1;
  if (hattn::ok(status)) status = gradients.try_workspace_bytes(bytes);
  if (!hattn::ok(status)) return static_cast<int>(status);
  hattn_forward_args c = HATTN_FORWARD_ARGS_INIT;
  c.q = &args.q.c_tensor(), c.k = &args.k.c_tensor(), c.v = &args.v.c_tensor(), c.o = &args.o.c_tensor();
  return bytes == 0 && reference_distance(&problem.c_problem(), &c) < 1e-6 ? 0 : 100;
}
