// hopper_attention_lists.hpp: with exceptions, and again without (-fno-exceptions), where only the twins are there.
#include <cstdint>
#include <cstring>
#include <hopper_attention_lists.hpp>
#include <utility>
#include <vector>

#include "check.h"
#include "reference.h"

using namespace hattn;

namespace {

static_assert(std::is_nothrow_move_constructible_v<BlockLists> && !std::is_copy_constructible_v<BlockLists>);
static_assert(!std::is_convertible_v<Documents, BlockLists>);
static_assert(noexcept(BlockLists::create(std::declval<const Slices&>(), std::declval<BlockLists&>())));

constexpr std::int64_t kSeqlenQ = 150, kSeqlenKv = 200;

// The masks of both descriptions are equal, so the lists are.
bool same(const BlockLists& a, const BlockLists& b) {
  if (a.block_mask().flags() != b.block_mask().flags()) return false;
  const auto equal = [](const ConstTensorView& x, const ConstTensorView& y) {
    std::int64_t elements = 1;
    if (x.ndim() != y.ndim() || x.dtype() != DType::I32 || !x.device().is_cpu()) return false;
    for (int axis = 0; axis < x.ndim(); ++axis) {
      if (x.shape(axis) != y.shape(axis)) return false;
      elements *= x.shape(axis);
    }
    return elements == 0 || std::memcmp(x.data(), y.data(), static_cast<std::size_t>(elements) * 4) == 0;
  };
  return equal(a.mask_block_cnt(), b.mask_block_cnt()) && equal(a.mask_block_idx(), b.mask_block_idx()) &&
         equal(a.mask_bits(), b.mask_bits()) && equal(a.full_block_cnt(), b.full_block_cnt()) &&
         equal(a.full_block_idx(), b.full_block_idx());
}

// Lists of a function of pairs, through a dense mask.
template <class Keep>
BlockLists dense(const Keep& keep) {
  std::vector<std::uint8_t> kept;
  for (std::int64_t q = 0; q < kSeqlenQ; ++q) {
    for (std::int64_t k = 0; k < kSeqlenKv; ++k) kept.push_back(keep(q, k) ? 1 : 0);
  }
  BlockLists lists;
  CHECK(BlockLists::create(DenseMask(1, 1, kSeqlenQ, kSeqlenKv, kept.data()), lists) == Status::Ok);
  return lists;
}

template <class Of, class Keep>
void check_of(const Of& of, const Keep& keep) {
  BlockLists lists;
  CHECK(BlockLists::create(of, lists) == Status::Ok && lists);
  CHECK(same(lists, dense(keep)));
}

void descriptions_make_lists_of_what_they_say() {
  const std::int32_t q_ranges[] = {0, 100, 100, 150}, k_ranges[] = {0, 130, 7, 57}, types[] = {0, 1};
  check_of(Slices(kSeqlenQ, kSeqlenKv, 2, q_ranges, k_ranges, types),
           [](std::int64_t q, std::int64_t k) { return q < 100 ? k < 130 : k >= 7 && k - 57 <= q - 150; });
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < kSeqlenKv; ++i) ids.push_back(i / 60);
  check_of(Documents(1, kSeqlenQ, kSeqlenKv, ids.data(), ids.data()),
           [](std::int64_t q, std::int64_t k) { return q / 60 == k / 60; });
  const std::int32_t prefix = 90;
  check_of(Prefixes(1, kSeqlenQ, kSeqlenKv, &prefix, MaskForm::window(20, 0, Corner::TopLeft)),
           [](std::int64_t q, std::int64_t k) { return k < 90 || (k <= q && k >= q - 20); });
  const std::int32_t count = 1, span[] = {130, 170};
  check_of(Spans(1, kSeqlenQ, kSeqlenKv, &count, span, MaskForm::causal(), MaskForm::window(100, kUnbounded)),
           [](std::int64_t q, std::int64_t k) {
             const std::int64_t own = q + 50;
             const auto in = [](std::int64_t key) { return key >= 130 && key < 170; };
             return (k <= own || (in(own) && in(k))) && k >= own - 100;
           });
}

void attention_uses_lists() {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(2 * kSeqlenKv));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 70);
  BlockLists lists;
  CHECK(BlockLists::create(Documents(2, kSeqlenKv, kSeqlenKv, ids.data(), ids.data()), lists) == Status::Ok);
  ForwardProblem problem(DType::F32);
  problem.batch(2).seqlens(kSeqlenKv, kSeqlenKv).heads(2, 1).head_dims(8, 8).causal().block_mask(lists.block_mask());
  CHECK(lists.block_mask().flags() ==
        (HATTN_BLOCK_MASK_LISTS | HATTN_BLOCK_MASK_PER_BATCH | HATTN_BLOCK_MASK_FULL_BLOCKS));
  std::vector<float> q(static_cast<std::size_t>(problem.q_shape().elements())), o(q.size());
  std::vector<float> kv(static_cast<std::size_t>(problem.k_shape().elements()));
  reference_fill(q.data(), q.size(), 1);
  reference_fill(kv.data(), kv.size(), 2);
  ForwardArgs args;
  args.q = ConstTensorView::contiguous(q.data(), Device::cpu(), problem.q_shape());
  args.k = args.v = ConstTensorView::contiguous(kv.data(), Device::cpu(), problem.k_shape());
  args.o = TensorView::contiguous(o.data(), Device::cpu(), problem.o_shape());
  lists.add_to(args);
  ForwardPlan plan;
  CHECK(ForwardPlan::create(problem, Device::cpu(), plan) == Status::Ok);
  CHECK(plan.try_run(args, nullptr) == Status::Ok);
  auto c = detail::tagged<hattn_forward_args>();
  c.q = &args.q.c_tensor(), c.k = &args.k.c_tensor(), c.v = &args.v.c_tensor(), c.o = &args.o.c_tensor();
  reference_given.counts = &args.mask_block_cnt->c_tensor(), reference_given.bits = &args.mask_bits->c_tensor();
  reference_given.indices = &args.mask_block_idx->c_tensor();
  reference_given.full_counts = &args.full_block_cnt->c_tensor();
  reference_given.full_indices = &args.full_block_idx->c_tensor();
  CHECK(reference_distance(&problem.c_problem(), &c) < 1e-5);
  // Gradients have the same arguments.
  BackwardArgs gradients;
  lists.add_to(gradients);
  CHECK(gradients.mask_bits->data() == args.mask_bits->data());

  // What lists moved from give is refused.
  const BlockLists moved = std::move(lists);
  CHECK(moved && !lists && lists.get() == nullptr);  // NOLINT(bugprone-use-after-move)
  lists.add_to(args);
  CHECK(plan.try_run(args, nullptr) == Status::Argument);
  CHECK(problem.block_mask(lists.block_mask()).supported(Device::cpu()) == Status::Value);
}

void what_is_refused_says_so() {
  const std::int32_t ranges[] = {0, 9, 3, 5}, types[] = {0, 0};
  const Slices twice(9, 9, 2, ranges, ranges, types);
  BlockLists lists;
  CHECK(BlockLists::create(twice, lists) == Status::Value && !lists);
  CHECK_TEXT(last_error(), "both keep query 3 and key 3");
  CHECK(BlockLists::create(Documents(1, 2, 2, nullptr, types), lists) == Status::Argument);
  CHECK_TEXT(last_error(), "q_ids: a null pointer");
#ifndef HATTN_NO_EXCEPTIONS
  try {
    const BlockLists thrown(twice);
    CHECK(!thrown);
  } catch (const hattn::Error& error) {
    CHECK(error.status() == Status::Value);
    CHECK_TEXT(error.what(), "HATTN_ERROR_VALUE: slices: slice 0");
  }
  CHECK(BlockLists(Documents(1, 2, 2, types, types)).block_mask().most_partial() == 0);
#endif
}

// The same bytes as through C, whose test has known answers.
void the_mask_of_dropout_is_that_of_c() {
  std::uint8_t keep[2 * 3 * 8 * 9] = {}, other[sizeof(keep)] = {};
  CHECK(hattn_dropout_mask(0.5F, 3, 4, 2, 3, 8, 9, other, sizeof(other)) == HATTN_OK);
  CHECK(hattn::try_dropout_mask(0.5F, 3, 4, 2, 3, 8, 9, keep, sizeof(keep)) == Status::Ok);
  CHECK(std::memcmp(keep, other, sizeof(keep)) == 0 && std::memchr(keep, 1, sizeof(keep)) != nullptr);
  CHECK(hattn::try_dropout_mask(2.0F, 3, 4, 2, 3, 8, 9, keep, sizeof(keep)) == Status::Value);
#ifndef HATTN_NO_EXCEPTIONS
  hattn::dropout_mask(0.0F, 3, 4, 2, 3, 8, 9, keep, sizeof(keep));
  CHECK(std::memchr(keep, 0, sizeof(keep)) == nullptr);
#endif
}

}  // namespace

int main() {
  RUN("hpp_lists", descriptions_make_lists_of_what_they_say);
  RUN("hpp_lists", attention_uses_lists);
  RUN("hpp_lists", what_is_refused_says_so);
  RUN("hpp_lists", the_mask_of_dropout_is_that_of_c);
  return check_result();
}
