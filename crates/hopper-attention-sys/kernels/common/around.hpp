// The kernels that run before and after a backward kernel, as its launch sees them.
//
// - Before: bwd_statistics (prepare.hpp) makes the statistics of each query, from its LSE and delta. It also writes
//   what the backward kernel begins with: the progress of blocks, the list of tiles, the counter, and zeros where sums
//   need them.
// - After: bwd_convert (convert.hpp) converts the f32 sums of dQ to dQ, and those of dK and dV where tiles have shares.
// - Last: bwd_sinks (sinks_bwd.hpp) makes the gradient of the sinks, where it is wanted, and d_bias_kernel
//   (common/d_bias.hpp) that of an additive bias.
//
// Both depend on fewer columns of the list than the backward kernel does. So rows share them. They are compiled in a
// translation unit of their own, which defines the functions declared here (HATTN_INSTANTIATE_*). The unit of a row
// only calls the functions.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels.hpp"

namespace hattn {

// The progress of a block of queries that no tile of keys visits.
constexpr int kUnvisited = -(1 << 30);

// bwd_statistics of one row's traits.
template <class Traits>
struct BwdStatistics {
  // Loads the kernel's module on the current device.
  static Status load() noexcept;
  static void launch(BwdParams const& params, cudaStream_t stream) noexcept;
  // The gradient of the sinks, where it is wanted, from these statistics (sinks_bwd.hpp).
  static void launch_sinks(BwdParams const& params, cudaStream_t stream) noexcept;
};

// bwd_convert of `Traits::Unmasked`: it does not depend on the mask.
template <class Traits>
struct BwdConvert {
  static Status load() noexcept;
  static void launch(BwdParams const& params, cudaStream_t stream) noexcept;
};

// The gradient of an additive bias of `Traits::Unmasked`, where it is wanted. Without queries, too: then it is 0.
template <class Traits>
struct BwdBiasGradient {
  static Status load() noexcept;
  static void launch(BwdParams const& params, cudaStream_t stream) noexcept;
};

}  // namespace hattn

// What the unit around a list says once a row, with the list's traits template and the row's columns.
#define HATTN_INSTANTIATE_STATISTICS(Traits, dtype, mask, ...) \
  template struct hattn::BwdStatistics<Traits<hattn::DType::dtype, hattn::MaskClass::mask, __VA_ARGS__>>;
// The same for the row's kernel and for the one that packs. Rows of class Blocks have none that packs, and kernels of
// their own after the backward kernel.
#define HATTN_INSTANTIATE_PREPARE(Traits, dtype, mask, ...) \
  HATTN_INSTANTIATE_PREPARE_##mask(Traits, dtype, mask, __VA_ARGS__)
#define HATTN_INSTANTIATE_PREPARE_BAND(...) \
  HATTN_INSTANTIATE_STATISTICS(__VA_ARGS__) \
  HATTN_INSTANTIATE_STATISTICS(__VA_ARGS__, true)
#define HATTN_INSTANTIATE_PREPARE_Full(...) HATTN_INSTANTIATE_PREPARE_BAND(__VA_ARGS__)
#define HATTN_INSTANTIATE_PREPARE_Causal(...) HATTN_INSTANTIATE_PREPARE_BAND(__VA_ARGS__)
#define HATTN_INSTANTIATE_PREPARE_Window(...) HATTN_INSTANTIATE_PREPARE_BAND(__VA_ARGS__)
#define HATTN_INSTANTIATE_PREPARE_Blocks(Traits, dtype, mask, ...)                                     \
  HATTN_INSTANTIATE_STATISTICS(Traits, dtype, mask, __VA_ARGS__)                                       \
  template struct hattn::BwdConvert<Traits<hattn::DType::dtype, hattn::MaskClass::mask, __VA_ARGS__>>; \
  template struct hattn::BwdBiasGradient<Traits<hattn::DType::dtype, hattn::MaskClass::mask, __VA_ARGS__>>;
// And once for all rows that differ by their mask alone, with the columns but the mask.
#define HATTN_INSTANTIATE_CONVERT(Traits, dtype, ...) \
  template struct hattn::BwdConvert<Traits<hattn::DType::dtype, hattn::MaskClass::Full, __VA_ARGS__>>;
