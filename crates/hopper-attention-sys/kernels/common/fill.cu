// One thread a (row, 8-column group): rows are (batch, head, position), the store is 16 bytes wide, and the first group
// of a row writes its LSE, where there is one. Bound by memory and rarely used, so it has no other design.
#include <cuda_runtime.h>

#include <cmath>

#include "common/fill.hpp"
#include "common/sequences.hpp"
#include "common/status.hpp"

namespace hattn {
namespace {

// `lse` may be absent.
__global__ void fill(TensorDesc const tensor, int batch, int seqlen, int heads, int head_dim, TensorDesc const lse) {
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
    reinterpret_cast<uint4*>(tensor.address + 2 * at)[group] = uint4{0, 0, 0, 0};
    if (group == 0 && lse.address != 0) {
      reinterpret_cast<float*>(lse.address)[entry * lse.stride_batch + head * lse.stride_head + position] = -INFINITY;
    }
  }
}

// A row of CTAs takes every so many-th record, and fills the gap behind its sequence. Before the first sequence of a
// packed tensor, and behind the last, there is a gap, too.
__global__ void fill_gaps(SequenceTable const table, TensorDesc const tensor, int element_bytes, int rows, int heads,
                          int head_dim, bool packed, bool of_keys, TensorDesc const lse) {
  int const chunks = head_dim * element_bytes / 16;
  auto const fill_rows = [&](int batch, int begin, int end) {
    std::int64_t const total = std::int64_t{end - begin} * heads * chunks;
    for (std::int64_t i = blockIdx.y * blockDim.x + threadIdx.x; i < total; i += gridDim.y * blockDim.x) {
      std::int64_t const chunk = i % chunks;
      std::int64_t const head = i / chunks % heads;
      std::int64_t const row = begin + i / chunks / heads;
      std::int64_t const at = batch * tensor.stride_batch + row * tensor.stride_row + head * tensor.stride_head;
      reinterpret_cast<uint4*>(tensor.address + element_bytes * at)[chunk] = uint4{0, 0, 0, 0};
      if (chunk == 0 && lse.address != 0) {
        reinterpret_cast<float*>(lse.address)[batch * lse.stride_batch + head * lse.stride_head + row] = -INFINITY;
      }
    }
  };
  for (int i = static_cast<int>(blockIdx.x); i < table.batch; i += static_cast<int>(gridDim.x)) {
    Sequence const sequence = table.records()[i];
    int const begin = of_keys ? sequence.kv_begin : sequence.q_begin;
    int const length = of_keys ? sequence.kv_len : sequence.q_len;
    int const end = of_keys ? sequence.kv_end : sequence.q_end;
    fill_rows(sequence.index, begin + length, end);
    if (packed && sequence.index == 0) {
      fill_rows(0, 0, begin);
    }
    if (packed && sequence.index == table.batch - 1) {
      fill_rows(0, end, rows);
    }
  }
}

Status launch(TensorDesc const& tensor, int batch, int seqlen, int heads, int head_dim, TensorDesc const& lse,
              CUstream_st* stream) noexcept {
  fill<<<1024, 256, 0, stream>>>(tensor, batch, seqlen, heads, head_dim, lse);
  return to_status(cudaGetLastError());
}

}  // namespace

Status prepare_fill() noexcept {
  Status const status = load_kernel(fill);
  return is_ok(status) ? load_kernel(fill_gaps) : status;
}

Status launch_fill_gaps(Sequences const& sequences, TensorDesc const& tensor, DType dtype, int batch, int rows,
                        int heads, int head_dim, bool of_keys, TensorDesc const& lse, CUstream_st* stream) noexcept {
  bool const packed = (of_keys ? sequences.cu_seqlens_kv : sequences.cu_seqlens_q) != 0;
  int const element_bytes = dtype == DType::E4M3 ? 1 : 2;
  fill_gaps<<<dim3(128, 16), 256, 0, stream>>>({sequences.table, batch}, tensor, element_bytes, rows, heads, head_dim,
                                               packed, of_keys, lse);
  return to_status(cudaGetLastError());
}

Status launch_fill_empty(FwdParams const& params, CUstream_st* stream) noexcept {
  return launch(params.o, params.batch, params.seqlen_q, params.heads_q, params.head_dim_vo, params.lse, stream);
}

Status launch_fill_gradients(BwdParams const& params, CUstream_st* stream) noexcept {
  auto const zero = [&](TensorDesc const& tensor, int seqlen, int heads, int head_dim) {
    return launch(tensor, params.batch, seqlen, heads, head_dim, TensorDesc{}, stream);
  };
  if (params.seqlen_kv == 0) {
    return zero(params.d_q, params.seqlen_q, params.heads_q, params.head_dim_qk);
  }
  Status const status = zero(params.d_k, params.seqlen_kv, params.heads_kv, params.head_dim_qk);
  return !is_ok(status) ? status : zero(params.d_v, params.seqlen_kv, params.heads_kv, params.head_dim_vo);
}

}  // namespace hattn
