// Tensor maps for the copy engine, made on the host at each launch and passed by value (a captured graph keeps its
// copy).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/slab.hpp"
#include "common/status.hpp"
#include "kernels.hpp"
#include "sm90/rows.hpp"

namespace hattn::sm90 {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, asked for through the runtime so that nothing links libcuda. Null where the driver is too old.
inline TensorMapEncoder tensor_map_encoder() noexcept {
  static auto const encoder = []() -> TensorMapEncoder {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      return nullptr;
    }
    return reinterpret_cast<TensorMapEncoder>(symbol);
  }();
  return encoder;
}

constexpr cuuint64_t element_bytes(DType dtype) { return dtype == DType::E4M3 ? 1 : 2; }

// A map over dimensions of `sizes` elements, fastest first. All but the first have a stride in bytes. Its box is
// `box_rows` rows of one head by `box_columns` columns, over which they are swizzled where these are 64 or 128 bytes.
// Reads beyond a dimension give zero, writes beyond it are dropped: that is what makes ragged sequences and head dims
// exact.
template <int kDims>
Status encode_map(CUtensorMap& map, DType dtype, std::uint64_t address, cuuint64_t const (&sizes)[kDims],
                  cuuint64_t const (&strides)[kDims - 1], int box_rows, int box_columns) noexcept {
  auto const encoder = tensor_map_encoder();
  if (encoder == nullptr) {
    return {StatusCode::DriverTooOld, 0};
  }
  cuuint32_t box[kDims];
  cuuint32_t step[kDims];
  for (int i = 0; i < kDims; ++i) {
    box[i] = i == 0 ? static_cast<cuuint32_t>(box_columns) : i == 1 ? static_cast<cuuint32_t>(box_rows) : 1;
    step[i] = 1;
  }
  CUtensorMapDataType const type = dtype == DType::E4M3   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == DType::BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  cuuint64_t const box_bytes = box_columns * element_bytes(dtype);
  CUtensorMapSwizzle const swizzle = box_bytes <= 16   ? CU_TENSOR_MAP_SWIZZLE_NONE
                                     : box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_128B;
  CUresult const result = encoder(&map, type, kDims, reinterpret_cast<void*>(address), sizes, strides, box, step,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return {StatusCode::TensorMap, static_cast<std::int32_t>(result)};
  }
  return {};
}

// A map over [batch, heads, seqlen, head_dim] (slowest first).
inline Status encode_dense_map(CUtensorMap& map, DType dtype, TensorDesc const& tensor, int batch, int seqlen,
                               int heads, int head_dim, int box_rows, int box_columns) noexcept {
  cuuint64_t const bytes = element_bytes(dtype);
  cuuint64_t const sizes[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(seqlen),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  cuuint64_t const strides[3] = {static_cast<cuuint64_t>(tensor.stride_row) * bytes,
                                 static_cast<cuuint64_t>(tensor.stride_head) * bytes,
                                 static_cast<cuuint64_t>(tensor.stride_batch) * bytes};
  return encode_map(map, dtype, tensor.address, sizes, strides, box_rows, box_columns);
}

// A map over sequences whose lengths the device knows (PackedRows in rows.hpp are its coordinates).
//
// From sequence to sequence the tensor is addressed in rows: by a batch stride that is a whole number of them, or
// without one. The copy engine clips boxes at the end of a dimension. So that it clips each sequence at its own end, a
// sequence's last row is before a fixed end, kPackedEnd, and two more dimensions take the box to its place: the first
// takes back the rows up to kPackedEnd (kPackedEnd * stride + kPackedEnd * (2^34 - stride) = 2^64, which is 0 in an
// address), the second counts rows. (Triton's ragged TMA descriptors address so.)
inline Status encode_packed_map(CUtensorMap& map, DType dtype, TensorDesc const& tensor, int heads, int head_dim,
                                int box_rows, int box_columns) noexcept {
  cuuint64_t const row = static_cast<cuuint64_t>(tensor.stride_row) * element_bytes(dtype);
  cuuint64_t const head = static_cast<cuuint64_t>(tensor.stride_head) * element_bytes(dtype);
  cuuint64_t const most = 0x7FFFFFFF;
  cuuint64_t const sizes[5] = {static_cast<cuuint64_t>(head_dim), kPackedEnd, static_cast<cuuint64_t>(heads), most,
                               most};
  cuuint64_t const strides[4] = {row, head, (cuuint64_t{1} << 34) - row, row};
  return encode_map(map, dtype, tensor.address, sizes, strides, box_rows, box_columns);
}

// Makes the maps of one launch, each over all of an operand. `status` keeps the first failure, after which nothing is
// made.
template <class Params, bool kPacked = false>
struct MapEncoder {
  Params const& params;
  DType dtype;
  int box_columns = kSlabColumns;
  Status status = {};

  // Of an operand with the rows and heads of Q.
  void queries(CUtensorMap& map, TensorDesc const& tensor, int head_dim, int box_rows) noexcept {
    encode(map, tensor, params.seqlen_q, params.heads_q, head_dim, box_rows);
  }
  // Of an operand with the rows and heads of K.
  void keys(CUtensorMap& map, TensorDesc const& tensor, int head_dim, int box_rows) noexcept {
    encode(map, tensor, params.seqlen_kv, params.heads_kv, head_dim, box_rows);
  }

 private:
  void encode(CUtensorMap& map, TensorDesc const& tensor, int seqlen, int heads, int head_dim, int box_rows) noexcept {
    if (is_ok(status) && kPacked) {
      status = encode_packed_map(map, dtype, tensor, heads, head_dim, box_rows, box_columns);
    } else if (is_ok(status)) {
      status = encode_dense_map(map, dtype, tensor, params.batch, seqlen, heads, head_dim, box_rows, box_columns);
    }
  }
};

}  // namespace hattn::sm90
