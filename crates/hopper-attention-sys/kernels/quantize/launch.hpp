// From plain parameters to started kernels: what the row of a source type does.
#pragma once

#include <cmath>

#include "common/status.hpp"
#include "quantize/kernel.hpp"
#include "quantize/row.hpp"

namespace hattn::quantize {

// Factors of a tensor without elements, which are written all the same.
static __global__ void fill_factors(FactorsDesc const descale, int heads, int factors, float most) {
  for (int i = static_cast<int>(threadIdx.x); i < factors; i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<float*>(descale.address)[i / heads * descale.stride_batch + i % heads * descale.stride_head] =
        descale_of(0.0F, most);
  }
}

// What was counted, as f32.
static __global__ void publish_counts(unsigned long long const* counted, float* counts, std::int64_t stride) {
  if (threadIdx.x < 6) {
    counts[threadIdx.x / 2 * stride + threadIdx.x % 2] = __ull2float_rn(counted[threadIdx.x]);
  }
}

using Kernel = void (*)(Params, Norms, Signs);

template <DType kSource, int kHeadDim>
Kernel kernel_of(Rotation rotation) noexcept {
  switch (rotation) {
    case Rotation::Whole:
      return quantize_kernel<kSource, kHeadDim, Rotation::Whole>;
    case Rotation::Parts:
      return quantize_kernel<kSource, kHeadDim, Rotation::Parts>;
    default:
      return quantize_kernel<kSource, kHeadDim, Rotation::None>;
  }
}

template <DType kSource>
Status prepare() noexcept {
  for (Rotation const rotation : {Rotation::None, Rotation::Whole, Rotation::Parts}) {
    cudaError_t error = cudaFuncSetAttribute(kernel_of<kSource, 64>(rotation),
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, Traits<64>::kSmemBytes);
    if (error == cudaSuccess) {
      error = cudaFuncSetAttribute(kernel_of<kSource, 128>(rotation), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   Traits<128>::kSmemBytes);
    }
    if (error != cudaSuccess) {
      return to_status(error);
    }
  }
  cudaFuncAttributes attributes;
  cudaError_t const error = cudaFuncGetAttributes(&attributes, fill_factors);
  return to_status(error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, publish_counts));
}

// Bit `number` of the signs: the top bit of SplitMix64's output of it.
inline bool negative(std::uint64_t seed, std::uint64_t number) noexcept {
  std::uint64_t z = seed + (number + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return ((z ^ (z >> 31)) >> 63) != 0;
}

template <DType kSource>
Status launch_tensor(QuantizeParams const& given, QuantizeTensor const& tensor, unsigned long long* counts,
                     CUstream_st* stream) noexcept {
  if (!tensor.wanted) {
    return {};
  }
  bool const shares = shares_factors(tensor, given.scaling);
  unsigned const blocks = (tensor.seqlen + kTileRows - 1) / kTileRows;
  unsigned const tiles = tensor.batch * tensor.heads * blocks;
  bool const one = given.scaling == Scaling::PerTensor;
  int const heads = one ? 1 : tensor.heads / tensor.group;
  int const factors = one ? 1 : tensor.batch * heads;
  if (tiles == 0) {
    if (shares && factors > 0) {
      fill_factors<<<1, 128, 0, stream>>>(tensor.descale, heads, factors, tensor.most);
    }
    return to_status(cudaGetLastError());
  }
  int const head_dim = tensor.head_dim <= 64 ? 64 : 128;
  unsigned const ctas = given.multiprocessors * (head_dim == 64 ? Traits<64>::kCtas : Traits<128>::kCtas);

  Params params{};
  params.values = tensor.values;
  params.stored = tensor.stored;
  params.descale = tensor.descale;
  params.scaling = given.scaling;
  params.given = tensor.given;
  params.heads_first = tensor.values.stride_head < tensor.values.stride_seqlen;
  params.tiles = tiles;
  params.jobs = shares ? 2 * tiles : tiles;
  params.blocks = Divisor{blocks};
  params.heads = Divisor{static_cast<unsigned>(tensor.heads)};
  params.group = Divisor{static_cast<unsigned>(tensor.group)};
  params.factor_heads = heads;
  params.seqlen = tensor.seqlen;
  params.chunks = tensor.head_dim / kChunk;
  params.tiles_a_factor = one ? tiles : tensor.group * blocks;
  // All of a factor's tiles must be measured before the first is converted, with the others that lie between them.
  unsigned const first = one ? tiles : (params.heads_first ? tensor.heads : tensor.group) * blocks;
  params.ahead = first + ctas < tiles ? first + ctas : tiles;
  params.most = tensor.most;
  params.rounds_to_most = tensor.most + tensor.most / 28.0F;  // 464 of 448, 14.5 of 14
  auto* const state = reinterpret_cast<unsigned*>(tensor.state);
  params.shared = {state, state + 4, state + 4 + factors};
  params.counts = counts;

  Norms norms{};
  Signs signs{};
  int chunk = 0;
  for (int size = 128; size >= 16; size /= 2) {
    if ((tensor.head_dim & size) != 0) {
      for (int const end = chunk + size / kChunk; chunk < end; ++chunk) {
        norms.of_chunk[chunk] = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
      }
    }
  }
  for (int element = 0; element < 128; ++element) {
    signs.bits[element / 32] |= negative(given.seed, element) ? 1U << (element % 32) : 0U;
  }
  Rotation const rotation = !tensor.rotated               ? Rotation::None
                            : tensor.head_dim == head_dim ? Rotation::Whole
                                                          : Rotation::Parts;
  unsigned const grid = tiles < ctas ? tiles : ctas;
  if (head_dim == 64) {
    kernel_of<kSource, 64>(rotation)<<<grid, Traits<64>::kThreads, Traits<64>::kSmemBytes, stream>>>(params, norms,
                                                                                                     signs);
  } else {
    kernel_of<kSource, 128>(rotation)<<<grid, Traits<128>::kThreads, Traits<128>::kSmemBytes, stream>>>(params, norms,
                                                                                                        signs);
  }
  return to_status(cudaGetLastError());
}

template <DType kSource>
Status launch(QuantizeParams const& params, CUstream_st* stream) noexcept {
  auto* const counted = reinterpret_cast<unsigned long long*>(params.workspace);
  bool const counts = params.counts != 0;
  QuantizeTensor const* const tensors[] = {&params.q, &params.k, &params.v};
  bool zeroed = counts;
  for (QuantizeTensor const* tensor : tensors) {
    zeroed = zeroed || (tensor->wanted && shares_factors(*tensor, params.scaling));
  }
  if (zeroed) {
    cudaError_t const error = cudaMemsetAsync(counted, 0, params.workspace_bytes, stream);
    if (error != cudaSuccess) {
      return to_status(error);
    }
  }
  for (int i = 0; i < 3; ++i) {
    Status const status = launch_tensor<kSource>(params, *tensors[i], counts ? counted + 2 * i : nullptr, stream);
    if (status.code != StatusCode::Ok) {
      return status;
    }
  }
  if (counts) {
    publish_counts<<<1, 32, 0, stream>>>(counted, reinterpret_cast<float*>(params.counts), params.counts_stride);
  }
  return to_status(cudaGetLastError());
}

}  // namespace hattn::quantize

// Defines the row that the table lists.
#define HATTN_QUANTIZE_INSTANCE(source)                                                                    \
  namespace hattn {                                                                                        \
  QuantizeRow HATTN_QUANTIZE_ROW(source)() noexcept {                                                      \
    return {Arch::Sm90, DType::source, quantize::prepare<DType::source>, quantize::launch<DType::source>}; \
  }                                                                                                        \
  }
