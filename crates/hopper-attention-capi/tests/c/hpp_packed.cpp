// Packed sequences and used lengths through hopper_attention.hpp: with exceptions, and again without (-fno-exceptions).
#include <algorithm>
#include <hopper_attention.hpp>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "reference_packed.h"

using namespace hattn;

namespace {

using Numbers = std::vector<std::int32_t>;

constexpr std::int64_t kHeadsQ = 4, kHeadsKv = 2, kDimQk = 8, kDimVo = 6;
constexpr float kUnwritten = -7.0F;

// One side of a problem of three sequences. The lists that it does not have are empty.
struct Side {
  std::int64_t rows;
  Numbers offsets, used;

  bool is_packed() const { return !offsets.empty(); }
  std::int64_t length(std::size_t sequence) const {
    if (!used.empty()) return used[sequence];
    return is_packed() ? offsets[sequence + 1] - offsets[sequence] : rows;
  }
  std::int64_t longest() const { return std::max({length(0), length(1), length(2)}); }

  // Whether a row of the tensor belongs to a sequence. Rows of all batch entries are counted together.
  bool belongs(std::size_t row) const {
    const auto all = static_cast<std::size_t>(rows);
    for (std::size_t s = 0; s < 3; ++s) {
      const std::size_t first = is_packed() ? static_cast<std::size_t>(offsets[s]) : s * all;
      if (row >= first && row < first + static_cast<std::size_t>(length(s))) return true;
    }
    return false;
  }
  std::optional<ConstTensorView> list(const Numbers& numbers) const {
    if (numbers.empty()) return std::nullopt;
    return ConstTensorView::contiguous(numbers.data(), Device::cpu(),
                                       Extents(static_cast<std::int64_t>(numbers.size())));
  }
};

// Every mix of sides that are packed, that are dense, and that have used lengths. Some sequences are empty, and some
// rows belong to none.
std::vector<std::pair<Side, Side>> mixes() {
  const Numbers cuts_q = {1, 4, 4, 9}, cuts_kv = {0, 5, 7, 13}, used_q = {2, 0, 5}, used_kv = {4, 2, 0};
  return {{{11, cuts_q, {}}, {13, cuts_kv, {}}},
          {{11, cuts_q, used_q}, {15, cuts_kv, {}}},
          {{11, cuts_q, {}}, {13, cuts_kv, used_kv}},
          {{11, cuts_q, used_q}, {13, cuts_kv, used_kv}},
          {{11, cuts_q, {}}, {6, {}, {}}},
          {{5, {}, {}}, {14, cuts_kv, {}}},
          {{11, cuts_q, {}}, {6, {}, used_kv}},
          {{5, {}, used_q}, {14, cuts_kv, {}}},
          {{5, {}, used_q}, {6, {}, {}}},
          {{5, {}, {}}, {6, {}, used_kv}},
          {{5, {}, used_q}, {6, {}, used_kv}}};
}

ForwardProblem problem_of(const Side& q, const Side& kv) {
  ForwardProblem problem(DType::F32);
  return problem.batch(3)
      .seqlens(q.rows, kv.rows)
      .heads(kHeadsQ, kHeadsKv)
      .head_dims(kDimQk, kDimVo)
      .causal()
      .lse(true)
      .packed(q.is_packed(), kv.is_packed())
      .used(!q.used.empty(), !kv.used.empty());
}

std::size_t count(const Extents& shape) { return static_cast<std::size_t>(shape.elements()); }

// An input, or an output that shows whether it was written. Rows of an input that belong to no sequence are NaN.
struct Rows {
  Rows(const Side& of, const Extents& shape_of, std::uint32_t seed, std::size_t elements_of_row)
      : side(&of), shape(shape_of), width(elements_of_row), data(count(shape_of), kUnwritten) {
    if (seed == 0) return;
    reference_fill(data.data(), data.size(), seed);
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (!side->belongs(i / width)) data[i] = std::numeric_limits<float>::quiet_NaN();
    }
  }

  ConstTensorView in() const { return ConstTensorView::contiguous(data.data(), Device::cpu(), shape); }
  TensorView out() { return TensorView::contiguous(data.data(), Device::cpu(), shape); }

  // Whether rows of no sequence are as they were, or 0.
  bool gaps_are_right(bool filled) const {
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (!side->belongs(i / width) && data[i] != (filled ? 0.0F : kUnwritten)) return false;
    }
    return true;
  }

  const Side* side;
  Extents shape;
  std::size_t width;
  std::vector<float> data;
};

// The log-sum-exp or its gradient: [batch, heads, rows] or [heads, rows].
struct RowNumbers {
  RowNumbers(const Side& of, const Extents& shape_of, std::uint32_t seed)
      : side(&of), shape(shape_of), data(count(shape_of), kUnwritten) {
    if (seed != 0) reference_fill(data.data(), data.size(), seed);
  }

  ConstTensorView in() const { return ConstTensorView::contiguous(data.data(), Device::cpu(), shape); }
  TensorView out() { return TensorView::contiguous(data.data(), Device::cpu(), shape); }

  bool gaps_are_right(bool filled) const {
    const auto rows = static_cast<std::size_t>(side->rows);
    for (std::size_t i = 0; i < data.size(); ++i) {
      const std::size_t batch = side->is_packed() ? 0 : i / rows / kHeadsQ;
      if (side->belongs(batch * rows + i % rows)) continue;
      if (data[i] != (filled ? -std::numeric_limits<float>::infinity() : kUnwritten)) return false;
    }
    return true;
  }

  const Side* side;
  Extents shape;
  std::vector<float> data;
};

// The lists of a run. Not made by the header, since a mistake there would go unnoticed.
template <class C, class Args>
void put_lists(C& c, const Args& args) {
  const auto at = [](const std::optional<ConstTensorView>& list) { return list ? &list->c_tensor() : nullptr; };
  c.cu_seqlens_q = at(args.cu_seqlens_q), c.cu_seqlens_kv = at(args.cu_seqlens_kv);
  c.seqused_q = at(args.seqused_q), c.seqused_kv = at(args.seqused_kv);
}

template <class Args>
void set_lists(Args& args, const Side& q, const Side& kv) {
  args.cu_seqlens_q = q.list(q.offsets), args.cu_seqlens_kv = kv.list(kv.offsets);
  args.seqused_q = q.list(q.used), args.seqused_kv = kv.list(kv.used);
}

// Both passes of a mix, with memory of their own.
struct Fixture {
  Fixture(const Side& of_q, const Side& of_kv, const ForwardProblem& of)
      : side_q(of_q),
        side_kv(of_kv),
        problem(of),
        q(side_q, problem.q_shape(), 1, kHeadsQ * kDimQk),
        k(side_kv, problem.k_shape(), 2, kHeadsKv * kDimQk),
        v(side_kv, problem.v_shape(), 3, kHeadsKv * kDimVo),
        o(side_q, problem.o_shape(), 0, kHeadsQ * kDimVo),
        d_o(side_q, problem.o_shape(), 4, kHeadsQ * kDimVo),
        d_q(side_q, problem.q_shape(), 0, kHeadsQ * kDimQk),
        d_k(side_kv, problem.k_shape(), 0, kHeadsKv * kDimQk),
        d_v(side_kv, problem.v_shape(), 0, kHeadsKv * kDimVo),
        lse(side_q, problem.lse_shape(), 0),
        d_lse(side_q, problem.lse_shape(), 5) {}
  Fixture(const Fixture&) = delete;
  Fixture& operator=(const Fixture&) = delete;

  ForwardArgs forward() {
    ForwardArgs args;
    args.q = q.in(), args.k = k.in(), args.v = v.in(), args.o = o.out(), args.lse = lse.out();
    set_lists(args, side_q, side_kv);
    return args;
  }

  BackwardArgs backward() {
    BackwardArgs args;
    args.q = q.in(), args.k = k.in(), args.v = v.in(), args.o = o.in(), args.lse = lse.in();
    args.d_o = d_o.in(), args.d_lse = d_lse.in();
    args.d_q = d_q.out(), args.d_k = d_k.out(), args.d_v = d_v.out();
    set_lists(args, side_q, side_kv);
    return args;
  }

  double distance(const ForwardArgs& args) const {
    auto c = detail::tagged<hattn_forward_args>();
    c.q = &args.q.c_tensor(), c.k = &args.k.c_tensor(), c.v = &args.v.c_tensor(), c.o = &args.o.c_tensor();
    c.lse = &args.lse->c_tensor();
    put_lists(c, args);
    return reference_packed_distance(&problem.c_problem(), &c);
  }

  hattn_backward_args for_reference(const BackwardArgs& args) const {
    auto c = detail::tagged<hattn_backward_args>();
    c.q = &args.q.c_tensor(), c.k = &args.k.c_tensor(), c.v = &args.v.c_tensor(), c.o = &args.o.c_tensor();
    c.lse = &args.lse.c_tensor(), c.d_o = &args.d_o.c_tensor(), c.d_lse = &args.d_lse->c_tensor();
    c.d_q = &args.d_q.c_tensor(), c.d_k = &args.d_k.c_tensor(), c.d_v = &args.d_v.c_tensor();
    put_lists(c, args);
    return c;
  }

  Side side_q, side_kv;
  ForwardProblem problem;
  Rows q, k, v, o, d_o, d_q, d_k, d_v;
  RowNumbers lse, d_lse;
};

constexpr bool is(const Extents& shape, std::int32_t size, std::int64_t first) {
  return shape.size() == size && shape[0] == first;
}

void setters_set_one_side_each() {
  constexpr ForwardProblem plain = ForwardProblem(DType::F32).batch(3).seqlens(11, 13).heads(4, 2).head_dims(8, 6);
  constexpr ForwardProblem of_q = ForwardProblem(plain).packed(true, false).used(false, true).max_seqlens(5, 0);
  constexpr ForwardProblem of_kv = ForwardProblem(plain).packed(false, true).used(true, false).max_seqlens(0, 6);
  const hattn_forward_problem q = of_q.c_problem(), kv = ForwardProblem(of_kv).fill_gaps(true).c_problem();
  CHECK(q.cu_seqlens_q == 1 && q.cu_seqlens_kv == 0 && kv.cu_seqlens_q == 0 && kv.cu_seqlens_kv == 1);
  CHECK(q.seqused_q == 0 && q.seqused_kv == 1 && kv.seqused_q == 1 && kv.seqused_kv == 0);
  CHECK(q.max_seqlen_q == 5 && q.max_seqlen_kv == 0 && kv.max_seqlen_q == 0 && kv.max_seqlen_kv == 6);
  CHECK(q.fill_gaps == 0 && kv.fill_gaps == 1);
  static_assert(is(of_q.q_shape(), 3, 11) && is(of_q.o_shape(), 3, 11) && is(of_q.lse_shape(), 2, 4));
  static_assert(is(of_q.k_shape(), 4, 3) && is(of_q.v_shape(), 4, 3));
  static_assert(is(of_kv.q_shape(), 4, 3) && is(of_kv.o_shape(), 4, 3) && is(of_kv.lse_shape(), 3, 3));
  static_assert(is(of_kv.k_shape(), 3, 13) && is(of_kv.v_shape(), 3, 13));
  const hattn_backward_problem back_q = BackwardProblem(of_q).c_problem();
  const hattn_backward_problem back_kv = BackwardProblem(ForwardProblem(of_kv).fill_gaps(true)).c_problem();
  CHECK(back_q.cu_seqlens_q == 1 && back_q.cu_seqlens_kv == 0 && back_q.seqused_q == 0 && back_q.seqused_kv == 1);
  CHECK(back_kv.cu_seqlens_q == 0 && back_kv.cu_seqlens_kv == 1 && back_kv.seqused_q == 1 && back_kv.seqused_kv == 0);
  CHECK(back_q.max_seqlen_q == 5 && back_q.max_seqlen_kv == 0 && back_kv.max_seqlen_q == 0);
  CHECK(back_kv.max_seqlen_kv == 6 && back_q.fill_gaps == 0 && back_kv.fill_gaps == 1);
  static_assert(is(BackwardProblem(of_q).q_shape(), 3, 11) && is(BackwardProblem(of_q).k_shape(), 4, 3));
  static_assert(is(BackwardProblem(of_kv).lse_shape(), 3, 3) && is(BackwardProblem(of_kv).v_shape(), 3, 13));
}

// Forward, and its gradients. Hints change nothing.
void computes(const Side& q, const Side& kv, bool filled) {
  Fixture f(q, kv, problem_of(q, kv).fill_gaps(filled));
  ForwardPlan plan;
  CHECK(ForwardPlan::create(f.problem, Device::cpu(), plan) == Status::Ok);
  CHECK(plan.try_run(f.forward(), nullptr) == Status::Ok);
  CHECK(f.distance(f.forward()) < 1e-6);
  CHECK(f.o.gaps_are_right(filled) && f.lse.gaps_are_right(filled));
  BackwardPlan gradients;
  CHECK(BackwardPlan::create(BackwardProblem(f.problem).d_lse(true), Device::cpu(), gradients) == Status::Ok);
  const BackwardArgs args = f.backward();
  CHECK(gradients.try_run(args, nullptr) == Status::Ok);
  const hattn_backward_args c = f.for_reference(args);
  CHECK(reference_packed_gradient_distance(&f.problem.c_problem(), &c) < 1e-5);
  CHECK(f.d_q.gaps_are_right(filled) && f.d_k.gaps_are_right(filled) && f.d_v.gaps_are_right(filled));

  const bool has_q = q.is_packed() || !q.used.empty(), has_kv = kv.is_packed() || !kv.used.empty();
  for (const std::int64_t wrong : {0, 1, 1 << 20}) {
    const std::int64_t most_q = wrong == 0 ? q.longest() : wrong, most_kv = wrong == 0 ? kv.longest() : wrong;
    ForwardProblem hinted = problem_of(q, kv).fill_gaps(filled).max_seqlens(has_q ? most_q : 0, has_kv ? most_kv : 0);
    Fixture again(q, kv, hinted);
    CHECK(ForwardPlan::create(hinted, Device::cpu(), plan) == Status::Ok);
    CHECK(plan.try_run(again.forward(), nullptr) == Status::Ok);
    CHECK(again.o.data == f.o.data && again.lse.data == f.lse.data);
    CHECK(BackwardPlan::create(BackwardProblem(hinted).d_lse(true), Device::cpu(), gradients) == Status::Ok);
    CHECK(gradients.try_run(again.backward(), nullptr) == Status::Ok);
    CHECK(again.d_q.data == f.d_q.data && again.d_k.data == f.d_k.data && again.d_v.data == f.d_v.data);
  }
}

void every_mix_of_lists_computes() {
  for (const auto& [q, kv] : mixes()) {
    computes(q, kv, false);
    computes(q, kv, true);
  }
}

// The comparison looks at lengths: those of another mix are wrong.
void the_distance_sees_wrong_lengths() {
  const Side q = {11, {1, 4, 4, 9}, {}}, kv = {13, {0, 5, 7, 13}, {}};
  Fixture f(q, kv, problem_of(q, kv));
  ForwardPlan plan;
  CHECK(ForwardPlan::create(f.problem, Device::cpu(), plan) == Status::Ok);
  CHECK(plan.try_run(f.forward(), nullptr) == Status::Ok);
  ForwardArgs args = f.forward();
  CHECK(f.distance(args) < 1e-6);
  const Numbers shifted = {0, 5, 8, 13};
  args.cu_seqlens_kv = f.side_kv.list(shifted);
  CHECK(f.distance(args) > 1e-3);
}

// A bias has numbers for the longest sequence of packed sides. Its gradient adds up those of all sequences.
void a_bias_covers_the_longest_sequence() {
  for (const auto& [q, kv] : mixes()) {
    if (!q.is_packed() && !kv.is_packed()) continue;
    const std::int64_t queries = q.is_packed() ? q.longest() : q.rows, keys = kv.is_packed() ? kv.longest() : kv.rows;
    for (const bool per_batch : {false, true}) {
      const Bias form = Bias(DType::F32).per_batch(per_batch).per_head(true).per_query(true).covering(queries, keys);
      Fixture f(q, kv, problem_of(q, kv).bias(form));
      const Extents shape(per_batch ? 3 : 1, kHeadsQ, queries, keys);
      std::vector<float> bias(count(shape)), d_bias(count(shape), kUnwritten);
      reference_fill(bias.data(), bias.size(), 6);
      const ConstTensorView view = ConstTensorView::contiguous(bias.data(), Device::cpu(), shape);
      reference_given.bias = &view.c_tensor();
      ForwardArgs args = f.forward();
      args.bias = view;
      ForwardPlan plan;
      CHECK(ForwardPlan::create(f.problem, Device::cpu(), plan) == Status::Ok);
      CHECK(plan.try_run(args, nullptr) == Status::Ok);
      CHECK(f.distance(args) < 1e-6);
      BackwardPlan gradients;
      const BackwardProblem of = BackwardProblem(f.problem).d_lse(true).d_bias(true);
      CHECK(of.c_problem().bias_queries == queries && of.c_problem().bias_keys == keys);
      CHECK(BackwardPlan::create(of, Device::cpu(), gradients) == Status::Ok);
      BackwardArgs back = f.backward();
      back.bias = view;
      back.dbias = TensorView::contiguous(d_bias.data(), Device::cpu(), shape);
      CHECK(gradients.try_run(back, nullptr) == Status::Ok);
      hattn_backward_args c = f.for_reference(back);
      c.dbias = &back.dbias->c_tensor();
      CHECK(reference_packed_gradient_distance(&f.problem.c_problem(), &c) < 1e-5);
      CHECK(reference_packed_bias_distance(&f.problem.c_problem(), &c) < 1e-5);
    }
  }
  reference_given.bias = nullptr;
}

// Each list that is missing, that was not asked for, or that is wrong. Nothing is written.
void wrong_lists_are_refused_by_name() {
  const Side q = {11, {1, 4, 4, 9}, {2, 0, 5}}, kv = {6, {}, {4, 2, 0}};
  Fixture f(q, kv, problem_of(q, kv));
  ForwardPlan plan;
  BackwardPlan gradients;
  CHECK(ForwardPlan::create(f.problem, Device::cpu(), plan) == Status::Ok);
  CHECK(BackwardPlan::create(BackwardProblem(f.problem).d_lse(true), Device::cpu(), gradients) == Status::Ok);
  const auto refused = [&](const auto& edit, const char* text) {
    ForwardArgs args = f.forward();
    edit(args);
    CHECK(plan.try_run(args, nullptr) == Status::Value);
    CHECK_TEXT(last_error(), text);
    BackwardArgs back = f.backward();
    edit(back);
    CHECK(gradients.try_run(back, nullptr) == Status::Value);
    CHECK_TEXT(last_error(), text);
    for (const auto* data : {&f.o.data, &f.lse.data, &f.d_q.data, &f.d_k.data, &f.d_v.data}) {
      CHECK(*data == std::vector<float>(data->size(), kUnwritten));
    }
  };
  const Numbers falling = {1, 4, 3, 9}, outside = {0, 4, 4, 12}, long_q = {2, 1, 5}, long_kv = {4, 7, 0};
  refused([](auto& args) { args.cu_seqlens_q.reset(); }, "cu_seqlens_q: missing");
  refused([](auto& args) { args.seqused_q.reset(); }, "seqused_q: missing");
  refused([](auto& args) { args.seqused_kv.reset(); }, "seqused_kv: missing");
  refused([](auto& args) { args.cu_seqlens_kv = args.cu_seqlens_q; }, "cu_seqlens_kv: given");
  refused([&](auto& args) { args.cu_seqlens_q = q.list(falling); }, "cu_seqlens_q: 3 at 2, after 4");
  refused([&](auto& args) { args.cu_seqlens_q = q.list(outside); }, "cu_seqlens_q: 12 at 3; allowed: 0 to 11");
  refused([&](auto& args) { args.seqused_q = q.list(long_q); }, "seqused_q: 1 at 1; allowed: 0 to 0");
  refused([&](auto& args) { args.seqused_kv = kv.list(long_kv); }, "seqused_kv: 7 at 1; allowed: 0 to 6");
  const ForwardProblem hinted = ForwardProblem(problem_of({5, {}, {}}, kv)).max_seqlens(3, 0);
  CHECK(hinted.supported(Device::cpu()) == Status::Value);
  CHECK_TEXT(last_error(), "max_seqlen_q: 3; allowed: with packed queries, or");
}

#ifndef HATTN_NO_EXCEPTIONS
void with_exceptions() {
  const Side q = {11, {1, 4, 4, 9}, {}}, kv = {6, {}, {4, 2, 0}};
  Fixture f(q, kv, problem_of(q, kv).max_seqlens(5, 4));
  const ForwardPlan plan(f.problem, Device::cpu());
  CHECK_TEXT(plan.describe().c_str(), " packed q used kv max_seqlen_q 5 max_seqlen_kv 4 ");
  plan.run(f.forward(), nullptr);
  CHECK(f.distance(f.forward()) < 1e-6);
  ForwardArgs args = f.forward();
  args.seqused_kv.reset();
  try {
    plan.run(args, nullptr);
    CHECK(false);
  } catch (const hattn::Error& error) {
    CHECK(error.status() == Status::Value);
    CHECK_TEXT(error.what(), "seqused_kv: missing");
  }
}
#endif

}  // namespace

int main() {
  RUN("hpp_packed", setters_set_one_side_each);
  RUN("hpp_packed", every_mix_of_lists_computes);
  RUN("hpp_packed", the_distance_sees_wrong_lengths);
  RUN("hpp_packed", a_bias_covers_the_longest_sequence);
  RUN("hpp_packed", wrong_lists_are_refused_by_name);
#ifndef HATTN_NO_EXCEPTIONS
  RUN("hpp_packed", with_exceptions);
#endif
  return check_result();
}
