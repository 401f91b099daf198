// hopper_attention_fp8.hpp: with exceptions, and again without (-fno-exceptions), where only the twins are there.
#include <algorithm>
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

// Packed sequences with rows before, between and behind them: of one row, of more than a block, and an empty one.
constexpr std::int64_t kRows = 385;
const std::int32_t kOffsetsQ[] = {2, 3, 143, 143, 290}, kOffsetsKv[] = {0, 140, 145, 151, 299};
const std::int32_t kUsedKv[] = {131, 5, 0, 20};
constexpr std::size_t kSequences = 4;

ConstTensorView list(const std::int32_t* numbers, std::int64_t elements) {
  return ConstTensorView::contiguous(numbers, Device::cpu(), Extents(elements));
}

// Whether rows [first, first + rows) of bytes or numbers are those of a tensor that holds them alone.
template <class T>
bool same_rows(const std::vector<T>& packed, std::size_t first, const std::vector<T>& alone, std::size_t width) {
  return std::equal(alone.begin(), alone.end(), packed.begin() + static_cast<std::ptrdiff_t>(first * width));
}

// Every row before the first sequence and behind the last one has this value.
template <class T>
bool ends_are(const std::vector<T>& data, const std::int32_t* offsets, std::size_t width, T value) {
  const auto cut = [&](std::int32_t row) { return static_cast<std::ptrdiff_t>(static_cast<std::size_t>(row) * width); };
  const auto is_value = [&](T x) { return x == value; };
  return std::all_of(data.begin(), data.begin() + cut(offsets[0]), is_value) &&
         std::all_of(data.begin() + cut(offsets[kSequences]), data.end(), is_value);
}

// What a run of a problem gives: the operands, and O.
struct Result {
  explicit Result(const ForwardProblem& of)
      : q(of.q_shape(), descale_q_shape(of), 1),
        k(of.k_shape(), descale_kv_shape(of), 2),
        v(of.v_shape(), descale_kv_shape(of), 3),
        o(count(of.o_shape()), 0x7fff) {}

  template <class Lists>
  void run(const ForwardProblem& forward, const Lists& set_lists, bool given) {
    QuantizeArgs args;
    args.q = q.to_quantise(), args.k = k.to_quantise(), args.v = v.to_quantise();
    args.q->given = args.k->given = args.v->given = given;
    set_lists(args);
    QuantizePlan quantise;
    CHECK(QuantizePlan::create(QuantizeProblem(forward, DType::F32).hadamard(9), Device::cpu(), quantise) ==
          Status::Ok);
    CHECK(quantise.try_run(args, nullptr) == Status::Ok);
    ForwardArgs run;
    run.q = q.operand(), run.k = k.operand(), run.v = v.operand();
    run.o = TensorView::contiguous(o.data(), DType::F16, Device::cpu(), forward.o_shape());
    run.descale_q = q.factor(), run.descale_k = k.factor(), run.descale_v = v.factor();
    set_lists(run);
    ForwardPlan plan;
    CHECK(ForwardPlan::create(forward, Device::cpu(), plan) == Status::Ok);
    CHECK(plan.try_run(run, nullptr) == Status::Ok);
  }

  Operand q, k, v;
  std::vector<std::uint16_t> o;
};

ForwardProblem of_sizes(Scaling scaling, std::int64_t batch, std::int64_t rows_q, std::int64_t rows_kv) {
  ForwardProblem made(DType::E4M3);
  made.batch(batch).seqlens(rows_q, rows_kv).heads(4, 2).head_dims(16, 32).causal().scaling(scaling);
  return made.output(DType::F16);
}

// Copies rows of a packed tensor of values to a tensor of their own.
void take_rows(Operand& to, const Operand& from, std::size_t first, std::size_t width) {
  const auto begin = from.values.begin() + static_cast<std::ptrdiff_t>(first * width);
  std::copy(begin, begin + static_cast<std::ptrdiff_t>(to.values.size()), to.values.begin());
}

// The factors of one sequence: of the tensor, of its KV heads, or of its own blocks.
std::vector<float> own_factors(const Operand& packed, Scaling scaling, std::size_t sequence, std::size_t first,
                               const Extents& shape) {
  std::vector<float> own;
  if (scaling == Scaling::PerTensor) own = packed.descale;
  for (std::size_t head = 0; scaling == Scaling::PerHead && head < 2; ++head) {
    own.push_back(packed.descale[2 * sequence + head]);
  }
  const std::size_t block = (first + 127 * sequence) / 128;
  for (std::int64_t i = 0; scaling == Scaling::PerBlock && i < shape[1] * shape[2]; ++i) {
    const auto head = static_cast<std::size_t>(i / shape[2]), at = static_cast<std::size_t>(i % shape[2]);
    own.push_back(packed.descale[head * static_cast<std::size_t>(packed.factors[1]) + block + at]);
  }
  return own;
}

// Each sequence has the bytes, the factors and the O of a problem of its own.
void packed_sequences_are_those_of_problems_of_their_own() {
  for (const Scaling scaling : {Scaling::PerTensor, Scaling::PerHead, Scaling::PerBlock}) {
    for (const bool filled : {false, true}) {
      const ForwardProblem forward =
          of_sizes(scaling, kSequences, kRows, kRows).packed(true, true).used(false, true).fill_gaps(filled);
      const Extents factors = descale_q_shape(forward);
      if (scaling == Scaling::PerBlock) {
        CHECK(factors.size() == 2 && factors[0] == 4 && factors[1] == (kRows + 127 * 4) / 128);
      } else {
        CHECK(is(factors, scaling == Scaling::PerHead ? 4 : 1, scaling == Scaling::PerHead ? 2 : 1, 1));
      }
      Result all(forward);
      all.run(
          forward,
          [](auto& args) {
            args.cu_seqlens_q = list(kOffsetsQ, 5), args.cu_seqlens_kv = list(kOffsetsKv, 5);
            args.seqused_kv = list(kUsedKv, 4);
          },
          false);
      const auto gap = static_cast<std::uint8_t>(filled ? 0 : 0x55);
      CHECK(ends_are(all.q.stored, kOffsetsQ, 4 * 16, gap) && ends_are(all.k.stored, kOffsetsKv, 2 * 16, gap));
      CHECK(ends_are(all.v.stored, kOffsetsKv, 2 * 32, gap));
      CHECK(ends_are(all.o, kOffsetsQ, 4 * 32, static_cast<std::uint16_t>(filled ? 0 : 0x7fff)));
      for (std::size_t s = 0; s < kSequences; ++s) {
        const auto first_q = static_cast<std::size_t>(kOffsetsQ[s]), first_kv = static_cast<std::size_t>(kOffsetsKv[s]);
        const ForwardProblem alone = of_sizes(scaling, 1, kOffsetsQ[s + 1] - kOffsetsQ[s], kUsedKv[s]);
        Result own(alone);
        take_rows(own.q, all.q, first_q, 4 * 16), take_rows(own.k, all.k, first_kv, 2 * 16);
        take_rows(own.v, all.v, first_kv, 2 * 32);
        const std::vector<float> of_q = own_factors(all.q, scaling, s, first_q, own.q.factors);
        const std::vector<float> of_k = own_factors(all.k, scaling, s, first_kv, own.k.factors);
        const std::vector<float> of_v = own_factors(all.v, scaling, s, first_kv, own.v.factors);
        // The largest magnitude of a whole tensor is not that of a sequence.
        const bool given = scaling == Scaling::PerTensor;
        if (given) own.q.descale = of_q, own.k.descale = of_k, own.v.descale = of_v;
        own.run(
            alone, [](auto&) {}, given);
        CHECK(own.q.descale == of_q && own.k.descale == of_k && own.v.descale == of_v);
        CHECK(same_rows(all.q.stored, first_q, own.q.stored, 4 * 16));
        CHECK(same_rows(all.k.stored, first_kv, own.k.stored, 2 * 16));
        CHECK(same_rows(all.v.stored, first_kv, own.v.stored, 2 * 32));
        CHECK(same_rows(all.o, first_q, own.o, 4 * 32));
      }
    }
  }
}

// Used lengths of a dense side beside a packed one, and a side that is not quantised: its lists are not asked for.
void one_side_dense_is_quantised() {
  const ForwardProblem forward = of_sizes(Scaling::PerBlock, 4, kRows, 150).packed(true, false).used(false, true);
  CHECK(descale_q_shape(forward).size() == 2 && is(descale_kv_shape(forward), 4, 2, 2));
  Operand q(forward.q_shape(), descale_q_shape(forward), 1), k(forward.k_shape(), descale_kv_shape(forward), 2);
  QuantizePlan plan;
  CHECK(QuantizePlan::create(QuantizeProblem(forward, DType::F32), Device::cpu(), plan) == Status::Ok);
  QuantizeArgs args;
  args.q = q.to_quantise();
  CHECK(plan.try_run(args, nullptr) == Status::Value);
  CHECK_TEXT(last_error(), "cu_seqlens_q: missing");
  args.cu_seqlens_q = list(kOffsetsQ, 5);
  CHECK(plan.try_run(args, nullptr) == Status::Ok);
  CHECK(ends_are(q.stored, kOffsetsQ, 4 * 16, std::uint8_t{0x55}) && q.stored[3 * 4 * 16] != 0x55);
  args = QuantizeArgs();
  args.k = k.to_quantise();
  args.cu_seqlens_q = list(kOffsetsQ, 5);
  CHECK(plan.try_run(args, nullptr) == Status::Value);
  CHECK_TEXT(last_error(), "seqused_kv: missing");
  CHECK(k.stored == std::vector<std::uint8_t>(k.stored.size(), 0x55));
  args.seqused_kv = list(kUsedKv, 4);
  CHECK(plan.try_run(args, nullptr) == Status::Ok);
  for (std::size_t i = 0; i < k.stored.size(); ++i) {
    const bool is_used = i / (2 * 16) % 150 < static_cast<std::size_t>(kUsedKv[i / (2 * 16) / 150]);
    CHECK(is_used || k.stored[i] == 0x55);
  }
  CHECK(k.descale[0] > 0.0F && k.descale[1] > 0.0F);
  // Of the second sequence nothing but the first block, and of the third none.
  CHECK(k.descale[4] > 0.0F && k.descale[5] == -1.0F && k.descale[8] == -1.0F);
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
  RUN("hpp_fp8", packed_sequences_are_those_of_problems_of_their_own);
  RUN("hpp_fp8", one_side_dense_is_quantised);
  RUN("hpp_fp8", what_is_refused_says_so);
#ifndef HATTN_NO_EXCEPTIONS
  RUN("hpp_fp8", with_exceptions);
#endif
  return check_result();
}
