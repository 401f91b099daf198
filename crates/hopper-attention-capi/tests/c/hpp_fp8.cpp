// hopper_attention_fp8.hpp: with exceptions, and again without (-fno-exceptions), where only the twins are there.
#include <cmath>
#include <cstdint>
#include <hopper_attention_fp8.hpp>
#include <vector>

#include "check.h"
#include "reference.h"

using namespace hattn;

namespace {

static_assert(std::is_nothrow_move_constructible_v<QuantizePlan> && !std::is_copy_constructible_v<QuantizePlan>);
static_assert(noexcept(std::declval<const QuantizePlan&>().try_run(std::declval<const QuantizeArgs&>(), nullptr)));
static_assert(!std::is_convertible_v<std::int64_t, Extents>);

ForwardProblem problem(Scaling scaling) {
  ForwardProblem made(DType::E4M3);
  made.batch(2).seqlens(130, 5).heads(4, 2).head_dims(16, 16).scaling(scaling).output(DType::F16).amax(true);
  return made;
}

bool is(const Extents& shape, std::int64_t batch, std::int64_t heads, std::int64_t blocks) {
  return shape.size() == 3 && shape[0] == batch && shape[1] == heads && shape[2] == blocks;
}

void factors_have_the_shapes_that_the_scaling_gives() {
  CHECK(is(descale_q_shape(problem(Scaling::PerTensor)), 1, 1, 1));
  CHECK(is(descale_q_shape(problem(Scaling::PerHead)), 2, 2, 1));
  CHECK(is(descale_kv_shape(problem(Scaling::PerHead)), 2, 2, 1));
  CHECK(is(descale_q_shape(problem(Scaling::PerBlock)), 2, 4, 2));
  CHECK(is(descale_kv_shape(problem(Scaling::PerBlock)), 2, 2, 1));
}

std::size_t count(const Extents& shape) { return static_cast<std::size_t>(shape.elements()); }

// A tensor of f32 values, and buffers for what it is quantised to.
struct Operand {
  Operand(const Extents& of, const Extents& of_factors, std::uint32_t seed)
      : shape(of), factors(of_factors), values(count(of)), stored(count(of), 0x55), descale(count(of_factors), -1.0F) {
    reference_fill(values.data(), values.size(), seed);
  }

  QuantizeTensor to_quantise() {
    QuantizeTensor tensor;
    tensor.values = ConstTensorView::contiguous(values.data(), Device::cpu(), shape);
    tensor.stored = TensorView::contiguous(stored.data(), DType::E4M3, Device::cpu(), shape);
    tensor.descale = TensorView::contiguous(descale.data(), Device::cpu(), factors);
    return tensor;
  }
  ConstTensorView operand() const {
    return ConstTensorView::contiguous(stored.data(), DType::E4M3, Device::cpu(), shape);
  }
  ConstTensorView factor() const { return ConstTensorView::contiguous(descale.data(), Device::cpu(), factors); }

  Extents shape, factors;
  std::vector<float> values;
  std::vector<std::uint8_t> stored;
  std::vector<float> descale;
};

void quantised_and_attended_to() {
  for (const Scaling scaling : {Scaling::PerTensor, Scaling::PerHead, Scaling::PerBlock}) {
    const bool half_scores = scaling == Scaling::PerHead;
    ForwardProblem forward = problem(scaling).half_scores(half_scores);
    if (scaling == Scaling::PerBlock) forward.head_dims(192, 128);
    CHECK(forward.c_problem().half_scores == (half_scores ? 1 : 0));
    Operand q(forward.q_shape(), descale_q_shape(forward), 1);
    Operand k(forward.k_shape(), descale_kv_shape(forward), 2);
    Operand v(forward.v_shape(), descale_kv_shape(forward), 3);
    float counts[6] = {-1, -1, -1, -1, -1, -1};
    QuantizeArgs args;
    args.q = q.to_quantise();
    args.k = k.to_quantise();
    args.v = v.to_quantise();
    args.counts = TensorView::contiguous(counts, Device::cpu(), Extents(3, 2));
    const QuantizeProblem quantising = QuantizeProblem(forward, DType::F32).hadamard(9);
    CHECK(quantising.supported(Device::cpu()) == Status::Ok);
    QuantizePlan quantise;
    CHECK(QuantizePlan::create(quantising, Device::cpu(), quantise) == Status::Ok);
    std::size_t bytes = 1;
    CHECK(quantise.try_workspace_bytes(bytes) == Status::Ok && bytes == 0);
    CHECK(quantise.try_run(args, nullptr) == Status::Ok);
    for (const float counted : counts) CHECK(counted == 0.0F);
    for (const std::uint8_t code : q.stored) CHECK(!half_scores || (code & 0x7fU) <= 0x56U);  // 14
    for (const float factor : q.descale) CHECK(factor > 0.0F && std::isfinite(factor));

    std::vector<std::uint16_t> o(count(forward.o_shape()), 0x7fff);
    float amax = -1.0F;
    ForwardArgs run;
    run.q = q.operand(), run.k = k.operand(), run.v = v.operand();
    run.o = TensorView::contiguous(o.data(), DType::F16, Device::cpu(), forward.o_shape());
    run.descale_q = q.factor(), run.descale_k = k.factor(), run.descale_v = v.factor();
    run.amax = TensorView::contiguous(&amax, Device::cpu(), Extents(1));
    ForwardPlan plan;
    CHECK(ForwardPlan::create(forward, Device::cpu(), plan) == Status::Ok);
    CHECK(plan.try_run(run, nullptr) == Status::Ok);
    // Means of values, so no larger than the values. The tolerance of the library's own tests says how close.
    float largest = 0.0F;
    for (const float x : v.values) largest = std::fmax(largest, std::fabs(x));
    CHECK(amax > 0.0F && amax <= largest * 1.1F);
    for (const std::uint16_t x : o) CHECK((x & 0x7c00U) != 0x7c00U);

    run.descale_v.reset();
    CHECK(plan.try_run(run, nullptr) == Status::Argument);
    CHECK_TEXT(last_error(), "descale_v: a null pointer");
  }
}

void what_is_refused_says_so() {
  const ForwardProblem forward = problem(Scaling::PerTensor);
  QuantizePlan plan;
  CHECK(QuantizePlan::create(QuantizeProblem(forward, DType::E4M3), Device::cpu(), plan) == Status::Dtype);
  CHECK_TEXT(last_error(), "source: dtype e4m3; allowed: bf16, f16, f32");
  CHECK(!plan && plan.try_run(QuantizeArgs(), nullptr) == Status::Argument);
  ForwardProblem wide(DType::F32);
  wide.seqlens(1, 1).heads(1, 1).head_dims(8, 8).scaling(Scaling::PerHead);
  CHECK(wide.supported(Device::cpu()) == Status::Value);
}

#ifndef HATTN_NO_EXCEPTIONS
void with_exceptions() {
  const QuantizePlan plan(QuantizeProblem(problem(Scaling::PerBlock), DType::BF16), Device::cpu());
  CHECK(plan.describe() == "quantise bf16 to e4m3 per-block: cpu, workspace 0 bytes" && plan.workspace_bytes() == 0);
  plan.run(QuantizeArgs(), nullptr);
  try {
    QuantizeArgs args;
    args.q = QuantizeTensor();
    plan.run(args, nullptr);
    CHECK(false);
  } catch (const hattn::Error& error) {
    CHECK(error.status() == Status::Argument);
    CHECK_TEXT(error.what(), "q.values: ndim 0");
  }
}
#endif

}  // namespace

int main() {
  RUN("hpp_fp8", factors_have_the_shapes_that_the_scaling_gives);
  RUN("hpp_fp8", quantised_and_attended_to);
  RUN("hpp_fp8", what_is_refused_says_so);
#ifndef HATTN_NO_EXCEPTIONS
  RUN("hpp_fp8", with_exceptions);
#endif
  return check_result();
}
