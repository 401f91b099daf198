// From plain parameters to started kernels: what the row of a source type does.
#pragma once

#include <cmath>

#include "common/fill.hpp"
#include "common/start.hpp"
#include "common/status.hpp"
#include "quantize/kernel.hpp"
#include "quantize/once.hpp"
#include "quantize/residency.hpp"
#include "quantize/row.hpp"

namespace hattn::quantize {

// What was counted, as f32.
static __global__ void publish_counts(unsigned long long const* counted, float* counts, std::int64_t stride) {
  if (threadIdx.x < 6) {
    counts[threadIdx.x / 2 * stride + threadIdx.x % 2] = __ull2float_rn(counted[threadIdx.x]);
  }
}

// A kernel for one kind of rotation, and what it is started with.
template <class KernelParams>
struct Kernel {
  void (*function)(KernelParams, Norms, Signs);
  int threads, smem_bytes;
  unsigned ctas;  // a multiprocessor
  unsigned tile_rows;
  unsigned tiles;  // that a CTA can hold
};

template <DType kSource, int kHeadDim, Rotation kRotation, class KernelParams>
Kernel<KernelParams> kernel_of(bool once) noexcept {
  using Once = OnceTraits<kHeadDim, kRotation>;
  using Traits = Traits<kHeadDim>;
  Kernel<KernelParams> const kernel{quantize_kernel<kSource, kHeadDim, kRotation, KernelParams>,
                                    Traits::kThreads,
                                    Traits::kSmemBytes,
                                    Traits::kCtas,
                                    kTileRows,
                                    0};
  if constexpr (!KernelParams::kPacked) {
    return once ? Kernel<KernelParams>{quantize_once_kernel<kSource, kHeadDim, kRotation>,
                                       Once::kThreads,
                                       Once::kSmemBytes,
                                       Once::kCtas,
                                       Once::kTileRows,
                                       Once::kTiles}
                : kernel;
  }
  return kernel;
}

template <DType kSource, Rotation kRotation, class KernelParams>
Kernel<KernelParams> kernel_of(int head_dim, bool once) noexcept {
  return head_dim <= 64    ? kernel_of<kSource, 64, kRotation, KernelParams>(once)
         : head_dim <= 128 ? kernel_of<kSource, 128, kRotation, KernelParams>(once)
                           : kernel_of<kSource, kLargestHeadDim, kRotation, KernelParams>(once);
}

// `once`: the kernel of once.hpp. There is none for PackedParams.
template <DType kSource, class KernelParams>
Kernel<KernelParams> kernel_of(int head_dim, Rotation rotation, bool once) noexcept {
  switch (rotation) {
    case Rotation::Whole:
      return kernel_of<kSource, Rotation::Whole, KernelParams>(head_dim, once);
    case Rotation::PowersOfTwo:
      return kernel_of<kSource, Rotation::PowersOfTwo, KernelParams>(head_dim, once);
    default:
      return kernel_of<kSource, Rotation::None, KernelParams>(head_dim, once);
  }
}

template <class KernelParams>
cudaError_t load(Kernel<KernelParams> const& kernel) noexcept {
  return cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.smem_bytes);
}

template <DType kSource>
Status prepare() noexcept {
  for (Rotation const rotation : {Rotation::None, Rotation::Whole, Rotation::PowersOfTwo}) {
    for (int const head_dim : {64, 128, kLargestHeadDim}) {
      for (cudaError_t const error : {load(kernel_of<kSource, Params>(head_dim, rotation, false)),
                                      load(kernel_of<kSource, Params>(head_dim, rotation, true)),
                                      load(kernel_of<kSource, PackedParams>(head_dim, rotation, false))}) {
        if (error != cudaSuccess) {
          return to_status(error);
        }
      }
    }
  }
  Residency::of_driver();
  Status status = load_kernel(publish_counts);
  status = is_ok(status) ? load_kernel(write_factors_of_zeros) : status;
  return is_ok(status) ? prepare_schedule() : status;
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

// Whether one transform takes all lanes of a row.
inline bool is_whole(int head_dim) noexcept { return head_dim == 64 || head_dim == 128 || head_dim == kLargestHeadDim; }

// How a tensor's rows are rotated, and the numbers for it.
struct RowRotation {
  Rotation rotation;
  Norms norms;
  Signs signs;

  RowRotation(QuantizeTensor const& tensor, std::uint64_t seed) noexcept
      : rotation{!tensor.rotated             ? Rotation::None
                 : is_whole(tensor.head_dim) ? Rotation::Whole
                                             : Rotation::PowersOfTwo},
        norms{},
        signs{} {
    int chunk = 0;
    for (int size = kLargestHeadDim; size >= 16; size /= 2) {
      if ((tensor.head_dim & size) != 0) {
        for (int const end = chunk + size / kChunk; chunk < end; ++chunk) {
          norms.of_chunk[chunk] = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
        }
      }
    }
    for (int element = 0; element < kLargestHeadDim; ++element) {
      int const bit = (element % 2 == 0 ? 15 : 31) - element % 32 / 2;
      signs.bits[element / 32] |= negative(seed, element) ? 1U << bit : 0U;
    }
  }
};

// Heads of the descale factors, where these are not per block. And how many factors there are then.
struct Factors {
  int heads, count;

  Factors(QuantizeParams const& given, QuantizeTensor const& tensor) noexcept
      : heads{given.scaling == Scaling::PerTensor ? 1 : tensor.heads / tensor.group},
        count{given.scaling == Scaling::PerTensor ? 1 : tensor.batch * heads} {}
};

// Writes `count` factors of a tensor `[entries, heads, blocks]`, as those of zeros.
inline void zero_factors(QuantizeTensor const& tensor, unsigned count, unsigned heads, unsigned blocks,
                         CUstream_st* stream) noexcept {
  if (count > 0) {
    write_factors_of_zeros<<<(count + 1023) / 1024, 256, 0, stream>>>(tensor.descale, heads, blocks, count,
                                                                      tensor.most);
  }
}

// What does not follow from the kernel.
inline Params params_of(QuantizeParams const& given, QuantizeTensor const& tensor,
                        unsigned long long* counts) noexcept {
  int const factors = Factors{given, tensor}.count;
  unsigned const span = span_of(tensor, shares_factors(tensor, given.scaling) && given.scaling != Scaling::PerTensor);
  Params params{};
  params.values = tensor.values;
  params.stored = tensor.stored;
  params.descale = tensor.descale;
  params.scaling = given.scaling;
  params.given = tensor.given;
  params.span = Divisor{span};
  params.spans = Divisor{tensor.heads / span};
  params.group = Divisor{static_cast<unsigned>(tensor.group)};
  params.factor_heads = Factors{given, tensor}.heads;
  params.seqlen = tensor.seqlen;
  params.chunks = tensor.head_dim / kChunk;
  params.most = tensor.most;
  params.rounds_to_most = tensor.most + tensor.most / 28.0F;  // 464 of 448, 14.5 of 14
  auto* const state = reinterpret_cast<unsigned*>(tensor.state);
  params.shared = {state, state, state + 4, state + 4 + factors};
  params.counts = counts;
  return params;
}

template <DType kSource>
Status launch_tensor(QuantizeParams const& given, QuantizeTensor const& tensor, unsigned long long* counts,
                     CUstream_st* stream) noexcept {
  bool const shares = shares_factors(tensor, given.scaling);
  bool const one = given.scaling == Scaling::PerTensor;
  if (tensor.batch == 0 || tensor.heads == 0 || tensor.seqlen == 0) {
    if (shares) {
      Factors const factors{given, tensor};
      zero_factors(tensor, factors.count, factors.heads, 1, stream);
    }
    return to_status(cudaGetLastError());
  }
  Params params = params_of(given, tensor, counts);
  RowRotation const rotating{tensor, given.seed};
  unsigned const multiprocessors = shares ? Residency::of_driver().multiprocessors(stream, given.multiprocessors)
                                          : static_cast<unsigned>(given.multiprocessors);
  // Returns the grid.
  auto const divide = [&](Kernel<Params> const& kernel, bool once) {
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
  auto const start = [&](Kernel<Params> const& kernel, unsigned grid, bool once) {
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
    return cudaLaunchKernelEx(&config, kernel.function, params, rotating.norms, rotating.signs);
  };
  if (shares) {
    Kernel<Params> const kernel = kernel_of<kSource, Params>(tensor.head_dim, rotating.rotation, true);
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
  Kernel<Params> const kernel = kernel_of<kSource, Params>(tensor.head_dim, rotating.rotation, false);
  return to_status(start(kernel, divide(kernel, false), false));
}

// The offsets and used lengths of a tensor's sequences, as addresses. 0: there are none.
struct Lengths {
  std::uint64_t offsets, used;
  int list_size;  // of the table

  Lengths(Sequences const& sequences, bool of_keys) noexcept
      : offsets{of_keys ? sequences.cu_seqlens_kv : sequences.cu_seqlens_q},
        used{of_keys ? sequences.seqused_kv : sequences.seqused_q},
        list_size{of_keys ? sequences.list_size : sequences.block_list_size} {}
  bool some() const noexcept { return offsets != 0 || used != 0; }
  bool packed() const noexcept { return offsets != 0; }
};

// A tensor whose sequences have lengths that the device knows. Their table is there, if there are sequences.
template <DType kSource>
Status launch_packed_tensor(QuantizeParams const& given, QuantizeTensor const& tensor, bool of_keys,
                            unsigned long long* counts, CUstream_st* stream) noexcept {
  Sequences const& sequences = given.sequences;
  Lengths const lengths{sequences, of_keys};
  Factors const factors{given, tensor};
  bool const shares = shares_factors(tensor, given.scaling);
  bool const empty = tensor.batch == 0 || tensor.seqlen == 0;
  if (shares && empty) {
    zero_factors(tensor, factors.count, factors.heads, 1, stream);
  }
  if (!tensor.given && !shares && sequences.fill_gaps) {
    // Blocks of sequences get their own factors after that.
    std::int64_t const apart = (kTileRows - 1) * (lengths.packed() ? std::int64_t{tensor.batch} : 1);
    unsigned const heads = tensor.heads;
    unsigned const blocks = (tensor.seqlen + apart) / kTileRows;
    zero_factors(tensor, (lengths.packed() ? 1 : tensor.batch) * heads * blocks, heads, blocks, stream);
  }
  if (!empty) {
    RowRotation const rotating{tensor, given.seed};
    auto const kernel = kernel_of<kSource, PackedParams>(tensor.head_dim, rotating.rotation, false);
    PackedParams params{params_of(given, tensor, counts)};
    params.of_keys = of_keys;
    params.table = {sequences.table, tensor.batch};
    params.list = of_keys ? params.table.list() : params.table.block_list(sequences.list_size);
    params.blocks_apart = lengths.packed() ? kTileRows - 1 : 0;
    params.heads = tensor.heads;
    // Of all sequences, no more than these.
    unsigned const tiles = static_cast<unsigned>(lengths.list_size) * params.heads;
    unsigned const ctas = static_cast<unsigned>(given.multiprocessors) * kernel.ctas;
    auto const start = [&](Job job) {
      params.job = job;
      params.factors = shares && job == Job::Convert ? factors.count : 0;
      start_kernel({static_cast<int>(tiles < ctas ? tiles : ctas), kernel.threads, kernel.smem_bytes, stream},
                   kernel.function, params, rotating.norms, rotating.signs);
    };
    if (shares) {
      start(Job::Measure);
    }
    start(shares || tensor.given ? Job::Convert : Job::Both);
  }
  if (Status const status = to_status(cudaGetLastError());
      !is_ok(status) || !sequences.fill_gaps || tensor.seqlen == 0) {
    return status;
  }
  return launch_fill_gaps(sequences, of_two_bytes(tensor.stored), tensor.batch, tensor.seqlen, tensor.heads,
                          tensor.head_dim / 2, of_keys, TensorDesc{}, stream);
}

// Makes the table of the sequences, of the sides that are quantised and have lengths. A tile is kTileRows rows.
inline Status launch_table(QuantizeParams const& params, CUstream_st* stream) noexcept {
  auto const rows = [&](QuantizeTensor const& tensor, bool of_keys) {
    return tensor.wanted && Lengths{params.sequences, of_keys}.some() ? tensor.seqlen : 0;
  };
  QuantizeTensor const& keys = params.k.wanted ? params.k : params.v;
  int const seqlen_q = rows(params.q, false);
  int const seqlen_kv = rows(keys, true);
  int const batch = params.q.wanted ? params.q.batch : keys.batch;
  if (batch == 0 || (seqlen_q == 0 && seqlen_kv == 0)) {
    return {};
  }
  return launch_schedule(params.sequences,
                         {batch, seqlen_q, seqlen_kv, kTileRows, 1, params.sequences.list_size, kTileRows,
                          params.sequences.block_list_size},
                         stream);
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
  if (params.sequences.table != 0) {
    if (Status const status = launch_table(params, stream); !is_ok(status)) {
      return status;
    }
  }
  for (int i = 0; i < 3; ++i) {
    if (!tensors[i]->wanted) {
      continue;
    }
    bool const of_keys = i > 0;
    auto* const found = counts ? counted + 2 * i : nullptr;
    bool const packs = params.sequences.table != 0 && Lengths{params.sequences, of_keys}.some();
    Status const status = packs ? launch_packed_tensor<kSource>(params, *tensors[i], of_keys, found, stream)
                                : launch_tensor<kSource>(params, *tensors[i], found, stream);
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
