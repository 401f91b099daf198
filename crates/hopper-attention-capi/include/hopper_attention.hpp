// Hopper Attention for C++17: hopper_attention.h with RAII, typed tensor views and exceptions. Header-only. It needs
// the standard library and the C header, and adds no symbol to the library. The C header says more about each option.
//
//   hattn::ForwardProblem problem(hattn::DType::F32);
//   problem.batch(2).seqlens(512, 512).heads(8, 2).head_dims(64, 64).causal();
//   hattn::ForwardPlan plan(problem, hattn::Device::cpu());
//
//   hattn::ForwardArgs args;
//   args.q = hattn::ConstTensorView::contiguous(q, hattn::Device::cpu(), problem.q_shape());
//   args.k = hattn::ConstTensorView::contiguous(k, hattn::Device::cpu(), problem.k_shape());
//   args.v = hattn::ConstTensorView::contiguous(v, hattn::Device::cpu(), problem.v_shape());
//   args.o = hattn::TensorView::contiguous(o, hattn::Device::cpu(), problem.o_shape());
//   plan.run(args, nullptr);
//
// BackwardProblem(problem), BackwardPlan and BackwardArgs do the same for the gradients.
//
// Errors: a call that fails throws hattn::Error. Each function that throws has a twin that does not. The twin of a
// constructor is create. Other twins begin with try_, such as try_run. A twin returns a Status and writes its result
// through a reference. With -fno-exceptions, or with HATTN_NO_EXCEPTIONS defined, there are only the twins. A call that
// refuses its arguments launches and writes nothing.
//
// Ownership: views, problems and arguments own nothing. Memory, streams and workspaces belong to the caller.
#ifndef HOPPER_ATTENTION_HPP
#define HOPPER_ATTENTION_HPP

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "hopper_attention_tensor.hpp"

#ifndef HATTN_NO_EXCEPTIONS
#include <string>
#endif

namespace hattn {
inline namespace HATTN_DETAIL_NAMESPACE {

namespace detail {

// The C functions of all passes under one name each, so that templates can call them. For the forward pass this makes
//   hattn_status c_supported(const hattn_forward_problem*, hattn_device)    which calls hattn_forward_supported
// and c_create, c_destroy, c_describe and c_workspace_size. They are inline: a program that does not use a pass needs
// none of its symbols.
#define HATTN_DETAIL_PASS(pass)                                                                          \
  inline hattn_status c_supported(const hattn_##pass##_problem* problem, hattn_device device) noexcept { \
    return hattn_##pass##_supported(problem, device);                                                    \
  }                                                                                                      \
  inline hattn_status c_create(const hattn_##pass##_problem* problem, hattn_device device,               \
                               hattn_##pass##_plan** plan) noexcept {                                    \
    return hattn_##pass##_plan_create(problem, device, plan);                                            \
  }                                                                                                      \
  inline void c_destroy(hattn_##pass##_plan* plan) noexcept { hattn_##pass##_plan_destroy(plan); }       \
  inline hattn_status c_describe(const hattn_##pass##_plan* plan, char* text, std::size_t capacity,      \
                                 std::size_t* length) noexcept {                                         \
    return hattn_##pass##_plan_describe(plan, text, capacity, length);                                   \
  }                                                                                                      \
  inline hattn_status c_workspace_size(const hattn_##pass##_plan* plan, std::size_t* bytes) noexcept {   \
    return hattn_##pass##_plan_workspace_size(plan, bytes);                                              \
  }
HATTN_DETAIL_PASS(forward)
HATTN_DETAIL_PASS(backward)
HATTN_DETAIL_PASS(quantize)
#undef HATTN_DETAIL_PASS

inline void c_destroy(hattn_tuning* tuning) noexcept { hattn_tuning_destroy(tuning); }

struct Destroy {
  template <class C>
  void operator()(C* owned) const noexcept {
    c_destroy(owned);
  }
};

}  // namespace detail

// Which keys a query attends to.
enum class Mask : hattn_mask {
  Full = HATTN_MASK_FULL,
  Causal = HATTN_MASK_CAUSAL,
  Window = HATTN_MASK_WINDOW,
  Chunked = HATTN_MASK_CHUNKED,
  Prefix = HATTN_MASK_PREFIX
};

// How masks are aligned. The aligned key of query i has the number i + seqlen_kv - seqlen_q
// (BottomRight) or i (TopLeft).
enum class Corner : hattn_corner { BottomRight = HATTN_BOTTOM_RIGHT, TopLeft = HATTN_TOP_LEFT };

// The instruction set of the kernels that compute a problem. Own: the newest one that the GPU runs.
enum class Arch : hattn_arch { Own = HATTN_ARCH_OWN, Sm80 = HATTN_ARCH_SM80, Sm90 = HATTN_ARCH_SM90 };

// Which elements of Q, K and V of E4M3 share a descale factor.
// PerTensor: all. PerHead: those of a sequence and KV head. PerBlock: those of 128 rows of a head.
enum class Scaling : hattn_scaling {
  PerTensor = HATTN_PER_TENSOR,
  PerHead = HATTN_PER_HEAD,
  PerBlock = HATTN_PER_BLOCK
};

// Which ALiBi slopes a problem has: one for each query head, or one for each batch and query head.
enum class Alibi : std::int32_t {
  None = HATTN_ALIBI_NONE,
  PerHead = HATTN_ALIBI_PER_HEAD,
  PerBatch = HATTN_ALIBI_PER_BATCH
};

// A block-sparse mask: lists of blocks of 128 queries and 128 keys (hattn_block_mask), beside the problem's mask.
// Setters return the mask, so that they can be chained.
class BlockMask {
 public:
  // Lists of at most so many partial blocks for a block of queries. All batch entries and heads share them. No full
  // blocks.
  explicit constexpr BlockMask(std::int32_t most_partial) noexcept : most_partial_(most_partial) {}

  // Whether each batch entry, and each query head, has lists of its own.
  constexpr BlockMask& per_batch(bool own) noexcept { return set(HATTN_BLOCK_MASK_PER_BATCH, own); }
  constexpr BlockMask& per_head(bool own) noexcept { return set(HATTN_BLOCK_MASK_PER_HEAD, own); }

  // Whether there are lists of full blocks.
  constexpr BlockMask& full_blocks(bool given) noexcept { return set(HATTN_BLOCK_MASK_FULL_BLOCKS, given); }

  constexpr hattn_block_mask flags() const noexcept { return flags_; }
  constexpr std::int32_t most_partial() const noexcept { return most_partial_; }

 private:
  constexpr BlockMask& set(hattn_block_mask flag, bool on) noexcept {
    flags_ = on ? flags_ | flag : flags_ & ~flag;
    return *this;
  }

  hattn_block_mask flags_ = HATTN_BLOCK_MASK_LISTS;
  std::int32_t most_partial_;
};

// The form of an additive bias: its type, F32, BF16 or F16, and which dimensions it has beside the keys. A dimension
// that it has not is 1, and shared. Setters return the form, so that they can be chained.
class Bias {
 public:
  explicit constexpr Bias(DType dtype) noexcept : dtype_(dtype) {}

  // Whether each batch entry, each query head, and each query has a bias of its own.
  constexpr Bias& per_batch(bool own) noexcept { return set(HATTN_BIAS_PER_BATCH, own); }
  constexpr Bias& per_head(bool own) noexcept { return set(HATTN_BIAS_PER_HEAD, own); }
  constexpr Bias& per_query(bool own) noexcept { return set(HATTN_BIAS_PER_QUERY, own); }

  // How many queries and keys of a sequence have numbers. For packed sequences; the default is seqlen_q and seqlen_kv.
  constexpr Bias& covering(std::int64_t queries, std::int64_t keys) noexcept {
    queries_ = queries;
    keys_ = keys;
    return *this;
  }

  constexpr DType dtype() const noexcept { return dtype_; }
  constexpr hattn_bias_dims dims() const noexcept { return dims_; }
  constexpr std::int64_t queries() const noexcept { return queries_; }
  constexpr std::int64_t keys() const noexcept { return keys_; }

 private:
  constexpr Bias& set(hattn_bias_dims flag, bool on) noexcept {
    dims_ = on ? dims_ | flag : dims_ & ~flag;
    return *this;
  }

  DType dtype_;
  hattn_bias_dims dims_ = 0;
  std::int64_t queries_ = 0;
  std::int64_t keys_ = 0;
};

// No bound on this side of a window.
inline constexpr std::int64_t kUnbounded = HATTN_UNBOUNDED;

namespace detail {

// What the problems of both passes have in common. Self is the derived class.
template <class Self, class CProblem>
class Problem {
 public:
  constexpr DType dtype() const noexcept { return static_cast<DType>(problem_.dtype); }
  // Shapes of tensors. Those of packed sequences have no batch: [total, heads, head_dim].
  constexpr Extents q_shape() const noexcept { return rows_q(problem_.heads_q, problem_.head_dim_qk); }
  constexpr Extents k_shape() const noexcept { return rows_kv(problem_.heads_kv, problem_.head_dim_qk); }
  constexpr Extents v_shape() const noexcept { return rows_kv(problem_.heads_kv, problem_.head_dim_vo); }
  constexpr Extents o_shape() const noexcept { return rows_q(problem_.heads_q, problem_.head_dim_vo); }
  constexpr Extents lse_shape() const noexcept {
    if (problem_.cu_seqlens_q != 0) return {problem_.heads_q, problem_.seqlen_q};
    return {problem_.batch, problem_.heads_q, problem_.seqlen_q};
  }

  // Ok: the device computes the problem. Unsupported: there is no kernel. NoDevice: there is no such device. Any other
  // status says what is wrong with the problem. Creates no context, loads nothing and never throws.
  [[nodiscard]] Status supported(Device device) const noexcept {
    if (const Status status = check_abi(); !ok(status)) return status;
    return from_library(c_supported(&problem_, device.c_value()));
  }

  // The struct that the C functions take.
  constexpr const CProblem& c_problem() const noexcept { return problem_; }

 protected:
  constexpr Problem() noexcept = default;

  // Sets a field of problem_. A bool becomes 0 or 1, and an enum its C value.
  template <class Field, class Value>
  constexpr Self& set(Field& field, Value value) noexcept {
    field = static_cast<Field>(value);
    return static_cast<Self&>(*this);
  }

  CProblem problem_ = tagged<CProblem>();

 private:
  constexpr Extents rows_q(std::int64_t heads, std::int64_t dim) const noexcept {
    if (problem_.cu_seqlens_q != 0) return {problem_.seqlen_q, heads, dim};
    return {problem_.batch, problem_.seqlen_q, heads, dim};
  }
  constexpr Extents rows_kv(std::int64_t heads, std::int64_t dim) const noexcept {
    if (problem_.cu_seqlens_kv != 0) return {problem_.seqlen_kv, heads, dim};
    return {problem_.batch, problem_.seqlen_kv, heads, dim};
  }
};

}  // namespace detail

// A forward pass, as numbers: O = softmax(mask(softmax_scale * Q K^T)) V.
//
// Setters return the problem, so that they can be chained. Defaults: batch 1, a full mask, the scale
// 1 / sqrt(head_dim_qk), no optional output. Numbers are checked when the problem is used. Other sizes that were not
// set are refused then.
class ForwardProblem : public detail::Problem<ForwardProblem, hattn_forward_problem> {
 public:
  // The element type of Q, K and V. It is also that of O, unless it is E4M3 (see output).
  explicit constexpr ForwardProblem(DType dtype) noexcept {
    problem_.dtype = static_cast<hattn_dtype>(dtype);
    problem_.batch = 1;
    problem_.seqlen_q = problem_.seqlen_kv = HATTN_UNSET;
  }

  constexpr ForwardProblem& batch(std::int64_t sequences) noexcept { return set(problem_.batch, sequences); }

  constexpr ForwardProblem& seqlens(std::int64_t q, std::int64_t kv) noexcept {
    return set(problem_.seqlen_q, q).set(problem_.seqlen_kv, kv);
  }

  // q is a multiple of kv. Head h of Q reads head h / (q / kv) of K and V.
  constexpr ForwardProblem& heads(std::int64_t q, std::int64_t kv) noexcept {
    return set(problem_.heads_q, q).set(problem_.heads_kv, kv);
  }

  // qk: number of elements of a query and of a key. vo: number of elements of a value and of an output.
  constexpr ForwardProblem& head_dims(std::int64_t qk, std::int64_t vo) noexcept {
    return set(problem_.head_dim_qk, qk).set(problem_.head_dim_vo, vo);
  }

  // For masks with numbers call window(), chunked() or prefix() instead: they set the numbers, too.
  constexpr ForwardProblem& mask(Mask mask) noexcept { return set(problem_.mask, mask); }

  // The keys up to the aligned key (Corner), with that key.
  constexpr ForwardProblem& causal(Corner corner = Corner::BottomRight) noexcept {
    return mask(Mask::Causal).corner(corner);
  }

  // The keys from `left` before the aligned key (Corner) to `right` after it, both included. kUnbounded: all of them.
  constexpr ForwardProblem& window(std::int64_t left, std::int64_t right,
                                   Corner corner = Corner::BottomRight) noexcept {
    return set(problem_.window_left, left).set(problem_.window_right, right).mask(Mask::Window).corner(corner);
  }

  // Chunks of so many keys, from key 0 on: the keys of the aligned key's chunk, up to the aligned key, with that key.
  constexpr ForwardProblem& chunked(std::int64_t keys, Corner corner = Corner::BottomRight) noexcept {
    return set(problem_.window_left, keys).mask(Mask::Chunked).corner(corner);
  }

  // The first `keys` keys, and the keys up to the aligned key, with that key.
  constexpr ForwardProblem& prefix(std::int64_t keys, Corner corner = Corner::BottomRight) noexcept {
    return set(problem_.window_left, keys).mask(Mask::Prefix).corner(corner);
  }

  constexpr ForwardProblem& corner(Corner corner) noexcept { return set(problem_.corner, corner); }

  // The factor on Q K^T, finite and above 0. 0 stands for 1 / sqrt(head_dim_qk).
  constexpr ForwardProblem& softmax_scale(float scale) noexcept { return set(problem_.softmax_scale, scale); }

  // Caps the scores: cap * tanh(softmax_scale * q k / cap), before the mask. Finite and above 0; 0: no cap.
  // Gradients are those of the capped scores.
  constexpr ForwardProblem& softcap(float cap) noexcept { return set(problem_.softcap, cap); }

  // Attention with linear biases: a score loses slope * |i + offset - j|, after the cap and before the mask
  // (hattn_alibi). The argument alibi_slopes of a run has the slopes. For other operands than E4M3. There is no
  // gradient of the slopes.
  constexpr ForwardProblem& alibi(Alibi slopes) noexcept { return set(problem_.alibi, slopes); }

  // Whether the largest score of each query head is an output: F32, [heads_q]. For other operands than E4M3.
  constexpr ForwardProblem& max_logits(bool wanted) noexcept { return set(problem_.max_logits, wanted); }

  // Lists of blocks that keep pairs, beside the mask: five arguments of a run have them. Not for packed sequences or
  // used lengths.
  constexpr ForwardProblem& block_mask(const BlockMask& lists) noexcept {
    return set(problem_.block_mask, lists.flags()).set(problem_.block_mask_most_partial, lists.most_partial());
  }

  // An additive bias of the scores, after the cap and before the mask. -inf hides a pair as a mask does. The argument
  // bias of a run has it. For other operands than E4M3. On a GPU no gradients with softcap.
  constexpr ForwardProblem& bias(const Bias& form) noexcept {
    set(problem_.bias_queries, form.queries()).set(problem_.bias_keys, form.keys());
    return set(problem_.bias, form.dtype()).set(problem_.bias_dims, form.dims());
  }

  // Dropout of the weights: the probability, 0 (none) to below 1, with which one becomes 0 (hattn_forward_problem). The
  // argument dropout_state of a run has the seed and the offset. Not for E4M3. docs/numerics.md lists the limits of
  // GPUs.
  constexpr ForwardProblem& dropout(float probability) noexcept { return set(problem_.dropout, probability); }

  // Restricts plans to kernels of one instruction set. The CPU takes Arch::Own only.
  constexpr ForwardProblem& arch(Arch arch) noexcept { return set(problem_.arch, arch); }

  // How many multiprocessors of the GPU the kernels leave to others, such as kernels of NCCL (default: 0). Kernels of
  // Arch::Sm80 cannot leave any, so that a plan is refused. The CPU ignores it. So does the quantiser.
  constexpr ForwardProblem& sm_margin(std::int32_t multiprocessors) noexcept {
    return set(problem_.sm_margin, multiprocessors);
  }

  // The most bytes that the workspace of a plan may have (default: 0, any number). A plan then cuts tiles less, and is
  // refused if its workspace has more bytes even without that. The CPU needs none. The quantiser ignores it.
  constexpr ForwardProblem& workspace_limit(std::uint64_t bytes) noexcept {
    return set(problem_.workspace_limit, bytes);
  }

  // Whether the sequences of Q, and those of K and V, are packed: one after the other, without padding. The length of a
  // packed side in seqlens() is the number of rows of all its sequences (total). Its tensors are [total, heads,
  // head_dim], and the log-sum-exp of packed queries is [heads_q, total_q]. The arguments cu_seqlens_q and
  // cu_seqlens_kv of a run say where each sequence begins.
  constexpr ForwardProblem& packed(bool q, bool kv) noexcept {
    return set(problem_.cu_seqlens_q, q).set(problem_.cu_seqlens_kv, kv);
  }

  // Whether each sequence uses only its first rows of Q, and of K and V. The arguments seqused_q and seqused_kv of a
  // run say how many.
  constexpr ForwardProblem& used(bool q, bool kv) noexcept {
    return set(problem_.seqused_q, q).set(problem_.seqused_kv, kv);
  }

  // About how many queries and keys the longest sequence has. 0: unknown. A hint for the choice of kernels, for packed
  // sides and used lengths only.
  constexpr ForwardProblem& max_seqlens(std::int64_t q, std::int64_t kv) noexcept {
    return set(problem_.max_seqlen_q, q).set(problem_.max_seqlen_kv, kv);
  }

  // Whether rows of outputs that belong to no sequence are filled: with 0, and the log-sum-exp with -inf.
  constexpr ForwardProblem& fill_gaps(bool wanted) noexcept { return set(problem_.fill_gaps, wanted); }

  // The element type of the attention sinks, one number for each query head: F32 or BF16. A sink takes part in the
  // softmax of all rows of its head, and has no value (hattn_forward_problem::sinks).
  constexpr ForwardProblem& sinks(DType dtype) noexcept { return set(problem_.sinks, dtype); }

  // Whether the log-sum-exp of each query is an output: natural logarithm, F32, [batch, heads_q, seqlen_q].
  constexpr ForwardProblem& lse(bool wanted) noexcept { return set(problem_.lse, wanted); }

  // The options from here on are for E4M3 operands only. hopper_attention_fp8.hpp makes such operands.

  // The element type of O: BF16 (the default), F16 or E4M3.
  constexpr ForwardProblem& output(DType dtype) noexcept { return set(problem_.output, dtype); }

  // Which elements share a descale factor. Default: PerTensor.
  constexpr ForwardProblem& scaling(Scaling scaling) noexcept { return set(problem_.scaling, scaling); }

  // Whether the largest magnitude of O, before scale_o and rounding, is an output: F32 [1].
  constexpr ForwardProblem& amax(bool wanted) noexcept { return set(problem_.amax, wanted); }

  // Allows f16 score accumulation on a GPU. It is fast if no stored element of Q and K is larger than 14 in magnitude.
  constexpr ForwardProblem& half_scores(bool wanted) noexcept { return set(problem_.half_scores, wanted); }
};

// The gradients of a forward pass with respect to Q, K and V, as numbers. dQ, dK, dV and dO (the gradient of the
// output) have the shapes of Q, K, V and O. Setters return the problem.
class BackwardProblem : public detail::Problem<BackwardProblem, hattn_backward_problem> {
 public:
  // The gradients of this forward pass. The log-sum-exp is an input, whether or not `forward` has lse(true). Defaults:
  // no gradient of the log-sum-exp, not deterministic, the margin of `forward`.
  explicit constexpr BackwardProblem(const ForwardProblem& forward) noexcept {
    const hattn_forward_problem& of = forward.c_problem();
    problem_.dtype = of.dtype;
    problem_.mask = of.mask;
    problem_.corner = of.corner;
    problem_.batch = of.batch;
    problem_.seqlen_q = of.seqlen_q;
    problem_.seqlen_kv = of.seqlen_kv;
    problem_.heads_q = of.heads_q;
    problem_.heads_kv = of.heads_kv;
    problem_.head_dim_qk = of.head_dim_qk;
    problem_.head_dim_vo = of.head_dim_vo;
    problem_.window_left = of.window_left;
    problem_.window_right = of.window_right;
    problem_.softmax_scale = of.softmax_scale;
    problem_.softcap = of.softcap;
    problem_.alibi = of.alibi;
    problem_.block_mask = of.block_mask;
    problem_.block_mask_most_partial = of.block_mask_most_partial;
    problem_.bias = of.bias;
    problem_.bias_dims = of.bias_dims;
    problem_.bias_queries = of.bias_queries;
    problem_.bias_keys = of.bias_keys;
    problem_.dropout = of.dropout;
    problem_.arch = of.arch;
    problem_.sm_margin = of.sm_margin;
    problem_.workspace_limit = of.workspace_limit;
    problem_.cu_seqlens_q = of.cu_seqlens_q;
    problem_.cu_seqlens_kv = of.cu_seqlens_kv;
    problem_.seqused_q = of.seqused_q;
    problem_.seqused_kv = of.seqused_kv;
    problem_.max_seqlen_q = of.max_seqlen_q;
    problem_.max_seqlen_kv = of.max_seqlen_kv;
    problem_.fill_gaps = of.fill_gaps;
    problem_.sinks = of.sinks;
  }

  // Whether a gradient of the log-sum-exp is an input: F32, [batch, heads_q, seqlen_q].
  constexpr BackwardProblem& d_lse(bool given) noexcept { return set(problem_.d_lse, given); }

  // Whether the gradient of the attention sinks is an output: F32, [heads_q]. The sinks are an input then. For a
  // forward problem with sinks() only.
  constexpr BackwardProblem& d_sinks(bool wanted) noexcept { return set(problem_.d_sinks, wanted); }

  // Whether the gradient of the bias is an output, of its shape and type. For a forward problem with bias() only.
  constexpr BackwardProblem& d_bias(bool wanted) noexcept { return set(problem_.d_bias, wanted); }

  // Whether the same inputs, plan and device always give the same bits. This may cost time on a GPU.
  constexpr BackwardProblem& deterministic(bool wanted) noexcept { return set(problem_.deterministic, wanted); }

  // As ForwardProblem::sm_margin, for the main kernel of the backward pass.
  constexpr BackwardProblem& sm_margin(std::int32_t multiprocessors) noexcept {
    return set(problem_.sm_margin, multiprocessors);
  }

  // As ForwardProblem::workspace_limit. Gradients need more than a forward pass, and take its limit unless it is set
  // here.
  constexpr BackwardProblem& workspace_limit(std::uint64_t bytes) noexcept {
    return set(problem_.workspace_limit, bytes);
  }
};

// Scratch memory on the plan's device: at least plan.workspace_bytes() bytes, aligned to 16 bytes.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// What a forward pass reads (ConstTensorView) and writes (TensorView).
struct ForwardArgs {
  ConstTensorView q{};              // [batch, seqlen_q, heads_q, head_dim_qk]
  ConstTensorView k{};              // [batch, seqlen_kv, heads_kv, head_dim_qk]
  ConstTensorView v{};              // [batch, seqlen_kv, heads_kv, head_dim_vo]
  TensorView o{};                   // [batch, seqlen_q, heads_q, head_dim_vo]
  std::optional<TensorView> lse{};  // F32 [batch, heads_q, seqlen_q]; given exactly if the problem has lse(true)
  Workspace workspace{};
  // Descale factors: F32 [batch, heads, blocks]. Given exactly with E4M3 operands.
  std::optional<ConstTensorView> descale_q{}, descale_k{}, descale_v{};
  std::optional<ConstTensorView> scale_o{};  // F32 [1], the factor on O; given exactly with an output of E4M3
  std::optional<TensorView> amax{};  // F32 [1], the largest magnitude of O; given exactly if the problem has amax(true)
  // Offsets and used lengths of sequences: I32 [batch + 1] and [batch]. Given exactly if the problem has them.
  std::optional<ConstTensorView> cu_seqlens_q{}, cu_seqlens_kv{}, seqused_q{}, seqused_kv{};
  std::optional<ConstTensorView> sinks{};  // [heads_q]; given exactly if the problem has sinks()
  // F32 [heads_q] or [batch, heads_q]; given exactly if the problem has alibi(), in the shape that it says
  std::optional<ConstTensorView> alibi_slopes{};
  std::optional<TensorView> max_logits{};  // F32 [heads_q]; given exactly if the problem has max_logits(true)
  // The lists of a block_mask(): I32 [B, H, Qb], [B, H, Qb, Kb] and [B, H, Qb, 512 * most_partial] (hattn_block_mask).
  std::optional<ConstTensorView> mask_block_cnt{}, mask_block_idx{}, mask_bits{};
  // Of full blocks: as the first two. Given exactly if the block mask has full_blocks(true).
  std::optional<ConstTensorView> full_block_cnt{}, full_block_idx{};
  // [1 or batch, 1 or heads_q, 1 or seqlen_q, seqlen_kv]. Given exactly with bias().
  std::optional<ConstTensorView> bias{};
  // Seed and offset of dropout(): I32 [4], the words of two 64-bit numbers, low ones first. Given exactly if the
  // problem's dropout is not 0.
  std::optional<ConstTensorView> dropout_state{};
};

// What a backward pass reads and writes. Outputs are overwritten, not added to.
struct BackwardArgs {
  ConstTensorView q{};                     // [batch, seqlen_q, heads_q, head_dim_qk]
  ConstTensorView k{};                     // [batch, seqlen_kv, heads_kv, head_dim_qk]
  ConstTensorView v{};                     // [batch, seqlen_kv, heads_kv, head_dim_vo]
  ConstTensorView o{};                     // [batch, seqlen_q, heads_q, head_dim_vo], written by the forward pass
  ConstTensorView lse{};                   // F32 [batch, heads_q, seqlen_q], written by the forward pass
  ConstTensorView d_o{};                   // as o
  std::optional<ConstTensorView> d_lse{};  // as lse; given exactly if the problem has d_lse(true)
  TensorView d_q{};                        // as q
  TensorView d_k{};                        // as k, summed over the query heads that read a key
  TensorView d_v{};                        // as v, summed likewise
  Workspace workspace{};
  // Offsets and used lengths of sequences: I32 [batch + 1] and [batch]. Given exactly if the problem has them.
  std::optional<ConstTensorView> cu_seqlens_q{}, cu_seqlens_kv{}, seqused_q{}, seqused_kv{};
  // The attention sinks and their gradient, F32: [heads_q]. Given exactly if the problem has d_sinks(true).
  std::optional<ConstTensorView> sinks{};
  std::optional<TensorView> d_sinks{};
  std::optional<ConstTensorView> alibi_slopes{};  // as in ForwardArgs
  // The lists of a block_mask(), as in ForwardArgs.
  std::optional<ConstTensorView> mask_block_cnt{}, mask_block_idx{}, mask_bits{}, full_block_cnt{}, full_block_idx{};
  std::optional<ConstTensorView> bias{};           // as in ForwardArgs
  std::optional<TensorView> dbias{};               // as bias; given exactly if the problem has d_bias(true)
  std::optional<ConstTensorView> dropout_state{};  // as in ForwardArgs: the numbers that the forward pass read
};

namespace detail {

template <class View>
const hattn_tensor* c_tensor(const std::optional<View>& view) noexcept {
  return view ? &view->c_tensor() : nullptr;
}

// The C struct of a pass, with the arguments that both passes have filled in.
template <class C, class Args>
C c_args(const Args& args) noexcept {
  auto c = tagged<C>();
  c.q = &args.q.c_tensor();
  c.k = &args.k.c_tensor();
  c.v = &args.v.c_tensor();
  c.o = &args.o.c_tensor();
  c.workspace = args.workspace.data;
  c.workspace_bytes = args.workspace.bytes;
  c.alibi_slopes = c_tensor(args.alibi_slopes);
  c.mask_block_cnt = c_tensor(args.mask_block_cnt);
  c.mask_block_idx = c_tensor(args.mask_block_idx);
  c.mask_bits = c_tensor(args.mask_bits);
  c.full_block_cnt = c_tensor(args.full_block_cnt);
  c.full_block_idx = c_tensor(args.full_block_idx);
  c.bias = c_tensor(args.bias);
  c.dropout_state = c_tensor(args.dropout_state);
  return c;
}

// Owns a struct that the library made, such as a plan. Movable, not copyable.
template <class C>
class Owner {
 public:
  C* get() const noexcept { return owned_.get(); }
  explicit operator bool() const noexcept { return owned_ != nullptr; }

 protected:
  Owner() noexcept = default;

  // Takes ownership of what `make` writes to its argument. On failure this stays as it was.
  template <class Make>
  Status take(const Make& make) noexcept {
    if (const Status status = check_abi(); !ok(status)) return status;
    C* made = nullptr;
    const Status status = from_library(make(&made));
    if (ok(status)) owned_.reset(made);
    return status;
  }

  std::unique_ptr<C, Destroy> owned_{};
};

// What all plans have in common. Self is the derived class. It must have try_run.
template <class Self, class ItsProblem, class ItsArgs, class C>
class Plan : public Owner<C> {
 public:
#ifndef HATTN_NO_EXCEPTIONS
  // Chooses a kernel and, on a GPU, loads it.
  Plan(const ItsProblem& problem, Device device) { check(take_for(problem, device)); }
#endif

  // The same without exceptions. On failure `plan` stays as it was.
  [[nodiscard]] static Status create(const ItsProblem& problem, Device device, Self& plan) noexcept {
    return plan.take_for(problem, device);
  }

  // adopt takes ownership of a plan that C functions made. release gives ownership up.
  static Self adopt(C* plan) noexcept {
    Self owner;
    owner.owned_.reset(plan);
    return owner;
  }
  [[nodiscard]] C* release() noexcept { return this->owned_.release(); }

  // The size of the workspace in bytes. Runs that may overlap in time need one workspace each.
  [[nodiscard]] Status try_workspace_bytes(std::size_t& bytes) const noexcept {
    return from_library(c_workspace_size(this->get(), &bytes));
  }

  // Writes as much of the description as fits into `capacity` bytes, with a final 0. `length` becomes the length of the
  // whole text, without the 0.
  [[nodiscard]] Status try_describe(char* text, std::size_t capacity, std::size_t& length) const noexcept {
    return from_library(c_describe(this->get(), text, capacity, &length));
  }

#ifndef HATTN_NO_EXCEPTIONS
  std::size_t workspace_bytes() const {
    std::size_t bytes = 0;
    check(try_workspace_bytes(bytes));
    return bytes;
  }

  // What the plan computes, with which kernel, and in which order.
  std::string describe() const {
    std::size_t length = 0;
    check(try_describe(nullptr, 0, length));
    std::string text(length, '\0');
    check(try_describe(text.data(), length + 1, length));
    return text;
  }

  void run(const ItsArgs& args, CUstream_st* stream) const {
    check(static_cast<const Self&>(*this).try_run(args, stream));
  }
#endif

 protected:
  Plan() noexcept = default;

 private:
  Status take_for(const ItsProblem& problem, Device device) noexcept {
    const auto& c = problem.c_problem();
    return this->take([&](C** made) { return c_create(&c, device.c_value(), made); });
  }
};

}  // namespace detail

// Which kernel was measured to be the fastest, for each version of the library, card and problem. `hattn tune` writes
// it. Movable, not copyable. Calls refuse an empty one (default-constructed or moved from).
class Tuning : public detail::Owner<hattn_tuning> {
 public:
  Tuning() noexcept = default;

#ifndef HATTN_NO_EXCEPTIONS
  // Reads the text that `hattn tune` wrote. The caller reads the file.
  explicit Tuning(const std::string& text) { detail::check(create(text.data(), text.size(), *this)); }
#endif

  // The same without exceptions. On failure `tuning` stays as it was.
  [[nodiscard]] static Status create(const char* text, std::size_t length, Tuning& tuning) noexcept {
    return tuning.take([&](hattn_tuning** made) { return hattn_tuning_create(text, length, made); });
  }
};

// How a problem is computed on a device. A plan is made once and run as often as wanted, by any threads and on any
// streams at once. Movable, not copyable. Calls refuse an empty plan (default-constructed or moved from).
//
// Inherited from detail::Plan: ForwardPlan(problem, device), create, run, workspace_bytes, describe, adopt, release.
class ForwardPlan : public detail::Plan<ForwardPlan, ForwardProblem, ForwardArgs, hattn_forward_plan> {
 public:
  using Plan::create;
  using Plan::Plan;
  ForwardPlan() noexcept = default;

#ifndef HATTN_NO_EXCEPTIONS
  // Uses the kernel that the tuning has for the problem on this card, if it has one.
  ForwardPlan(const ForwardProblem& problem, Device device, const Tuning& tuning) {
    detail::check(create(problem, device, tuning, *this));
  }
#endif

  // The same without exceptions. On failure `plan` stays as it was.
  [[nodiscard]] static Status create(const ForwardProblem& problem, Device device, const Tuning& tuning,
                                     ForwardPlan& plan) noexcept {
    return plan.take([&](hattn_forward_plan** made) {
      return hattn_forward_plan_create_tuned(&problem.c_problem(), device.c_value(), tuning.get(), made);
    });
  }

  // Computes the problem. On a GPU the work is enqueued on the stream (null: the default stream). The call allocates
  // nothing and waits for nothing. Tensors and workspace must stay valid until the work is done. On the CPU the work is
  // done on return, and the stream is not used.
  [[nodiscard]] Status try_run(const ForwardArgs& args, CUstream_st* stream) const noexcept {
    auto c = detail::c_args<hattn_forward_args>(args);
    c.lse = detail::c_tensor(args.lse);
    c.descale_q = detail::c_tensor(args.descale_q);
    c.descale_k = detail::c_tensor(args.descale_k);
    c.descale_v = detail::c_tensor(args.descale_v);
    c.scale_o = detail::c_tensor(args.scale_o);
    c.amax = detail::c_tensor(args.amax);
    c.cu_seqlens_q = detail::c_tensor(args.cu_seqlens_q);
    c.cu_seqlens_kv = detail::c_tensor(args.cu_seqlens_kv);
    c.seqused_q = detail::c_tensor(args.seqused_q);
    c.seqused_kv = detail::c_tensor(args.seqused_kv);
    c.sinks = detail::c_tensor(args.sinks);
    c.max_logits = detail::c_tensor(args.max_logits);
    return detail::from_library(hattn_forward_run(get(), &c, stream));
  }
};

// How the gradients of a problem are computed on a device. Used as ForwardPlan.
class BackwardPlan : public detail::Plan<BackwardPlan, BackwardProblem, BackwardArgs, hattn_backward_plan> {
 public:
  using Plan::Plan;
  BackwardPlan() noexcept = default;

  // Computes the gradients. Rules as for ForwardPlan::try_run.
  [[nodiscard]] Status try_run(const BackwardArgs& args, CUstream_st* stream) const noexcept {
    auto c = detail::c_args<hattn_backward_args>(args);
    c.lse = &args.lse.c_tensor();
    c.d_o = &args.d_o.c_tensor();
    c.d_lse = detail::c_tensor(args.d_lse);
    c.d_q = &args.d_q.c_tensor();
    c.d_k = &args.d_k.c_tensor();
    c.d_v = &args.d_v.c_tensor();
    c.cu_seqlens_q = detail::c_tensor(args.cu_seqlens_q);
    c.cu_seqlens_kv = detail::c_tensor(args.cu_seqlens_kv);
    c.seqused_q = detail::c_tensor(args.seqused_q);
    c.seqused_kv = detail::c_tensor(args.seqused_kv);
    c.sinks = detail::c_tensor(args.sinks);
    c.d_sinks = detail::c_tensor(args.d_sinks);
    c.dbias = detail::c_tensor(args.dbias);
    return detail::from_library(hattn_backward_run(get(), &c, stream));
  }
};

}  // namespace HATTN_DETAIL_NAMESPACE
}  // namespace hattn

#endif  // HOPPER_ATTENTION_HPP
