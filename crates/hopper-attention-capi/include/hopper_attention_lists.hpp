// Lists of blocks for Hopper Attention: the operands of a problem with a BlockMask, which the library makes on the host
// of slices, documents, prefixes, spans or a dense mask. Header-only, on top of hopper_attention.hpp. Errors are as
// there. hopper_attention_lists.h says more about each description. And the mask of dropout.
//
//   hattn::BlockLists lists(hattn::Documents(batch, seqlen_q, seqlen_kv, q_ids, kv_ids));
//   problem.block_mask(lists.block_mask()).causal();
//   lists.add_to(args);   // of a run on the CPU. For a GPU copy the lists there: mask_block_cnt() and the other views
//
// Ownership: descriptions are views of the caller's arrays, which are read while lists are made. Lists own their
// memory.
#ifndef HOPPER_ATTENTION_LISTS_HPP
#define HOPPER_ATTENTION_LISTS_HPP

#include <memory>
#include <utility>

#include "hopper_attention.hpp"
#include "hopper_attention_lists.h"

namespace hattn {
inline namespace HATTN_DETAIL_NAMESPACE {

namespace detail {

// The C functions that make lists under one name, as those of plans.
inline hattn_status c_lists(const hattn_slices* from, hattn_block_lists** lists) noexcept {
  return hattn_block_lists_from_slices(from, lists);
}
inline hattn_status c_lists(const hattn_documents* from, hattn_block_lists** lists) noexcept {
  return hattn_block_lists_from_documents(from, lists);
}
inline hattn_status c_lists(const hattn_prefixes* from, hattn_block_lists** lists) noexcept {
  return hattn_block_lists_from_prefixes(from, lists);
}
inline hattn_status c_lists(const hattn_spans* from, hattn_block_lists** lists) noexcept {
  return hattn_block_lists_from_spans(from, lists);
}
inline hattn_status c_lists(const hattn_dense_mask* from, hattn_block_lists** lists) noexcept {
  return hattn_block_lists_from_dense_mask(from, lists);
}

struct DestroyLists {
  void operator()(hattn_block_lists* owned) const noexcept { hattn_block_lists_destroy(owned); }
};

// What all descriptions have in common. C is the struct of the C header.
template <class C>
class Description {
 public:
  // The struct that the C functions take.
  constexpr const C& c_value() const noexcept { return c_; }

 protected:
  constexpr Description(std::int64_t seqlen_q, std::int64_t seqlen_kv) noexcept {
    c_.seqlen_q = seqlen_q;
    c_.seqlen_kv = seqlen_kv;
  }

  C c_ = tagged<C>();
};

}  // namespace detail

// A mask with its numbers, for prefixes and spans: which keys a query keeps. As the setters of ForwardProblem.
class MaskForm {
 public:
  static constexpr MaskForm full() noexcept { return {Mask::Full, 0, 0, Corner::BottomRight}; }
  static constexpr MaskForm causal(Corner corner = Corner::BottomRight) noexcept {
    return {Mask::Causal, 0, 0, corner};
  }
  static constexpr MaskForm window(std::int64_t left, std::int64_t right,
                                   Corner corner = Corner::BottomRight) noexcept {
    return {Mask::Window, left, right, corner};
  }
  static constexpr MaskForm chunked(std::int64_t keys, Corner corner = Corner::BottomRight) noexcept {
    return {Mask::Chunked, keys, 0, corner};
  }
  static constexpr MaskForm prefix(std::int64_t keys, Corner corner = Corner::BottomRight) noexcept {
    return {Mask::Prefix, keys, 0, corner};
  }

  constexpr Mask mask() const noexcept { return mask_; }
  constexpr Corner corner() const noexcept { return corner_; }
  constexpr std::int64_t left() const noexcept { return left_; }
  constexpr std::int64_t right() const noexcept { return right_; }

 private:
  constexpr MaskForm(Mask mask, std::int64_t left, std::int64_t right, Corner corner) noexcept
      : mask_(mask), corner_(corner), left_(left), right_(right) {}

  Mask mask_;
  Corner corner_;
  std::int64_t left_, right_;
};

namespace detail {

template <class C>
constexpr void set_mask(C& c, const MaskForm& mask) noexcept {
  c.mask = static_cast<hattn_mask>(mask.mask());
  c.corner = static_cast<hattn_corner>(mask.corner());
  c.window_left = mask.left();
  c.window_right = mask.right();
}

}  // namespace detail

// `count` slices of the pairs, as MagiAttention's FFA has them (hattn_slices). q_ranges and k_ranges are [count, 2],
// types is [count]: 0 (full), 1 (causal), 2 (inverse causal) or 3 (both). Slices that keep one pair twice are refused.
class Slices : public detail::Description<hattn_slices> {
 public:
  constexpr Slices(std::int64_t seqlen_q, std::int64_t seqlen_kv, std::int64_t count, const std::int32_t* q_ranges,
                   const std::int32_t* k_ranges, const std::int32_t* types) noexcept
      : Description(seqlen_q, seqlen_kv) {
    c_.count = count;
    c_.q_ranges = q_ranges;
    c_.k_ranges = k_ranges;
    c_.types = types;
  }
};

// Documents: a pair is kept if both have the same number, 0 or more. q_ids is [batch, seqlen_q], kv_ids is
// [batch, seqlen_kv]. batch is that of the problem, or 1 if all batch entries share the numbers.
class Documents : public detail::Description<hattn_documents> {
 public:
  constexpr Documents(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_kv, const std::int32_t* q_ids,
                      const std::int32_t* kv_ids) noexcept
      : Description(seqlen_q, seqlen_kv) {
    c_.batch = batch;
    c_.q_ids = q_ids;
    c_.kv_ids = kv_ids;
  }
};

// Prefixes: a pair is kept if the mask keeps it, or the key is below the prefix of the batch entry. prefixes is
// [batch].
class Prefixes : public detail::Description<hattn_prefixes> {
 public:
  constexpr Prefixes(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_kv, const std::int32_t* prefixes,
                     const MaskForm& mask) noexcept
      : Description(seqlen_q, seqlen_kv) {
    c_.batch = batch;
    c_.prefixes = prefixes;
    detail::set_mask(c_, mask);
  }
};

// Spans: a pair is kept if the mask keeps it or both are in one span, and `within` keeps it, too. counts is [batch]:
// how many spans each batch entry has. spans has all of them, [sum of counts, 2]: the first key and the one after the
// last. batch is that of the problem, or 1 if all batch entries share the spans.
class Spans : public detail::Description<hattn_spans> {
 public:
  constexpr Spans(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_kv, const std::int32_t* counts,
                  const std::int32_t* spans, const MaskForm& mask, const MaskForm& within = MaskForm::full()) noexcept
      : Description(seqlen_q, seqlen_kv) {
    c_.batch = batch;
    c_.counts = counts;
    c_.spans = spans;
    detail::set_mask(c_, mask);
    c_.within = static_cast<hattn_mask>(within.mask());
    c_.within_corner = static_cast<hattn_corner>(within.corner());
    c_.within_left = within.left();
    c_.within_right = within.right();
  }
};

// A dense mask: kept is [batch, heads_q, seqlen_q, seqlen_kv], a byte for each pair, 1 (kept) or 0. batch and heads_q
// are those of the problem, or 1 if all batch entries, or all query heads, share the mask.
class DenseMask : public detail::Description<hattn_dense_mask> {
 public:
  constexpr DenseMask(std::int64_t batch, std::int64_t heads_q, std::int64_t seqlen_q, std::int64_t seqlen_kv,
                      const std::uint8_t* kept) noexcept
      : Description(seqlen_q, seqlen_kv) {
    c_.batch = batch;
    c_.heads_q = heads_q;
    c_.kept = kept;
  }
};

// Lists of blocks in host memory, which they own. Movable, not copyable. They do not change, and many threads may use
// them at once. An empty one (default-constructed or moved from) gives a mask and views that every call refuses.
class BlockLists {
 public:
  BlockLists() noexcept = default;

#ifndef HATTN_NO_EXCEPTIONS
  // Makes the lists of Slices, Documents, Prefixes, Spans or a DenseMask.
  template <class C>
  explicit BlockLists(const detail::Description<C>& from) {
    detail::check(create(from, *this));
  }
#endif

  // The same without exceptions. On failure `lists` stays as it was.
  template <class C>
  [[nodiscard]] static Status create(const detail::Description<C>& from, BlockLists& lists) noexcept {
    if (const Status status = detail::check_abi(); !ok(status)) return status;
    hattn_block_lists* made = nullptr;
    if (const Status status = detail::from_library(detail::c_lists(&from.c_value(), &made)); !ok(status)) return status;
    std::unique_ptr<hattn_block_lists, detail::DestroyLists> owned(made);
    auto arrays = detail::tagged<hattn_block_arrays>();
    const Status status = detail::from_library(hattn_block_lists_arrays(made, &arrays));
    if (ok(status)) {
      lists.owned_ = std::move(owned);
      lists.arrays_ = arrays;
    }
    return status;
  }

  hattn_block_lists* get() const noexcept { return owned_.get(); }
  explicit operator bool() const noexcept { return owned_ != nullptr; }

  // What ForwardProblem::block_mask takes. There always are lists of full blocks.
  BlockMask block_mask() const noexcept {
    BlockMask mask(owned_ ? arrays_.block_mask_most_partial : -1);
    mask.per_batch((arrays_.block_mask & HATTN_BLOCK_MASK_PER_BATCH) != 0);
    mask.per_head((arrays_.block_mask & HATTN_BLOCK_MASK_PER_HEAD) != 0);
    return mask.full_blocks(true);
  }

  // The lists: I32 on the CPU, of the shapes that hattn_block_mask says. They stay valid until the lists are destroyed.
  ConstTensorView mask_block_cnt() const noexcept { return view(arrays_.mask_block_cnt, 3, arrays_.shape); }
  ConstTensorView mask_block_idx() const noexcept { return view(arrays_.mask_block_idx, 4, arrays_.shape); }
  ConstTensorView mask_bits() const noexcept { return view(arrays_.mask_bits, 4, arrays_.bits_shape); }
  ConstTensorView full_block_cnt() const noexcept { return view(arrays_.full_block_cnt, 3, arrays_.shape); }
  ConstTensorView full_block_idx() const noexcept { return view(arrays_.full_block_idx, 4, arrays_.shape); }

  // Sets the five arguments of a run on the CPU: ForwardArgs or BackwardArgs.
  template <class Args>
  void add_to(Args& args) const noexcept {
    args.mask_block_cnt = mask_block_cnt();
    args.mask_block_idx = mask_block_idx();
    args.mask_bits = mask_bits();
    args.full_block_cnt = full_block_cnt();
    args.full_block_idx = full_block_idx();
  }

 private:
  ConstTensorView view(const std::int32_t* data, std::int32_t rank, const std::int64_t (&shape)[4]) const noexcept {
    if (!owned_) return ConstTensorView();
    return ConstTensorView::contiguous(data, Device::cpu(), Extents(rank, shape));
  }

  std::unique_ptr<hattn_block_lists, detail::DestroyLists> owned_{};
  hattn_block_arrays arrays_{};
};

// Which pairs of a query and a key dropout keeps: 1 where a pair is kept, 0 where it is dropped. `keep` has `bytes`
// bytes of host memory: [batch, heads_q, seqlen_q, seqlen_kv], row-major. `seed` and `offset` are those of
// dropout_state.
[[nodiscard]] inline Status try_dropout_mask(float dropout, std::uint64_t seed, std::uint64_t offset,
                                             std::int64_t batch, std::int64_t heads_q, std::int64_t seqlen_q,
                                             std::int64_t seqlen_kv, std::uint8_t* keep, std::size_t bytes) noexcept {
  if (const Status status = detail::check_abi(); !ok(status)) return status;
  return detail::from_library(
      hattn_dropout_mask(dropout, seed, offset, batch, heads_q, seqlen_q, seqlen_kv, keep, bytes));
}

#ifndef HATTN_NO_EXCEPTIONS
inline void dropout_mask(float dropout, std::uint64_t seed, std::uint64_t offset, std::int64_t batch,
                         std::int64_t heads_q, std::int64_t seqlen_q, std::int64_t seqlen_kv, std::uint8_t* keep,
                         std::size_t bytes) {
  detail::check(try_dropout_mask(dropout, seed, offset, batch, heads_q, seqlen_q, seqlen_kv, keep, bytes));
}
#endif

}  // namespace HATTN_DETAIL_NAMESPACE
}  // namespace hattn

#endif  // HOPPER_ATTENTION_LISTS_HPP
