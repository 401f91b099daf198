// FP8 operands for Hopper Attention: the shapes of descale factors, and the quantiser, which makes FP8 operands of
// 16-bit tensors. Header-only, on top of hopper_attention.hpp. Errors and ownership are as there.
//
//   hattn::ForwardProblem problem(hattn::DType::E4M3);
//   problem.batch(2).seqlens(512, 512).heads(8, 2).head_dims(64, 64).scaling(hattn::Scaling::PerBlock);
//   hattn::QuantizePlan quantise(hattn::QuantizeProblem(problem, hattn::DType::BF16).hadamard(7), device);
//
//   hattn::QuantizeArgs args;
//   args.q = hattn::QuantizeTensor{q, stored_q, descale_q};   // views; k and v likewise
//   args.workspace = {memory, bytes};                         // quantise.workspace_bytes()
//   quantise.run(args, stream);                               // and then ForwardPlan(problem, device).run(.., stream)
#ifndef HOPPER_ATTENTION_FP8_HPP
#define HOPPER_ATTENTION_FP8_HPP

#include "hopper_attention.hpp"

namespace hattn {
inline namespace HATTN_DETAIL_NAMESPACE {

// The number of rows that share a descale factor with Scaling::PerBlock.
inline constexpr std::int64_t kScaleBlock = 128;

namespace detail {
constexpr Extents descale_shape(const hattn_forward_problem& problem, std::int64_t seqlen, std::int64_t heads,
                                bool packed) noexcept {
  switch (problem.scaling) {
    case HATTN_PER_HEAD:
      return {problem.batch, problem.heads_kv, 1};
    case HATTN_PER_BLOCK:
      if (packed) return {heads, (seqlen + (kScaleBlock - 1) * problem.batch) / kScaleBlock};
      return {problem.batch, heads, seqlen / kScaleBlock + (seqlen % kScaleBlock != 0 ? 1 : 0)};
    default:
      return {1, 1, 1};
  }
}
}  // namespace detail

// The shape of the descale factors of Q, and of those of K and V: [batch, heads, blocks]. With factors per block of
// packed sequences: [heads, blocks].
constexpr Extents descale_q_shape(const ForwardProblem& problem) noexcept {
  const hattn_forward_problem& c = problem.c_problem();
  return detail::descale_shape(c, c.seqlen_q, c.heads_q, c.cu_seqlens_q != 0);
}
constexpr Extents descale_kv_shape(const ForwardProblem& problem) noexcept {
  const hattn_forward_problem& c = problem.c_problem();
  return detail::descale_shape(c, c.seqlen_kv, c.heads_kv, c.cu_seqlens_kv != 0);
}

// How Q, K and V become E4M3 operands of a forward problem, as numbers. It holds a copy of that problem.
class QuantizeProblem {
 public:
  // source: element type of the values that are quantised, F16 or BF16; on the CPU also F32. Default: no rotation.
  constexpr QuantizeProblem(const ForwardProblem& problem, DType source) noexcept : forward_(problem.c_problem()) {
    problem_.source = static_cast<hattn_dtype>(source);
  }

  // Rotates each query and key before it is quantised, by random signs and a Hadamard transform. Q K^T stays as it is,
  // and outliers spread over their vectors. Queries and keys of one forward pass need the same seed.
  constexpr QuantizeProblem& hadamard(std::uint64_t seed) noexcept {
    problem_.hadamard = 1;
    problem_.seed = seed;
    return *this;
  }

  // As Problem::supported.
  [[nodiscard]] Status supported(Device device) const noexcept {
    if (const Status status = detail::check_abi(); !ok(status)) return status;
    const hattn_quantize_problem problem = c_problem();
    return detail::from_library(detail::c_supported(&problem, device.c_value()));
  }

  // The struct that the C functions take. It points into this object.
  constexpr hattn_quantize_problem c_problem() const noexcept {
    hattn_quantize_problem problem = problem_;
    problem.forward = &forward_;
    return problem;
  }

 private:
  hattn_forward_problem forward_;
  hattn_quantize_problem problem_ = detail::tagged<hattn_quantize_problem>();
};

// One tensor to quantise.
struct QuantizeTensor {
  ConstTensorView values{};  // read: the source type
  TensorView stored{};       // written: E4M3, the shape of values
  TensorView descale{};      // F32 [batch, heads, blocks]: written, or read if given
  bool given = false;        // whether the caller gives the factors
};

// What a quantiser reads and writes. Any of q, k and v may be absent.
struct QuantizeArgs {
  std::optional<QuantizeTensor> q{}, k{}, v{};
  // Two numbers for each of q, k and v, written: F32 [3, 2]. The first counts the elements that were stored as 448 (or
  // 14) because they were too large. The second counts the elements that were not finite. May be absent.
  std::optional<TensorView> counts{};
  Workspace workspace{};
  // Offsets and used lengths of sequences: I32 [batch + 1] and [batch]. Given if the problem has them, and a tensor of
  // that side is quantised.
  std::optional<ConstTensorView> cu_seqlens_q{}, cu_seqlens_kv{}, seqused_q{}, seqused_kv{};
};

// How tensors are quantised on a device. Used as ForwardPlan.
class QuantizePlan : public detail::Plan<QuantizePlan, QuantizeProblem, QuantizeArgs, hattn_quantize_plan> {
 public:
  using Plan::Plan;
  QuantizePlan() noexcept = default;

  // Quantises the tensors. Rules as for ForwardPlan::try_run.
  [[nodiscard]] Status try_run(const QuantizeArgs& args, CUstream_st* stream) const noexcept {
    const auto tensor = [](const std::optional<QuantizeTensor>& from) {
      auto c = detail::tagged<hattn_quantize_tensor>();
      if (from) {
        c.values = &from->values.c_tensor();
        c.stored = &from->stored.c_tensor();
        c.descale = &from->descale.c_tensor();
        c.given = from->given ? 1 : 0;
      }
      return c;
    };
    const hattn_quantize_tensor q = tensor(args.q);
    const hattn_quantize_tensor k = tensor(args.k);
    const hattn_quantize_tensor v = tensor(args.v);
    auto c = detail::tagged<hattn_quantize_args>();
    c.q = args.q ? &q : nullptr;
    c.k = args.k ? &k : nullptr;
    c.v = args.v ? &v : nullptr;
    c.counts = detail::c_tensor(args.counts);
    c.cu_seqlens_q = detail::c_tensor(args.cu_seqlens_q);
    c.cu_seqlens_kv = detail::c_tensor(args.cu_seqlens_kv);
    c.seqused_q = detail::c_tensor(args.seqused_q);
    c.seqused_kv = detail::c_tensor(args.seqused_kv);
    c.workspace = args.workspace.data;
    c.workspace_bytes = args.workspace.bytes;
    return detail::from_library(hattn_quantize_run(get(), &c, stream));
  }
};

}  // namespace HATTN_DETAIL_NAMESPACE
}  // namespace hattn

#endif  // HOPPER_ATTENTION_FP8_HPP
