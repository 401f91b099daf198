// One thread a (row, 8-column group): rows are (batch, head, position), the store is 16 bytes wide, and the first group
// of a row writes its LSE, where there is one. Bound by memory and rarely used, so it has no other design.
#include <cuda_runtime.h>

#include <cmath>
#include <cute/config.hpp>

#include "common/fill.hpp"
#include "common/sequences.hpp"
#include "common/sinks_bwd.hpp"
#include "common/status.hpp"

namespace hattn {
namespace {

// What the rows of a tensor are filled with: zeros, and -inf for their LSE. With sinks the LSE is the sink of the head.
// A sink of NaN makes NaN of the head's rows, and of their largest magnitude (`amax`). `lse` and `amax` may be absent.
struct Filling {
  TensorDesc lse;
  TensorDesc sinks;
  DType sinks_dtype;
  float* amax;
};

CUTE_DEVICE void store_lse(TensorDesc const& lse, std::int64_t batch, std::int64_t head, std::int64_t row,
                           float value) {
  reinterpret_cast<float*>(lse.address)[batch * lse.stride_batch + head * lse.stride_head + row * lse.stride_row] =
      value;
}

__global__ void fill(TensorDesc const tensor, int batch, int seqlen, int heads, int head_dim, Filling const filling) {
  constexpr unsigned kNan = 0x7fff7fffU;  // two f16, two bf16, and four e4m3
  TensorDesc const& lse = filling.lse;
  std::int64_t const groups = head_dim / 8;
  std::int64_t const total = groups * seqlen * heads * batch;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < total;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::int64_t rest = i;
    std::int64_t const group = rest % groups;
    rest /= groups;
    std::int64_t const position = rest % seqlen;
    rest /= seqlen;
    std::int64_t const head = rest % heads;
    std::int64_t const entry = rest / heads;
    std::int64_t const at = entry * tensor.stride_batch + position * tensor.stride_row + head * tensor.stride_head;
    float const sink = sink_of_head(filling, static_cast<int>(head));
    unsigned const word = isnan(sink) ? kNan : 0;
    reinterpret_cast<uint4*>(tensor.address + 2 * at)[group] = uint4{word, word, word, word};
    if (group == 0 && lse.address != 0) {
      store_lse(lse, entry, head, position, sink);
    }
    if (isnan(sink) && filling.amax != nullptr) {
      *filling.amax = sink;  // by every thread that comes here a NaN
    }
  }
}

// The gradient of the sinks where there are no keys: a row's LSE is the sink of its head, and its O is 0. A CTA has a
// head.
__global__ void __launch_bounds__(kSinkThreads) fill_sinks(BwdParams const params) {
  int const head = static_cast<int>(blockIdx.x);
  float const sink = sink_of_head(params, head);
  double sum = 0.0;
  std::int64_t const rows = std::int64_t{params.batch} * params.seqlen_q;
  if (sink != -INFINITY && params.d_lse.address != 0) {
    for (std::int64_t row = threadIdx.x; row < rows; row += kSinkThreads) {
      std::int64_t const batch = row / params.seqlen_q;
      std::int64_t const query = row - batch * params.seqlen_q;
      float const lse = element_of(params.lse, batch, head, query);
      if (lse != -INFINITY) {
        sum += weighed(weight_of_sink(sink, lse), element_of(params.d_lse, batch, head, query));
      }
    }
  }
  store_sink_gradient(params, head, isnan(sink) && rows > 0 ? static_cast<double>(sink) : sum);
}

__global__ void fill_max_logits(TensorDesc const max_logits, int heads) {
  for (int head = static_cast<int>(threadIdx.x); head < heads; head += static_cast<int>(blockDim.x)) {
    reinterpret_cast<float*>(max_logits.address)[head * max_logits.stride_head] = -INFINITY;
  }
}

// Rows [begin, end) of a batch entry, by CTAs `cta`, `cta + ctas` and so on of all.
CUTE_DEVICE void fill_rows(TensorDesc const& tensor, int heads, int head_dim, TensorDesc const& lse, int batch,
                           int begin, int end, int cta, int ctas) {
  unsigned const chunks = head_dim / 8;
  unsigned const of_row = chunks * heads;
  for (int row = begin + cta; row < end; row += ctas) {
    for (unsigned i = threadIdx.x; i < of_row; i += blockDim.x) {
      unsigned const head = i / chunks;
      unsigned const chunk = i - head * chunks;
      std::int64_t const at = batch * tensor.stride_batch + row * tensor.stride_row + head * tensor.stride_head;
      reinterpret_cast<uint4*>(tensor.address + 2 * at)[chunk] = uint4{0, 0, 0, 0};
      if (chunk == 0 && lse.address != 0) {
        store_lse(lse, batch, head, row, -INFINITY);
      }
    }
  }
}

// Before the first sequence of a packed tensor, and behind the last, there may be a long gap: all CTAs fill it. A row
// of CTAs takes every so many-th record, and fills the gap behind its sequence.
__global__ void fill_gaps(SequenceTable const table, TensorDesc const tensor, int rows, int heads, int head_dim,
                          bool packed, bool of_keys, TensorDesc const lse) {
  int const across = static_cast<int>(gridDim.y);
  int const cta = static_cast<int>(blockIdx.y);
  if (packed) {
    SequenceHeader const header = *table.header();
    int const all = static_cast<int>(gridDim.x) * across;
    int const own = static_cast<int>(blockIdx.x) * across + cta;
    fill_rows(tensor, heads, head_dim, lse, 0, 0, of_keys ? header.kv_begin : header.q_begin, own, all);
    fill_rows(tensor, heads, head_dim, lse, 0, of_keys ? header.kv_end : header.q_end, rows, own, all);
  }
  for (int i = static_cast<int>(blockIdx.x); i < table.batch; i += static_cast<int>(gridDim.x)) {
    Sequence const sequence = table.records()[i];
    int const begin = of_keys ? sequence.kv_begin + sequence.kv_len : sequence.q_begin + sequence.q_len;
    fill_rows(tensor, heads, head_dim, lse, sequence.index, begin, of_keys ? sequence.kv_end : sequence.q_end, cta,
              across);
  }
}

Status launch(TensorDesc const& tensor, int batch, int seqlen, int heads, int head_dim, Filling const& filling,
              CUstream_st* stream) noexcept {
  fill<<<1024, 256, 0, stream>>>(tensor, batch, seqlen, heads, head_dim, filling);
  return to_status(cudaGetLastError());
}

Filling without_sinks(TensorDesc const& lse) noexcept { return {lse, TensorDesc{}, DType::F32, nullptr}; }

}  // namespace

Status prepare_fill() noexcept {
  Status status = load_kernel(fill);
  status = is_ok(status) ? load_kernel(fill_sinks) : status;
  status = is_ok(status) ? load_kernel(fill_max_logits) : status;
  return is_ok(status) ? load_kernel(fill_gaps) : status;
}

Status launch_fill_gaps(Sequences const& sequences, TensorDesc const& tensor, int batch, int rows, int heads,
                        int head_dim, bool of_keys, TensorDesc const& lse, CUstream_st* stream) noexcept {
  bool const packed = (of_keys ? sequences.cu_seqlens_kv : sequences.cu_seqlens_q) != 0;
  if (batch == 0) {
    // There is no table. All of a packed tensor is a gap, and another is empty.
    return packed ? launch(tensor, 1, rows, heads, head_dim, without_sinks(lse), stream) : Status{};
  }
  fill_gaps<<<dim3(128, 16), 256, 0, stream>>>({sequences.table, batch}, tensor, rows, heads, head_dim, packed, of_keys,
                                               lse);
  return to_status(cudaGetLastError());
}

Status launch_fill_empty(FwdParams const& params, CUstream_st* stream) noexcept {
  Filling const filling{params.lse, params.sinks, params.sinks_dtype, reinterpret_cast<float*>(params.amax.address)};
  return launch(params.o, params.batch, params.seqlen_q, params.heads_q, params.head_dim_vo, filling, stream);
}

Status launch_fill_max_logits(FwdParams const& params, CUstream_st* stream) noexcept {
  if (params.max_logits.address == 0) {
    return {};
  }
  fill_max_logits<<<1, 256, 0, stream>>>(params.max_logits, params.heads_q);
  return to_status(cudaGetLastError());
}

Status launch_fill_sinks(BwdParams const& params, CUstream_st* stream) noexcept {
  if (params.d_sinks.address == 0) {
    return {};
  }
  fill_sinks<<<params.heads_q, kSinkThreads, 0, stream>>>(params);
  return to_status(cudaGetLastError());
}

Status launch_fill_gradients(BwdParams const& params, CUstream_st* stream) noexcept {
  auto const zero = [&](TensorDesc const& tensor, int seqlen, int heads, int head_dim) {
    return launch(tensor, params.batch, seqlen, heads, head_dim, without_sinks(TensorDesc{}), stream);
  };
  if (Status const status = launch_fill_sinks(params, stream); !is_ok(status)) {
    return status;
  }
  if (params.seqlen_kv == 0) {
    return zero(params.d_q, params.seqlen_q, params.heads_q, params.head_dim_qk);
  }
  Status const status = zero(params.d_k, params.seqlen_kv, params.heads_kv, params.head_dim_qk);
  return !is_ok(status) ? status : zero(params.d_v, params.seqlen_kv, params.heads_kv, params.head_dim_vo);
}

}  // namespace hattn
