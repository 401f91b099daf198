// From plain parameters to started kernels: what the row of a source type does.
#pragma once

#include <cmath>

#include "common/status.hpp"
#include "quantize/kernel.hpp"
#include "quantize/once.hpp"
#include "quantize/residency.hpp"
#include "quantize/row.hpp"

namespace hattn::quantize {

// Factors of a tensor without elements, which are written all the same.
static __global__ void fill_factors(TensorDesc const descale, int heads, int factors, float most) {
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

// A kernel for one kind of rotation, and what it is started with.
struct Kernel {
  void (*function)(Params, Norms, Signs);
  int threads, smem_bytes;
  unsigned ctas;  // a multiprocessor
  unsigned tile_rows;
  unsigned tiles;  // that a CTA can hold
};

template <DType kSource, int kHeadDim, Rotation kRotation>
Kernel kernel_of(bool once) noexcept {
  using Once = OnceTraits<kHeadDim, kRotation>;
  using Traits = Traits<kHeadDim>;
  return once ? Kernel{quantize_once_kernel<kSource, kHeadDim, kRotation>,
                       Once::kThreads,
                       Once::kSmemBytes,
                       Once::kCtas,
                       Once::kTileRows,
                       Once::kTiles}
              : Kernel{quantize_kernel<kSource, kHeadDim, kRotation>,
                       Traits::kThreads,
                       Traits::kSmemBytes,
                       Traits::kCtas,
                       kTileRows,
                       0};
}

template <DType kSource>
Kernel kernel_of(int head_dim, Rotation rotation, bool once) noexcept {
  bool const small = head_dim <= 64;
  switch (rotation) {
    case Rotation::Whole:
      return small ? kernel_of<kSource, 64, Rotation::Whole>(once) : kernel_of<kSource, 128, Rotation::Whole>(once);
    case Rotation::PowersOfTwo:
      return small ? kernel_of<kSource, 64, Rotation::PowersOfTwo>(once)
                   : kernel_of<kSource, 128, Rotation::PowersOfTwo>(once);
    default:
      return small ? kernel_of<kSource, 64, Rotation::None>(once) : kernel_of<kSource, 128, Rotation::None>(once);
  }
}

template <DType kSource>
Status prepare() noexcept {
  for (Rotation const rotation : {Rotation::None, Rotation::Whole, Rotation::PowersOfTwo}) {
    for (int const head_dim : {64, 128}) {
      for (bool const once : {false, true}) {
        Kernel const kernel = kernel_of<kSource>(head_dim, rotation, once);
        cudaError_t const error =
            cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
        if (error != cudaSuccess) {
          return to_status(error);
        }
      }
    }
  }
  Residency::of_driver();
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

// How many neighbouring heads have their tiles numbered together (schedule.hpp).
// - by_head: the heads that share a factor, so that few tiles lie between the first and the last tile of a factor.
// (Whole
//   rows of memory gain nothing over that, benches/LOG.md, 30.)
// - Else: all heads.
// 1 where rows lie nearer than heads.
inline unsigned span_of(QuantizeTensor const& tensor, bool by_head) noexcept {
  if (tensor.values.stride_head >= tensor.values.stride_row) {
    return 1;
  }
  return by_head ? tensor.group : tensor.heads;
}

template <DType kSource>
Status launch_tensor(QuantizeParams const& given, QuantizeTensor const& tensor, unsigned long long* counts,
                     CUstream_st* stream) noexcept {
  if (!tensor.wanted) {
    return {};
  }
  bool const shares = shares_factors(tensor, given.scaling);
  bool const one = given.scaling == Scaling::PerTensor;
  int const heads = one ? 1 : tensor.heads / tensor.group;
  int const factors = one ? 1 : tensor.batch * heads;
  if (tensor.batch == 0 || tensor.heads == 0 || tensor.seqlen == 0) {
    if (shares && factors > 0) {
      fill_factors<<<1, 128, 0, stream>>>(tensor.descale, heads, factors, tensor.most);
    }
    return to_status(cudaGetLastError());
  }
  int const head_dim = tensor.head_dim <= 64 ? 64 : 128;
  unsigned const span = span_of(tensor, shares && !one);

  Params params{};
  params.values = tensor.values;
  params.stored = tensor.stored;
  params.descale = tensor.descale;
  params.scaling = given.scaling;
  params.given = tensor.given;
  params.span = Divisor{span};
  params.spans = Divisor{tensor.heads / span};
  params.group = Divisor{static_cast<unsigned>(tensor.group)};
  params.factor_heads = heads;
  params.seqlen = tensor.seqlen;
  params.chunks = tensor.head_dim / kChunk;
  params.most = tensor.most;
  params.rounds_to_most = tensor.most + tensor.most / 28.0F;  // 464 of 448, 14.5 of 14
  auto* const state = reinterpret_cast<unsigned*>(tensor.state);
  params.shared = {state, state, state + 4, state + 4 + factors};
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
    int const bit = (element % 2 == 0 ? 15 : 31) - element % 32 / 2;
    signs.bits[element / 32] |= negative(given.seed, element) ? 1U << bit : 0U;
  }
  Rotation const rotation = !tensor.rotated               ? Rotation::None
                            : tensor.head_dim == head_dim ? Rotation::Whole
                                                          : Rotation::PowersOfTwo;
  unsigned const multiprocessors = shares ? Residency::of_driver().multiprocessors(stream, given.multiprocessors)
                                          : static_cast<unsigned>(given.multiprocessors);
  // Returns the grid.
  auto const divide = [&](Kernel const& kernel, bool once) {
    unsigned const ctas = multiprocessors * kernel.ctas;
    unsigned const tiles_a_head = (tensor.seqlen + kernel.tile_rows - 1) / kernel.tile_rows;
    unsigned const tiles = tensor.batch * tensor.heads * tiles_a_head;
    // All tiles of a factor must be measured before the first of them can be converted.
    unsigned const together = one ? tiles : tensor.group * tiles_a_head;
    params.tile_rows = kernel.tile_rows;
    params.tiles = tiles;
    params.tiles_a_head = Divisor{tiles_a_head};
    params.jobs = shares && !once ? 2 * tiles : tiles;
    params.tiles_a_factor = together;
    params.ahead = together + ctas < tiles ? together + ctas : tiles;
    return tiles < ctas ? tiles : ctas;
  };
  auto const start = [&](Kernel const& kernel, unsigned grid, bool once) {
    // CTAs of once.hpp wait for each other, so that all of them must run at once.
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = kernel.threads;
    config.dynamicSmemBytes = kernel.smem_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = once ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel.function, params, norms, signs);
  };
  if (shares) {
    Kernel const kernel = kernel_of<kSource>(head_dim, rotation, true);
    unsigned const grid = divide(kernel, true);
    // A factor may have up to kernel.tiles tiles for each CTA. But near that bound each CTA waits for all others.
    if (params.tiles_a_factor <= 3 * kernel.tiles * grid / 4) {
      cudaError_t const error = start(kernel, grid, true);
      if (error != cudaErrorCooperativeLaunchTooLarge) {
        return to_status(error);
      }
      // Fewer multiprocessors than the driver has said. Nothing was started. (A capture ends in an error here.)
      cudaGetLastError();
    }
  }
  Kernel const kernel = kernel_of<kSource>(head_dim, rotation, false);
  return to_status(start(kernel, divide(kernel, false), false));
}

template <DType kSource>
Status launch(QuantizeParams const& params, CUstream_st* stream) noexcept {
  auto* const counted = reinterpret_cast<unsigned long long*>(params.workspace);
  bool const counts = params.counts.address != 0;
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
    if (!is_ok(status)) {
      return status;
    }
  }
  if (counts) {
    publish_counts<<<1, 32, 0, stream>>>(counted, reinterpret_cast<float*>(params.counts.address),
                                         params.counts.stride_batch);
  }
  return to_status(cudaGetLastError());
}

}  // namespace hattn::quantize

// Defines the row that the table lists.
#define HATTN_QUANTIZE_INSTANCE(source)                                                                      \
  namespace hattn {                                                                                          \
  QuantizeRow HATTN_QUANTIZE_ROW(source)() noexcept {                                                        \
    return {{Arch::Sm90, DType::source}, quantize::prepare<DType::source>, quantize::launch<DType::source>}; \
  }                                                                                                          \
  }
