// hopper_attention.hpp: compiled with exceptions, and again without (-fno-exceptions), where only the twins are there.
#include <hopper_attention.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "reference.h"

using namespace hattn;

namespace {

// A type of the user's, for dtype_of.
struct MyBf16 {
  std::uint16_t bits;
};

}  // namespace

template <>
struct hattn::dtype_of<MyBf16> {
  static constexpr DType value = DType::BF16;
};

namespace {

static_assert(std::is_nothrow_move_constructible_v<ForwardPlan> && std::is_nothrow_move_assignable_v<ForwardPlan>);
static_assert(!std::is_copy_constructible_v<ForwardPlan> && !std::is_copy_assignable_v<ForwardPlan>);
static_assert(std::is_nothrow_move_constructible_v<BackwardPlan> && std::is_nothrow_move_assignable_v<BackwardPlan>);
static_assert(!std::is_copy_constructible_v<BackwardPlan> && !std::is_copy_assignable_v<BackwardPlan>);
static_assert(!std::is_constructible_v<BackwardPlan, ForwardPlan> &&
              !std::is_convertible_v<ForwardProblem, BackwardProblem>);
static_assert(std::is_trivially_copyable_v<TensorView> && std::is_trivially_copyable_v<ForwardProblem>);
static_assert(std::is_convertible_v<TensorView, ConstTensorView> &&
              !std::is_convertible_v<ConstTensorView, TensorView>);
static_assert(!std::is_convertible_v<int, Device> && !std::is_convertible_v<std::int64_t, Extents>);
static_assert(noexcept(std::declval<const ForwardPlan&>().try_run(std::declval<const ForwardArgs&>(), nullptr)));
static_assert(noexcept(std::declval<const BackwardPlan&>().try_run(std::declval<const BackwardArgs&>(), nullptr)));
static_assert(sizeof(BackwardProblem) == sizeof(hattn_backward_problem));
static_assert(sizeof(TensorView) == sizeof(hattn_tensor) && sizeof(ForwardProblem) == sizeof(hattn_forward_problem));

void fill(std::vector<float>& data, const Extents& shape, std::uint32_t seed) {
  data.resize(static_cast<std::size_t>(shape.elements()));
  reference_fill(data.data(), data.size(), seed);
}

// Memory that shows whether it was written.
std::vector<float> unwritten(const Extents& shape) {
  return std::vector<float>(static_cast<std::size_t>(shape.elements()), -7.0F);
}

bool untouched(const std::vector<float>& data) {
  for (const float x : data) {
    if (x != -7.0F) return false;
  }
  return true;
}

// The inputs and O of a pass in C. Not made by the header, since a mistake there would go unnoticed.
template <class C, class Args>
C for_reference(const Args& args) {
  auto c = detail::tagged<C>();
  c.q = &args.q.c_tensor(), c.k = &args.k.c_tensor(), c.v = &args.v.c_tensor(), c.o = &args.o.c_tensor();
  return c;
}

// A problem with memory of its own.
struct Fixture {
  using Plan = ForwardPlan;
  static constexpr double kTolerance = 1e-6;

  explicit Fixture(ForwardProblem of) : problem(of) {
    fill(q, problem.q_shape(), 1);
    fill(k, problem.k_shape(), 2);
    fill(v, problem.v_shape(), 3);
    o = unwritten(problem.o_shape());
    lse = unwritten(problem.lse_shape());
    args.q = ConstTensorView::contiguous(q.data(), Device::cpu(), problem.q_shape());
    args.k = ConstTensorView::contiguous(k.data(), Device::cpu(), problem.k_shape());
    args.v = ConstTensorView::contiguous(v.data(), Device::cpu(), problem.v_shape());
    args.o = TensorView::contiguous(o.data(), Device::cpu(), problem.o_shape());
    if (problem.c_problem().lse != 0) {
      args.lse = TensorView::contiguous(lse.data(), Device::cpu(), problem.lse_shape());
    }
  }

  double distance() const {
    auto c = for_reference<hattn_forward_args>(args);
    c.lse = args.lse ? &args.lse->c_tensor() : nullptr;
    return reference_distance(&problem.c_problem(), &c);
  }

  bool all_untouched() const { return untouched(o) && untouched(lse); }

  ForwardProblem problem;
  std::vector<float> q, k, v, o, lse;
  ForwardArgs args;
};

// Its gradients, once the forward pass has run.
struct BackwardFixture {
  using Plan = BackwardPlan;
  static constexpr double kTolerance = 1e-5;

  explicit BackwardFixture(ForwardProblem of) : forward(of), problem(BackwardProblem(of).d_lse(true)) {
    ForwardPlan plan;
    CHECK(ForwardPlan::create(forward.problem, Device::cpu(), plan) == Status::Ok);
    CHECK(plan.try_run(forward.args, nullptr) == Status::Ok);
    fill(d_o, problem.o_shape(), 4);
    fill(d_lse, problem.lse_shape(), 5);
    d_q = unwritten(problem.q_shape());
    d_k = unwritten(problem.k_shape());
    d_v = unwritten(problem.v_shape());
    args.q = forward.args.q;
    args.k = forward.args.k;
    args.v = forward.args.v;
    args.o = forward.args.o;
    args.lse = *forward.args.lse;
    args.d_o = ConstTensorView::contiguous(d_o.data(), Device::cpu(), problem.o_shape());
    args.d_lse = ConstTensorView::contiguous(d_lse.data(), Device::cpu(), problem.lse_shape());
    args.d_q = TensorView::contiguous(d_q.data(), Device::cpu(), problem.q_shape());
    args.d_k = TensorView::contiguous(d_k.data(), Device::cpu(), problem.k_shape());
    args.d_v = TensorView::contiguous(d_v.data(), Device::cpu(), problem.v_shape());
  }

  double distance() const {
    auto c = for_reference<hattn_backward_args>(args);
    c.d_o = &args.d_o.c_tensor();
    c.d_lse = args.d_lse ? &args.d_lse->c_tensor() : nullptr;
    c.d_q = &args.d_q.c_tensor();
    c.d_k = &args.d_k.c_tensor();
    c.d_v = &args.d_v.c_tensor();
    return reference_gradient_distance(&forward.problem.c_problem(), &c);
  }

  bool all_untouched() const { return untouched(d_q) && untouched(d_k) && untouched(d_v); }

  Fixture forward;
  BackwardProblem problem;
  std::vector<float> d_o, d_lse, d_q, d_k, d_v;
  BackwardArgs args;
};

ForwardProblem small() {
  return ForwardProblem(DType::F32).batch(2).seqlens(5, 7).heads(4, 2).head_dims(8, 6).lse(true);
}

// With every number and option that both passes have.
constexpr ForwardProblem all_set() {
  return ForwardProblem(DType::BF16)
      .batch(1)
      .seqlens(2, 3)
      .heads(4, 2)
      .head_dims(6, 7)
      .window(8, kUnbounded, Corner::TopLeft)
      .softmax_scale(0.5F)
      .softcap(50.0F)
      .alibi(Alibi::PerBatch)
      .max_logits(true)
      .dropout(0.25F)
      .block_mask(BlockMask(1).per_batch(true).per_head(true).full_blocks(true).per_batch(false))
      .bias(Bias(DType::F32).per_batch(true).per_head(true).per_query(true).per_head(false))
      .arch(Arch::Sm80)
      .sm_margin(16)
      .workspace_limit(5000);
}

// The C struct of a problem has all of them.
template <class Problem>
void holds_all(const Problem& problem) {
  const auto& c = problem.c_problem();
  CHECK(c.struct_size == sizeof(c) && c.abi_version == 1 && c.dtype == HATTN_BF16);
  CHECK(c.batch == 1 && c.seqlen_q == 2 && c.seqlen_kv == 3 && c.heads_q == 4 && c.heads_kv == 2);
  CHECK(c.block_mask_most_partial == 1);
  CHECK(c.bias == HATTN_F32 && c.bias_dims == (HATTN_BIAS_PER_BATCH | HATTN_BIAS_PER_QUERY));
  CHECK(c.block_mask == (HATTN_BLOCK_MASK_LISTS | HATTN_BLOCK_MASK_PER_HEAD | HATTN_BLOCK_MASK_FULL_BLOCKS));
  CHECK(c.head_dim_qk == 6 && c.head_dim_vo == 7 && c.softmax_scale == 0.5F && c.softcap == 50.0F);
  CHECK(c.dropout == 0.25F);
  CHECK(c.alibi == HATTN_ALIBI_PER_BATCH && c.arch == HATTN_ARCH_SM80);
  CHECK(c.mask == HATTN_MASK_WINDOW && c.corner == HATTN_TOP_LEFT);
  CHECK(c.window_left == 8 && c.window_right == HATTN_UNBOUNDED && c.sm_margin == 16);
  CHECK(c.workspace_limit == 5000);
}

void problems_hold_what_was_set() {
  constexpr ForwardProblem problem = all_set().lse(true);
  static_assert(problem.dtype() == DType::BF16 && problem.k_shape()[2] == 2 && problem.lse_shape().size() == 3);
  holds_all(problem);
  CHECK(problem.c_problem().struct_size == sizeof(hattn_forward_problem) && problem.c_problem().lse == 1);
  CHECK(problem.c_problem().max_logits == 1);
  const hattn_forward_problem causal = ForwardProblem(DType::F16).causal().c_problem();
  CHECK(causal.mask == HATTN_MASK_CAUSAL && causal.corner == HATTN_BOTTOM_RIGHT && causal.lse == 0);
  CHECK(causal.arch == HATTN_ARCH_OWN && causal.sm_margin == 0 && causal.workspace_limit == 0);
  const hattn_forward_problem full = ForwardProblem(problem).mask(Mask::Full).lse(false).c_problem();
  CHECK(full.mask == HATTN_MASK_FULL && full.lse == 0 && full.batch == 1);
}

void backward_problems_hold_the_forward_one() {
  constexpr BackwardProblem problem = BackwardProblem(all_set()).d_lse(true).deterministic(true);
  static_assert(problem.dtype() == DType::BF16 && problem.v_shape()[3] == 7 && problem.lse_shape().size() == 3);
  holds_all(problem);
  const hattn_backward_problem& c = problem.c_problem();
  CHECK(c.struct_size == sizeof(c) && c.d_lse == 1 && c.deterministic == 1);
  CHECK(BackwardProblem(problem).sm_margin(3).c_problem().sm_margin == 3);
  CHECK(BackwardProblem(problem).workspace_limit(0).c_problem().workspace_limit == 0);
  const hattn_backward_problem plain = BackwardProblem(all_set().arch(Arch::Sm90).lse(true)).c_problem();
  CHECK(plain.d_lse == 0 && plain.deterministic == 0 && plain.seqlen_kv == 3 && plain.arch == HATTN_ARCH_SM90);
}

void views_hold_pointer_type_place_shape_and_strides() {
  float data[24] = {};
  const TensorView dense = TensorView::contiguous(data, Device::cuda(3), {1, 2, 3, 4});
  CHECK(dense.data() == data && dense.dtype() == DType::F32 && dense.device() == Device::cuda(3) && dense.ndim() == 4);
  CHECK(dense.shape(1) == 2 && dense.stride(0) == 24 && dense.stride(1) == 12 && dense.stride(2) == 4);
  CHECK(dense.stride(3) == 1);
  // Memory that is [batch, heads, seqlen, head_dim], in the logical order.
  const TensorView heads_first = TensorView::contiguous(data, Device::cpu(), {1, 3, 2, 4}).transposed(1, 2);
  CHECK(heads_first.shape(1) == 2 && heads_first.shape(2) == 3 && heads_first.stride(1) == 4);
  CHECK(heads_first.stride(2) == 8 && heads_first.device().is_cpu());
  CHECK(dense.transposed(1, 4).ndim() == 0 && dense.transposed(-1, 0).data() == nullptr);
  const MyBf16 half[6] = {};
  const ConstTensorView read = ConstTensorView::strided(half, Device::cpu(), {1, 2, 2}, {100, 3, 1});
  CHECK(read.dtype() == DType::BF16 && read.data() == half && read.ndim() == 3 && read.stride(0) == 100);
  const ConstTensorView converted = dense;
  CHECK(converted.data() == data && converted.stride(1) == 12 && converted.device() == dense.device());
  const TensorView typed = TensorView::strided(data, DType::E4M3, Device::cpu(), {1, 1, 1, 8}, {8, 8, 8, 1});
  CHECK(typed.dtype() == DType::E4M3);
  // Not as many strides as sizes, and nothing at all: refused where it is used.
  CHECK(TensorView::strided(data, Device::cpu(), {1, 1, 8}, {8, 8, 8, 1}).ndim() == 0);
  CHECK(TensorView().data() == nullptr && TensorView().ndim() == 0);
  // Empty dimensions do not make strides 0, and products that do not fit are the largest number.
  CHECK(TensorView::compact({2, 0, 3, 4})[0] == 12);
  const std::int64_t large = std::int64_t{1} << 40;
  CHECK(TensorView::compact({2, large, large, 1})[0] == INT64_MAX &&
        TensorView::compact({2, large, large, 1})[1] == large);
}

// The plan computes what the arguments ask for.
template <class F>
void runs(const F& f, const typename F::Plan& plan) {
  CHECK(plan.try_run(f.args, nullptr) == Status::Ok);
  CHECK(f.distance() < F::kTolerance);
}

// The twins of all that a plan is asked.
template <class F>
void all_twins_answer(const F& f) {
  typename F::Plan plan;
  CHECK(!plan);
  CHECK(f.problem.supported(Device::cpu()) == Status::Ok);
  CHECK(F::Plan::create(f.problem, Device::cpu(), plan) == Status::Ok && plan);
  std::size_t bytes = 9, length = 0;
  char text[256];
  CHECK(plan.try_workspace_bytes(bytes) == Status::Ok && bytes == 0);
  CHECK(plan.try_describe(text, sizeof(text), length) == Status::Ok && length == strlen(text));
  runs(f, plan);
}

void the_twins_compute() { all_twins_answer(Fixture(small().causal())); }

void a_tuning_is_taken_and_given_back() {
  Fixture f(small().causal());
  const char text[] = "0.1.0\tcard\tshape\tkernel\n";
  Tuning tuning;
  ForwardPlan plan;
  CHECK(ForwardPlan::create(f.problem, Device::cpu(), tuning, plan) == Status::Argument && !plan);
  CHECK_TEXT(last_error(), "tuning: a null pointer");
  CHECK(Tuning::create(text, sizeof(text) - 1, tuning) == Status::Ok && tuning);
  CHECK(Tuning::create("a", 1, tuning) == Status::Value && tuning);
  CHECK(ForwardPlan::create(f.problem, Device::cpu(), tuning, plan) == Status::Ok && plan);
  tuning = Tuning();
  runs(f, plan);
}

void any_head_dims_compute_on_the_cpu() {
  const int dims[][2] = {{192, 128}, {128, 192}, {256, 256}, {512, 512}, {12, 520}};
  for (const auto& [qk, vo] : dims) all_twins_answer(Fixture(small().batch(1).head_dims(qk, vo).causal()));
  // The plain gradients take time with the third power of the head dims.
  all_twins_answer(BackwardFixture(small().batch(1).seqlens(2, 3).heads(2, 1).head_dims(136, 8)));
}

void strides_of_any_order_compute() {
  Fixture f(small().window(2, 1));
  // The same elements stored [batch, heads, seqlen, head_dim]; O into every second row of a larger tensor.
  std::vector<float> k(f.k.size()), o(f.o.size() * 2, -7.0F);
  const auto& k_in = f.args.k;
  const ConstTensorView moved = ConstTensorView::contiguous(k.data(), Device::cpu(), {2, 2, 7, 8}).transposed(1, 2);
  for (int b = 0; b < 2; ++b) {
    for (int s = 0; s < 7; ++s) {
      for (int h = 0; h < 2; ++h) {
        for (int d = 0; d < 8; ++d) {
          const auto at = [&](const ConstTensorView& t) {
            return static_cast<std::size_t>(b * t.stride(0) + s * t.stride(1) + h * t.stride(2) + d);
          };
          k[at(moved)] = f.k[at(k_in)];
        }
      }
    }
  }
  f.args.k = moved;
  f.args.o = TensorView::strided(o.data(), Device::cpu(), f.problem.o_shape(), {240, 48, 12, 1});
  ForwardPlan plan;
  CHECK(ForwardPlan::create(f.problem, Device::cpu(), plan) == Status::Ok);
  runs(f, plan);
  for (std::size_t i = 0; i < o.size(); ++i) CHECK((o[i] == -7.0F) == (i % 12 >= 6));
}

void the_twins_compute_gradients() {
  BackwardFixture f(small().causal());
  all_twins_answer(f);
  // Again without a gradient of the log-sum-exp, which makes a difference.
  f.args.d_lse.reset();
  CHECK(f.distance() > 1e-3);
  BackwardPlan plan;
  CHECK(BackwardPlan::create(f.problem.d_lse(false), Device::cpu(), plan) == Status::Ok);
  runs(f, plan);
}

void gradients_of_any_strides_compute() {
  BackwardFixture f(small().window(2, 1));
  // One row of dO for all queries; dQ stored [batch, heads, seqlen, head_dim]; dK into every second row of a larger
  // tensor.
  f.args.d_o = ConstTensorView::strided(f.d_o.data(), Device::cpu(), f.problem.o_shape(), {24, 0, 6, 1});
  f.args.d_q = TensorView::contiguous(f.d_q.data(), Device::cpu(), {2, 4, 5, 8}).transposed(1, 2);
  std::vector<float> d_k(f.d_k.size() * 2, -7.0F);
  f.args.d_k = TensorView::strided(d_k.data(), Device::cpu(), f.problem.k_shape(), {224, 32, 16, 1});
  BackwardPlan plan;
  CHECK(BackwardPlan::create(f.problem, Device::cpu(), plan) == Status::Ok);
  runs(f, plan);
  for (std::size_t i = 0; i < d_k.size(); ++i) CHECK((d_k[i] == -7.0F) == (i % 16 >= 8));
}

// A wrong problem, a wrong view of a tensor of Q's shape (its name is in the text), and an empty plan.
template <class F, class View>
void all_twins_refuse(const F& f, View& view, const std::string& name, const char* no_plan) {
  using Problem = std::decay_t<decltype(f.problem)>;
  typename F::Plan plan;
  CHECK(F::Plan::create(f.problem, Device::cpu(), plan) == Status::Ok);
  auto* const before = plan.get();
  CHECK(F::Plan::create(Problem(small().heads(4, 3)), Device::cpu(), plan) == Status::Value);
  CHECK_TEXT(last_error(), "heads_q: 4 with heads_kv 3; allowed: a multiple of heads_kv");
  CHECK(plan.get() == before);
  CHECK(Problem(small().softmax_scale(-1.0F)).supported(Device::cpu()) == Status::Value);
  CHECK(Problem(small().softcap(-1.0F)).supported(Device::cpu()) == Status::Value);
  CHECK(Problem(small()).supported(Device::cuda(-5)) == Status::Argument);
  const View right = view;
  view = View();
  CHECK(plan.try_run(f.args, nullptr) == Status::Argument);
  CHECK_TEXT(last_error(), (name + ": ndim 0").c_str());
  view = View::contiguous(right.data(), DType::F32, Device::cpu(), f.problem.k_shape());
  CHECK(plan.try_run(f.args, nullptr) == Status::Shape);
  CHECK_TEXT(last_error(), (name + ": shape [2, 7, 2, 8], expected [2, 5, 4, 8]").c_str());
  CHECK(f.all_untouched());
  typename F::Plan empty;
  std::size_t bytes = 9;
  CHECK(empty.try_run(f.args, nullptr) == Status::Argument && empty.try_workspace_bytes(bytes) == Status::Argument);
  CHECK_TEXT(last_error(), no_plan);
}

void the_twins_refuse() {
  Fixture f(small());
  all_twins_refuse(f, f.args.q, "q", "plan: a null pointer; allowed: one from hattn_forward_plan_create");
  CHECK(strcmp(name(Status::Workspace), "HATTN_ERROR_WORKSPACE") == 0);
  CHECK(ok(Status::Ok) && !ok(Status::Internal));
}

void the_twins_refuse_gradients() {
  BackwardFixture f(small());
  all_twins_refuse(f, f.args.d_q, "d_q", "plan: a null pointer; allowed: one from hattn_backward_plan_create");
}

template <class Plan, class Problem>
void move(const Problem& problem) {
  Plan first;
  CHECK(Plan::create(problem, Device::cpu(), first) == Status::Ok);
  auto* const made = first.get();
  Plan second(std::move(first));
  CHECK(second.get() == made && first.get() == nullptr);
  CHECK(Plan::create(problem, Device::cpu(), first) == Status::Ok);
  first = std::move(second);  // frees what it held
  CHECK(first.get() == made && !second);
  second = Plan::adopt(first.release());
  CHECK(second.get() == made && !first);
  // Into another thread, which outlives it.
  std::thread([plan = std::move(second)] {
    std::size_t bytes = 1;
    CHECK(plan.try_workspace_bytes(bytes) == Status::Ok && bytes == 0);
  }).join();
  CHECK(!second);
}

void plans_move() {
  move<ForwardPlan>(small());
  move<BackwardPlan>(BackwardProblem(small()));
}

void sizes_that_were_forgotten_are_refused() {
  const ForwardProblem no_lengths = ForwardProblem(DType::F32).heads(1, 1).head_dims(8, 8);
  CHECK(no_lengths.supported(Device::cpu()) == Status::Value);
  CHECK_TEXT(last_error(), "seqlen_q: HATTN_UNSET (-1); allowed: 0 and above");
  CHECK(BackwardProblem(no_lengths).supported(Device::cpu()) == Status::Value);
  CHECK(ForwardProblem(DType::F32).seqlens(1, 1).head_dims(8, 8).supported(Device::cpu()) == Status::Value);
  CHECK(ForwardProblem(DType::F32).seqlens(1, 1).heads(1, 1).supported(Device::cpu()) == Status::Value);
  // A batch of 1 is what most problems have.
  CHECK(ForwardProblem(DType::F32).seqlens(1, 1).heads(1, 1).head_dims(8, 8).supported(Device::cpu()) == Status::Ok);
}

void each_thread_has_its_text() {
  CHECK(small().heads(4, 3).supported(Device::cpu()) == Status::Value);
  std::thread([] {
    CHECK(strcmp(last_error(), "") == 0);
    CHECK(small().batch(-2).supported(Device::cpu()) == Status::Value);
    CHECK_TEXT(last_error(), "batch: -2");
  }).join();
  CHECK_TEXT(last_error(), "heads_q: 4");
}

void a_negative_ordinal_is_no_device() {
  constexpr Device none = Device::cuda(-1);
  static_assert(none != Device::cpu() && !none.is_cpu() && none == Device::cuda(-7) && Device::cuda(3).c_value() == 3);
  Fixture fixture(ForwardProblem(DType::F32).batch(1).seqlens(2, 3).heads(2, 1).head_dims(4, 4));
  CHECK(fixture.problem.supported(none) == Status::Argument);
  CHECK_TEXT(last_error(), "device: -2147483648; allowed: HATTN_CPU (-1), or the ordinal of a GPU, 0 and above");
  ForwardPlan plan;
  CHECK(ForwardPlan::create(fixture.problem, none, plan) == Status::Argument && !plan);
  CHECK(ok(ForwardPlan::create(fixture.problem, Device::cpu(), plan)));
  const ConstTensorView nowhere = ConstTensorView::contiguous(fixture.q.data(), none, fixture.problem.q_shape());
  CHECK(nowhere.device() == none);
  fixture.args.q = nowhere;
  CHECK(plan.try_run(fixture.args, nullptr) == Status::Argument && untouched(fixture.o));
  CHECK_TEXT(last_error(), "q: device -2147483648");
}

void the_device_count_is_a_number() {
  int count = -1;
  CHECK(hattn::try_device_count(count) == Status::Ok && count >= 0);
  CHECK(small().supported(Device::cuda(count)) == Status::NoDevice);
  CHECK(strchr(hattn::version(), '.') != nullptr);
}

#ifdef HATTN_NO_EXCEPTIONS
constexpr const char* kSuite = "hpp_noexcept";
#else
constexpr const char* kSuite = "hpp";

template <class Call>
Status thrown(const Call& call, const char* part) {
  try {
    call();
  } catch (const hattn::Error& error) {
    const std::runtime_error& base = error;
    CHECK_TEXT(base.what(), part);
    CHECK_TEXT(base.what(), hattn::name(error.status()));
    return error.status();
  }
  const bool something_was_thrown = false;
  CHECK(something_was_thrown);
  return Status::Ok;
}

template <class F>
void throws_nothing(const F& f, const char* described) {
  const typename F::Plan plan(f.problem, Device::cpu());
  CHECK(plan.workspace_bytes() == 0);
  const std::string text = plan.describe();
  CHECK_TEXT(text.c_str(), described);
  CHECK(text.back() != '\0' && text.size() == strlen(text.c_str()));
  plan.run(f.args, nullptr);
  CHECK(f.distance() < F::kTolerance);
}

void what_is_right_throws_nothing() {
  CHECK(device_count() >= 0);
  throws_nothing(Fixture(small()), "forward f32 batch 2");
  throws_nothing(BackwardFixture(small()), "backward f32 batch 2");
}

// Without the optional tensor, on a GPU that is not there, and without a plan.
template <class F, class View>
void throws(F& f, std::optional<View>& optional, const char* missing) {
  using Plan = typename F::Plan;
  const Plan plan(f.problem, Device::cpu());
  optional.reset();
  CHECK(thrown([&] { plan.run(f.args, nullptr); }, missing) == Status::Value);
  CHECK(thrown([&] { Plan(f.problem, Device::cuda(1000)); }, "no device: cuda:1000") == Status::NoDevice);
  CHECK(thrown([] { return Plan().describe(); }, "plan: a null pointer") == Status::Argument);
  CHECK(thrown([] { return Plan().workspace_bytes(); }, "plan: a null pointer") == Status::Argument);
  CHECK(f.all_untouched());
}

void what_is_wrong_throws_its_status_and_text() {
  Fixture f(small());
  throws(f, f.args.lse, "lse: missing");
  BackwardFixture gradients(small());
  throws(gradients, gradients.args.d_lse, "d_lse: missing");
  CHECK(thrown([] { ForwardPlan(small().head_dims(0, 8), Device::cpu()); }, "head_dim_qk: 0") == Status::Value);
  const ForwardPlan plan(f.problem, Device::cpu());
  f.args.lse = f.args.o;
  CHECK(thrown([&] { plan.run(f.args, nullptr); }, "lse: ndim 4") == Status::Argument);
  CHECK(ForwardPlan(f.problem, Device::cpu(), Tuning("# nothing")));
  CHECK(thrown([] { return Tuning("no line"); }, "line 1 with 1 fields") == Status::Value);
  CHECK(f.all_untouched());
}
#endif

}  // namespace

// Two packed sequences: each has the result of a problem of its own.
void packed_sequences_compute() {
  constexpr std::int64_t kCuts[] = {0, 3, 7};
  const std::int32_t offsets[] = {0, 3, 7};
  ForwardProblem problem(DType::F32);
  problem.batch(2).seqlens(9, 9).heads(2, 1).head_dims(4, 4).causal().packed(true, true).fill_gaps(true).lse(true);
  CHECK(problem.q_shape().size() == 3 && problem.q_shape()[0] == 9 && problem.q_shape()[1] == 2);
  CHECK(problem.lse_shape().size() == 2 && problem.lse_shape()[0] == 2 && problem.lse_shape()[1] == 9);
  CHECK(BackwardProblem(problem).v_shape().size() == 3 && BackwardProblem(problem).v_shape()[1] == 1);
  std::vector<float> q, k, v;
  fill(q, problem.q_shape(), 1), fill(k, problem.k_shape(), 2), fill(v, problem.v_shape(), 3);
  std::vector<float> o = unwritten(problem.o_shape());
  std::vector<float> lse = unwritten(problem.lse_shape());
  ForwardArgs args;
  args.q = ConstTensorView::contiguous(q.data(), Device::cpu(), problem.q_shape());
  args.k = ConstTensorView::contiguous(k.data(), Device::cpu(), problem.k_shape());
  args.v = ConstTensorView::contiguous(v.data(), Device::cpu(), problem.v_shape());
  args.o = TensorView::contiguous(o.data(), Device::cpu(), problem.o_shape());
  args.lse = TensorView::contiguous(lse.data(), Device::cpu(), problem.lse_shape());
  ForwardPlan plan;
  CHECK(ok(ForwardPlan::create(problem, Device::cpu(), plan)));
  CHECK(plan.try_run(args, nullptr) == Status::Value);
  CHECK_TEXT(last_error(), "cu_seqlens_q: missing");
  args.cu_seqlens_q = ConstTensorView::contiguous(offsets, Device::cpu(), Extents(3));
  const std::int32_t falling[] = {0, 5, 3};
  args.cu_seqlens_kv = ConstTensorView::contiguous(falling, Device::cpu(), Extents(3));
  CHECK(plan.try_run(args, nullptr) == Status::Value);
  CHECK_TEXT(last_error(), "cu_seqlens_kv: 3 at 2, after 5; allowed: offsets that do not decrease");
  CHECK(untouched(o) && untouched(lse));
  args.cu_seqlens_kv = args.cu_seqlens_q;
  CHECK(ok(plan.try_run(args, nullptr)));
  for (int i = 0; i < 2; ++i) {
    const std::int64_t first = kCuts[i], rows = kCuts[i + 1] - first;
    ForwardProblem alone(DType::F32);
    alone.seqlens(rows, rows).heads(2, 1).head_dims(4, 4).causal();
    std::vector<float> want = unwritten(alone.o_shape());
    ForwardArgs of;
    of.q = ConstTensorView::contiguous(q.data() + first * 8, Device::cpu(), alone.q_shape());
    of.k = ConstTensorView::contiguous(k.data() + first * 4, Device::cpu(), alone.k_shape());
    of.v = ConstTensorView::contiguous(v.data() + first * 4, Device::cpu(), alone.v_shape());
    of.o = TensorView::contiguous(want.data(), Device::cpu(), alone.o_shape());
    ForwardPlan single;
    CHECK(ok(ForwardPlan::create(alone, Device::cpu(), single)) && ok(single.try_run(of, nullptr)));
    CHECK(std::vector<float>(o.begin() + first * 8, o.begin() + (first + rows) * 8) == want);
  }
  CHECK(std::vector<float>(o.begin() + 7 * 8, o.end()) == std::vector<float>(2 * 8, 0.0F));
}

int main() {
  RUN(kSuite, problems_hold_what_was_set);
  RUN(kSuite, backward_problems_hold_the_forward_one);
  RUN(kSuite, views_hold_pointer_type_place_shape_and_strides);
  RUN(kSuite, the_twins_compute);
  RUN(kSuite, a_tuning_is_taken_and_given_back);
  RUN(kSuite, any_head_dims_compute_on_the_cpu);
  RUN(kSuite, strides_of_any_order_compute);
  RUN(kSuite, the_twins_refuse);
  RUN(kSuite, the_twins_compute_gradients);
  RUN(kSuite, gradients_of_any_strides_compute);
  RUN(kSuite, the_twins_refuse_gradients);
  RUN(kSuite, packed_sequences_compute);
  RUN(kSuite, plans_move);
  RUN(kSuite, sizes_that_were_forgotten_are_refused);
  RUN(kSuite, each_thread_has_its_text);
  RUN(kSuite, a_negative_ordinal_is_no_device);
  RUN(kSuite, the_device_count_is_a_number);
#ifndef HATTN_NO_EXCEPTIONS
  RUN(kSuite, what_is_right_throws_nothing);
  RUN(kSuite, what_is_wrong_throws_its_status_and_text);
#endif
  return check_result();
}
